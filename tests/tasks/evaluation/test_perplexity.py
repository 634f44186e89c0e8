"""Perplexity by length and by position, against windows scored one by one."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from latte.tasks.evaluation import perplexity, take_texts
from latte.tasks.evaluation.perplexity import cut, perplexity_ratio
from latte.tasks.evaluation.plot import check_plot, plot_perplexity
from latte.tasks.evaluation.positions import bucket_edges
from latte.tasks.evaluation.statistics import Estimate, choose, mean_over_groups
from tests.tasks.evaluation.small import make_model, random_tokens, slow_losses

TEXTS = [random_tokens(48, seed=2), random_tokens(24, seed=3), random_tokens(24, seed=4)]


def slow_windows(model, length: int, bos: int | None) -> list[list[torch.Tensor]]:
    """The losses of every window of every text."""
    found = []
    for text in TEXTS:
        windows = text.view(-1, length).clone()
        if bos is not None:
            windows[:, 0] = bos
        found.append([slow_losses(model, window[None])[0].double() for window in windows])
    return found


@pytest.mark.parametrize("name", ["macchiato", "llama", "gemma2"])
@pytest.mark.parametrize("bos", [None, 256])
def test_whole_windows(name, bos):
    model = make_model(name)
    report = perplexity(model, TEXTS, [24, 8], bos=bos, batch_tokens=50)
    assert [result.length for result in report.lengths] == [8, 24]
    for result in report.lengths:
        losses = slow_windows(model, result.length, bos)
        expected = torch.cat([torch.cat(text) for text in losses]).mean()
        assert result.loss.value == pytest.approx(float(expected), rel=1e-4)
        assert result.perplexity.value == pytest.approx(math.exp(expected), rel=1e-3)
        assert result.windows == 96 // result.length
        assert result.tokens == 96 - result.windows
        assert result.documents == 3
        assert result.sums == pytest.approx([float(torch.cat(text).sum()) for text in losses], rel=1e-4)


@pytest.mark.parametrize("chunk", [5, 24])
def test_chunks_change_nothing(chunk):
    model = make_model("macchiato")
    whole, parts = (perplexity(model, TEXTS, [8, 24], chunk=size) for size in (None, chunk))
    for one, other in zip(whole.lengths, parts.lengths, strict=True):
        assert one.loss.value == pytest.approx(other.loss.value, rel=1e-5)


@pytest.mark.parametrize("stride", [1, 3, 7])
def test_sliding_windows(stride):
    """Each token is predicted from as many before it as the slowest way would give it."""
    model = make_model("llama")
    report = perplexity(model, TEXTS, [8], mode="sliding", stride=stride)
    expected = []
    for text in TEXTS:
        scored, end = 1, 8
        while True:
            window = text[end - 8 : end]
            expected.append(slow_losses(model, window[None])[0, scored - (end - 8) - 1 :])
            if end == len(text):
                break
            scored, end = end, min(end + stride, len(text))
    assert report.lengths[0].tokens == sum(map(len, expected)) == 96 - 3
    assert report.lengths[0].loss.value == pytest.approx(float(torch.cat(expected).mean()), rel=1e-4)
    assert report.positions == []


@given(st.data())
def test_sliding_scores_every_token_but_the_first_once(data):
    length = data.draw(st.integers(2, 12))
    stride = data.draw(st.integers(1, length - 1))
    text = torch.arange(data.draw(st.integers(length, 60)))
    scored = []
    for window in cut([text], length, "sliding", stride):
        assert 0 <= window.start <= len(text) - length
        assert window.scored >= (length - stride if window.start else 1)
        scored += range(window.start + window.scored, window.start + length)
    assert scored == list(range(1, len(text)))


def test_positions_are_of_the_longest_length_and_add_up():
    model = make_model("macchiato")
    report = perplexity(model, TEXTS, [8, 24], buckets=4, spacing="equal")
    losses = torch.stack([window for text in slow_windows(model, 24, None) for window in text])
    assert (report.positions[0].start, report.positions[-1].end) == (1, 24)
    for bucket in report.positions:
        expected = losses[:, bucket.start - 1 : bucket.end - 1]
        assert bucket.loss.value == pytest.approx(float(expected.mean()), rel=1e-4)
        assert bucket.tokens == expected.numel()
    weighted = sum(bucket.loss.value * bucket.tokens for bucket in report.positions)
    assert weighted / report.lengths[-1].tokens == pytest.approx(report.lengths[-1].loss.value)


@given(st.integers(2, 70_000), st.integers(1, 40), st.sampled_from(["log", "equal"]))
def test_buckets_cover_all_positions(length, count, spacing):
    edges = bucket_edges(length, count, spacing)
    assert (edges[0], edges[-1]) == (1, length)
    assert edges == sorted(set(edges))
    assert 1 <= len(edges) - 1 <= max(count, 2)


def test_the_error_of_equal_groups_is_that_of_their_means():
    sums, counts = [3.0, 5.0, 9.0, 4.0], [2, 2, 2, 2]
    found = mean_over_groups(sums, counts)
    means = np.array(sums) / 2
    assert found.value == pytest.approx(means.mean())
    assert found.error == pytest.approx(means.std(ddof=1) / math.sqrt(len(means)))
    assert mean_over_groups([3.0], [2]) == Estimate(1.5, None)


def test_one_text_has_an_error_over_its_windows():
    report = perplexity(make_model("llama"), TEXTS[:1], [8])
    result = report.lengths[0]
    assert (result.documents, result.windows, len(result.sums)) == (1, 6, 6)
    assert result.loss.error > 0
    assert all(bucket.loss.error is not None for bucket in report.positions)


def test_the_ratio_has_the_error_of_differences():
    one, other = (perplexity(make_model(name), TEXTS, [8]).lengths[0] for name in ("llama", "gemma2"))
    ratio = perplexity_ratio(one, other)
    assert ratio.value == pytest.approx(one.perplexity.value / other.perplexity.value)
    assert perplexity_ratio(one, one) == Estimate(1.0, 0.0)
    with pytest.raises(ValueError, match="cannot be compared"):
        perplexity_ratio(one, perplexity(make_model("llama"), TEXTS[:2], [8]).lengths[0])


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(1, 10), st.integers(1, 6))
def test_texts_are_taken_in_turns(sizes, span, wanted):
    documents = [[index] * size for index, size in enumerate(sizes)]
    if max(sizes) < span:
        with pytest.raises(ValueError, match="longest has"):
            take_texts(documents, span, wanted * span)
        return
    texts = take_texts(documents, span, wanted * span)
    shares = [len(text) // span for text in texts]
    assert all(len(text) == share * span > 0 for text, share in zip(texts, shares, strict=True))
    owners = [int(text[0]) for text in texts]
    assert owners == [index for index, size in enumerate(sizes) if size >= span][: len(owners)]
    assert sum(shares) == min(wanted, sum(sizes[owner] // span for owner in owners))
    full = [shares[i] == sizes[owner] // span for i, owner in enumerate(owners)]
    assert all(max(shares) - share <= 1 or is_full for share, is_full in zip(shares, full, strict=True))


def test_reading_stops_when_there_is_enough():
    def documents():
        yield from ([0] * 10, [1] * 10)
        pytest.fail("more was read than was needed")

    assert [text.tolist() for text in take_texts(documents(), 5, 10)] == [[0] * 5, [1] * 5]


def test_a_choice_depends_on_its_seed_and_keeps_the_order():
    items = list(range(100))
    one, same, other = (choose(items, 10, seed) for seed in (1, 1, 2))
    assert one == same == sorted(one)
    assert one != other
    assert choose(items, None, 0) == choose(items, 1000, 0) == items


@pytest.mark.parametrize(
    ("lengths", "options", "words"),
    [
        ([], {}, "at least 2"),
        ([1], {}, "at least 2"),
        ([8], {"stride": 4}, "do not overlap"),
        ([8], {"mode": "sliding", "stride": 8}, "less than the length 8"),
        ([8, 25], {}, "fewer than the length 25"),
    ],
)
def test_bad_lengths(lengths, options, words):
    with pytest.raises(ValueError, match=words):
        perplexity(make_model("llama"), TEXTS, lengths, **options)


def test_more_tokens_than_asked_for():
    with pytest.raises(ValueError, match="one text alone has 20"):
        take_texts([[0] * 30], 20, 10)


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_the_plot(kind, tmp_path):
    path = tmp_path / f"figure.{kind}"
    check_plot(path)
    reports = {name: perplexity(make_model(name), TEXTS, [8, 24]) for name in ("llama", "macchiato")}
    plot_perplexity(reports, path)
    begins = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[kind]
    assert path.read_bytes().startswith(begins)
    assert list(tmp_path.iterdir()) == [path]


def test_a_plot_that_cannot_be_written(tmp_path):
    with pytest.raises(ValueError, match=r"must end with \.png"):
        check_plot(tmp_path / "figure.gif")
    with pytest.raises(ValueError, match="no folder"):
        check_plot(tmp_path / "nowhere" / "figure.png")
