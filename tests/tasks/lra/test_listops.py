"""ListOps: values against an independent parser, lengths and shares against Long Range Arena's own recursion."""

import random
import time
from statistics import mean, median

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from latte.models import LatteConfig, LatteForSequenceClassification
from latte.tasks.generation import block_generator
from latte.tasks.lra import ListOps, ListOpsSettings, expressions
from latte.tasks.lra.expressions import TOKENS, Shape, make_expressions
from latte.tasks.lra.listops import parse_expression

FUNCTIONS = {"[MIN": min, "[MAX": max, "[MED": lambda x: int(median(x)), "[SM": lambda x: sum(x) % 10}
TINY = {"min_length": 20, "length": 120, "max_depth": 5, "examples": 11, "validation_examples": 5}
TINY |= {"test_examples": 3, "workers": 1}


def evaluate(words: list[str]) -> tuple[int, int]:
    """Value and depth of an expression, by recursive descent."""

    def read(place: int) -> tuple[int, int, int]:
        if words[place] not in FUNCTIONS:
            return int(words[place]), 1, place + 1
        function, arguments, depths = FUNCTIONS[words[place]], [], []
        place += 1
        while words[place] != "]":
            value, depth, place = read(place)
            arguments.append(value)
            depths.append(depth)
        assert 2 <= len(arguments) <= 10
        return function(arguments), 1 + max(depths), place + 1

    value, depth, end = read(0)
    assert end == len(words)
    return value, depth


def words_of(tokens) -> list[str]:
    return [TOKENS[token] for token in tokens]


def release_form(words: list[str]) -> str:
    """An expression as the official release writes it, a bracket around each application to one more argument."""
    stack: list[list[str]] = []
    for word in words:
        if word in FUNCTIONS:
            stack.append([word])
            continue
        if word == "]":
            parts = [*stack.pop(), word]
            whole = parts[0]
            for part in parts[1:]:
                whole = f"( {whole} {part} )"
        else:
            whole = word
        if not stack:
            return whole
        stack[-1].append(whole)
    raise AssertionError("not closed")


@given(st.integers(0, 2**40), st.integers(3, 7), st.integers(2, 10), st.integers(3, 40))
@example(0, 7, 2, 37)  # so rare that a round finds none
@settings(max_examples=15, deadline=None)
def test_values_lengths_and_depths(seed, max_depth, max_args, min_length):
    shape = Shape(min(min_length, 2 ** (max_depth - 1)), 400, max_depth, max_args)
    made = make_expressions(block_generator(seed, "train", 0), 25, shape)
    for index in range(25):
        words = words_of(made.tokens[made.offsets[index] : made.offsets[index + 1]])
        value, depth = evaluate(words)
        assert value == made.values[index]
        assert shape.min_length < len(words) < shape.max_length
        assert depth <= max_depth


@pytest.mark.parametrize(("shortest", "longest"), [(1, 4), (150, 400)], ids=["none is", "next to none is"])
def test_lengths_that_nothing_has_are_refused(shortest, longest, monkeypatch):
    monkeypatch.setattr(expressions, "PATIENCE", 20)
    with pytest.raises(
        ValueError, match=rf"max_depth 7 .* more than {shortest} and less than {longest} tokens; choose"
    ):
        make_expressions(block_generator(0, "train", 0), 2, Shape(shortest, longest, 7, 2))


def test_the_arena_s_own_lengths():
    made = make_expressions(block_generator(0, "train", 0), 100, Shape(500, 2000, 10, 10))
    lengths = np.diff(made.offsets)
    assert lengths.min() > 500
    assert lengths.max() < 2000
    for index in (0, 57, 99):
        assert evaluate(words_of(made.tokens[made.offsets[index] : made.offsets[index + 1]]))[0] == made.values[index]


def draw_naively(dice: random.Random, depth: int, max_depth: int, max_args: int) -> list[str]:
    """Long Range Arena's recursion, as its paper describes it."""
    if depth == max_depth or dice.random() > 0.25:
        return [str(dice.randrange(10))]
    words = [dice.choice(list(FUNCTIONS))]
    for _ in range(dice.randint(2, max_args)):
        words += draw_naively(dice, depth + 1, max_depth, max_args)
    return [*words, "]"]


def test_expressions_are_distributed_as_the_recursion_has_them():
    dice, naive = random.Random(0), []
    while len(naive) < 1500:
        words = draw_naively(dice, 1, 6, 6)
        if 20 < len(words) < 150:
            naive.append(words)
    made = make_expressions(block_generator(1, "train", 0), 1500, Shape(20, 150, 6, 6))
    ours = [words_of(made.tokens[a:b]) for a, b in zip(made.offsets, made.offsets[1:], strict=False)]
    for measure in (len, lambda words: evaluate(words)[1], lambda words: evaluate(words)[0], _operators, _arguments):
        first, second = [measure(words) for words in naive], [measure(words) for words in ours]
        error = np.sqrt(np.var(first) / 1500 + np.var(second) / 1500)
        assert abs(mean(first) - mean(second)) < 4 * error
        assert np.std(first) == pytest.approx(np.std(second), rel=0.12)


def _operators(words: list[str]) -> int:
    return sum(word in FUNCTIONS for word in words)


def _arguments(words: list[str]) -> float:
    return (len(words) - 1 - words.count("]")) / _operators(words)


def test_the_same_from_any_number_of_processes(tmp_path):
    chosen = TINY | {"examples": 1100}
    data = [
        ListOps(ListOpsSettings(**chosen | {"workers": workers}, cache=str(tmp_path / str(workers))), seed=3).prepare()
        for workers in (1, 2)
    ]
    assert data[0].fingerprint == data[1].fingerprint
    assert len(data[0].train) == 1100
    for index in range(0, 1100, 57):
        for name in ("input_ids", "labels"):
            assert torch.equal(data[0].train[index][name], data[1].train[index][name])


def test_an_example_depends_on_seed_split_and_index_alone(tmp_path):
    def prepare(seed: int = 0, **words):
        return ListOps(ListOpsSettings(**(TINY | words), cache=str(tmp_path)), seed=seed).prepare()

    few, many, other = prepare(), prepare(examples=600), prepare(seed=1)
    assert torch.equal(few.train[10]["input_ids"], many.train[10]["input_ids"])
    assert not torch.equal(few.train[0]["input_ids"], other.train[0]["input_ids"])
    assert not torch.equal(few.train[0]["input_ids"], few.validation[0]["input_ids"])
    assert len({few.fingerprint, many.fingerprint, other.fingerprint}) == 3
    with pytest.raises(IndexError):
        few.train[11]


@pytest.mark.parametrize("padding", ["batch", "length"])
def test_batches_are_padded_and_a_model_is_measured(tmp_path, padding):
    task = ListOps(ListOpsSettings(**TINY, cache=str(tmp_path), padding=padding))
    data = task.prepare()
    batch = data.collate([data.train[index] for index in range(11)])
    longest = max(len(data.train[index]["input_ids"]) for index in range(11))
    assert batch["input_ids"].shape == (11, 120 if padding == "length" or longest > 64 else 64)
    for index in range(11):
        own = data.train[index]["input_ids"]
        assert batch["attention_mask"][index].sum() == len(own)
        assert torch.equal(batch["input_ids"][index, : len(own)], own)
        assert not batch["input_ids"][index, len(own) :].any()
    model = LatteForSequenceClassification(
        LatteConfig.from_preset("macchiato-tiny", num_hidden_layers=1, **data.model)
    ).eval()
    with torch.no_grad():
        sums, outputs = task.measure(model, batch), model(**batch)
    assert sums["loss"][0] / 11 == pytest.approx(outputs.loss.item(), rel=1e-4)
    assert sums["accuracy"] == (float((outputs.logits.argmax(-1) == batch["labels"]).sum()), 11.0)


def write_release(folder, rows: list[tuple[str, object]], header: str = "Source\tTarget") -> None:
    for name in ("train", "val", "test"):
        lines = [header, *(f"{source}\t{target}" for source, target in rows)]
        (folder / f"basic_{name}.tsv").write_text("\r\n".join(lines) + "\r\n")


def test_the_official_release_is_read(tmp_path):
    made = make_expressions(block_generator(5, "train", 0), 6, Shape(20, 120, 5, 5))
    words = [words_of(made.tokens[a:b]) for a, b in zip(made.offsets, made.offsets[1:], strict=False)]
    rows = [(release_form(expression), value) for expression, value in zip(words, made.values, strict=True)]
    assert rows[0][0].startswith("( ( ")
    folder = tmp_path / "listops-1000"
    folder.mkdir()
    write_release(folder, rows)
    data = ListOps(ListOpsSettings(data=str(folder), cache=str(tmp_path / "cache"))).prepare()
    assert len(data.train) == len(data.validation) == len(data.test) == 6
    for index, expression in enumerate(words):
        assert words_of(data.test[index]["input_ids"].tolist()) == expression
        assert data.test[index]["labels"] == made.values[index]
    cut = ListOps(ListOpsSettings(data=str(folder), min_length=3, length=17, cache=str(tmp_path / "cache"))).prepare()
    assert words_of(cut.test[0]["input_ids"].tolist()) == words[0][:17]
    assert cut.fingerprint != data.fingerprint


@pytest.mark.parametrize(
    ("rows", "header", "message"),
    [
        ([("( [MAX 3 ) ] )", 3)], "Text\tLabel", "no column 'Source', 'Target'; it has 'Text', 'Label'"),
        ([("( ( [MAX 3 ) ] )", 11)], "Source\tTarget", "line 2: Target is 11"),
        ([("( ( [MAX 3 ) ] )", 3), ("( ( [AVG 3 ) ] )", 3)], "Source\tTarget", "line 3: .* is no expression"),
        ([], "Source\tTarget", "has no expressions"),
        ([("( ( [MAX 3 ) ] )", "x")], "Source\tTarget", "line 2: invalid literal"),
    ],
)
def test_a_release_that_is_none(tmp_path, rows, header, message):
    write_release(tmp_path, rows, header)
    with pytest.raises(ValueError, match=message):
        ListOps(ListOpsSettings(data=str(tmp_path), cache=str(tmp_path / "cache"))).prepare()


def test_missing_files(tmp_path):
    with pytest.raises(ValueError, match="no such file or folder"):
        ListOps(ListOpsSettings(data=str(tmp_path / "nowhere"))).prepare()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"has no basic_train\.tsv; it has notes\.txt"):
        ListOps(ListOpsSettings(data=str(tmp_path))).prepare()


def test_an_expression_is_parsed():
    assert words_of(parse_expression(b"( ( ( [MED 3 ) ( ( ( [SM 9 ) 4 ) ] ) ) ] )")) == [
        "[MED", "3", "[SM", "9", "4", "]", "]",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"length": 501}, "nothing is between them"),
        ({"max_depth": 3, "max_args": 5}, "have 37 tokens at most"),
        ({"max_args": 1}, "max_args is 1"),
    ],
)
def test_settings_that_cannot_be(words, message):
    with pytest.raises(ValueError, match=message):
        ListOpsSettings(**words)


@pytest.mark.bench
def test_a_hundred_thousand_expressions_take_two_minutes(tmp_path):
    begin = time.perf_counter()
    ListOps(ListOpsSettings(cache=str(tmp_path))).prepare()
    assert time.perf_counter() - begin < 120
