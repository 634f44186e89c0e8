"""What can be asked for, and what is said of the rest."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForSequenceClassification

from latte.convert import convert
from latte.convert.settings import conversion_config, mixer_blocks
from latte.models import LatteConvertedConfig
from tests.convert.sources import FAMILIES, LOCAL, SIZES, make_source


def make_config(family="llama", **settings):
    return make_source(family, **settings).config


def test_the_defaults():
    config = conversion_config(make_config("llama"))
    assert (config.window, config.num_latents, config.mixer, config.initial_window_share) == (128, 16, "rglru", 0.95)
    assert config.layers == [0, 1, 2]
    assert (config.vocab_size, config.hidden_size, config.num_heads) == (101, 42, 6)
    assert config.max_position_embeddings == 256
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_setting_of_the_source_is_kept(family):
    source = make_config(family)
    back = conversion_config(source, window=7).source_config()
    assert type(back) is type(source)
    ours = {"_name_or_path", "dtype", "transformers_version"}
    kept, expected = ({k: v for k, v in x.to_dict().items() if k not in ours} for x in (back, source))
    assert kept == expected


def test_a_setting_of_the_source_has_one_place():
    config = conversion_config(make_config("llama"))
    config.vocab_size = 103
    assert config.source["vocab_size"] == config.vocab_size == 103
    again = LatteConvertedConfig.from_dict(config.to_dict())
    assert again.vocab_size == 103
    model = convert(make_source("llama"))
    model.resize_token_embeddings(107)
    assert model.config.vocab_size == model.config.source["vocab_size"] == 107


@pytest.mark.parametrize(
    ("family", "layers", "expected"),
    [
        ("llama", "all", [0, 1, 2]),
        ("llama", "global", [0, 1, 2]),
        ("gemma2", "global", [1]),
        ("qwen3", "global", [1]),
        ("mistral", "all", [0, 1, 2]),
        ("llama", [2, 0, 2], [0, 2]),
    ],
)
def test_layers(family, layers, expected):
    assert conversion_config(make_config(family), window=7, layers=layers).layers == expected


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama", {"window": 0}, "window is 0; it must be an integer of at least 1"),
        ("llama", {"window": 257}, "window is 257, over the source's own context of 256"),
        ("mistral", {"window": LOCAL + 1}, f"over layer 0's own of {LOCAL}; choose at most {LOCAL}, or convert other"),
        ("llama", {"num_latents": 0}, "num_latents is 0; it must be an integer of at least 1"),
        ("llama", {"mixer": "blend"}, "mixer is 'blend'; it must be one of"),
        ("llama", {"initial_window_share": 0.0}, "initial_window_share is 0.0; it must be above 0 and at most 1"),
        ("llama", {"initial_window_share": 1.5}, "initial_window_share is 1.5"),
        ("mistral", {"layers": "global", "window": 7}, "every layer of the source has a window"),
        ("llama", {"layers": "some"}, "layers is 'some'; it must be"),
        ("llama", {"layers": []}, r"layers is \[\]; it must be"),
        ("llama", {"layers": 1}, "layers is 1; it must be"),
        ("llama", {"initial_window_share": "most"}, "initial_window_share is most; it must be above 0"),
        ("llama", {"layers": [3]}, "layers has 3; the source's layers are numbered from 0 to 2"),
        ("llama", {"layers": [-1]}, "layers has -1"),
        ("llama", {"layers": [True]}, "layers has True"),
    ],
)
def test_what_cannot_be_asked_for(family, options, message):
    with pytest.raises(ValueError, match=message):
        conversion_config(make_config(family), **options)


def test_sources_that_cannot_be_converted():
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match=r"a 'gpt2' model, which cannot be converted; those can: Gemma 2 \('gemma2'\)"):
        convert(gpt2)
    with pytest.raises(ValueError, match="'latte_converted' model, which cannot be converted"):
        convert(convert(make_source("llama")))
    with pytest.raises(ValueError, match="LlamaForSequenceClassification; it must be its family's …ForCausalLM"):
        convert(LlamaForSequenceClassification(make_config("llama")))
    with pytest.raises(ValueError, match="model is Linear; it must be a pretrained model"):
        convert(torch.nn.Linear(2, 3))
    with pytest.raises(ValueError, match=r"attention_dropout is 0\.1; converted layers have none"):
        convert(make_source("qwen2", attention_dropout=0.1))
    with pytest.raises(ValueError, match="is not causal"):
        convert(make_source("gemma3_text", use_bidirectional_attention=True))
    quantized = make_source("llama")
    quantized.lm_head.weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match="model is quantized"):
        convert(quantized)
    with pytest.raises(ValueError, match="source has no model_type"):
        LatteConvertedConfig()
    settings = conversion_config(make_config("llama")).to_dict()
    with pytest.raises(ValueError, match="layers has 7; the source's layers are numbered from 0 to 2"):
        LatteConvertedConfig.from_dict(settings | {"layers": [0, 7]})


def test_blocks_of_the_mixer_divide_the_width():
    assert [mixer_blocks(width) for width in (576, 640, 42, 101)] == [16, 16, 14, 1]
    assert SIZES["hidden_size"] % conversion_config(make_config("llama")).mixer_blocks == 0
