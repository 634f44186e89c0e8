"""`latte inspect`: what goes to stdout, to stderr and to files, and what it says of bad input."""

import copy
import json
import re

import pytest
import torch

from latte.analysis.measures import measure
from latte.analysis.rows import attention_row, trace
from latte.cli import inspecting, main
from latte.models import LatteConfig, LatteForCausalLM
from latte.tasks.text import byte_tokenizer
from tests.cli.test_command import error_line

SIZES = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_heads": 2}
TEXT = "A latent chooses among the tokens: ä, ß and 🙂.\n" * 3


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LatteForCausalLM(LatteConfig(**SIZES, num_latents=3, window=5, initializer_range=0.5)).eval()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """A saved model without a tokenizer: bytes are tokens."""
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Reports go to where we are."""
    monkeypatch.chdir(tmp_path)


def run(capsys, *arguments: str) -> tuple[dict, str]:
    """The JSON document and stderr of a run."""
    assert main(["inspect", *arguments, "--json"]) == 0
    printed = capsys.readouterr()
    return json.loads(printed.out), printed.err


def meta_of(path):
    return json.loads(re.search(r'id="meta">(.*?)</script>', path.read_text(encoding="utf-8"), re.DOTALL)[1])


def test_the_table_goes_to_stdout_and_the_rest_to_stderr(folder, tmp_path, capsys):
    assert main(["inspect", folder, "--text", TEXT]) == 0
    printed = capsys.readouterr()
    lines = [line.split() for line in printed.out.splitlines() if line.strip()]
    assert lines[0][:4] == ["layer", "head", "in", "effect"]
    assert [line[:2] for line in lines[1:5]] == [["0", "0"], ["0", "1"], ["1", "0"], ["1", "1"]]
    assert "collapsed: fewer than a tenth" in " ".join(printed.out.split())
    assert "report" not in printed.out
    assert "the report is in inspect.html" in printed.err
    meta = meta_of(tmp_path / "inspect.html")
    assert "".join(meta["texts"]) == TEXT


def test_the_document_has_the_measures(folder, model, capsys):
    document, _ = run(capsys, folder, "--text", TEXT, "--device", "cpu")
    tokens = torch.tensor(list(TEXT.encode()))
    assert (document["tokens"], document["shown_tokens"], document["has_latents"]) == (len(tokens), len(tokens), True)
    for layer, measured in zip(document["layers"], measure(model, tokens), strict=True):
        for words in (
            ["usage"],
            ["chosen"],
            ["effective_latents"],
            ["latent_reach", "within_90"],
            ["score_reach", "mean"],
        ):
            actual, expected = layer, measured.record()
            for word in words:
                actual, expected = actual[word], expected[word]
            torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_what_a_token_attends_to(folder, model, capsys):
    document, _ = run(capsys, folder, "--text", TEXT, "--token", "-3", "--layers", "1", "--chunk", "10")
    (layer,) = document["attention"]
    tokens = torch.tensor(list(TEXT.encode()))
    row = attention_row(trace(model, tokens)["model.layers.1.attention"], -3)
    assert (layer["layer"], layer["token"]) == ("model.layers.1.attention", len(tokens) - 3)
    for head, found in enumerate(layer["heads"]):
        top = row.top(head, 20)
        assert [x["position"] for x in found["top"]][:5] == [x.position for x in top][:5]
        assert [x["weight"] for x in found["top"]] == pytest.approx([x.weight for x in top], rel=1e-3)
        assert found["window_share"] == pytest.approx(row.local_share[head].item(), rel=1e-3)
    assert main(["inspect", folder, "--text", TEXT, "--token", "5"]) == 0
    assert "Token 5 'e'" in capsys.readouterr().out


def test_files(folder, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "text"
    path.write_text(TEXT, encoding="utf-8")
    document, _ = run(
        capsys, folder, "--file", str(path), "--max-tokens", "40", "--show", "30", "--layers", "0",
        "--output", "a.html", "--figures", "drawn", "--format", "svg,png",
    )  # fmt: skip
    assert (document["tokens"], document["shown_tokens"], document["report"]) == (40, 30, "a.html")
    names = {"attention", "distances", "states", "usage"}
    assert {path.name for path in (tmp_path / "drawn").iterdir()} == {f"{x}.{y}" for x in names for y in ("svg", "png")}
    assert len(meta_of(tmp_path / "a.html")["texts"]) == 30
    assert any("first 30 tokens; measures are of all 40" in note for note in document["notes"])


def test_metrics_of_a_run(folder, model, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    from latte.analysis.usage import UsageMeter

    with torch.no_grad(), UsageMeter(model) as meter:
        model(torch.arange(30)[None])
    lines = [{"step": step, "split": "usage", "layers": [x.record() for x in meter.layers()]} for step in (0, 5)]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    document, _ = run(capsys, folder, "--text", TEXT, "--figures", "drawn", "--metrics", str(metrics))
    assert "drawn/training.png" in document["figures"]


def test_a_model_without_latents_shows_what_there_is(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    document, error = run(capsys, "transformer-tiny", "--text", TEXT, "--token", "-1", "--figures", "drawn")
    assert document["has_latents"] is False
    assert "no latents" in error
    assert len(document["layers"][0]["score_reach"]["mean"]) == 4
    assert document["attention"][0]["heads"][0]["window_share"] == pytest.approx(1)
    assert {path.name for path in (tmp_path / "drawn").iterdir()} == {"attention.png", "distances.png"}
    assert any("no latents" in note for note in meta_of(tmp_path / "inspect.html")["notes"])


def test_a_preset_warns_of_its_random_weights(capsys):
    document, error = run(capsys, "latte-tiny", "--text", "abc")
    assert document["random_weights"]
    assert "random" in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["latte-tiny"], ["--text TEXT", "--file FILE"]),
        (["latte-tiny", "--text", "x", "--file", "y"], ["one of them"]),
        (["latte-tiny", "--file", "/nowhere/at/all"], ["--file /nowhere/at/all"]),
        (["latte-tiny", "--text", ""], ["empty"]),
        (["latte-tiny", "--text", "x", "--output", "nowhere/a.html"], ["--output", "nowhere"]),
        (["latte-tiny", "--text", "x", "--layers", "1;2"], ["--layers 1;2", "0,5,11"]),
        (["latte-tiny", "--text", "x", "--layers", "4"], ["no layer 4", "0 to 3"]),
        (["latte-tiny", "--text", "x", "--format", "gif"], ["--format gif", "png"]),
        (["latte-tiny", "--text", "x", "--token", "1"], ["--token 1", "0 to 0"]),
        (["latte-tiny", "--text", "x", "--metrics", "nowhere.jsonl", "--figures", "f"], ["nowhere.jsonl"]),
        (["latte-tiny", "--text", "x", "--metrics", "nowhere.jsonl"], ["nowhere.jsonl", "no such file"]),
        (["latte-tiny", "--text", "x", "--metrics", __file__], ["--metrics", "--figures FOLDER"]),
        (["latte-tiny", "--text", "x", "--metrics", __file__, "--figures", "f"], ["test_inspect.py is no metrics"]),
        (["latte-tiny", "--text", "x", "--format", ","], ["--format", "png"]),
        (["latte-tiny", "--text", "x", "--seed", str(2**70)], ["--seed"]),
        (["latte-tinny", "--text", "x"], ["latte-tinny", "'latte-tiny'"]),
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", *arguments]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("latte: error: ")
    assert all(word in line for word in words), line
    assert not (tmp_path / "inspect.html").exists()


def test_weights_that_are_not_finite_are_named(model, tmp_path, capsys):
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.model.layers[0].feedforward.down.weight[3, 4] = torch.nan
    broken.save_pretrained(tmp_path / "broken")
    assert main(["inspect", str(tmp_path / "broken"), "--text", TEXT]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "error: model.layers.1.attention: its latent_query of token 0 is not finite" in line
    assert "its weight model.layers.0.feedforward.down.weight holds NaN or infinity" in line
    assert not (tmp_path / "inspect.html").exists()


def test_a_text_longer_than_memory_is_cut(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(inspecting, "free_memory", lambda: 2 * inspecting.BYTES_PER_TEXT_BYTE * 50)
    path = tmp_path / "long"
    path.write_text(TEXT, encoding="utf-8")
    document, error = run(capsys, folder, "--file", str(path))
    assert document["tokens"] == 50
    assert "memory has room for 50" in error


def test_a_model_of_bytes_that_has_a_tokenizer_reads_any_bytes(model, tmp_path, monkeypatch, capsys):
    """All of them where memory has no room for the rest of the file, too."""
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    path = tmp_path / "bytes"
    path.write_bytes(b"caf\xff\xfe" * 20)
    assert run(capsys, str(tmp_path / "model"), "--file", str(path))[0]["tokens"] == 100
    monkeypatch.setattr(inspecting, "free_memory", lambda: 2 * inspecting.BYTES_PER_TEXT_BYTE * 50)
    assert run(capsys, str(tmp_path / "model"), "--file", str(path))[0]["tokens"] == 50


def test_softmax_attention_longer_than_memory_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(inspecting, "free_memory", lambda: 100_000)
    assert main(["inspect", "transformer-tiny", "--text", TEXT]) == 2
    assert "--max-tokens" in capsys.readouterr().err.splitlines()[-1]


def test_without_transformers_the_error_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("latte.cli.generate.find_spec", lambda name: None)
    assert main(["inspect", "latte-tiny", "--text", "x"]) == 2
    assert "pip install 'latte-attention[train]'" in error_line(capsys)
