"""`latte evaluate`: its document, tables and files, and what it says of bad input."""

import json
import os
import sys

import pytest
import torch

from latte.cli import evaluation, main
from latte.cli.evaluate import parse_depths, parse_length
from latte.models import LatteForCausalLM
from latte.tasks.evaluation import Encoder, lambada, perplexity, read_passages, take_texts
from tests.cli.test_command import error_line
from tests.tasks.evaluation.small import byte_tokenizer, make_model

TEXT = "It was late when the sailor came back from the harbour, and nobody was there to tell. " * 12
PAIR = {"sentence_good": "The cats sleep.", "sentence_bad": "The cats sleeps.", "UID": "n", "linguistics_term": "t"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with two models, and files to measure them on."""
    path = tmp_path_factory.mktemp("evaluate")
    for name in ("macchiato", "llama"):
        make_model(name).save_pretrained(path / name)
        byte_tokenizer().save_pretrained(path / name)
    make_model("gemma2").save_pretrained(path / "gemma2")
    texts = [TEXT, TEXT[::-1], "short"]
    (path / "books.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (path / "lambada.jsonl").write_text("".join(json.dumps({"text": f"a cup of {n}"}) + "\n" for n in range(9)))
    (path / "blimp").mkdir()
    (path / "blimp" / "n.jsonl").write_text(3 * (json.dumps(PAIR) + "\n"))
    return path


def run(capsys, *arguments: object) -> tuple[dict, str]:
    """The JSON document and stderr of a run."""
    assert main(["evaluate", *map(str, arguments), "--device", "cpu", "--json"]) == 0
    printed = capsys.readouterr()
    return json.loads(printed.out), printed.err


def test_everything_beside_the_source(place, capsys, tmp_path):
    output, plot = tmp_path / "results.json", tmp_path / "plot.png"
    document, error = run(
        capsys, place / "macchiato", "--against", place / "llama", "--text", place / "books.jsonl", "--lengths",
        "256,512", "--max-tokens", "1K", "--passkey", "--depths", "0,1", "--trials", 2, "--distractors", 2,
        "--lambada", place / "lambada.jsonl", "--blimp", place / "blimp", "--limit", 2, "--speed",
        "--output", output, "--plot", plot,
    )  # fmt: skip
    assert json.loads(output.read_text()) == document
    assert plot.read_bytes().startswith(b"\x89PNG")
    ours, source = document["model"], document["against"]
    assert (ours["architecture"], source["architecture"]) == ("LatteForCausalLM", "LlamaForCausalLM")
    assert ours["bos"] == 256
    for entry in (ours, source):
        assert [row["length"] for row in entry["perplexity"]["lengths"]] == [256, 512]
        assert [row["documents"] for row in entry["perplexity"]["lengths"]] == [2, 2]
        assert (len(entry["passkey"]["cells"]), len(entry["speed"])) == (4, 2)
        assert (entry["lambada"]["passages"], entry["blimp"]["pairs"]) == (2, 2)
    ratio = document["perplexity_ratio"][1]["value"]
    one, other = (entry["perplexity"]["lengths"][1]["perplexity"]["value"] for entry in (ours, source))
    assert ratio == pytest.approx(one / other)
    assert document["settings"]["text"] == [str(place / "books.jsonl")]
    assert "perplexity took" in error


def test_the_numbers_are_those_of_the_functions(place, capsys):
    document, _ = run(
        capsys, place / "macchiato", "--text", place / "books.jsonl", "--lengths", "300", "--max-tokens", 900,
        "--lambada", place / "lambada.jsonl", "--dtype", "float32",
    )  # fmt: skip
    model, encoder = make_model("macchiato"), Encoder(byte_tokenizer())
    texts = take_texts([encoder.encode(TEXT), encoder.encode(TEXT[::-1])], 300, 900)
    expected = perplexity(model, texts, [300], bos=256).lengths[0]
    found = document["model"]["perplexity"]["lengths"][0]
    assert found["loss"]["value"] == pytest.approx(expected.loss.value)
    assert found["loss"]["error"] == pytest.approx(expected.loss.error)
    assert (found["tokens"], found["windows"]) == (3 * 299, 3)
    words = lambada(model, encoder, read_passages(place / "lambada.jsonl"))
    assert document["model"]["lambada"]["perplexity"]["value"] == pytest.approx(words.perplexity.value)


def test_sliding_and_joined(place, capsys):
    document, _ = run(
        capsys, place / "llama", "--text", place / "books.jsonl", "--join", "--lengths", "512", "--mode", "sliding",
        "--stride", 300, "--max-tokens", "1K", "--bos", "never",
    )  # fmt: skip
    row = document["model"]["perplexity"]["lengths"][0]
    assert (row["tokens"], row["windows"], row["documents"]) == (1023, 3, 1)
    assert document["model"]["bos"] is None
    assert document["model"]["perplexity"]["positions"] == []


def test_tables(place, capsys):
    arguments = ["evaluate", place / "macchiato", "--against", place / "llama", "--text", place / "books.jsonl"]
    arguments += ["--lengths", "256", "--max-tokens", 512, "--passkey", "--trials", 1, "--depths", 0.5, "--speed"]
    arguments += ["--lambada", place / "lambada.jsonl", "--blimp", place / "blimp", "--device", "cpu"]
    assert main(list(map(str, arguments))) == 0
    out = capsys.readouterr().out
    for words in ("Perplexity, whole windows", "macchiato", "llama", "ratio", "Loss by position", "depth 0.5"):
        assert words in out
    for words in ("LAMBADA accuracy", "BLiMP accuracy", "difference", "decode tokens/s", "KiB"):
        assert words in out


def test_different_tokens_are_not_compared(place, capsys):
    arguments = [place / "llama", "--against", "macchiato-tiny", "--text", place / "books.jsonl", "--lengths", "256"]
    document, error = run(capsys, *arguments, "--max-tokens", 512)
    assert document["perplexity_ratio"] is None
    assert document["against"]["random_weights"] is True
    assert "weights are random" in error
    assert main(["evaluate", *map(str, arguments), "--max-tokens", "512", "--device", "cpu"]) == 0
    assert "cannot be compared" in capsys.readouterr().out


def test_a_softcap_of_scores_is_honoured(place, capsys):
    document, error = run(
        capsys, place / "gemma2", "--text", place / "books.jsonl", "--lengths", "64", "--max-tokens", 64
    )
    assert document["model"]["attention"] == "eager"
    assert "byte is a token" in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "nothing to measure"),
        (("--text", "nothing.txt"), "--text nothing.txt: there is no such file"),
        (("--lambada", "nothing.jsonl"), "--lambada nothing.jsonl: there is no such file"),
        (("--blimp", "nothing"), "--blimp nothing: there is no such file or folder"),
        (("--haystack", "nothing", "--passkey"), "--haystack nothing"),
        (("--speed", "--lengths", "2Q"), "such as 500, 2K or 1M"),
        (("--speed", "--lengths", ","), "it is empty"),
        (("--passkey", "--depths", "0,2"), "between 0 and 1"),
        (("--passkey", "--depths", "a"), "between 0 and 1"),
        (("--passkey", "--lengths", "50"), "tokens at least"),
        (("--speed", "--plot", "a.png"), "needs --text"),
        (("--speed", "--output", "no/where.json"), "there is no folder"),
        (("--text", "BOOKS", "--plot", "a.gif"), "must end with"),
        (("--text", "BOOKS", "--lengths", "2K"), "longest has 1,0"),
        (("--text", "BOOKS", "--lengths", "512", "--max-tokens", "100"), "at least 512"),
        (("--text", "BOOKS", "--lengths", "64", "--stride", "8"), "do not overlap"),
        (("--text", "BOOKS", "--text-field", "body"), "no text in field 'body'"),
        (("--blimp", "BOOKS"), "no text in field 'sentence_good'"),
        (("--speed", "--attention", "magic"), "--attention magic"),
        (("--speed", "--seed", str(2**70)), "--seed"),
        (("--passkey", "--lengths", "1K", "--distractors", "90000"), "there are 90000 keys of 5 digits"),
    ],
)
def test_bad_input(arguments, words, place, capsys):
    arguments = [str(place / "books.jsonl") if word == "BOOKS" else word for word in arguments]
    assert main(["evaluate", str(place / "llama"), *arguments, "--device", "cpu"]) == 2
    printed = capsys.readouterr()
    last = printed.err.splitlines()[-1]  # after what was said while the model was loaded
    assert printed.out == ""
    assert last.startswith("latte: error: ")
    assert words in last


def test_what_cannot_be_at_the_end_is_said_at_the_beginning(place, tmp_path, monkeypatch, capsys):
    """Measuring may take hours."""
    monkeypatch.setattr(evaluation, "measure", pytest.fail)
    speed = ["evaluate", str(place / "llama"), "--speed", "--device", "cpu"]
    assert main([*speed, "--against", str(tmp_path / "nothing")]) == 2
    assert "there is no such folder" in error_line(capsys)
    monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK)
    for option in ("--output", "--plot"):
        assert main([*speed, "--text", str(place / "books.jsonl"), option, str(tmp_path / "a.png")]) == 2
        assert f"{option} {tmp_path / 'a.png'}: {tmp_path} does not allow" in error_line(capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--passkey", "--lengths", "50,512"), "the length is 50; a question about a hidden key takes"),
        (("--passkey", "--lengths", "512", "--distractors", "90000"), "there are 90000 keys of 5 digits"),
        (("--passkey", "--lengths", "256,1K", "--haystack", "LITTLE"), "the haystack has 500 tokens"),
        (("--lengths", "8K"), "no document has 8,192 tokens"),
        (("--lengths", "64", "--stride", "8"), "do not overlap"),
        (("--lengths", "512", "--max-tokens", "100"), "need at least 512"),
    ],
)
def test_nothing_is_measured_before_all_is_seen_to_fit(arguments, words, place, tmp_path, monkeypatch, capsys):
    for name in ("perplexity", "lambada", "decode_speed"):
        monkeypatch.setattr(evaluation.measures, name, pytest.fail)
    little = tmp_path / "little.txt"
    little.write_text(TEXT[:500])
    arguments = [str(little) if word == "LITTLE" else word for word in arguments]
    first = ["--text", str(place / "books.jsonl"), "--lambada", str(place / "lambada.jsonl"), "--speed"]
    assert main(["evaluate", str(place / "llama"), *first, *arguments, "--device", "cpu"]) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_a_haystack_is_read_as_far_as_the_longest_prompt_needs(place, tmp_path, capsys):
    """`--max-tokens` bounds it only where that is more."""
    hay = tmp_path / "hay.txt"
    hay.write_text(TEXT)
    document, _ = run(
        capsys, place / "llama", "--passkey", "--lengths", "512", "--haystack", hay, "--max-tokens", 100,
        "--depths", "0", "--trials", 1, "--distractors", 1,
    )  # fmt: skip
    assert document["model"]["passkey"]["cells"][0]["trials"] == 1


def test_no_such_model(tmp_path, capsys):
    assert main(["evaluate", str(tmp_path / "nothing"), "--speed"]) == 2
    assert "there is no such folder" in error_line(capsys)
    (tmp_path / "model.gguf").write_text("GGUF")
    assert main(["evaluate", str(tmp_path / "model.gguf"), "--speed"]) == 2
    assert "it is a file; name a folder that save_pretrained or latte convert has written" in error_line(capsys)


def test_losses_that_are_not_finite_are_told(place, tmp_path, capsys):
    """Not with the exit code: results of a model beside it are not lost."""
    model = LatteForCausalLM.from_pretrained(place / "macchiato")
    broken, late = tmp_path / "broken", tmp_path / "late"
    with torch.no_grad():
        row = model.model.embed_tokens.weight[ord("w")].clone()
        model.model.embed_tokens.weight[ord("w")] = torch.inf  # is not among the first tokens
        model.save_pretrained(late)
        model.model.embed_tokens.weight[ord("w")] = row
        model.model.norm.weight[3] = torch.nan
        model.save_pretrained(broken)
    for folder in (broken, late):
        byte_tokenizer().save_pretrained(folder)
    text = ("--text", place / "books.jsonl", "--lengths", "64,128")
    document, error = run(capsys, broken, *text, "--blimp", place / "blimp")
    assert document["model"]["perplexity"]["lengths"][0]["loss"]["value"] is None
    assert f"warning: {broken}: losses are not finite, and measures say nothing: its weight model.norm.weight" in error
    _, error = run(capsys, late, *text)
    assert f"warning: {late}: the loss at 64, 128 is not finite: its weight model.embed_tokens.weight" in error
    _, error = run(capsys, place / "macchiato", *text)
    assert "warning" not in error


def test_without_the_harness(place, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["evaluate", str(place / "llama"), "--tasks", "hellaswag"]) == 2
    assert "pip install 'lm_eval[hf]'" in error_line(capsys)


def test_lengths_and_depths():
    assert [parse_length("--x", word) for word in ("500", "2K", "2k", "1M")] == [500, 2048, 2048, 2**20]
    assert parse_depths("1, 0,0.5") == [0.0, 0.5, 1.0]
