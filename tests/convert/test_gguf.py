"""GGUF files: their heads, and models that come in them."""

import struct

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from latte.convert import Settings, convert_checkpoint
from latte.convert.gguf import check_architecture, read_metadata
from latte.convert.source import find_source
from tests.convert.sources import make_source, make_tokens

gguf = pytest.importorskip("gguf")

NAMES = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate",
    "up_proj": "ffn_up", "down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
TOKENS = ["<pad>", "<bos>", "<eos>", *(chr(code) for code in range(33, 127)), "ab", "cd"]


def write_gguf(path, model, *, bos=True):
    """A Qwen2 model, whose weights GGUF takes as they are."""
    config = model.config
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b", "c d"])  # of one, Transformers 5.17 makes its characters
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(bos)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, tensor in model.state_dict().items():
        parts = name.removeprefix("model.").split(".")
        if name == "lm_head.weight":
            continue  # tied
        stored = {"embed_tokens": "token_embd", "norm": "output_norm"}.get(parts[0], "")
        if parts[0] == "layers":
            stored = f"blk.{parts[1]}.{NAMES[parts[-2]]}"
        writer.add_tensor(f"{stored}.{parts[-1]}", tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def model():
    return make_source("qwen2", hidden_size=48, vocab_size=len(TOKENS))


def test_a_gguf_file_is_converted(model, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", model)
    made = convert_checkpoint(
        str(tmp_path / "tiny.gguf"), tmp_path / "out", Settings(window=29, initial_window_share=1.0)
    )
    assert (made.family, made.dtype) == ("Qwen2", "float32")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = make_tokens(2, 23) % len(TOKENS)
    with torch.no_grad():
        torch.testing.assert_close(converted(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("x!")["input_ids"] == [1, TOKENS.index("x"), TOKENS.index("!")]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    assert tokenizer("x<eos>")["input_ids"] == [1, TOKENS.index("x"), 2]
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"


def test_the_head_of_a_file(model, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", model, bos=False)
    metadata = read_metadata(tmp_path / "tiny.gguf")
    assert metadata["general.architecture"] == "qwen2"
    assert metadata["qwen2.embedding_length"] == 48
    assert metadata["qwen2.rope.freq_base"] == 10_000.0
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    assert "tokenizer.ggml.tokens" not in metadata


def test_which_file_of_a_folder(model, tmp_path):
    write_gguf(tmp_path / "one.gguf", model)
    assert find_source(str(tmp_path), None, print).gguf_file == "one.gguf"
    write_gguf(tmp_path / "two.gguf", model)
    assert find_source(str(tmp_path), "two.gguf", print).gguf_file == "two.gguf"
    with pytest.raises(ValueError, match=r"choose one of its GGUF files with --gguf-file: one\.gguf, two\.gguf"):
        find_source(str(tmp_path), None, print)
    with pytest.raises(ValueError, match="no such file in"):
        find_source(str(tmp_path), "three.gguf", print)
    with pytest.raises(ValueError, match="SOURCE is a file already"):
        find_source(str(tmp_path / "one.gguf"), "one.gguf", print)
    with pytest.raises(ValueError, match="--low-memory does not read GGUF"):
        convert_checkpoint(str(tmp_path / "one.gguf"), tmp_path / "out", Settings(), low_memory=True)


@pytest.mark.parametrize("share", [0.5, 0.99])
@pytest.mark.parametrize("calibration", [None, list])
def test_a_file_that_is_cut_short(model, tmp_path, share, calibration):
    path = tmp_path / "cut.gguf"
    write_gguf(path, model)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=r"SOURCE .*: cut\.gguf cannot be read \(.*\); it is broken, so copy it again"):
        convert_checkpoint(str(path), tmp_path / "out", Settings(window=29), calibration=calibration)
    assert sorted(tmp_path.iterdir()) == [path]


def head(architecture: str, version: int = 3) -> bytes:
    """The head of a file with one entry."""
    key, value = b"general.architecture", architecture.encode()
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(value)) + value
    return b"GGUF" + struct.pack("<IQQ", version, 0, 1) + entry


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04", "is no GGUF file"),
        (b"", "is no GGUF file"),
        (head("mamba"), "GGUF file of type 'mamba', which cannot be converted; those can: Gemma 2"),
        (head("llama", version=99), "GGUF of version 99; known are 2, 3"),
        (head("llama")[:-3], "ends in the middle of its head"),
        (head("llama").replace(struct.pack("<I", 8), struct.pack("<I", 77)), "value of unknown type 77"),
    ],
)
def test_files_that_cannot_be_converted(tmp_path, content, message):
    path = tmp_path / "strange.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(str(path), tmp_path / "out", Settings())
    assert sorted(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("word", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_families_by_gguf_s_words(tmp_path, word):
    (tmp_path / "a.gguf").write_bytes(head(word))
    assert check_architecture(tmp_path / "a.gguf") == {"general.architecture": word}
