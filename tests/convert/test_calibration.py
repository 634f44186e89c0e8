"""Latents in the role of the first token, which a window loses: nearer to the source, and nothing else is changed."""

import json
import math

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from latte.cli import main
from latte.convert import calibrate, calibration, convert, new_parameters
from latte.convert.calibration import LEAST_PAST_WINDOW, LOCAL_SHARE
from latte.convert.sink import MARGIN, MOST, discriminant, ridge
from latte.convert.stretches import choose_stretches
from latte.models.families import own_window
from tests.cli.test_command import error_line
from tests.convert.sources import FAMILIES, LATENTS, VOCABULARY, make_source, make_tokens

BEGIN, WINDOW, LENGTH = 1, 7, 71
CALIBRATED = {"latent_query.weight", "latent_query.bias", "latent_key.weight"}


def make_global_source(family, **settings):
    """A source some of whose layers see all tokens."""
    return make_source(family, **({"sliding_window": None} if family == "mistral" else {}), **settings)


def make_rows(count, length=LENGTH, seed=0):
    """Texts that begin with the same token."""
    rows = make_tokens(count, length, seed)
    rows[:, 0] = BEGIN
    return list(rows)


def make_source_with_sink(strength=4.0, **settings):
    """All heads look at the first token: a channel of its own tells it, and rotary positions hardly turn that."""
    source = make_source("llama", **settings)
    config, size = source.config, source.config.head_dim
    with torch.no_grad():
        source.model.embed_tokens.weight[:, 0] = 0
        source.model.embed_tokens.weight[BEGIN, 0] = 30
        for layer in source.model.layers:
            layer.input_layernorm.weight[0] = 1
            attention = layer.self_attn
            attention.o_proj.weight[0], attention.o_proj.bias[0] = 0, 0
            layer.mlp.down_proj.weight[0], layer.mlp.down_proj.bias[0] = 0, 0
            slowest = torch.arange(size - 1, config.num_key_value_heads * size, size)
            attention.k_proj.weight[slowest] = 0
            attention.k_proj.weight[slowest, 0] = 1
            attention.k_proj.bias[slowest] = 0
            attention.q_proj.bias[size - 1 :: size] = strength
    return source


def convert_again(source, **settings):
    torch.manual_seed(5)
    return convert(source, **({"window": WINDOW, "num_latents": LATENTS, "mixer": "none"} | settings))


@torch.no_grad()
def far_logits(model, rows):
    """Of tokens whose window has lost the first one."""
    return model(torch.stack(rows), use_cache=False).logits[:, WINDOW:]


@pytest.mark.parametrize(("mixer", "factor"), [("none", 4), ("rglru", 2), ("conv", 1)])
def test_a_calibrated_model_is_nearer_to_its_source(mixer, factor):
    source, held_out = make_source_with_sink(), make_rows(4, seed=9)
    expected = far_logits(source, held_out)
    model = convert_again(source, mixer=mixer)
    before = (far_logits(model, held_out) - expected).square().mean()
    calibrate(model, source, make_rows(8))
    after = (far_logits(model, held_out) - expected).square().mean()
    assert before > 0.1 * expected.var()
    assert after < before / factor  # after a mixer, tokens next to the first are much like it


@pytest.mark.parametrize("family", FAMILIES)
def test_only_what_latents_are_chosen_by_changes(family):
    source = make_global_source(family)
    model = convert_again(source, mixer="rglru")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    calibrate(model, source, make_rows(3))
    for name, weight in model.state_dict().items():
        if name.split(".", 4)[-1] not in CALIBRATED:
            assert torch.equal(weight, before[name]), name
        assert weight.shape == before[name].shape
        assert weight.isfinite().all()
    for index, layer in enumerate(model.model.layers):
        key, own = layer.self_attn.latent_key.weight, before[f"model.layers.{index}.self_attn.latent_key.weight"]
        others = torch.arange(len(key)) % LATENTS != 0
        assert torch.equal(key[others], own[others])


@pytest.mark.parametrize("mixer", ["none", "conv", "rglru"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_with_every_mixer(family, mixer):
    source = make_global_source(family)
    model = convert_again(source, mixer=mixer, layers="global")
    before = {name: weight.clone() for name, weight in new_parameters(model).items()}
    calibrate(model, source, make_rows(2, length=LENGTH - 20) + make_rows(1))
    after = new_parameters(model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "mixer" not in name}
    assert far_logits(model, make_rows(2)).isfinite().all()


@pytest.mark.parametrize("family", FAMILIES)
def test_odds_are_those_of_the_source_s_own_attention(family, monkeypatch):
    """Scores with all that a family does to them, as the source's own code has them: heads, norms, scale and cap."""
    seen = []

    def note_and_fit(x, odds, real, window, latents):
        seen.append((x, odds, real))
        return fit(x, odds, real, window, latents)

    fit = calibration.fit_sink
    monkeypatch.setattr(calibration, "fit_sink", note_and_fit)
    source = make_global_source(family)
    short, long = make_rows(1, 41) + make_rows(1)
    calibrate(convert_again(source, layers="global"), source, [short, long])
    with torch.no_grad():
        outputs = [source(row[None], output_attentions=True, output_hidden_states=True) for row in (short, long)]
    layers = [layer for layer in range(3) if own_window(source.config, layer) is None]
    assert len(seen) == len(layers)
    for layer, (x, odds, real) in zip(layers, seen, strict=True):
        assert real.sum(dim=1).tolist() == [41, LENGTH]
        for row, output in enumerate(outputs):
            weights = output.attentions[layer][0]  # [H T T]
            tokens = range(WINDOW, weights.shape[-1])
            window = torch.stack([weights[:, t, t - WINDOW + 1 : t + 1].sum(-1) for t in tokens], dim=0)
            expected = torch.stack([weights[:, t, 0] for t in tokens]).log() - window.log()
            torch.testing.assert_close(odds[row, WINDOW : weights.shape[-1]], expected, rtol=1e-4, atol=1e-4)
            inputs = source.model.layers[layer].input_layernorm(output.hidden_states[layer])[0]
            torch.testing.assert_close(x[row, : weights.shape[-1]], inputs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_source_is_left_as_it_was(dtype):
    source = make_source("gemma2").to(dtype).train()
    model = convert_again(source).eval()
    rows = torch.stack(make_rows(2))
    storages = {name: weight.data_ptr() for name, weight in source.named_parameters()}
    with torch.no_grad():
        before = source.eval()(rows).logits
    source.train()
    calibrate(model, source, make_rows(3))
    with pytest.raises(ValueError, match="row 0 has token"):
        calibrate(model, source, [torch.full((LENGTH,), VOCABULARY)])
    assert source.training
    assert not model.training
    assert source.config._attn_implementation == "eager"
    assert model.dtype == source.dtype == dtype
    assert {name: weight.data_ptr() for name, weight in source.named_parameters()} == storages
    assert all(not layer.self_attn._forward_pre_hooks for layer in source.model.layers)
    with torch.no_grad():
        assert torch.equal(source.eval()(rows).logits, before)


def test_bfloat16_is_calibrated_in_float32():
    source = make_source_with_sink().bfloat16()
    narrow, wide = convert_again(source), convert_again(source.float())
    calibrate(narrow, source.bfloat16(), make_rows(4))
    calibrate(wide, source.float(), make_rows(4))
    for name, weight in new_parameters(narrow).items():
        torch.testing.assert_close(weight.float(), new_parameters(wide)[name].bfloat16().float(), rtol=0.02, atol=1e-3)


def test_local_layers_keep_to_their_windows():
    source = make_source("gemma3_text")
    model = convert_again(source, layers=[0, 1])
    calibrate(model, source, make_rows(3))
    local, sees_all, untouched = (layer.self_attn for layer in model.model.layers)
    assert local.latent_query.weight.abs().max() == 0
    shares = local.latent_query.bias.unflatten(0, (-1, LATENTS + 1)).softmax(dim=-1)[:, 0]
    torch.testing.assert_close(shares, torch.full_like(shares, LOCAL_SHARE))
    assert sees_all.latent_query.weight.abs().max() > 0
    assert not hasattr(untouched, "latent_query")


def test_a_model_that_fails_keeps_its_latents():
    source = make_source("llama")
    model = convert_again(source)
    before = {name: weight.clone() for name, weight in new_parameters(model).items()}
    with torch.no_grad():
        source.model.layers[2].input_layernorm.weight.fill_(math.inf)
    with pytest.raises(ValueError, match="calibration of layer 2 gave numbers that are not finite"):
        calibrate(model, source, make_rows(3))
    assert all(torch.equal(weight, before[name]) for name, weight in new_parameters(model).items())


def test_ridge_finds_a_linear_map():
    x = torch.randn(5000, 5) + 3 * torch.arange(5)
    weight, bias = torch.randn(5, 3), torch.randn(3)
    found = ridge(x, x @ weight + bias)
    slow = torch.cat([x, torch.ones(5000, 1)], dim=1).double()
    penalty = 0.03 * slow.square().sum(dim=0).mean()
    rows, zeros = torch.cat([slow, penalty.sqrt() * torch.eye(6)]), torch.zeros(6, 3)
    expected = torch.linalg.lstsq(rows, torch.cat([x @ weight + bias, zeros]).double()).solution.float()
    torch.testing.assert_close(torch.cat([found[0], found[1][None]]), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("distance", "bounded"), [(3.0, "margin"), (0.5, "most")])
def test_a_key_tells_first_tokens_from_others(distance, bounded):
    generator = torch.Generator().manual_seed(0)
    others = torch.randn(4000, 11, generator=generator)
    first = 0.1 * torch.randn(12, 11, generator=generator)
    first[:, 4] += distance * 3
    key = discriminant(first, others)
    peak, rest = (first @ key).mean(), (others @ key)
    if bounded == "margin":
        assert peak - rest.sort().values[int(0.999 * 4000) - 1] == pytest.approx(MARGIN, rel=1e-3)
    else:
        assert peak - rest.mean() == pytest.approx(MOST, rel=1e-3)


def test_stretches_come_from_the_midst_of_documents():
    documents = [list(range(100)), list(range(200, 209)), list(range(300, 325)), list(range(400, 500))]
    options = {"tokens": 10, "least": 10, "begin": None}
    rows = choose_stretches(documents, count=2, **options)
    assert [row.tolist() for row in rows] == [list(range(50, 60)), list(range(312, 322))]
    rows = choose_stretches(documents, count=4, **options)
    assert [row[0].item() for row in rows] == [50, 60, 312, 450]
    rows = choose_stretches(documents, tokens=10, least=8, count=2, begin=7)
    assert [row.tolist() for row in rows] == [[7, *range(50, 59)], [7, *range(200, 209)]]
    assert all(row.dtype == torch.long for row in rows)
    assert choose_stretches(documents[1:2], count=2, **options) == []
    endless = iter(lambda: documents[0], None)  # reading stops when there are enough
    assert len(choose_stretches(endless, count=3, **options)) == 3


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "there are no rows to calibrate with"),
        ([torch.zeros(LENGTH)], "row 0 is torch.float32"),
        ([torch.zeros(1, LENGTH, dtype=torch.long)], r"row 0 is torch.int64 of shape \(1, 71\)"),
        ([*make_rows(1), *make_rows(1, WINDOW + LEAST_PAST_WINDOW - 1)], "row 1 has 22 tokens; with a window of 7"),
        (make_rows(1, 300), "300 tokens, over the source's own context of 256; cut rows to that"),
        (torch.zeros(2, 9, dtype=torch.long), "row 0 has 9 tokens"),
        ([torch.full((LENGTH,), -3)], "row 0 has token -3; the model knows 0 to 100"),
    ],
)
def test_bad_rows(rows, words):
    source = make_source("llama")
    with pytest.raises(ValueError, match=words):
        calibrate(convert_again(source), source, rows)


def test_a_source_that_is_not_the_model_s():
    source = make_source("llama")
    model, rows = convert_again(source), make_rows(2)
    with pytest.raises(ValueError, match="model is LlamaForCausalLM; it must be a converted one"):
        calibrate(source, source, rows)
    with pytest.raises(ValueError, match="source is Qwen2ForCausalLM; the model was converted from a 'llama' model"):
        calibrate(model, make_source("qwen2"), rows)
    with pytest.raises(ValueError, match="give the source that it was converted from"):
        calibrate(model, make_source("llama", num_hidden_layers=2), rows)
    with pytest.raises(ValueError, match=r"is of shape .* in the source and .* in the model"):
        calibrate(model, make_source("llama", intermediate_size=59), rows)
    local = make_source("mistral")
    with pytest.raises(ValueError, match="no converted layer sees the first token"):
        calibrate(convert_again(local), local, rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A source with a sink, and a tokenizer that puts a token before each text."""
    path = tmp_path_factory.mktemp("source")
    make_source_with_sink().save_pretrained(path)
    words = {"<unk>": 0, "<bos>": BEGIN, "<eos>": 2} | {f"w{number}": number for number in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BEGIN)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>")
    fast.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    documents = (" ".join(f"w{token}" for token in row.tolist()) for row in make_tokens(6, 200))
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return path


SIZES = ["--window", str(WINDOW), "--latents", str(LATENTS), "--mixer", "none"]


def test_on_the_command_line(folder, text, tmp_path, capsys):
    out = tmp_path / "out"
    options = [*SIZES, "--calibrate", str(text), "--calibration-tokens", "81", "--calibration-texts", "4"]
    assert main(["convert", str(folder), str(out), *options]) == 0
    printed = capsys.readouterr()
    assert f"{LATENTS} latents per head, mixer none, calibrated on 324 tokens" in printed.out
    assert "calibrating the latents on 4 stretches of text, 324 tokens" in printed.err
    source, made = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (folder, out))
    torch.manual_seed(0)
    expected = convert(source, window=WINDOW, num_latents=LATENTS, mixer="none")
    middles = make_tokens(6, 200)[:4, 100:180]
    rows = [torch.cat([torch.tensor([BEGIN]), row]) for row in middles]
    calibrate(expected, source, rows, device="cuda" if torch.cuda.is_available() else "cpu")  # as the command does
    for name, weight in expected.state_dict().items():
        torch.testing.assert_close(made.state_dict()[name], weight, rtol=1e-5, atol=1e-6)
    held_out = make_rows(3, seed=11)
    torch.testing.assert_close(far_logits(made, held_out), far_logits(expected, held_out), rtol=1e-4, atol=1e-4)


def test_the_document_counts_the_tokens(folder, text, tmp_path, capsys):
    options = [*SIZES, "--calibrate", str(text), "--calibration-tokens", "50", "--json", "--dtype", "bfloat16"]
    assert main(["convert", str(folder), str(tmp_path / "out"), *options]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["calibration_tokens"] == 12 * 50
    assert document["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--low-memory"], "--calibrate runs the whole source, which --low-memory never holds"),
        (["--calibration-tokens", "22"], "--calibration-tokens 22: with a window of 7 it must be 23 or more"),
        (["--window", "220"], "no document has the 236 tokens that it needs; give longer text, or a shorter --window"),
        (["--calibrate", "nowhere.txt"], "--calibrate nowhere.txt: there is no such file"),
        (["--text-field", "words"], "has no text in field 'words'"),
        (["--latents", "0"], "num_latents is 0"),
    ],
)
def test_bad_options(folder, text, tmp_path, capsys, options, words):
    long = ["--calibration-tokens", "256"]
    code = main(["convert", str(folder), str(tmp_path / "out"), *SIZES, *long, "--calibrate", str(text), *options])
    assert code == 2
    assert words in error_line(capsys)
    assert not list(tmp_path.iterdir())


def test_a_source_without_a_tokenizer(text, tmp_path, capsys):
    make_source("llama").save_pretrained(tmp_path / "source")
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "out"), "--calibrate", str(text)]) == 2
    assert "it has no tokenizer that Transformers can load" in error_line(capsys)
    assert not (tmp_path / "out").exists()
