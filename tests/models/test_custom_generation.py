"""Ways to generate that are not Transformers' own: a function in a folder, which has only the cache to work with."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.models.forms import MAIN_FORMS, make_model, make_tokens

FOLDER = str(Path(__file__).parent / "contrastive_search")
ALPHA, CANDIDATES, COUNT = 0.9, 4, 7


@pytest.fixture(autouse=True)
def own_modules(monkeypatch, tmp_path):
    """Code that Transformers loads is copied to where this test ends."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))


@torch.no_grad()
def contrastive(model, text: Tensor) -> Tensor:
    """Contrastive search of one text, each candidate read with all that came before it."""
    for _ in range(COUNT):
        p, candidates = model(text, use_cache=False).logits[0, -1].softmax(dim=-1).topk(CANDIDATES)
        scores = []
        for share, token in zip(p, candidates, strict=True):
            longer = torch.cat([text, token.view(1, 1)], dim=1)
            states = model(longer, use_cache=False, output_hidden_states=True).hidden_states[-1][0]
            likeness = torch.cosine_similarity(states[-1:], states[:-1], dim=-1).max()
            scores.append((1 - ALPHA) * share - ALPHA * likeness)
        text = torch.cat([text, candidates[torch.stack(scores).argmax()].view(1, 1)], dim=1)
    return text


@pytest.mark.parametrize("roll_back", [False, True], ids=["candidates at once", "candidates taken back"])
@pytest.mark.parametrize("form", MAIN_FORMS)
def test_contrastive_search(form, roll_back):
    model, tokens = make_model(form), make_tokens(2, 13)
    text = model.generate(
        tokens, custom_generate=FOLDER, trust_remote_code=True, penalty_alpha=ALPHA, top_k=CANDIDATES,
        max_new_tokens=COUNT, roll_back=roll_back,
    )  # fmt: skip
    assert torch.equal(text, torch.cat([contrastive(model, row[None]) for row in tokens]))
    greedy = model.generate(tokens, max_new_tokens=COUNT, do_sample=False, pad_token_id=0, eos_token_id=-1)
    assert not torch.equal(text, greedy)


def test_contrastive_search_is_not_within_transformers():
    """It has moved to the Hub, of which this is the address; when it comes back, the documentation is wrong."""
    with pytest.raises(ValueError, match=r"trust_remote_code=True.*hf.co/transformers-community/contrastive-search"):
        make_model("macchiato").generate(make_tokens(1, 5), penalty_alpha=ALPHA, top_k=CANDIDATES, do_sample=False)
