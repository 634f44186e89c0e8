"""Figures show all layers and heads, their numbers are those that were measured, and files are whole."""

import json
import sys

import pytest
import torch
from numpy.testing import assert_allclose

from latte import LatteForSequenceClassification
from latte.analysis.inspection import inspect_tokens
from latte.analysis.plots import (
    attention_maps,
    distance_profiles,
    save,
    state_maps,
    usage_maps,
    usage_over_training,
)
from latte.analysis.rows import attention_matrix, trace
from latte.analysis.training import read_usage_history
from latte.analysis.usage import UsageMeter
from tests.analysis.small import HEADS, LATENTS, LAYERS, make_model, make_tokens

pytest.importorskip("matplotlib", reason="figures need matplotlib")
T = 37
TEXTS = [f"token $ {number}\n" for number in range(32)]


@pytest.fixture(scope="module")
def seen():
    return inspect_tokens(make_model(), make_tokens(T))


def images(figure):
    return [axis.images[0].get_array() for axis in figure.axes if axis.images]


def test_maps_of_states(seen):
    figure = state_maps(seen.traces, TEXTS)
    shown = images(figure)
    assert len(shown) == LAYERS * HEADS
    p = torch.softmax(seen.traces[1].parts.latent_query, dim=-1)
    assert_allclose(shown[HEADS + 2], p[:, 2].T, rtol=1e-5)
    labels = [label.get_text() for label in figure.axes[-2].get_xticklabels()]
    assert labels[3] == r"token␣\$␣3"[:10].replace("\n", "↵")


def test_maps_of_attention(seen):
    shown = images(attention_maps(seen.traces, TEXTS))
    assert len(shown) == LAYERS * HEADS
    assert_allclose(shown[1] ** 2, attention_matrix(seen.traces[0])[1], rtol=1e-5, atol=1e-7)


def test_maps_of_a_model_that_reads_both_ways():
    """What the first tokens attend to among all, of which the map shows the first."""
    model = make_model(mixer="conv", kind=LatteForSequenceClassification, causal=False, pad_token_id=0)
    tokens = make_tokens(T)
    seen = inspect_tokens(model, tokens)
    whole = trace(model, tokens)
    shown = images(attention_maps(seen.traces, TEXTS))
    assert_allclose(
        shown[HEADS + 1] ** 2,
        attention_matrix(whole["model.layers.1.attention"])[1, : len(TEXTS), : len(TEXTS)],
        rtol=1e-5,
        atol=1e-7,
    )
    assert [map_of_states.shape for map_of_states in images(state_maps(seen.traces, TEXTS))[:-1]] == [
        (LATENTS + 1, len(TEXTS))
    ] * (LAYERS * HEADS - 1)


def test_maps_of_usage(seen):
    figure = usage_maps(seen.measures)
    assert_allclose(images(figure)[1], seen.measures[1].usage.usage)
    beside = [text.get_text() for axis in figure.axes for text in axis.texts]
    assert beside == [f"{x:.1f}" for measured in seen.measures for x in measured.usage.effective_latents.tolist()]


def test_profiles_of_distance(seen):
    figure = distance_profiles(seen.measures)
    lines = [line for line in figure.axes[1].lines if len(line.get_xdata())]
    assert len(lines) == 2 * HEADS  # latents and window
    assert all(sum(line.get_ydata()) == pytest.approx(1) for line in lines)


def test_without_latents():
    seen = inspect_tokens(make_model("softmax"), make_tokens(T))
    assert not seen.has_latents
    with pytest.raises(ValueError, match="no latents"):
        state_maps(seen.traces, TEXTS)
    with pytest.raises(ValueError, match="no latents"):
        usage_maps(seen.measures)
    assert len(images(attention_maps(seen.traces, TEXTS))) == LAYERS * HEADS
    assert len([line for line in distance_profiles(seen.measures).axes[0].lines if len(line.get_xdata())]) == HEADS


@pytest.fixture(params=["latte", "macchiato"])
def metrics(request, tmp_path):
    """As training writes them, with other lines between."""
    model, lines = make_model(request.param), []
    for step in (0, 10, 25):
        with torch.no_grad(), UsageMeter(model) as meter:
            model(make_tokens(1, T, seed=step))
        lines.append({"step": step, "split": "samples", "texts": [{"text": "a\u2028b\x85c"}]})
        lines.append({"step": step, "split": "usage", "layers": [layer.record() for layer in meter.layers()]})
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path, lines


def test_usage_over_training(metrics):
    path, lines = metrics
    history = read_usage_history(path)
    assert history.steps == [0, 10, 25]
    assert history.effective_latents.shape == (3, LAYERS, HEADS)
    assert history.effective_latents[1, 1].tolist() == pytest.approx(lines[3]["layers"][1]["effective_latents"])
    figure = usage_over_training(history)
    means = [line for line in figure.axes[0].lines if line.get_linewidth() > 1]
    assert_allclose(means[1].get_ydata(), history.effective_latents[:, 1].mean(dim=1))
    assert bool(figure.axes[1].lines) == (history.window_share is not None)


def test_metrics_that_have_no_usage(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(ValueError, match="no such file"):
        read_usage_history(path)
    path.write_text('{"step": 1, "split": "train"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="no line is of the usage"):
        read_usage_history(path)
    for content in ("x", "[1]", '{"split": "usage"}', '{"step": 1, "split": "usage", "layers": [1]}'):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match=r"metrics\.jsonl is no metrics\.jsonl as a training run writes it"):
            read_usage_history(path)


@pytest.mark.parametrize(("kind", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_files_are_whole_and_the_same_each_time(seen, kind, start, tmp_path):
    paths = [tmp_path / f"{name}.{kind}" for name in "ab"]
    for path in paths:
        save(usage_maps(seen.measures), path)
    first, second = (path.read_bytes() for path in paths)
    assert first.startswith(start)
    assert first == second
    assert sorted(tmp_path.iterdir()) == paths


def test_a_file_that_fails_leaves_nothing(seen, tmp_path):
    figure = usage_maps(seen.measures)
    figure.savefig = lambda *_, **__: 1 / 0
    with pytest.raises(ZeroDivisionError):
        save(figure, tmp_path / "a.png")
    with pytest.raises(ValueError, match="png, svg, pdf"):
        save(figure, tmp_path / "a.gif")
    assert not list(tmp_path.iterdir())


def test_without_matplotlib(seen, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        usage_maps(seen.measures)


def test_the_latents_are_named(seen):
    axis = usage_maps(seen.measures).axes[LAYERS - 1]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["window", str(LATENTS)]
