"""Windows are the stream cut into equal lengths; positions begin anew where documents do."""

import pickle
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from latte.tasks.base import stack
from latte.tasks.text.shards import PreparedText, ShardWriter
from latte.tasks.text.windows import Spans, TokenStream, Windows, all_documents, draw, hold_out

on_disk = settings(deadline=None, max_examples=50)  # each example is written with fsync
DOCUMENTS = st.lists(st.integers(1, 9), min_size=1, max_size=12)


def write(folder: Path, lengths: list[int], shard_tokens: int = 11, digests: list[int] | None = None) -> PreparedText:
    """Documents of these lengths whose tokens count on from 0."""
    writer = ShardWriter(folder, np.dtype("<u2"), shard_tokens)
    for number, length in enumerate(lengths):
        writer.write(np.arange(writer.tokens, writer.tokens + length))
        writer.end_document(10 * length, digests[number] if digests else number)
    writer.finish({"tokenizer": {}, "sources": []})
    return PreparedText(folder)


@on_disk
@given(DOCUMENTS, st.integers(1, 8), st.data())
def test_windows_are_the_chosen_documents_one_after_another(
    lengths: list[int], context: int, data: st.DataObject
) -> None:
    chosen = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    ends = np.cumsum(lengths)
    tokens = [list(range(end - length, end)) for length, end in zip(lengths, ends, strict=True)]
    expected = [token for document, taken in zip(tokens, chosen, strict=True) if taken for token in document]
    with TemporaryDirectory() as folder:
        text = write(Path(folder), lengths)
        spans = Spans((ends - lengths)[chosen], ends[chosen], 0)
        windows = Windows(TokenStream(text, spans), context, separate=False)
        assert len(windows) == len(expected) // context
        joined = [token for window in windows for token in window["input_ids"].tolist()]
        assert joined == expected[: len(windows) * context]
        assert all(window["labels"].equal(window["input_ids"]) for window in windows)


@on_disk
@given(DOCUMENTS, st.integers(2, 8))
def test_separate_documents_begin_at_position_zero_and_are_not_foretold(lengths: list[int], context: int) -> None:
    """Against the form that walks through the tokens one by one."""
    starts = set(np.cumsum([0, *lengths]).tolist())
    with TemporaryDirectory() as folder:
        text = write(Path(folder), lengths)
        for window in Windows(TokenStream(text, all_documents(text)), context, separate=True):
            position = -1
            for i, token in enumerate(window["input_ids"].tolist()):
                position = 0 if token in starts or i == 0 else position + 1
                assert window["position_ids"][i] == position
                assert window["labels"][i] == (-100 if token in starts and i > 0 else token)


def test_windows_by_index_by_batch_and_by_loader_are_the_same(tmp_path: Path) -> None:
    text = write(tmp_path, [7, 5, 13, 1, 30])
    for separate in (False, True):
        windows = Windows(TokenStream(text, all_documents(text)), 4, separate)
        indices = [3, 0, 13, 3]
        batch = stack(windows.__getitems__(indices))
        for name, value in batch.items():
            assert value.dtype == torch.int64
            torch.testing.assert_close(value, torch.stack([windows[i][name] for i in indices]))
        loader = DataLoader(windows, batch_size=4, sampler=indices, collate_fn=stack)  # pyright: ignore
        (loaded,) = loader
        assert {name: value.tolist() for name, value in loaded.items()} == {k: v.tolist() for k, v in batch.items()}


def test_a_beginning_takes_the_place_of_each_first_token(tmp_path: Path) -> None:
    text = write(tmp_path, [5, 4])
    stream = TokenStream(text, all_documents(text))
    plain, begun = Windows(stream, 4, separate=True), Windows(stream, 4, separate=True, begin=77)
    assert len(begun) == 2
    for before, after in ((plain[index], begun[index]) for index in range(len(begun))):
        assert after["input_ids"].tolist() == [77, *before["input_ids"][1:].tolist()]
        assert after["labels"][1:].tolist() == before["labels"][1:].tolist()  # nothing asks for the first one
        assert after["position_ids"].tolist() == before["position_ids"].tolist()


def test_other_windows_than_there_are(tmp_path: Path) -> None:
    text = write(tmp_path, [7])
    windows = Windows(TokenStream(text, all_documents(text)), 3, separate=False)
    assert len(windows) == 2
    for index in (2, -1):
        with pytest.raises(IndexError, match=f"window {index} of 2"):
            windows[index]


def test_windows_travel_to_other_processes_without_their_tokens(tmp_path: Path) -> None:
    text = write(tmp_path, [50_000], shard_tokens=1 << 20)
    windows = Windows(TokenStream(text, all_documents(text)), 100, separate=True)
    assert windows[3]["input_ids"][0] == 300  # the shards are open
    data = pickle.dumps(windows)
    assert len(data) < 5000
    assert pickle.loads(data)[3]["input_ids"].equal(windows[3]["input_ids"])


@on_disk
@given(
    st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=30), st.integers(0, 5), st.sampled_from([0.01, 0.3, 0.9])
)
def test_each_document_is_on_one_side_and_equal_ones_on_the_same(digests: list[int], seed: int, share: float) -> None:
    lengths = [1 + number % 7 for number in range(len(digests))]
    with TemporaryDirectory() as folder:
        text = write(Path(folder), lengths, digests=digests)
        train, validation = hold_out(text, share, seed)
        assert sorted([*train.ends, *validation.ends]) == np.cumsum(lengths).tolist()
        assert train.size + validation.size == 10 * sum(lengths)
        side = {int(end): False for end in train.ends} | {int(end): True for end in validation.ends}
        by_digest: dict[int, set[bool]] = {}
        for digest, end in zip(digests, np.cumsum(lengths).tolist(), strict=True):
            by_digest.setdefault(digest, set()).add(side[end])
        assert all(len(sides) == 1 for sides in by_digest.values())
        if len(by_digest) > 1:
            assert len(train.ends)
            assert len(validation.ends)


def test_seeds_draw_differently_and_evenly() -> None:
    digests = np.random.default_rng(0).integers(0, 2**63, 20_000, dtype=np.uint64)
    one, two = draw(digests, 1), draw(digests, 2)
    for lots in (one, two, draw(np.arange(20_000, dtype=np.uint64), 0)):
        assert abs((lots < 0.1).mean() - 0.1) < 0.01
        assert lots.min() >= 0
        assert lots.max() < 1
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.03


def test_of_a_single_document_the_end_is_held_out(tmp_path: Path) -> None:
    text = write(tmp_path, [1000], shard_tokens=1 << 20)
    train, validation = hold_out(text, 0.05, seed=3)
    assert (train.tokens, validation.tokens) == (950, 50)
    assert (train.size, validation.size) == (9500, 500)
    assert TokenStream(text, validation).tokens(0, 2).tolist() == [950, 951]


def test_equal_documents_alone_leave_nothing_to_hold_out(tmp_path: Path) -> None:
    text = write(tmp_path, [5, 5], digests=[9, 9])
    train, validation = hold_out(text, 0.5, seed=0)
    assert (train.tokens, validation.tokens) == (10, 0)
    assert len(TokenStream(text, validation)) == 0
