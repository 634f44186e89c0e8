"""Everyday life: checkpointing, compilation, export, LoRA, pipelines, Trainer."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments, pipeline

from latte.models.recomputation import recompute_layers
from tests.models.forms import VOCABULARY, WINDOW, make_model, make_tokens, padded

CLOSE = {"rtol": 1e-5, "atol": 2e-5}
# PyTorch's own, in what compiles with inductor:
IGNORED = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


def gradients(model, call) -> list[Tensor]:
    model.zero_grad()
    call(labels=make_tokens(2, 23), input_ids=make_tokens(2, 23)).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("form", ["latte", "macchiato"])
def test_gradient_checkpointing(form, reentrant):
    model = make_model(form).train()
    expected = gradients(model, model)
    recompute_layers(model, {"use_reentrant": reentrant})
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    model.enable_input_require_grads()
    torch.testing.assert_close(gradients(model, model), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("form", ["latte conv", "macchiato"])
def test_training_in_one_graph(form, fresh_dynamo):
    model = make_model(form).train()
    expected = gradients(model, model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(model, compiled), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", ["latte", "macchiato"])
def test_other_lengths_need_no_other_graph(form, fresh_dynamo):
    model, graphs = make_model(form), []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=count)
    with torch.no_grad():
        for length in (23, 64, 31):
            ids, mask = padded(make_tokens(2, length), [length, 17])
            actual = compiled(ids, attention_mask=mask, use_cache=False).logits
            expected = model(ids, attention_mask=mask).logits
            torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], **CLOSE)
    assert len(graphs) == 1


@IGNORED
@pytest.mark.slow
def test_inductor(fresh_dynamo):
    model = make_model("macchiato").train()
    expected = gradients(model, model)
    torch.testing.assert_close(gradients(model, torch.compile(model)), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("form", ["latte", "macchiato", "softmax"])
def test_export(form):
    """The forward for any length from the window's on."""
    model, tokens = make_model(form), make_tokens(2, 23)
    length = torch.export.Dim("length", min=WINDOW, max=2**20)
    shapes = {"input_ids": {1: length}, "use_cache": None}
    program = torch.export.export(
        model, (), {"input_ids": tokens, "use_cache": False}, dynamic_shapes=shapes, strict=False
    )
    for text in (tokens, make_tokens(2, 71)):
        actual = program.module()(input_ids=text, use_cache=False).logits
        torch.testing.assert_close(actual, model(text).logits, **CLOSE)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT 0.21 reads it
@pytest.mark.parametrize("targets", ["all-linear", ["latent_query", "latent_key", "query", "key", "value", "output"]])
def test_lora(targets, tmp_path):
    model, tokens = make_model("macchiato"), make_tokens(2, 23)
    adapted = get_peft_model(model, LoraConfig(r=3, target_modules=targets, task_type="CAUSAL_LM"))
    torch.testing.assert_close(adapted(tokens).logits, make_model("macchiato")(tokens).logits, **CLOSE)
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=1.0)
    adapted.train()
    before = adapted(input_ids=tokens, labels=tokens).loss
    for _ in range(3):
        optimizer.zero_grad()
        adapted(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    assert adapted(input_ids=tokens, labels=tokens).loss < before
    adapted.eval().save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(make_model("macchiato"), tmp_path)
    torch.testing.assert_close(loaded(tokens).logits, adapted(tokens).logits, **CLOSE)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: index for index, word in enumerate(["<pad>", *(f"w{index}" for index in range(1, VOCABULARY))])}
    plain = Tokenizer(WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", padding_side="left")


def test_pipeline(tokenizer):
    model = make_model("macchiato")
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    prompts = ["w5 w7 w9 w11 w13", "w3"]
    options = {"max_new_tokens": 4, "do_sample": False, "return_full_text": False}
    alone = [generate(prompt, **options)[0]["generated_text"] for prompt in prompts]
    together = [texts[0]["generated_text"] for texts in generate(prompts, batch_size=2, **options)]
    assert together == alone
    assert len(alone[0].split()) == 4


def test_trainer(tmp_path):
    """A few steps on one text: the loss falls, and evaluation has logits to look at."""
    text = make_tokens(1, 31)[0]
    rows = [{"input_ids": text, "labels": text} for _ in range(8)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=8, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=3e-2, report_to=[], use_cpu=True, disable_tqdm=True, logging_strategy="no", save_strategy="no",
        dataloader_pin_memory=False,
    )  # fmt: skip
    model = make_model("macchiato", initializer_range=0.02)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:2])
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.7 * before
    assert trainer.predict(rows[:2]).predictions.shape == (2, 31, VOCABULARY)
