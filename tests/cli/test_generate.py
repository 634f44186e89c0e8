"""`latte generate`: what goes to stdout and to stderr, and what it says of bad input."""

import json
import os
import shutil
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import pytest
import torch

from latte.cli import generate, generation, main
from latte.models import LatteConfig, LatteForCausalLM, LatteForSeq2SeqLM
from latte.tasks.text import byte_tokenizer
from tests.cli.test_command import error_line

WORDS = ["<unk>", "a", "cup", "of", "latte", "with", "milk", "please"]
SIZES = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_heads": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved model without a tokenizer."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    LatteForCausalLM(LatteConfig(**SIZES, num_latents=3, window=5)).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory):
    """A saved model whose tokenizer knows words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("words")
    words = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(path)
    torch.manual_seed(0)
    LatteForCausalLM(LatteConfig(**SIZES | {"vocab_size": len(words)}, num_latents=3)).save_pretrained(path)
    return str(path)


def run(capsys, *arguments: str) -> tuple[dict, str]:
    """The JSON document and stderr of a run."""
    assert main(["generate", *arguments, "--json"]) == 0
    printed = capsys.readouterr()
    return json.loads(printed.out), printed.err


def test_text_goes_to_stdout_and_the_rest_to_stderr(folder, capsys):
    assert main(["generate", folder, "--prompt", "abc", "--max-new-tokens", "7"]) == 0
    printed = capsys.readouterr()
    document, _ = run(capsys, folder, "--prompt", "abc", "--max-new-tokens", "7")
    assert printed.out == document["text"] + "\n"
    for words in ("every byte is a token", "prefill: 2 tokens", "decode: 7 tokens", "tokens/s", "as many as after"):
        assert words in printed.err


def test_the_document(folder, capsys):
    document, error = run(capsys, folder, "--prompt", "abc", "--max-new-tokens", "7", "--device", "cpu")
    assert (document["model"], document["device"], document["dtype"]) == (folder, "cpu", "float32")
    assert (document["prompt_tokens"], len(document["tokens"]), document["random_weights"]) == (3, 7, False)
    assert all(token < 256 for token in document["tokens"])
    assert document["state_bytes"] == document["state_bytes_after_prompt"] > 0
    assert "decode" not in error


def test_it_is_what_generate_gives(folder, capsys):
    document, _ = run(capsys, folder, "--prompt", "abc", "--max-new-tokens", "9")
    model = LatteForCausalLM.from_pretrained(folder).eval()
    tokens = torch.tensor([list(b"abc")])
    for _ in range(9):
        logits = model(input_ids=tokens, use_cache=False).logits[0, -1, :256]
        tokens = torch.cat([tokens, logits.argmax().reshape(1, 1)], dim=1)
    assert document["tokens"] == tokens[0, 3:].tolist()


@pytest.mark.parametrize("chunk", ["1", "7", "8192"])
def test_chunks_change_nothing(folder, chunk, tmp_path, capsys):
    path = tmp_path / "prompt.txt"
    path.write_bytes(bytes(range(97, 140)))
    document, _ = run(capsys, folder, "--file", str(path), "--chunk", chunk, "--max-new-tokens", "5")
    whole, _ = run(capsys, folder, "--file", str(path), "--max-new-tokens", "5")
    assert document["prompt_tokens"] == 43
    assert document["tokens"] == whole["tokens"]


def test_standard_input(folder, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", type("Input", (), {"buffer": BytesIO(b"abc")}))
    document, _ = run(capsys, folder, "--file", "-", "--max-new-tokens", "3")
    assert document["prompt_tokens"] == 3


def test_a_seed_fixes_what_is_drawn(folder, capsys):
    arguments = (folder, "--prompt", "abc", "--sample", "--temperature", "5", "--max-new-tokens", "20")
    first, again, other = (run(capsys, *arguments, "--seed", seed)[0]["tokens"] for seed in "112")
    assert first == again != other


def test_the_models_own_tokenizer(with_tokenizer, capsys):
    document, error = run(capsys, with_tokenizer, "--prompt", "a cup of", "--max-new-tokens", "4")
    assert document["prompt_tokens"] == 3
    assert set(document["text"].split()) <= set(WORDS[1:])
    assert "byte" not in error


@pytest.mark.parametrize(
    "settings",
    [{"num_beams": 3, "num_return_sequences": 2}, {"cache_implementation": "static"}],
    ids=str,
)
def test_how_a_folder_would_generate_is_left_aside(settings, folder, tmp_path, capsys):
    path = shutil.copytree(folder, tmp_path / "model")
    words = json.loads((path / "generation_config.json").read_text(encoding="utf-8"))
    (path / "generation_config.json").write_text(json.dumps(words | settings), encoding="utf-8")
    options = ("--prompt", "abc", "--max-new-tokens", "9")
    assert run(capsys, str(path), *options)[0]["tokens"] == run(capsys, folder, *options)[0]["tokens"]


def test_a_preset_warns_of_its_random_weights(capsys):
    document, error = run(capsys, "latte-tiny", "--prompt", "x", "--max-new-tokens", "2", "--dtype", "bfloat16")
    assert "weights are random" in error
    assert (document["random_weights"], document["dtype"]) == (True, "bfloat16")
    assert document["prefill_tokens_per_s"] is None  # the one token is read by the first step


def test_a_cache_that_grows_is_said_to(capsys):
    assert main(["generate", "transformer-tiny", "--prompt", "abc", "--max-new-tokens", "4"]) == 0
    assert "it grows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["latte-tiny"], ["--prompt TEXT", "--file FILE"]),
        (["latte-tiny", "--prompt", "x", "--file", "y"], ["one of them"]),
        (["latte-tiny", "--file", "/nowhere/at/all"], ["--file /nowhere/at/all"]),
        (["latte-tiny", "--prompt", "x", "--greedy", "--top-k", "3"], ["--greedy", "--top-k"]),
        (["latte-tiny", "--prompt", "x", "--temperature", "0"], ["--temperature 0", "--greedy"]),
        (["latte-tiny", "--prompt", "x", "--temperature", "inf"], ["--temperature inf", "finite"]),
        (["latte-tiny", "--prompt", "x", "--top-p", "1.5"], ["--top-p 1.5", "at most 1"]),
        (["latte-tiny", "--prompt", "x", "--seed", "9" * 20], ["--seed", "less than or equal to"]),
        (["latte-tiny", "--prompt", "x", "--max-new-tokens", "0"], ["--max-new-tokens", "equal to 1"]),
        (["latte-tiny", "--prompt", "x", "--dtype", "int8"], ["--dtype", "int8", "bfloat16"]),
        (["latte-tinny", "--prompt", "x"], ["latte-tinny", "'latte-tiny'"]),
        (["./nowhere", "--prompt", "x"], ["./nowhere", "no such folder"]),
        (["/", "--prompt", "x"], ["config.json", "save_pretrained"]),
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments, words, capsys):
    assert main(["generate", *arguments]) == 2
    line = error_line(capsys)
    assert all(word in line for word in words), line


def test_an_empty_prompt(folder, capsys):
    assert main(["generate", folder, "--prompt", ""]) == 2
    assert "empty" in capsys.readouterr().err.splitlines()[-1]


def test_cuda_without_a_device_is_refused(folder, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["generate", folder, "--prompt", "x", "--device", "cuda"]) == 2
    assert "--device cpu" in error_line(capsys)


def test_a_vocabulary_too_small_for_bytes(tmp_path, capsys):
    LatteForCausalLM(LatteConfig(**SIZES | {"vocab_size": 100})).save_pretrained(tmp_path)
    assert main(["generate", str(tmp_path), "--prompt", "x"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "no tokenizer" in line
    assert "at least 256" in line


def test_a_model_that_predicts_nothing(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}), encoding="utf-8")
    assert main(["generate", str(tmp_path), "--prompt", "x"]) == 2
    assert "'vit' model does not predict the next token" in error_line(capsys)


def test_an_encoder_decoder_continues_nothing(tmp_path, capsys):
    LatteForSeq2SeqLM(LatteConfig(**SIZES)).save_pretrained(tmp_path)
    capsys.readouterr()
    assert main(["generate", str(tmp_path), "--prompt", "x"]) == 2
    assert "an encoder-decoder" in error_line(capsys)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"window": 0}, ["config.json", "window is 0"]),
        ({"window": "wide"}, ["config.json", "'window'", "'wide'"]),
        ({"rope_parameters": {"rope_type": "spiral"}}, ["config.json", "rope_type is 'spiral'"]),
        ({"num_latents": 2}, ["layers.0.attention.latent_key.weight is [6, 16]", "[4, 16] by config.json"]),
    ],
)
def test_a_folder_whose_settings_are_wrong(settings, words, folder, tmp_path, capsys):
    copied = Path(shutil.copytree(folder, tmp_path / "model"))
    config = json.loads((copied / "config.json").read_text(encoding="utf-8"))
    (copied / "config.json").write_text(json.dumps(config | settings), encoding="utf-8")
    assert main(["generate", str(copied), "--prompt", "x"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert all(word in line for word in [str(copied), *words]), line


@pytest.mark.parametrize(
    ("file", "words"), [("model.safetensors", "cannot be loaded"), ("tokenizer.json", "tokenizer")]
)
def test_a_folder_with_a_broken_file(file, words, with_tokenizer, tmp_path, capsys):
    copied = Path(shutil.copytree(with_tokenizer, tmp_path / "model"))
    (copied / file).write_bytes(b"{}")
    assert main(["generate", str(copied), "--prompt", "a cup"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert str(copied) in line
    assert words in line


def test_a_name_that_the_hub_does_not_give(monkeypatch, capsys):
    def refuse(name):
        raise OSError(f"{name} is not a local folder\nand not on the hub")

    monkeypatch.setattr(generation.AutoConfig, "from_pretrained", refuse)
    assert main(["generate", "someone/something", "--prompt", "x"]) == 2
    line = error_line(capsys)
    assert "someone/something is not a local folder and not on the hub" in line
    assert "latte-r-swa++" in line


@pytest.mark.parametrize("choice", ["--greedy", "--sample"])
@pytest.mark.parametrize(
    ("value", "words"),
    [(torch.nan, "its weight model.norm.weight holds NaN"), (1e30, "its weights are finite, in float32")],
)
def test_logits_that_are_not_finite(value, words, choice, folder, tmp_path, capsys):
    model = LatteForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.norm.weight[3] = value
        model.model.embed_tokens.weight[7] *= 1e30
        model.model.embed_tokens.weight[8] = -model.model.embed_tokens.weight[7]  # one logit of both is +inf
    model.save_pretrained(tmp_path)
    assert main(["generate", str(tmp_path), "--prompt", "abc", choice]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "error: the logits after 3 tokens are not finite, so that no token can be chosen" in line
    assert words in line


def test_a_prompt_that_is_not_utf8(folder, with_tokenizer, capsys):
    """Python has such bytes of the command line as characters of their own."""
    typed = os.fsdecode(b"caf\xff")
    assert run(capsys, folder, "--prompt", typed, "--max-new-tokens", "1")[0]["prompt_tokens"] == 4
    assert main(["generate", with_tokenizer, "--prompt", typed]) == 2
    assert "latte: error: the text is not UTF-8: " in capsys.readouterr().err


def test_a_prompt_is_utf8_wherever_it_was_typed():
    """Whatever the encoding of a terminal, models have learned from UTF-8."""
    code = "from latte.cli.generate import read_prompt; assert read_prompt('caf\\xe9', None) == b'caf\\xc3\\xa9'"
    ascii_only = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code], env=ascii_only, check=True, timeout=300)


def test_text_that_is_not_utf8(with_tokenizer, tmp_path, capsys):
    path = tmp_path / "bytes"
    path.write_bytes(b"\xff\xfe")
    assert main(["generate", with_tokenizer, "--file", str(path)]) == 2
    assert "not UTF-8" in capsys.readouterr().err.splitlines()[-1]


def test_a_model_of_bytes_that_has_a_tokenizer_reads_any_bytes(folder, tmp_path, capsys):
    """As training on bytes saves it, which reads such files."""
    shutil.copytree(folder, tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    path = tmp_path / "bytes"
    path.write_bytes(b"caf\xff\xfe")
    for given in (("--prompt", os.fsdecode(b"caf\xff\xfe")), ("--file", str(path))):
        command = (*given, "--max-new-tokens", "3")
        document, _ = run(capsys, str(tmp_path / "model"), *command)
        assert document["prompt_tokens"] == 5
        assert document["tokens"] == run(capsys, folder, *command)[0]["tokens"]


def test_without_transformers_the_error_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(generate, "find_spec", lambda name: None)
    assert main(["generate", "latte-tiny", "--prompt", "x"]) == 2
    assert "pip install 'latte-attention[train]'" in error_line(capsys)


def test_letters_of_several_bytes_are_shown_whole():
    pieces = []
    writer = generation.Writer(generation.ByteTokenizer(), pieces.append)
    writer.put(torch.tensor([[1, 2]]))  # the prompt
    for byte in "aé–ß".encode():
        writer.put(torch.tensor([byte]))
    writer.put(torch.tensor([0xC3]))  # half a letter
    writer.end()
    assert pieces == ["a", "é", "–", "ß", "\N{REPLACEMENT CHARACTER}"]
    assert writer.text == "".join(pieces)
