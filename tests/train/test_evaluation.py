"""Metrics over batches, classifiers, and texts that a model writes."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor, nn

from latte.models import LatteConfig, LatteForCausalLM, LatteForSequenceClassification
from latte.tasks.base import Batch, Budget, Plan, Sums, Task, TaskData
from latte.train import read_metrics, run
from latte.train.evaluation import evaluate, evaluation_batches, write_samples
from latte.train.objective import Classification, NextToken
from tests.train import tiny

CPU = torch.device("cpu")


class CountCalls(tiny.CountingTask):
    """The number of examples, and the mean of their first tokens."""

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        first = batch["input_ids"][:, 0]
        return {"first": (float(first.sum()), len(first)), "never": (0.0, 0.0)}

    def summarize(self, means):
        return dict(means)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 50])
def test_sums_over_batches_are_means_over_examples(batch_size):
    task = CountCalls(tiny.CountingSettings())
    data = task.prepare()
    model = nn.Linear(1, 1).train()
    means, usage = evaluate(task, data, model, "validation", count=0, batch_size=batch_size, device=CPU)
    expected = sum(int(data.validation[index]["input_ids"][0]) for index in range(7)) / 7
    assert means == {"first": pytest.approx(expected)}
    assert usage == []
    assert model.training


def test_some_examples_are_the_same_every_time():
    data = tiny.task(examples=100).prepare()
    batches = [[batch["input_ids"] for batch, _ in evaluation_batches(data.train, data, 12, 5)] for _ in range(2)]
    assert [len(batch) for batch in batches[0]] == [5, 5, 2]
    assert all(torch.equal(first, second) for first, second in zip(*batches, strict=True))
    start = torch.stack([data.train[index]["input_ids"] for index in range(5)])
    assert not torch.equal(batches[0][0], start)  # from all over, not from the beginning


def test_examples_that_come_together_are_fetched_together():
    class Together(tiny.Counting):
        def __getitem__(self, index):
            pytest.fail("one by one")

        def __getitems__(self, indices):
            return [tiny.Counting.__getitem__(self, index) for index in indices]

    data = tiny.task().prepare()
    examples = Together(7, 5)
    batches = [batch["input_ids"] for batch, _ in evaluation_batches(examples, data, 0, 3)]
    expected = torch.stack([tiny.Counting(7, 5)[index]["input_ids"] for index in range(7)])
    assert torch.equal(torch.cat(batches), expected)


def test_parts_of_a_loss_add_up():
    """Micro batches with different numbers of labels: the mean is over labels, not over micro batches."""
    torch.manual_seed(0)
    model = LatteForCausalLM(LatteConfig.from_preset("macchiato-tiny", **tiny.SMALL, vocab_size=tiny.PRIME))
    tokens = torch.randint(0, tiny.PRIME, (4, 9))
    labels = tokens.clone()
    labels[0, 2:] = -100
    whole = {"input_ids": tokens, "labels": labels}
    parts = [{name: x[rows] for name, x in whole.items()} for rows in (slice(0, 1), slice(1, 4))]
    objective = NextToken()
    items = sum(objective.items(part) for part in parts)
    assert items == 1 + 3 * 8
    total = sum(objective.loss(model, part, items) for part in parts)
    logits = model(tokens, use_cache=False).logits[:, :-1].flatten(0, 1)
    torch.testing.assert_close(total, nn.functional.cross_entropy(logits, labels[:, 1:].flatten()))


def test_parts_of_a_classifiers_loss_add_up():
    torch.manual_seed(0)
    config = LatteConfig.from_preset("macchiato-tiny", **tiny.SMALL, vocab_size=tiny.PRIME, num_labels=3)
    model = LatteForSequenceClassification(config)
    whole = {"input_ids": torch.randint(0, tiny.PRIME, (5, 9)), "labels": torch.tensor([0, 1, 2, 0, 1])}
    parts = [{name: x[rows] for name, x in whole.items()} for rows in (slice(0, 1), slice(1, 5))]
    objective = Classification()
    items = sum(objective.items(part) for part in parts)
    total = sum(objective.loss(model, part, items) for part in parts)
    torch.testing.assert_close(total, model(**whole).loss)


@dataclass(frozen=True)
class ParitySettings:
    examples: int = field(default=23, metadata={"help": "How many."})


class Parity:
    def __init__(self, examples: int) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return self.examples

    def __getitem__(self, index: int, /) -> dict[str, Tensor]:
        bits = torch.tensor([index >> place & 1 for place in range(6)])
        return {"input_ids": bits, "labels": bits.sum() % 2}


class ParityTask(Task[ParitySettings]):
    name = "parity"
    settings_class = ParitySettings
    plans = {"default": Plan("macchiato-tiny", Budget(steps=6, batch_size=4, learning_rate=1e-2))}  # noqa: RUF012
    best = ("accuracy", "max")

    def prepare(self, progress: Callable[[str, int, int], None] | None = None) -> TaskData:
        words = {"vocab_size": 2, "num_labels": 2}
        return TaskData(Parity(23), Parity(11), "classification", words, "parity", tokens_per_example=6)

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        right = model(**batch).logits.argmax(-1) == batch["labels"]
        return {"accuracy": (float(right.sum()), len(right))}


def test_classifiers_are_trained_and_resumed(tmp_path):
    output = tmp_path / "run"
    settings = tiny.settings(output, steps=6, eval_every=3, micro_batch_size=2)
    result = run(ParityTask(ParitySettings()), settings)
    assert result.test == {}
    run(ParityTask(ParitySettings()), replace(settings, steps=8), resume=True)
    records = [record for record in read_metrics(output / "metrics.jsonl") if record["split"] == "validation"]
    assert [record["step"] for record in records] == [3, 6, 8]
    model = LatteForSequenceClassification.from_pretrained(output / "model")
    batch = ParityTask(ParitySettings()).prepare().collate([Parity(11)[index] for index in range(11)])
    with torch.no_grad():
        right = model(**batch).logits.argmax(-1) == batch["labels"]
    assert records[-1]["accuracy"] == pytest.approx(float(right.float().mean()))


class Letters:
    """A tokenizer of letters."""

    pad_token_id, eos_token_id = None, 0

    def __call__(self, text: str, return_tensors: str) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([[ord(letter) - ord("a") for letter in text]])}

    def decode(self, tokens: Tensor, skip_special_tokens: bool) -> str:
        return "".join(chr(ord("a") + int(token)) for token in tokens)


def test_samples_leave_no_trace():
    torch.manual_seed(0)
    model = LatteForCausalLM(LatteConfig.from_preset("macchiato-tiny", **tiny.SMALL, vocab_size=tiny.PRIME)).train()
    model.config.use_cache = False  # as Trainer has it
    data = replace(tiny.task().prepare(), tokenizer=Letters(), prompts=("abc", "cb"))
    state = torch.get_rng_state()
    texts = write_samples(data, model, 5, CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert [text["prompt"] for text in texts] == ["abc", "cb"]
    assert all(1 <= len(text["text"]) <= 5 for text in texts)
    assert texts == write_samples(data, model, 5, CPU)
    assert write_samples(data, model, 0, CPU) == []
    assert write_samples(replace(data, tokenizer=None), model, 5, CPU) == []
