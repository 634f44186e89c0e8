"""Chains of causes: a solver that follows rules has all answers, and one that knows direct effects no others."""

import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from latte.models import LatteConfig, LatteForCausalLM
from latte.tasks import task_class
from latte.tasks.chains import BLANK, CAUSES, FIRST_DEPTH, STOP, CausalChains, ChainsSettings, Documents

SMALL = {"examples": 7, "validation_examples": 5, "test_examples": 3}


def read_rules(tokens: list[int]) -> dict[int, int]:
    """What causes what, by reading a document token by token."""
    return {
        tokens[place - 1]: tokens[place + 1]
        for place, token in enumerate(tokens[:-2])
        if token == CAUSES and tokens[place + 2] == STOP
    }


def follow(rules: dict[int, int], cause: int, steps: int) -> int:
    for _ in range(steps):
        cause = rules[cause]
    return cause


@st.composite
def any_settings(draw):
    depth = draw(st.integers(1, 4))
    rules = 2 * depth + 1 + draw(st.integers(0, 6))
    return ChainsSettings(
        symbols=rules + draw(st.integers(0, 9)),
        rules=rules,
        coincidences=draw(st.integers(0, 5)),
        depth=depth,
        questions=draw(st.integers(1, rules * depth)),
        gap=draw(st.integers(0, 11)),
        **SMALL,
    )


@given(any_settings(), st.integers(0, 2**40))
@settings(max_examples=40, deadline=None)
def test_whoever_follows_the_rules_has_every_answer(chosen, seed):
    for example in Documents(chosen, seed, "train", 3):
        tokens, labels = example["input_ids"].tolist(), example["labels"].tolist()
        rules = read_rules(tokens)
        asked = [place for place, label in enumerate(labels) if label != -100]
        assert len(tokens) == chosen.length
        assert max(tokens) < chosen.vocab_size
        assert len(rules) == chosen.rules
        assert len(asked) == chosen.questions
        assert len({(tokens[place - 2], tokens[place - 1]) for place in asked}) == chosen.questions
        for place in asked:
            assert tokens[place] == BLANK  # the answer is not shown, so no question helps with another
            assert follow(rules, tokens[place - 2], tokens[place - 1] - FIRST_DEPTH + 1) == labels[place]


class Solver(nn.Module):
    """Answers as a language model would, by `guess` from the document's rules, a cause and a number of steps."""

    def __init__(self, guess, vocab_size: int) -> None:
        super().__init__()
        self.guess, self.vocab_size = guess, vocab_size

    def forward(self, input_ids, use_cache, logits_to_keep):
        logits = torch.zeros(*input_ids.shape, self.vocab_size)
        for row, tokens in enumerate(input_ids.tolist()):
            rules = read_rules(tokens)
            for place in range(1, len(tokens)):
                steps = tokens[place] - FIRST_DEPTH + 1
                if 1 <= steps <= 3 and tokens[place - 1] in rules:
                    logits[row, place, self.guess(rules, tokens[place - 1], steps)] = 1.0
        return SimpleNamespace(logits=logits[:, logits_to_keep])


def score(guess, documents: int = 1500) -> dict[str, float]:
    task = CausalChains(ChainsSettings(examples=1, validation_examples=documents, test_examples=1), seed=11)
    data = task.prepare()
    batch = data.collate([data.validation[index] for index in range(documents)])
    sums = task.measure(Solver(guess, task.settings.vocab_size), batch)
    assert sums["direct"][1] + sums["chained"][1] == sums["accuracy"][1] == 6 * documents
    return {name: total / weight for name, (total, weight) in sums.items()}


def test_a_solver_that_follows_rules_is_always_right():
    scores = score(follow, documents=100)
    assert scores["direct"] == scores["chained"] == scores["accuracy"] == 1.0
    assert all(scores[f"accuracy_{steps}_steps"] == 1.0 for steps in (1, 2, 3))


def test_a_solver_that_knows_direct_effects_has_those_and_else_chance():
    dice = random.Random(0)

    def guess(rules, cause, steps):
        others = [symbol for symbol in rules if symbol not in (cause, rules[cause])]
        return rules[cause] if steps == 1 else dice.choice(sorted(others))

    scores = score(guess)
    chance = CausalChains(ChainsSettings(**SMALL)).prepare().facts["chance"]
    assert scores["direct"] == 1.0
    assert chance["chained"] == pytest.approx(1 / 6)
    assert scores["accuracy_2_steps"] == pytest.approx(chance["chained"], abs=0.03)
    assert scores["accuracy_3_steps"] == pytest.approx(chance["chained"], abs=0.03)


def test_the_order_of_statements_gives_nothing_away():
    """Neighbouring statements, the last one and steps back are no better than chance at chained questions."""
    guesses = {
        "the next stated cause": lambda rules, cause, steps: _neighbour(list(rules), cause, steps),
        "the next stated effect": lambda rules, cause, steps: _neighbour(list(rules.values()), rules[cause], steps - 1),
        "the last effect": lambda rules, cause, steps: list(rules.values())[-1],
        "the cause of the cause": lambda rules, cause, steps: {b: a for a, b in rules.items()}[cause],
        "the direct effect": lambda rules, cause, steps: rules[cause],
    }
    for name, guess in guesses.items():
        assert score(guess, documents=1000)["chained"] < 1 / 6 + 0.03, name


def _neighbour(stated: list[int], symbol: int, steps: int) -> int:
    return stated[(stated.index(symbol) + steps) % len(stated)]


def test_coincidences_never_state_a_rule():
    chosen = ChainsSettings(coincidences=9, **SMALL)
    for example in Documents(chosen, 0, "train", 50):
        tokens = example["input_ids"].tolist()
        rules = read_rules(tokens)
        said = [(tokens[p - 1], tokens[p + 1]) for p in range(1, 4 * 17, 4) if tokens[p] != CAUSES]
        assert len(said) == 9
        assert all(first in rules and second in rules and rules[first] != second != first for first, second in said)


def test_an_example_depends_on_seed_split_and_index_alone():
    few, many = (Documents(ChainsSettings(**SMALL), 3, "train", count) for count in (5, 2000))
    for name in ("input_ids", "labels"):
        assert torch.equal(few[4][name], many[4][name])
    assert not torch.equal(few[0]["input_ids"], Documents(ChainsSettings(**SMALL), 3, "test", 1)[0]["input_ids"])


def test_a_model_is_measured():
    task = CausalChains(ChainsSettings(**SMALL))
    data = task.prepare()
    model = LatteForCausalLM(LatteConfig.from_preset("macchiato-tiny", num_hidden_layers=1, **data.model)).eval()
    batch = data.collate([data.test[index] for index in range(3)])
    with torch.no_grad():
        sums, loss = task.measure(model, batch), model(**batch).loss
    assert sums["loss"][1] == 18
    assert sums["loss"][0] / 18 == pytest.approx(loss.item(), rel=1e-4)
    for plan in task_class("chains").plans.values():
        LatteConfig.from_preset(plan.preset, **plan.model)
        ChainsSettings(**plan.settings)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"rules": 6}, "in a ring of fewer than 7"),
        ({"symbols": 7}, "each rule needs a symbol"),
        ({"questions": 25}, "allow for 24 different ones"),
        ({"gap": -1}, "gap is -1; it must be at least 0"),
        ({"depth": 0}, "depth is 0"),
    ],
)
def test_settings_that_cannot_be(words, message):
    with pytest.raises(ValueError, match=message):
        ChainsSettings(**words)
