"""Keys hidden in long texts: the prompts, and what is said of a model's answers."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from latte.tasks.evaluation import Encoder, Scorer, passkey
from latte.tasks.evaluation.haystack import make_prompt
from latte.tasks.evaluation.passkey import batches, run_batch, says, write
from tests.tasks.evaluation.small import byte_tokenizer, make_model, random_tokens, slow_losses

ENCODER = Encoder(byte_tokenizer())


@given(length=st.integers(230, 900), depth=st.floats(0, 1), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_prompts(length, depth, seed):
    prompt = make_prompt(ENCODER, length, depth, random=Random(seed))
    assert len(prompt.tokens) + max(map(len, prompt.answers)) == length
    assert prompt.tokens[0] == ENCODER.bos
    text = ENCODER.decode(prompt.tokens)
    assert text.count(prompt.key) == 2
    assert text.endswith("The pass key is")
    answers = [ENCODER.decode(answer) for answer in prompt.answers]
    assert answers[0] == f" {prompt.key}"
    assert len(set(answers)) == 8
    assert all(len(answer) == 6 and answer[1:].isdigit() for answer in answers)
    assert not any(answer in text for answer in answers[1:])
    begin, end = text.index("\n\n"), text.rindex("\n\n")
    before, after = text.index(" The pass key is") - begin - 2, end - text.rindex("is the pass key.") - 16
    assert before == round(depth * (before + after))


def test_prompts_depend_on_their_seed():
    one, same, other = (make_prompt(ENCODER, 400, 0.5, random=Random(seed)) for seed in (1, 1, 2))
    assert one == same != other


def test_a_haystack_of_ones_own():
    haystack = list(range(100, 200)) * 4
    prompt = make_prompt(ENCODER, 400, 1.0, random=Random(0), haystack=haystack)
    filler = prompt.tokens[90:130]
    assert any(haystack[start : start + 40] == filler for start in range(len(haystack)))
    with pytest.raises(ValueError, match="the haystack has 5 tokens"):
        make_prompt(ENCODER, 400, 1.0, random=Random(0), haystack=haystack[:5])


@pytest.mark.parametrize("name", ["macchiato", "llama", "gemma3"])
def test_answers_are_ranked_by_their_probability(name):
    model = make_model(name)
    prompts = [make_prompt(ENCODER, 230, depth, random=Random(depth), distractors=3) for depth in (0, 1)]
    trials = run_batch(Scorer(model, 64), ENCODER, prompts)
    for prompt, trial in zip(prompts, trials, strict=True):
        count = len(prompt.tokens)
        rows = (torch.tensor([prompt.tokens + answer]) for answer in prompt.answers)
        losses = torch.tensor([float(slow_losses(model, row)[0, count - 1 :].sum()) for row in rows])
        assert trial.probability == pytest.approx(float((-losses).softmax(0)[0]), rel=1e-3)
        assert trial.first == bool((losses[1:] > losses[0]).all())


@pytest.mark.parametrize("name", ["macchiato", "gemma3"])
def test_writing_is_greedy_generation(name):
    model, tokens = make_model(name), random_tokens(2, 9)
    scorer = Scorer(model)
    written = write(scorer, tokens[:, -1:], scorer.read(tokens[:, :-1]), 5)
    expected = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=5, min_new_tokens=5, do_sample=False,
        pad_token_id=0,
    )  # fmt: skip
    assert written == expected[:, 9:].tolist()


def test_a_report_has_every_length_and_depth():
    model, told = make_model("macchiato"), []
    options = {"depths": (0.0, 1.0), "trials": 3, "distractors": 2, "batch_tokens": 600}
    report = passkey(model, ENCODER, [230, 260], **options, progress=lambda *done: told.append(done))
    assert [(cell.length, cell.depth, cell.trials) for cell in report.cells] == [
        (230, 0.0, 3), (230, 1.0, 3), (260, 0.0, 3), (260, 1.0, 3)
    ]  # fmt: skip
    assert report.candidates == 3
    assert told[-1] == (12, 12)
    again = passkey(model, ENCODER, [260], **options)
    assert again.cells == report.cells[2:]  # prompts do not depend on what else is measured


def test_batches_have_one_length():
    prompts = [make_prompt(ENCODER, length, 0, random=Random(0)) for length in (230, 231, 230, 230)]
    assert [len(batch) for batch in batches(prompts, 2)] == [2, 1, 1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [(" 12345.", True), ("12345", True), (' "12345"', True), ("123456", False), ("x 12345", False)],
)
def test_what_counts_as_the_key(text, expected):
    assert says(text, "12345") is expected


def test_bad_input():
    with pytest.raises(ValueError, match="tokens at least"):
        make_prompt(ENCODER, 30, 0, random=Random(0))
    with pytest.raises(ValueError, match="depth is 2"):
        make_prompt(ENCODER, 300, 2, random=Random(0))
    with pytest.raises(ValueError, match="at least 1"):
        passkey(make_model("llama"), ENCODER, [300], trials=0)
