"""The loss without logits is the plain one, in value and gradient, and takes what Trainer hands to it."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.forms import VOCABULARY, make_model, make_tokens

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def plain_loss(model, tokens: Tensor, labels: Tensor, **options) -> Tensor:
    logits = model(tokens).logits.float()[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), **options)


@pytest.fixture
def tokens() -> Tensor:
    return make_tokens(2, 23)


@pytest.mark.parametrize("form", ["latte", "macchiato conv"])  # the latter with a softcap
def test_loss_and_gradients(form, tokens):
    model = make_model(form).train()
    labels = tokens.masked_fill(torch.rand(tokens.shape) < 0.3, -100)
    gradients = []
    losses = model(tokens, labels=labels).loss, plain_loss(model, tokens, labels, ignore_index=-100)
    torch.testing.assert_close(*losses, **CLOSE)
    for loss in losses:
        model.zero_grad()
        loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)


def test_logits_are_left_out_in_training_and_there_in_evaluation(tokens):
    model = make_model("macchiato")
    assert model(tokens, labels=tokens).logits.shape == (2, 23, VOCABULARY)
    assert model(tokens, labels=tokens, return_logits=False).logits is None
    assert model(tokens).loss is None
    model.train()
    assert model(tokens, labels=tokens).logits is None
    assert model(tokens, labels=tokens, return_logits=True).logits.shape == (2, 23, VOCABULARY)
    assert model(tokens).logits.shape == (2, 23, VOCABULARY)


def test_no_tensor_of_the_size_of_all_logits(tokens):
    """The largest tensor that training makes does not grow as tokens × vocabulary in float32."""
    model = make_model("latte", vocab_size=50_021).train()
    batch = torch.randint(0, 50_021, (1, 1500))
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            output = function(*args, **(kwargs or {}))
            if isinstance(output, Tensor):
                largest = max(largest, output.numel())
            return output

    with Watch():
        model(batch, labels=batch).loss.backward()
    assert largest < 0.5 * 1500 * 50_021


@pytest.mark.parametrize("count", [37, torch.tensor(37)])
def test_gradient_accumulation(count, tokens):
    """Trainer divides by the labels of all accumulated batches."""
    model = make_model("macchiato").train()
    actual = model(tokens, labels=tokens, num_items_in_batch=count).loss
    torch.testing.assert_close(actual, plain_loss(model, tokens, tokens, reduction="sum") / 37, **CLOSE)


def test_labels_that_are_shifted_already(tokens):
    model = make_model("macchiato").train()
    shifted = F.pad(tokens[:, 1:], (0, 1), value=-100)
    actual = model(tokens, labels=torch.zeros_like(tokens), shift_labels=shifted).loss
    torch.testing.assert_close(actual, plain_loss(model, tokens, tokens), **CLOSE)


def test_labels_of_another_shape_are_refused(tokens):
    model = make_model("macchiato")
    batch, length = tokens.shape
    for labels in (tokens[:, :-1], tokens[:1], tokens[0]):
        with pytest.raises(ValueError, match=rf"^labels has shape .*; it must be \[{batch}, {length}\]"):
            model(tokens, labels=labels)
        with pytest.raises(ValueError, match=rf"^shift_labels has shape .*; it must be \[{batch}, {length}\]"):
            model(tokens, labels=tokens, shift_labels=labels)


def test_another_index_to_ignore(tokens):
    model = make_model("macchiato")
    labels = tokens.masked_fill(tokens > 50, 7)
    actual = model(tokens, labels=labels, ignore_index=7).loss
    torch.testing.assert_close(actual, plain_loss(model, tokens, labels, ignore_index=7), **CLOSE)


def test_a_loss_function_of_one_s_own(tokens):
    model = make_model("macchiato").train()
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.mean() + vocab_size
    output = model(tokens, labels=tokens)
    torch.testing.assert_close(output.loss, output.logits.mean() + VOCABULARY)


def test_a_wrapped_head_is_asked_for_its_logits(tokens):
    """PEFT and quantisers wrap or replace it; what they add must be in the loss."""

    class Doubled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.weight = inner, inner.weight

        def forward(self, hidden: Tensor) -> Tensor:
            return 2 * self.inner(hidden)

    model = make_model("macchiato").train()
    model.lm_head = Doubled(model.lm_head)
    output = model(tokens, labels=tokens)
    torch.testing.assert_close(output.loss, plain_loss(model, tokens, tokens), **CLOSE)


@pytest.mark.parametrize("keep", [1, 5, torch.tensor([3, 17])], ids=str)
def test_some_of_the_logits(keep, tokens):
    model = make_model("macchiato conv")
    whole = model(tokens).logits
    rows = slice(-keep, None) if isinstance(keep, int) else keep
    output = model(tokens, labels=tokens, logits_to_keep=keep)
    torch.testing.assert_close(output.logits, whole[:, rows], **CLOSE)
    torch.testing.assert_close(output.loss, plain_loss(model, tokens, tokens), **CLOSE)


def test_logits_stay_in_the_model_s_dtype(tokens):
    model = make_model("macchiato").to(torch.bfloat16)
    output = model(tokens, labels=tokens)
    assert output.logits.dtype == torch.bfloat16
    assert output.loss.dtype == torch.float32


def test_autocast(tokens):
    model = make_model("macchiato").train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, labels=tokens).loss
    loss.backward()
    assert loss.isfinite()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
