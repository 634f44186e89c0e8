"""`latte convert`: what goes to stdout and to stderr, and what it says of bad input."""

import json

import pytest
from transformers import AutoModelForCausalLM

from latte.cli import main
from latte.cli.convert import parse_layers
from tests.cli.test_command import error_line
from tests.convert.sources import make_source


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("source")
    make_source("gemma3_text").save_pretrained(path)
    return str(path)


def test_the_summary(source, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["convert", source, str(out), "--window", "11", "--latents", "3", "--layers", "0,2"]) == 0
    printed = capsys.readouterr()
    assert f"{out}: Gemma 3 (text)," in printed.out
    assert "converted 2 of 3 layers: window 11, 3 latents per head, mixer rglru, window share 0.95" in printed.out
    assert "parameters are new" in printed.out
    assert "done in" in printed.err


def test_the_document(source, tmp_path, capsys):
    out = str(tmp_path / "out")
    options = ["--window", "11", "--latents", "3", "--mixer", "conv", "--layers", "global", "--dtype", "bfloat16"]
    options += ["--initial-window-share", "0.5", "--low-memory", "--max-shard-size", "1MB", "--seed", "3", "--json"]
    assert main(["convert", source, out, *options]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["source"], document["out"], document["layers"]) == (source, out, [1])
    assert (document["window"], document["num_latents"], document["mixer"]) == (11, 3, "conv")
    assert (document["initial_window_share"], document["dtype"]) == (0.5, "bfloat16")
    config = AutoModelForCausalLM.from_pretrained(out).config
    assert (config.window, config.num_latents, config.mixer, config.layers) == (11, 3, "conv", [1])


def test_a_converted_model_writes(source, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert main(["convert", source, out, "--window", "11"]) == 0
    capsys.readouterr()
    assert main(["convert", out, str(tmp_path / "again")]) == 2
    assert "'latte_converted' model, which cannot be converted" in error_line(capsys)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--window", "0"], "window is 0; it must be an integer of at least 1"),
        (["--window", "30"], "over layer 0's own of 29"),
        (["--window", "300", "--layers", "global"], "over the source's own context of 256"),
        (["--latents", "0"], "num_latents is 0"),
        (["--layers", "0,x"], "--layers 0,x: it must be all, global, or numbers"),
        (["--layers", "7"], "layers has 7; the source's layers are numbered from 0 to 2"),
        (["--initial-window-share", "2"], "initial_window_share is 2"),
        (["--max-shard-size", "big"], "--max-shard-size big: it must be a size"),
        (["--gguf-file", "x.gguf"], "--gguf-file x.gguf: there is no such file"),
    ],
)
def test_bad_options(source, tmp_path, capsys, options, words):
    assert main(["convert", source, str(tmp_path / "out"), *options]) == 2
    assert words in error_line(capsys)
    assert not list(tmp_path.iterdir())


def test_bad_sources(tmp_path, capsys):
    assert main(["convert", "./nowhere", str(tmp_path / "out")]) == 2
    assert "SOURCE ./nowhere: there is no such folder or file" in error_line(capsys)
    (tmp_path / "model.gguf").write_bytes(b"zip?")
    assert main(["convert", str(tmp_path / "model.gguf"), str(tmp_path / "out")]) == 2
    assert "is no GGUF file" in error_line(capsys)


def test_layers():
    assert parse_layers("all") == "all"
    assert parse_layers("global") == "global"
    assert parse_layers("0, 3,5") == [0, 3, 5]
