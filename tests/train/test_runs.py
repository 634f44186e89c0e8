"""Whole runs: what they compute, what they leave behind, and what they refuse."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from latte.models import LatteConfig, LatteForCausalLM
from latte.tasks.base import TaskData
from latte.train import Display, read_metrics, run
from latte.train.checkpoints import MANIFEST, write_manifest
from latte.train.engine import STATE_FILE
from latte.train.schedules import rate_at
from tests.train import tiny


class Notes(Display):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, message: str) -> None:
        self.lines.append(message)


def records(output: Path, split: str) -> list[dict]:
    return [record for record in read_metrics(output / "metrics.jsonl") if record["split"] == split]


def train_by_hand(settings, data: TaskData) -> tuple[nn.Module, list[float]]:
    """The same run as a plain loop: one example after the other, and AdamW by its formulas."""
    from latte.train.order import Order

    torch.manual_seed(settings.seed)
    model = LatteForCausalLM(LatteConfig.from_preset(settings.preset, **{**data.model, **settings.words}))
    order = Order(len(data.train), settings.batch_size, settings.seed)
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()]
    losses = []
    for step in range(settings.steps):
        model.zero_grad()
        loss = 0.0
        for index in order.batch(step):
            example = {name: x[None] for name, x in data.train[int(index)].items()}
            part = model(**example).loss / settings.batch_size
            part.backward()
            loss += part.item()
        losses.append(loss)
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        scale = min(1.0, settings.gradient_clip / (float(norm) + 1e-6))
        rate = settings.learning_rate * rate_at(step, settings)
        for p, (first, second) in zip(model.parameters(), moments, strict=True):
            gradient = p.grad * scale
            first.lerp_(gradient, 1 - settings.beta1)
            second.lerp_(gradient**2, 1 - settings.beta2)
            decay = settings.weight_decay if p.ndim > 1 else 0.0
            with torch.no_grad():
                p *= 1 - rate * decay
                mean = first / (1 - settings.beta1 ** (step + 1))
                spread = (second / (1 - settings.beta2 ** (step + 1))).sqrt() + 1e-8
                p -= rate * mean / spread
    return model, losses


def test_it_computes_what_a_plain_loop_does(undisturbed):
    settings = tiny.settings(undisturbed)
    model, losses = train_by_hand(settings, tiny.task().prepare())
    assert list(tiny.losses(undisturbed).values()) == pytest.approx(losses, rel=1e-4)
    saved = load_file(undisturbed / "model" / "model.safetensors")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(saved[name], parameter.detach(), rtol=1e-2, atol=2e-3)


def test_what_it_leaves_behind(undisturbed):
    names = {path.name for path in undisturbed.iterdir()}
    assert names == {"run.json", "metrics.jsonl", "checkpoints", "best", "model", "result.json"}
    assert [path.name for path in sorted((undisturbed / "checkpoints").iterdir())] == ["step-00000009", "step-00000012"]
    document = json.loads((undisturbed / "run.json").read_text())
    assert (document["task"], document["run"]["precision"]) == ("counting", "fp32")
    assert document["data"]["facts"] == {"examples": 29}
    result = json.loads((undisturbed / "result.json").read_text())
    assert (result["step"], result["tokens"]) == (12, 12 * 4 * 9)
    assert result["best"]["step"] == 12
    assert (undisturbed / "best").resolve().name == "step-00000012"


def test_the_model_is_one_for_everybody(undisturbed):
    model = AutoModelForCausalLM.from_pretrained(undisturbed / "model")
    assert model.config.use_cache is True  # Trainer switches it off while it trains
    tokens = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert tokens.shape == (1, 7)


def test_metrics(undisturbed):
    train, validation, test = (records(undisturbed, split) for split in ("train", "validation", "test"))
    assert [record["step"] for record in train] == list(range(1, 13))
    assert [record["step"] for record in validation] == [6, 12]
    assert [record["step"] for record in test] == [12]
    assert train[-1]["tokens"] == 12 * 4 * 9
    assert train[0]["seconds"] < train[-1]["seconds"]
    rates = [1e-2 * rate_at(step, tiny.settings(undisturbed)) for step in range(12)]
    assert [record["learning_rate"] for record in train] == pytest.approx(rates)  # each step's own
    model = LatteForCausalLM.from_pretrained(undisturbed / "model")
    data = tiny.task().prepare()
    batch = data.collate([data.validation[index] for index in range(7)])
    with torch.no_grad():
        expected = model(**batch).loss.item()
    assert validation[-1]["loss"] == pytest.approx(expected, rel=1e-5)
    assert validation[-1]["perplexity"] == pytest.approx(torch.tensor(expected).exp().item(), rel=1e-5)


def test_usage_of_latents_is_recorded(undisturbed):
    usage = records(undisturbed, "usage")
    assert [record["step"] for record in usage] == [6, 12]
    layers = usage[0]["layers"]
    assert [layer["layer"] for layer in layers] == ["model.layers.0.attention", "model.layers.1.attention"]
    assert all(len(layer[name]) == 2 for layer in layers for name in ("entropy", "effective_latents", "window_share"))


def test_collapse_is_warned_of_once(tmp_path):
    class CollapsedTask(tiny.CountingTask):
        def measure(self, model, batch):
            with torch.no_grad():
                for layer in model.model.layers:
                    layer.attention.latent_query.bias[5] = 50.0  # a latent of the second head
            return super().measure(model, batch)

    notes = Notes()
    settings = tiny.settings(tmp_path / "run", explosion=0.0, words={"bias": True})
    run(CollapsedTask(tiny.CountingSettings()), settings, display=notes)
    warnings = [line for line in notes.lines if "collapsed" in line]
    assert len(warnings) == 1
    assert "in 2 heads" in warnings[0]
    assert "model.layers.0.attention head 1" in warnings[0]


def test_micro_batches_change_nothing_but_rounding(tmp_path, undisturbed):
    run(tiny.task(), tiny.settings(tmp_path / "run", micro_batch_size=1))
    assert tiny.losses(tmp_path / "run") == pytest.approx(tiny.losses(undisturbed), rel=1e-4)


def test_looking_changes_nothing(tmp_path, undisturbed):
    """How often it is evaluated, recorded and saved, and by whom examples are read."""
    settings = tiny.settings(tmp_path / "run", eval_every=2, log_every=4, save_every=5, eval_examples=3, readers=1)
    run(tiny.task(), settings)
    expected = load_file(undisturbed / "model" / "model.safetensors")
    actual = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    losses = list(tiny.losses(undisturbed).values())
    assert tiny.losses(tmp_path / "run")[8] == pytest.approx(sum(losses[4:8]) / 4)


@pytest.mark.parametrize("given", [{"precision": "bf16"}, {"checkpoint_layers": True}], ids=str)
def test_other_ways_to_compute(given, tmp_path, undisturbed):
    run(tiny.task(), tiny.settings(tmp_path / "run", **given))
    saved = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert all(tensor.dtype == torch.float32 for tensor in saved.values())
    assert tiny.losses(tmp_path / "run") == pytest.approx(tiny.losses(undisturbed), rel=0.05)


def test_only_some_parameters_learn(tmp_path, undisturbed):
    settings = tiny.settings(tmp_path / "run", trainable="latents")
    run(tiny.task(), settings)
    torch.manual_seed(settings.seed)
    before = LatteForCausalLM(LatteConfig.from_preset(settings.preset, vocab_size=tiny.PRIME, **settings.words))
    after = load_file(tmp_path / "run" / "model" / "model.safetensors")
    for name, parameter in before.named_parameters():
        learns = any(word in name for word in ("latent_query", "latent_key", "mixer"))
        assert torch.equal(after[name], parameter) != learns, name
    states = load_file(tmp_path / "run" / "checkpoints" / "step-00000012" / "optimizer.safetensors")
    assert all("latent" in name or "mixer" in name for name in states)


@pytest.fixture
def llama(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=13, **sizes)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def test_any_language_model_can_be_trained_further(llama, tmp_path):
    """Ours or not: the run begins with its weights, in float32, and can be resumed."""

    class LlamaTask(tiny.CountingTask):
        def measure(self, model, batch):
            return {"loss": (float(model(**batch).loss), 1.0)}

    output = tmp_path / "run"
    settings = replace(tiny.settings(output, learning_rate=1e-9, steps=6), model=llama, words={})
    run(LlamaTask(tiny.CountingSettings()), settings)
    run(LlamaTask(tiny.CountingSettings()), replace(settings, steps=9), resume=True)
    before, after = (LlamaForCausalLM.from_pretrained(path, dtype="auto") for path in (llama, output / "model"))
    assert (before.dtype, after.dtype) == (torch.bfloat16, torch.float32)
    for old, new in zip(before.parameters(), after.parameters(), strict=True):
        torch.testing.assert_close(new, old.float(), rtol=0, atol=1e-6)


def test_more_steps(tmp_path):
    """A finished run is made longer: what was recorded stays, and the schedule is that of the new length."""
    output = tmp_path / "run"
    run(tiny.task(), tiny.settings(output, steps=6))
    before = tiny.losses(output)
    result = run(tiny.task(), tiny.settings(output, steps=9), resume=True)
    assert result.step == 9
    assert list(tiny.losses(output)) == list(range(1, 10))
    assert {step: tiny.losses(output)[step] for step in before} == before
    again = run(tiny.task(), tiny.settings(output, steps=9), resume=True)  # nothing is left to do
    assert (again.step, again.test) == (9, result.test)


def test_fewer_steps_than_there_are(tmp_path):
    """A finished run is not made shorter, one that has not come so far is; nothing is changed by asking."""
    output = tmp_path / "run"
    run(tiny.task(), tiny.settings(output, steps=6))
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"steps is 5 and .*run has learned for 6 already; resume with --steps 6 or"):
        run(tiny.task(), tiny.settings(output, steps=5), resume=True)
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before
    shutil.rmtree(output / "checkpoints" / "step-00000006")
    assert run(tiny.task(), tiny.settings(output, steps=5), resume=True).step == 5


def test_a_damaged_checkpoint(tmp_path, undisturbed):
    """The one before it is taken, and the run ends as it would have."""
    output = tmp_path / "run"
    run(tiny.task(), tiny.settings(output))
    (output / "checkpoints" / "step-00000012" / "optimizer.safetensors").write_bytes(b"nothing")
    notes = Notes()
    run(tiny.task(), tiny.settings(output), resume=True, display=notes)
    assert any("step-00000012 is damaged" in line and "step-00000009" in line for line in notes.lines)
    assert tiny.losses(output) == tiny.losses(undisturbed)


@pytest.mark.parametrize(
    ("state", "fault"),
    [
        ("{}", "is of step 0"),
        ('{"step": 9}', "is of step 9"),
        ("[]", "cannot be read"),
        ('{"step": 12', "cannot be read"),
        ('{"steps": 12}', "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_state_of_another_step(state, fault, tmp_path, undisturbed):
    """It is damaged too, even where the manifest fits it; else a run would begin at that step with later weights."""
    output = tmp_path / "run"
    shutil.copytree(undisturbed, output, symlinks=True)
    last = output / "checkpoints" / "step-00000012"
    (last / STATE_FILE).unlink()
    if state is not None:
        (last / STATE_FILE).write_text(state)
    (last / MANIFEST).unlink()
    write_manifest(last, 12)
    notes = Notes()
    run(tiny.task(), tiny.settings(output), resume=True, display=notes)
    damaged = f"step-00000012 is damaged: its state.json {fault}; going back to step-00000009"
    assert any(damaged in line for line in notes.lines), notes.lines
    assert tiny.losses(output) == tiny.losses(undisturbed)


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    output = tmp_path / "run"
    run(tiny.task(), tiny.settings(output, steps=6))
    assert not [path for path in output.rglob("*") if path.suffix in (".bin", ".pt", ".pth", ".pkl")]
    monkeypatch.setattr("torch.load", pytest.fail)
    monkeypatch.setattr("pickle.load", pytest.fail)
    run(tiny.task(), tiny.settings(output, steps=9), resume=True)


def test_a_full_disk(tmp_path, monkeypatch):
    """Writing a checkpoint fails; the one before it is whole, and the run goes on from there when there is room."""
    output = tmp_path / "run"

    def no_room(*_):
        raise OSError(28, "No space left on device")

    class FullDisk(Display):
        def advance(self, done: int) -> None:
            if done == 6:
                monkeypatch.setattr("latte.train.engine.save_optimizer", no_room)

    with pytest.raises(OSError, match=r"step 6 cannot be written .*No space left.* last whole one is .*step-00000003"):
        run(tiny.task(), tiny.settings(output), display=FullDisk())
    monkeypatch.undo()
    result = run(tiny.task(), tiny.settings(output), resume=True)
    assert result.step == 12


def test_folders_that_are_not_ours(tmp_path, undisturbed):
    with pytest.raises(ValueError, match="holds a run; go on with --resume, begin anew with --overwrite"):
        run(tiny.task(), tiny.settings(undisturbed))
    with pytest.raises(ValueError, match="there is nothing to resume"):
        run(tiny.task(), tiny.settings(tmp_path / "none"), resume=True)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "me.jpg").write_bytes(b"")
    with pytest.raises(ValueError, match="not empty and holds no run"):
        run(tiny.task(), tiny.settings(tmp_path / "photos"), overwrite=True)
    assert (tmp_path / "photos" / "me.jpg").exists()
    with pytest.raises(NotADirectoryError, match=r"run cannot be made: .*me\.jpg is a file; name another --output"):
        run(tiny.task(), tiny.settings(tmp_path / "photos" / "me.jpg" / "run"))


def test_overwriting(tmp_path):
    output = tmp_path / "run"
    run(tiny.task(), tiny.settings(output, steps=6))
    run(tiny.task(), tiny.settings(output, steps=3), overwrite=True)
    assert list(tiny.losses(output)) == [1, 2, 3]
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["step-00000003"]


def test_what_fails_before_it_begins_leaves_nothing(tmp_path, monkeypatch):
    """Neither a folder that the next run would refuse, nor a run that is gone before there is another."""

    class NoData(tiny.CountingTask):
        def prepare(self, progress=None):
            raise ValueError("there is no data")

    output = tmp_path / "run"
    monkeypatch.setattr("latte.train.records.find_spec", lambda name: None)
    for task, given in (
        (NoData(tiny.CountingSettings()), {}),
        (tiny.task(), {"trainable": "nobody"}),
        (tiny.task(), {"track": ("wandb",)}),
    ):
        with pytest.raises(ValueError, match=r"there is no data|no parameter is called|wandb, which is not installed"):
            run(task, tiny.settings(output, **given))
        assert not output.exists()
    run(tiny.task(), tiny.settings(output, steps=3))
    with pytest.raises(ValueError, match="there is no data"):
        run(NoData(tiny.CountingSettings()), tiny.settings(output), overwrite=True)
    assert (output / "model").is_dir()


def test_resuming_with_other_settings(undisturbed):
    before = (undisturbed / "run.json").read_text()
    settings = tiny.settings(undisturbed, learning_rate=5.0, seed=4, log_every=7)
    with pytest.raises(ValueError, match=r"learning_rate was 0.01, is 5.0; seed was 3, is 4\. Resume with the same"):
        run(tiny.task(), settings, resume=True)
    with pytest.raises(ValueError, match="examples was 29, is 31"):
        run(tiny.task(examples=31), tiny.settings(undisturbed), resume=True)
    assert (undisturbed / "run.json").read_text() == before


def test_resuming_with_other_data(tmp_path):
    class Changed(tiny.CountingTask):
        def prepare(self, progress=None):
            return replace(super().prepare(), fingerprint="other")

    run(tiny.task(), tiny.settings(tmp_path / "run", steps=3))
    with pytest.raises(ValueError, match="begun with other data"):
        run(Changed(tiny.CountingSettings()), tiny.settings(tmp_path / "run", steps=6), resume=True)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"micro_batch_size": 3}, "micro_batch_size is 3; it must divide the 4 examples"),
        ({"words": {"vocab_size": 5}}, "vocab_size is 5, but the data has 11 tokens"),
        ({"words": {"windw": 5}}, "windw: no such setting"),
        ({"words": {"window": "wide"}}, "window"),
        ({"trainable": "nobody"}, "no parameter is called so"),
        ({"model": Path("nowhere")}, "model is nowhere, which has no config.json"),
        ({"device": "cuda"}, "no CUDA device"),
        ({"data_seed": 5}, "the task's seed is 0 and data_seed 5"),
    ],
    ids=str,
)
def test_settings_that_make_no_run(given, words, tmp_path):
    if given.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match=words):
        run(tiny.task(), tiny.settings(tmp_path / "run", **given))


def test_an_unknown_preset(tmp_path):
    with pytest.raises(ValueError, match="preset is 'espresso'"):
        run(tiny.task(), replace(tiny.settings(tmp_path / "run"), preset="espresso", words={}))
    assert not (tmp_path / "run").exists()


def train_compiled(output: Path) -> None:
    run(tiny.task(), tiny.settings(output, compile=True))


@pytest.mark.slow
def test_compiled_layers(tmp_path, undisturbed):
    """In a process of its own: torch.compile warns of parts of itself."""
    assert tiny.in_process(train_compiled, tmp_path / "run") == 0
    assert tiny.losses(tmp_path / "run") == pytest.approx(tiny.losses(undisturbed), rel=1e-3)
    assert records(tmp_path / "run", "usage")  # hooks are called where layers are looked at
