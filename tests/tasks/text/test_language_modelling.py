"""The task as training and evaluation see it."""

import math
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from tokenizers import processors
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from latte.models import LatteConfig, LatteForCausalLM
from latte.tasks import task_class
from latte.tasks.base import TaskData, stack
from latte.tasks.text import LanguageModelling, LanguageModellingSettings
from tests.tasks.text.samples import make_text

SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_heads": 2}


def write_texts(folder: Path, count: int = 20, length: int = 300) -> str:
    folder.mkdir(exist_ok=True)
    for number in range(count):
        (folder / f"{number:03}.txt").write_text(make_text(length, number))
    return str(folder)


def task(tmp_path: Path, seed: int = 0, **chosen: Any) -> LanguageModelling:
    chosen = {"data": (write_texts(tmp_path / "texts"),), "context": 32, "cache": str(tmp_path / "cache")} | chosen
    return LanguageModelling(LanguageModellingSettings(**chosen), seed=seed)


def windows(examples: Any) -> list[list[int]]:
    return [example["input_ids"].tolist() for example in examples]


def test_it_is_the_task_called_lm() -> None:
    assert task_class("lm") is LanguageModelling
    assert LanguageModelling.name == "lm"


def test_settings_can_become_options() -> None:
    plain = {str, int, float, bool, type(None)}
    hints = get_type_hints(LanguageModellingSettings)
    for item in fields(LanguageModellingSettings):
        assert item.metadata["help"].endswith("."), item.name
        parts = set(get_args(hints[item.name]) or [hints[item.name]])
        assert parts <= plain or parts == {"joined", "separate"} or parts == {str, ...}, item.name


@pytest.mark.parametrize("name", ["default", "paper"])
def test_plans_fit_settings_and_presets(name: str) -> None:
    plan = LanguageModelling.plans[name]
    LanguageModellingSettings(**plan.settings)
    LatteConfig.from_preset(plan.preset, **plan.model)
    assert plan.budget.steps > plan.budget.warmup_steps


def test_the_papers_plan_reads_eight_billion_tokens() -> None:
    plan = LanguageModelling.plans["paper"]
    assert plan.budget.steps * plan.budget.batch_size * plan.settings["context"] == pytest.approx(8e9, rel=1e-4)


def test_bytes_of_a_folder(tmp_path: Path) -> None:
    data = task(tmp_path, held_out=0.3).prepare()
    assert data.head == "causal-lm"
    assert data.model == {"vocab_size": 257, "eos_token_id": 256}
    assert data.tokens_per_example == 32
    assert data.tokenizer is not None
    assert len(data.tokenizer) == 257
    texts = {make_text(300, number) for number in range(20)}
    seen = {}
    for name, examples in (("train", data.train), ("validation", data.validation)):
        stream = [token for window in windows(examples) for token in window]
        documents = "".join("\x00" if token == 256 else chr(token) for token in stream).split("\x00")
        seen[name] = {document.encode("latin-1").decode() for document in documents[:-1]}
        assert data.facts[f"{name}_tokens"] // 32 == len(examples)
    assert seen["train"] | seen["validation"] <= texts
    assert not seen["train"] & seen["validation"]
    assert seen["validation"]
    assert data.facts["train_documents"] + data.facts["validation_documents"] == 20
    assert all(any(text.startswith(prompt) for text in seen["validation"]) for prompt in data.prompts[:2])


def test_examples_are_the_same_each_time_and_the_fingerprint_tells_others_apart(tmp_path: Path) -> None:
    first, again = task(tmp_path).prepare(), task(tmp_path).prepare()
    assert windows(first.train) == windows(again.train)
    assert first.fingerprint == again.fingerprint
    others = [
        task(tmp_path, seed=1),
        task(tmp_path, context=16),
        task(tmp_path, documents="separate"),
        task(tmp_path, held_out=0.2),
        task(tmp_path, tokenizer="bpe:300"),
        task(tmp_path, data=(write_texts(tmp_path / "more", 21),)),
        task(tmp_path, validation=(write_texts(tmp_path / "more", 21),)),
    ]
    assert len({first.fingerprint, *(other.prepare().fingerprint for other in others)}) == 8
    separate = {task(tmp_path, seed, validation=(str(tmp_path / "more"),)).prepare().fingerprint for seed in (0, 1)}
    assert len(separate) == 1  # nothing is drawn


def test_a_validation_text_of_its_own(tmp_path: Path) -> None:
    other = write_texts(tmp_path / "other", 3, 100)
    data = task(tmp_path, validation=(other,)).prepare()
    assert (data.facts["train_documents"], data.facts["validation_documents"]) == (20, 3)
    assert bytes(windows(data.validation)[0]) == make_text(300, 0).encode()[:32]


def test_a_trained_bpe_serves_both_texts(tmp_path: Path) -> None:
    data = task(tmp_path, tokenizer="bpe:300", validation=(write_texts(tmp_path / "other", 3),)).prepare()
    assert data.model == {"vocab_size": 300, "eos_token_id": 0}
    assert data.tokenizer is not None
    text = data.tokenizer.decode(windows(data.validation)[0])
    assert make_text(300, 0).startswith(text.rstrip("\N{REPLACEMENT CHARACTER}"))


def slow_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[float, int]:
    """Nats and tokens, document by document, from the logits of each alone."""
    nats, count = 0.0, 0
    for row in range(len(batch["input_ids"])):
        tokens, labels = batch["input_ids"][row], batch["labels"][row]
        cuts = [0, len(tokens)]
        if "position_ids" in batch:
            cuts = [*(batch["position_ids"][row] == 0).nonzero().flatten().tolist(), len(tokens)]
        for start, end in pairwise(cuts):
            logits = model(input_ids=tokens[None, start:end]).logits[0, :-1]
            nats += float(nn.functional.cross_entropy(logits, labels[start + 1 : end], reduction="sum"))
            count += end - start - 1
    return nats, count


def small_model(data: TaskData, kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "latte":
        config = LatteConfig(**SIZES, **data.model, num_latents=3, window=5, mixer="rglru", initializer_range=0.5)
        return LatteForCausalLM(config).eval()
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "initializer_range": 0.5}
    return GPT2LMHeadModel(GPT2Config(**sizes, **data.model, bos_token_id=256)).eval()


@pytest.mark.parametrize(("kind", "documents"), [("latte", "joined"), ("latte", "separate"), ("gpt2", "joined")])
@torch.no_grad()
def test_loss_perplexity_and_bits_against_logits(tmp_path: Path, kind: str, documents: str) -> None:
    folder = write_texts(tmp_path / "short", 40, 20)
    chosen = task(tmp_path, data=(folder,), documents=documents, held_out=0.4)
    data = chosen.prepare()
    model = small_model(data, kind)
    examples = [data.validation[i] for i in range(4)]
    assert documents == "joined" or any((example["position_ids"][1:] == 0).any() for example in examples)
    total, weight = 0.0, 0.0
    for part in (examples[:3], examples[3:]):  # of different sizes, so that a mean of means would not do
        nats, count = chosen.measure(model, data.collate(part))["loss"]
        total, weight = total + nats, weight + count
    expected, count = slow_loss(model, stack(examples))
    assert weight == count
    assert total == pytest.approx(expected, rel=1e-4)
    summary = chosen.summarize({"loss": total / weight})
    assert summary["loss"] == total / weight
    assert summary["perplexity"] == pytest.approx(math.exp(expected / count), rel=1e-3)
    in_tokens, in_bytes = (data.facts[f"validation_{what}"] for what in ("tokens", "bytes"))
    assert summary["bits_per_byte"] == pytest.approx(expected / count / math.log(2) * in_tokens / in_bytes, rel=1e-4)


def test_measuring_holds_no_logits(tmp_path: Path) -> None:
    chosen = task(tmp_path)
    data = chosen.prepare()
    model = small_model(data, "latte")
    seen: list[Any] = []
    model.register_forward_hook(lambda module, inputs, output: seen.append(output.logits))
    wrapped = nn.ModuleDict({"module": model})
    wrapped.forward = model.__call__  # what DistributedDataParallel and others do
    chosen.measure(wrapped, data.collate([data.validation[0]]))
    assert seen == [None]


def test_a_loss_beyond_measure_and_no_bytes() -> None:
    assert LanguageModelling().summarize({"loss": 1000.0}) == {"loss": 1000.0, "perplexity": math.inf}
    assert math.isnan(LanguageModelling().summarize({"loss": math.nan})["perplexity"])


def test_contexts_longer_than_the_text(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"context is 90000, longer than the training text of \d+ tokens; choose at most"
    ):
        task(tmp_path, context=90_000).prepare()
    with pytest.raises(ValueError, match=r"longer than the validation text of \d+ tokens; .* enlarge held_out"):
        task(tmp_path, context=2000).prepare()


def test_equal_documents_leave_nothing_to_validate_on(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("the same text again " * 5)
    settings = LanguageModellingSettings(
        data=(f"{tmp_path}/a.txt", f"{tmp_path}/b.txt"), context=8, cache=f"{tmp_path}/cache"
    )
    with pytest.raises(ValueError, match=r"context is 8, .* validation text of 0 tokens; enlarge held_out, or name a"):
        LanguageModelling(settings).prepare()


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"context": 1}, "context is 1; a window needs at least 2"),
        ({"held_out": 1.0}, r"held_out is 1\.0; it must be a share"),
        ({"documents": "apart"}, "documents is 'apart'; it must be 'joined' or 'separate'"),
        ({"workers": -1}, "workers is -1"),
        ({"prompts": ("a", "")}, "data, validation or prompts have an empty name or text"),
        ({"data": "text.txt"}, "are tuples of strings"),
    ],
)
def test_settings_that_make_no_sense(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LanguageModellingSettings(**chosen)


def test_verification_reads_all_tokens(tmp_path: Path) -> None:
    data = task(tmp_path).prepare()
    shard = Path(data.facts["prepared"]) / "tokens-00000.bin"
    shard.write_bytes(b"\x01\x00" + shard.read_bytes()[2:])
    task(tmp_path).prepare()
    with pytest.raises(ValueError, match=r"the SHA-256 of tokens-00000\.bin is not the manifest's"):
        task(tmp_path, verify=True).prepare()


def test_the_default_is_the_standard_library(tmp_path: Path) -> None:
    data = LanguageModelling(LanguageModellingSettings(cache=str(tmp_path))).prepare()
    assert data.facts["train_tokens"] > 5_000_000
    assert 0.005 < data.facts["validation_tokens"] / data.facts["train_tokens"] < 0.2
    assert len(data.prompts) == 3
    assert data.train[0]["input_ids"].shape == (512,)


def test_a_model_saved_with_its_tokenizer_generates_from_the_command_line(tmp_path: Path, capsys) -> None:
    from latte.cli import main

    data = task(tmp_path).prepare()
    small_model(data, "latte").save_pretrained(tmp_path / "model")  # pyright: ignore
    assert data.tokenizer is not None
    data.tokenizer.save_pretrained(tmp_path / "model")
    assert main(["generate", str(tmp_path / "model"), "--prompt", "é", "--max-new-tokens", "5"]) == 0
    assert capsys.readouterr().out


def test_a_few_steps_learn(tmp_path: Path) -> None:
    chosen = task(tmp_path, documents="separate")
    data = chosen.prepare()
    model = small_model(data, "latte").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = data.collate([data.train[i] for i in range(16)])
    before = chosen.measure(model, batch)["loss"]
    for _ in range(15):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = chosen.measure(model, batch)["loss"]
    assert after[0] < 0.8 * before[0]


def test_windows_begin_as_the_tokenizer_has_texts_begin(tmp_path: Path) -> None:
    """A model that was trained with a first token of its own is lost where a window begins without it."""
    plain = task(tmp_path).prepare()
    tokenizer = plain.tokenizer
    assert tokenizer is not None
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    begin = tokenizer.convert_tokens_to_ids("<s>")
    pipeline = tokenizer.backend_tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    pipeline.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    data = task(tmp_path, tokenizer=str(tmp_path / "tokenizer")).prepare()
    for examples in (data.train, data.validation):
        assert {example["input_ids"][0].item() for example in examples} == {begin}
    assert data.fingerprint != plain.fingerprint


@torch.no_grad()
def test_bits_per_byte_do_not_count_beginnings_that_are_not_foretold(tmp_path: Path) -> None:
    """Where documents are separate, no label asks for a token to begin with, which says no byte either."""
    tokenizer = task(tmp_path).prepare().tokenizer
    assert tokenizer is not None
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    begin = tokenizer.convert_tokens_to_ids("<s>")
    pipeline = tokenizer.backend_tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    pipeline.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    chosen = {"tokenizer": str(tmp_path / "tokenizer"), "data": (write_texts(tmp_path / "short", 40, 8),)}
    for documents, tokens_per_document in (("separate", 1), ("joined", 2)):  # besides those of its text
        measured = task(tmp_path, documents=documents, held_out=0.4, **chosen)
        counts = measured.prepare().facts
        size = counts["validation_bytes"]
        foretold = size + tokens_per_document * counts["validation_documents"]  # each byte is a token
        bits = measured.summarize({"loss": math.log(2)})["bits_per_byte"]
        assert bits == pytest.approx(foretold / size)
