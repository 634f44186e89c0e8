"""Learning from a teacher: its logits, and what its attention layers give out.

States are seen by hooks, so that the student runs as it would without a teacher: compiled, in DDP's wrapping, and with
activations that are computed again in the backward pass. The student's hooks do nothing in evaluation.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from latte.models import LatteForCausalLM
from latte.tasks.base import Batch
from latte.train.attention import attention_of, converted_attention
from latte.train.divergence import linear_divergence
from latte.train.objective import IGNORED, NextToken
from latte.train.settings import RunSettings
from latte.train.teachers import check_head, computing, prediction, product_dtype

INPUTS = ("input_ids", "attention_mask", "position_ids")


@dataclass
class Lesson:
    """What a teacher has shown of one batch."""

    hidden: Tensor  # [B T C], the last one
    inputs: list[Tensor]  # of the attention layers that are compared; empty where nobody reads them
    outputs: list[Tensor]
    real: Tensor | None  # [B T] which tokens are no padding; None where there is none


class Teacher:
    """Computes a lesson; `layers` are the attention modules to be compared, by name."""

    def __init__(self, model: PreTrainedModel, layers: Mapping[str, nn.Module], *, with_inputs: bool) -> None:
        self.model, self.with_inputs = model, with_inputs
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []
        see: Any = torch.compiler.disable(self._see)
        for module in layers.values():
            module.register_forward_hook(see, with_kwargs=True)

    def _see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._outputs.append(output[0])
        if self.with_inputs:
            self._inputs.append(kwargs["hidden_states"])

    @torch.no_grad()
    def teach(self, batch: Batch) -> Lesson:
        given = {name: batch[name] for name in INPUTS if name in batch}
        hidden = self.model.base_model(**given, use_cache=False).last_hidden_state
        mask = batch.get("attention_mask")
        lesson = Lesson(hidden, self._inputs, self._outputs, None if mask is None else mask.bool())
        self._inputs, self._outputs = [], []
        return lesson


class Student:
    """Sees a model's states while it trains, and compares its layers with a lesson's.

    `inputs` says what the compared layers read. With "teacher" a layer is called a second time, beside its own call;
    where the layers are `alone` and no other loss needs the model's own states, the teacher's take their place.
    """

    def __init__(self, model: PreTrainedModel, layers: Mapping[str, nn.Module], inputs: str, alone: bool) -> None:
        self.model, self.inputs, self.alone = model, inputs, alone
        self.lesson: Lesson | None = None  # kept for backward, which may compute layers again
        self._listening = False
        self._hidden: Tensor | None = None
        self._errors: list[Tensor] = []
        model.base_model.register_forward_hook(self._see_hidden)
        for index, module in enumerate(layers.values()):
            replace, compare = (torch.compiler.disable(hook) for hook in (self._replace_input, self._compare))
            module.register_forward_pre_hook(partial(replace, index), with_kwargs=True)
            module.register_forward_hook(partial(compare, index), with_kwargs=True)

    def expect(self, lesson: Lesson) -> None:
        self.lesson, self._listening, self._hidden, self._errors = lesson, True, None, []

    def take(self) -> tuple[Tensor, list[Tensor]]:
        """The last hidden states of the forward pass, and each compared layer's errors by row."""
        hidden, errors, self._listening, self._hidden, self._errors = self._hidden, self._errors, False, None, []
        if hidden is None:
            raise ValueError("the model has shown no states; it must be in training, and the one this was made for")
        return hidden, errors

    def _see_hidden(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._listening:
            self._hidden = output.last_hidden_state

    def _note(self, y: Tensor, target: Tensor, real: Tensor | None) -> None:
        error = relative_errors(y, target, real)
        if self._listening:
            self._errors.append(error)

    def _replace_input(self, index: int, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if not module.training or not self.alone or self.inputs == "student" or self.lesson is None:
            return None
        return args, kwargs | {"hidden_states": self._like(self.lesson.inputs[index], kwargs["hidden_states"])}

    def _compare(self, index: int, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if not module.training or self.lesson is None:
            return None
        target, real = self.lesson.outputs[index], self.lesson.real
        if self.inputs == "teacher" and not self.alone:
            x = self._like(self.lesson.inputs[index], kwargs["hidden_states"])
            self._note(module.forward(**(kwargs | {"hidden_states": x}))[0], target, real)
            return None
        self._note(output[0], target, real)
        return (self._like(target, output[0]), *output[1:]) if self.inputs == "teacher" else None

    @staticmethod
    def _like(x: Tensor, own: Tensor) -> Tensor:
        """The teacher's tensor as the student's would be: packed rows lie one after another."""
        return x.reshape_as(own).to(own.dtype)


def relative_errors(y: Tensor, target: Tensor, real: Tensor | None) -> Tensor:
    """[B] mean squared error of each row's real tokens, divided by the target's mean square."""
    target = target.float()
    error = y.reshape_as(target).float() - target
    if real is not None:
        target, error = (x.masked_fill(~real.unsqueeze(-1), 0) for x in (target, error))
    return error.square().sum(dim=(1, 2)) / target.square().sum(dim=(1, 2)).clamp(min=torch.finfo(torch.float32).tiny)


class Distillation(NextToken):
    """The loss of the next token, divergence from the teacher, and errors of layers, each with its weight.

    All three are means over labelled tokens, for a row's errors count by its labels: parts of a step add up. `parts`
    has the terms of the last batch, without their weights.
    """

    def __init__(
        self, settings: RunSettings, model: PreTrainedModel, teacher: PreTrainedModel, device: torch.device
    ) -> None:
        self.settings, self.device = settings, device
        self.weights = {
            "next_token": settings.loss_weight, "logits": settings.distill_logits, "layers": settings.distill_layers,
        }  # fmt: skip
        if settings.distill_logits:
            with computing(settings, device):
                check_head(teacher, "the teacher")
                check_head(model, "the model")
        alone = not (settings.loss_weight or settings.distill_logits)
        compared = compared_layers(model, teacher) if settings.distill_layers else ({}, {})
        if alone:
            check_reach(model, compared[0])
        self.student = Student(model, compared[0], settings.distill_inputs, alone)
        self.teacher = Teacher(teacher, compared[1], with_inputs=settings.distill_inputs == "teacher")
        self.parts: dict[str, Tensor] = {}

    def loss(self, model: nn.Module, batch: Batch, items: Tensor) -> Tensor:
        with computing(self.settings, self.device):
            lesson = self.teacher.teach(batch)
        self.student.expect(lesson)
        terms = {}
        if self.weights["next_token"]:
            terms["next_token"] = super().loss(model, batch, items)
        else:
            self._run(model, batch)
        counts, (hidden, errors) = counted(batch), self.student.take()
        if self.weights["logits"]:
            terms["logits"] = self._divergence(lesson.hidden, hidden, counts) / items
        if self.weights["layers"]:
            terms["layers"] = (torch.stack(errors).mean(dim=0) * counts.sum(dim=1)).sum() / items
        self.parts = {name: term.detach() for name, term in terms.items()}
        return torch.stack([self.weights[name] * term for name, term in terms.items()]).sum()

    def _run(self, model: nn.Module, batch: Batch) -> None:
        """Without labels, and without logits where the model can leave them out."""
        given = {name: x for name, x in batch.items() if name not in ("labels", "shift_labels")}
        ours = isinstance(self.student.model, LatteForCausalLM)
        options: dict[str, Any] = {"return_logits": False} if ours else {"logits_to_keep": 1}
        model(**given, use_cache=False, **options)

    def _divergence(self, teachers: Tensor, hidden: Tensor, counts: Tensor) -> Tensor:
        """Times the square of the temperature, so that its gradients keep their size."""
        expected, actual = prediction(self.teacher.model, teachers), prediction(self.student.model, hidden)
        temperature, dtype = self.settings.distill_temperature, product_dtype(self.settings)
        return temperature**2 * linear_divergence(expected, actual, counts.flatten(), temperature, dtype)


def counted(batch: Batch) -> Tensor:
    """[B T] whether the token after each one is a label."""
    if "shift_labels" in batch:
        return batch["shift_labels"] != IGNORED
    return nn.functional.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:] != IGNORED


def compared_layers(
    model: PreTrainedModel, teacher: PreTrainedModel
) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """The student's converted layers and those of the teacher in their places."""
    own = converted_attention(model)
    if not own:
        raise ValueError(
            "distill_layers is set, but the model is not a converted one; leave it out, or convert it first"
        )
    ours, theirs = attention_of(model), attention_of(teacher)
    sizes = [(len(layers), kind.config.hidden_size) for layers, kind in ((ours, model), (theirs, teacher))]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"distill_layers is set, but the teacher has {sizes[1][0]} layers of width {sizes[1][1]} and the model "
            f"{sizes[0][0]} of width {sizes[0][1]}; leave it out, or choose --teacher source"
        )
    places = zip(ours, theirs.items(), strict=True)
    return own, dict(their for name, their in places if name in own)


def check_reach(model: PreTrainedModel, layers: Mapping[str, nn.Module]) -> None:
    """Raise ValueError where something learns that the layers' errors do not depend on."""
    for name, weight in model.named_parameters():
        if weight.requires_grad and not any(name.startswith(f"{layer}.") for layer in layers):
            raise ValueError(
                f"distill_layers is the only loss, and {name} has no part in converted attention; choose "
                "--trainable latents, or set loss_weight or distill_logits"
            )
