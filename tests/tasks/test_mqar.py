"""Recall: every answer follows from what stands before it, and scores are those of an independent count."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from latte.models import LatteConfig, LatteForCausalLM
from latte.tasks import task_class
from latte.tasks.mqar import FIGURE_5, FILLER, MQAR, MQARSettings, RecallExamples

SMALL = {"examples": 7, "validation_examples": 5, "test_examples": 3}


def recall(tokens: list[int], place: int) -> int | None:
    """The value that follows the key at `place` − 1, from what stands before: an independent solver."""
    key = tokens[place - 1]
    for before in range(0, place - 1, 2):
        if tokens[before] == key:
            return tokens[before + 1]
    return None


@st.composite
def any_settings(draw):
    pairs = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3, unique=True)))
    return MQARSettings(
        length=4 * max(pairs) + 2 * draw(st.integers(0, 20)),
        pairs=pairs,
        vocab_size=2 * max(pairs) + 2 + draw(st.integers(0, 50)),
        gap=draw(st.sampled_from(["power", "uniform"])),
        power=draw(st.sampled_from([0.01, 0.5, 1.0])),
        **SMALL,
    )


@given(any_settings(), st.integers(0, 2**40))
@settings(max_examples=40, deadline=None)
def test_every_answer_follows_from_the_tokens_before(chosen, seed):
    for index, example in enumerate(RecallExamples(chosen, seed, "train", 7)):
        tokens, labels = example["input_ids"].tolist(), example["labels"].tolist()
        pairs = chosen.pairs[index % len(chosen.pairs)]
        answers = [place for place, label in enumerate(labels) if label != -100]
        assert len(tokens) == len(labels) == chosen.length
        assert len(answers) == pairs
        assert all(recall(tokens, place) == labels[place] and tokens[place] == FILLER for place in answers)
        keys, values = tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2]
        assert sorted(tokens[place - 1] for place in answers) == sorted(keys)  # each is asked for once
        assert len(set(keys)) == len(set(values)) == pairs
        assert 0 < min(keys) <= max(keys) < chosen.vocab_size // 2 <= min(values) <= max(values) < chosen.vocab_size
        assert tokens.count(FILLER) == chosen.length - 3 * pairs


def test_an_example_depends_on_seed_split_and_index_alone():
    chosen = MQARSettings(**SMALL)
    few, many = RecallExamples(chosen, 3, "train", 20), RecallExamples(chosen, 3, "train", 3000)
    for index in (19, 0, 7):
        assert torch.equal(few[index]["input_ids"], many[index]["input_ids"])
    others = RecallExamples(chosen, 4, "train", 20), RecallExamples(chosen, 3, "test", 20)
    assert not any(torch.equal(few[0]["input_ids"], other[0]["input_ids"]) for other in others)
    assert len(np.unique(many.tokens, axis=0)) == 3000


def test_another_process_makes_the_same():
    script = (
        "from latte.tasks.mqar import *; d = MQAR(MQARSettings(examples=9), seed=5).prepare(); "
        "print(d.fingerprint, d.train[8]['input_ids'].tolist())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    data = MQAR(MQARSettings(examples=9), seed=5).prepare()
    assert done.stdout.strip() == f"{data.fingerprint} {data.train[8]['input_ids'].tolist()}"


@pytest.mark.parametrize(("gap", "power"), [("power", 0.01), ("power", 0.6), ("uniform", 0.01)])
def test_places_of_the_first_query_follow_the_law(gap, power):
    chosen = MQARSettings(length=40, pairs=(4,), gap=gap, power=power)
    made = RecallExamples(chosen, 0, "train", 20_000)
    first_key = made.tokens[:, :1]
    places = (made.tokens[:, 8::2] == first_key).argmax(axis=1)
    weights = np.arange(1, 17, dtype=float) ** ((power if gap == "power" else 1.0) - 1)
    expected = 20_000 * weights / weights.sum()
    chi_squared = ((np.bincount(places, minlength=16) - expected) ** 2 / expected).sum()
    assert chi_squared < 45  # of 15 degrees of freedom: 1 in 10,000


def test_numbers_of_pairs_are_mixed_in_equal_parts():
    data = MQAR(MQARSettings(pairs=(2, 5, 8), examples=30)).prepare()
    counts = [int((example["labels"] != -100).sum()) for example in (data.train[index] for index in range(30))]
    assert {count: counts.count(count) for count in counts} == {2: 10, 5: 10, 8: 10}


def test_scores_are_those_of_the_whole_logits():
    task = MQAR(MQARSettings(length=40, pairs=(3, 7), vocab_size=31, **SMALL))
    data = task.prepare()
    torch.manual_seed(0)
    model = LatteForCausalLM(LatteConfig.from_preset("macchiato-tiny", num_hidden_layers=1, **data.model)).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(40)  # spread the logits, so that accuracies are not all 0
        batch = data.collate([data.train[index] for index in range(7)])
        sums = task.measure(model, batch)
        logits, loss = model(batch["input_ids"]).logits, model(**batch).loss
    expected = {3: [0, 0], 7: [0, 0]}
    for row in range(7):
        answers = [place for place in range(40) if batch["labels"][row, place] != -100]
        for place in answers:
            expected[len(answers)][0] += int(logits[row, place - 1].argmax() == batch["labels"][row, place])
            expected[len(answers)][1] += 1
    assert sums["accuracy_3_pairs"] == tuple(expected[3])
    assert sums["accuracy_7_pairs"] == tuple(expected[7])
    assert sums["accuracy"] == tuple(a + b for a, b in zip(*expected.values(), strict=True))
    assert sums["loss"][0] / sums["loss"][1] == pytest.approx(loss.item(), rel=1e-4)


def test_a_batch_without_a_number_of_pairs_weighs_nothing():
    task = MQAR(MQARSettings(pairs=(4, 8), **SMALL))
    data = task.prepare()
    model = LatteForCausalLM(LatteConfig.from_preset("macchiato-tiny", num_hidden_layers=1, **data.model)).eval()
    with torch.no_grad():
        sums = task.measure(model, data.collate([data.train[0], data.train[2]]))
    assert sums["accuracy_8_pairs"] == (0.0, 0.0)
    assert sums["accuracy_4_pairs"][1] == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"length": 63}, "length is 63; it must be even"),
        ({"length": 30, "pairs": (8,)}, "make length at least 32"),
        ({"pairs": (8,), "vocab_size": 17}, "leaves 7 keys: make vocab_size at least 18"),
        ({"pairs": ()}, r"pairs is \(\)"),
        ({"pairs": (4, 4)}, "different numbers"),
        ({"pairs": (0,)}, "at least 1"),
        ({"power": 0.0}, "power is 0.0"),
        ({"examples": 0}, "examples is 0"),
    ],
)
def test_settings_that_cannot_be(words, message):
    with pytest.raises(ValueError, match=message) as caught:
        MQARSettings(**words)
    assert "\n" not in str(caught.value)


def test_the_smallest_vocabulary_that_fits():
    tokens = RecallExamples(MQARSettings(length=32, pairs=(8,), vocab_size=18), 0, "train", 50).tokens
    assert tokens.max() == 17


def test_plans_are_models_that_fit():
    for plan in task_class("mqar").plans.values():
        chosen = MQARSettings(**plan.settings)
        config = LatteConfig.from_preset(plan.preset, **plan.model)
        assert config.window is not None
        assert config.window <= chosen.length
        assert math.isclose(plan.budget.final_rate, 0.0)
    assert all(f"paper-{length}x{pairs}" in MQAR.plans for length, pairs in FIGURE_5)
