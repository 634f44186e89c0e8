"""`generate` in all its ways gives what whole forwards give, with and without a cache."""

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig, DynamicCache, StaticCache, TextStreamer
from transformers.generation.streamers import BaseStreamer

from tests.models.forms import FORMS, MAIN_FORMS, assert_same_cache, greedy, make_model, make_tokens, padded

PROMPT = 23  # longer than the window


def reference(model, tokens: Tensor, count: int = 9) -> Tensor:
    """Greedy tokens, each from a forward of the whole text."""
    text = tokens
    for _ in range(count):
        text = torch.cat([text, model(text, use_cache=False).logits[:, -1:].argmax(dim=-1)], dim=1)
    return text[:, tokens.shape[1] :]


@pytest.mark.parametrize("form", FORMS)
def test_greedy(form):
    model, tokens = make_model(form), make_tokens(2, PROMPT)
    expected = reference(model, tokens)
    assert len(expected.unique()) > 3
    assert torch.equal(greedy(model, tokens), expected)
    assert torch.equal(greedy(model, tokens, use_cache=False), expected)
    assert torch.equal(greedy(model, tokens, cache_implementation="static"), expected)
    assert torch.equal(greedy(model, tokens, cache_implementation="dynamic"), expected)


@pytest.mark.parametrize("kind", [None, "static"])
@pytest.mark.parametrize("form", MAIN_FORMS)
def test_left_padded_batches(form, kind):
    model, lengths = make_model(form), [PROMPT, 9, 2]
    ids, mask = padded(make_tokens(3, PROMPT), lengths)
    batch = greedy(model, ids, attention_mask=mask, cache_implementation=kind)
    for row, length in enumerate(lengths):
        assert torch.equal(batch[row], reference(model, ids[row : row + 1, PROMPT - length :])[0])


@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("form", MAIN_FORMS)
def test_prompts_in_chunks(form, chunk):
    model = make_model(form)
    ids, mask = padded(make_tokens(2, PROMPT), [PROMPT, 9])
    expected = greedy(model, ids, attention_mask=mask)
    for kind in (None, "static"):
        options = {"prefill_chunk_size": chunk, "cache_implementation": kind}
        assert torch.equal(greedy(model, ids, attention_mask=mask, **options), expected)
        assert torch.equal(greedy(model, ids[:1], **options), expected[:1])


@pytest.mark.parametrize("chunk", [0, -5])
def test_chunks_of_nothing_are_refused(chunk):
    with pytest.raises(ValueError, match=f"prefill_chunk_size is {chunk}; it must be an integer of at least 1, or"):
        greedy(make_model("macchiato"), make_tokens(1, PROMPT), prefill_chunk_size=chunk)


@pytest.mark.parametrize("form", MAIN_FORMS)
def test_beams_with_and_without_cache(form):
    model, tokens = make_model(form), make_tokens(2, PROMPT)
    options = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5}
    options |= {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, "eos_token_id": 5}
    expected = model.generate(tokens, use_cache=False, **options)
    for kind in (None, "static"):
        assert torch.equal(model.generate(tokens, cache_implementation=kind, **options), expected)


@pytest.mark.parametrize("form", MAIN_FORMS)
def test_sampling(form):
    model, tokens = make_model(form), make_tokens(2, PROMPT)
    texts = []
    for options in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        torch.manual_seed(3)
        texts.append(model.generate(tokens, do_sample=True, top_k=20, max_new_tokens=9, pad_token_id=0, **options))
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])
    torch.manual_seed(4)
    several = model.generate(tokens, do_sample=True, num_return_sequences=3, max_new_tokens=4, pad_token_id=0)
    assert several.shape == (6, PROMPT + 4)


@pytest.mark.parametrize("form", MAIN_FORMS)
def test_from_embeddings(form):
    model, tokens = make_model(form), make_tokens(2, PROMPT)
    embeds = model.get_input_embeddings()(tokens)
    options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    expected = reference(model, tokens)
    assert torch.equal(model.generate(inputs_embeds=embeds, **options), expected)
    for chunk in (1, 5, 64):
        assert torch.equal(model.generate(inputs_embeds=embeds, prefill_chunk_size=chunk, **options), expected)


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("form", MAIN_FORMS)
def test_a_conversation_goes_on(form, kind, chunk):
    """The cache of one turn is where the next begins: only what is new is read."""
    model, tokens = make_model(form), make_tokens(1, PROMPT)
    config = model.config
    cache = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=64)
    text = tokens
    for turn in range(3):
        answer = greedy(model, text, count=6, past_key_values=cache, prefill_chunk_size=chunk)
        assert torch.equal(answer, reference(model, text, 6))
        text = torch.cat([text, answer, make_tokens(1, 4, seed=turn)], dim=1)
        assert int(cache.get_seq_length()) == text.shape[1] - 5  # all but the last answer and the new words


@pytest.mark.parametrize("how", ["lookup", "draft"])
@pytest.mark.parametrize("form", MAIN_FORMS)
def test_a_conversation_goes_on_with_drafts(form, how):
    """Transformers would have the whole text read again, behind itself."""
    model, text = make_model(form), make_tokens(1, PROMPT)
    cache = DynamicCache(config=model.config)
    options = {"prompt_lookup_num_tokens": 3} if how == "lookup" else {"assistant_model": nearly(model)}
    for turn in range(3):
        answer = greedy(model, text, count=6, past_key_values=cache, **options)
        assert torch.equal(answer, reference(model, text, 6))
        text = torch.cat([text, answer, make_tokens(1, 4, seed=turn)], dim=1)
        assert int(cache.get_seq_length()) == text.shape[1] - 5


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("cut", [PROMPT, PROMPT - 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"prefill_chunk_size": 4}, {"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 1}],
    ids=str,
)
def test_a_text_that_the_cache_has_read_has_nothing_to_go_on_from(options, cut, kind):
    """Transformers would have it read a second time, or fail at a tensor without tokens."""
    model, tokens = make_model("macchiato"), make_tokens(1, PROMPT)
    config = model.config
    cache = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=64)
    with torch.no_grad():
        model(tokens, past_key_values=cache)
    message = rf"has read {PROMPT} tokens, and the text has no more"
    if kind == "static" and options.keys() & {"prompt_lookup_num_tokens", "assistant_early_exit"}:
        message = "[Ss]tatic"
    with pytest.raises(ValueError, match=message):
        greedy(model, tokens[:, :cut], past_key_values=cache, **options)


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 2}], ids=str)
def test_what_is_new_may_be_given_alone_or_with_the_text_before(options):
    model, tokens = make_model("macchiato"), make_tokens(1, PROMPT)
    expected, mask = reference(model, tokens), torch.ones_like(tokens)
    for given in (tokens, tokens[:, -5:]):
        with torch.no_grad():
            cache = model(tokens[:, :-5]).past_key_values
        assert torch.equal(greedy(model, given, past_key_values=cache, attention_mask=mask, **options), expected)


@pytest.mark.parametrize("form", MAIN_FORMS)
def test_what_generate_returns(form):
    model, tokens = make_model(form), make_tokens(2, PROMPT)
    options = {"return_dict_in_generate": True, "output_logits": True, "output_hidden_states": True}
    output = model.generate(tokens, max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0, **options)
    logits = torch.stack(output.logits, dim=1)
    torch.testing.assert_close(logits, model(output.sequences).logits[:, PROMPT - 1 : -1], rtol=1e-5, atol=2e-5)
    assert [len(states) for states in output.hidden_states] == 5 * [3]
    assert_same_cache(output.past_key_values, model(output.sequences[:, :-1]).past_key_values)


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"use_cache": False}], ids=str)
def test_no_more_text_than_learned_positions(options):
    model, tokens = make_model("latte", positions="learned", max_position_embeddings=10), make_tokens(2, 7)
    assert torch.equal(greedy(model, tokens, count=4, **options), reference(model, tokens, 4))  # the last is not read
    with pytest.raises(ValueError, match=r"at position 10 and max_position_embeddings is 10: .* generate fewer tokens"):
        greedy(model, tokens, count=5, **options)
    ids, mask = padded(make_tokens(2, 9), [5, 2])
    assert greedy(model, ids, count=6, attention_mask=mask, **options).shape == (2, 6)


class Collector(BaseStreamer):
    """What a streamer is given, piece by piece."""

    def __init__(self) -> None:
        self.pieces: list[Tensor] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.pieces.append(value.flatten())

    def end(self) -> None:
        self.ended = True


def test_streaming():
    model, tokens, streamer = make_model("macchiato"), make_tokens(1, PROMPT), Collector()
    assert issubclass(TextStreamer, BaseStreamer)
    text = greedy(model, tokens, streamer=streamer)
    assert streamer.ended
    assert torch.equal(torch.cat(streamer.pieces), torch.cat([tokens[0], text[0]]))
    assert all(len(piece) == 1 for piece in streamer.pieces[1:])


@pytest.mark.parametrize("form", ["latte rglru", "macchiato"])
def test_assisted_by_a_draft_model(form):
    """Some of the drafts are wrong, and leave no trace."""
    model, tokens = make_model(form), make_tokens(1, PROMPT)
    expected = reference(model, tokens, 25)
    for draft in (model, make_model(form, seed=1), nearly(model)):
        draft.generation_config.num_assistant_tokens = 4
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        output = model.generate(
            tokens, max_new_tokens=25, do_sample=False, eos_token_id=-1, pad_token_id=0, assistant_model=draft,
            return_dict_in_generate=True,
        )  # fmt: skip
        assert torch.equal(output.sequences[:, PROMPT:], expected)
        assert output.past_key_values.get_seq_length() == PROMPT + 24


@pytest.mark.parametrize("form", FORMS)
def test_drafts_from_the_first_layers(form):
    model, tokens = make_model(form), make_tokens(1, PROMPT)
    assert torch.equal(greedy(model, tokens, assistant_early_exit=1), reference(model, tokens))
    assert model.config.num_hidden_layers == 2


def nearly(model):
    """A draft that is right now and then."""
    twin = type(model)(model.config).eval()
    twin.load_state_dict(model.state_dict())
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1 + 0.15 * torch.randn_like(parameter))
    return twin


@pytest.mark.parametrize("form", MAIN_FORMS)
def test_drafts_from_the_prompt(form):
    model, phrase = make_model(form), make_tokens(1, 7)
    tokens = torch.cat([phrase, make_tokens(1, 3), phrase, make_tokens(1, 2), phrase], dim=1)
    assert torch.equal(greedy(model, tokens, count=15, prompt_lookup_num_tokens=5), reference(model, tokens, 15))


def test_a_static_cache_takes_no_drafts():
    model, tokens = make_model("macchiato"), make_tokens(1, PROMPT)
    cache = StaticCache(config=model.config, max_cache_len=64)
    with pytest.raises(ValueError, match=r"[Ss]tatic"):
        greedy(model, tokens, past_key_values=cache, prompt_lookup_num_tokens=3)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # PyTorch's own
@pytest.mark.parametrize("form", ["latte", "macchiato", "softmax"])
def test_compiled_steps(form, fresh_dynamo):
    """With a static cache the step is one graph, made once: not again for another text."""
    model = make_model(form)
    config = CompileConfig(fullgraph=True, dynamic=False, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    for seed in range(2):
        tokens = make_tokens(2, PROMPT, seed)
        options = {"cache_implementation": "static", "compile_config": config}
        with torch.compiler.set_stance("default" if seed == 0 else "fail_on_recompile"):
            actual = greedy(model, tokens, **options)
        assert torch.equal(actual, reference(model, tokens))
    assert hasattr(model, "_compiled_call")
