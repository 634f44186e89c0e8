"""metrics.jsonl and the trackers."""

import json
import sys
from types import ModuleType

import pytest

from latte.train.records import MetricsFile, Records, open_trackers, read_metrics


def write(path, after, *steps):
    file = MetricsFile(path, after)
    for step in steps:
        file.write({"step": step, "split": "train", "loss": step / 2})
    file.close()


def read_steps(path):
    return [record["step"] for record in read_metrics(path)]


def test_lines_are_appended_and_cut_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, None, 1, 2, 3)
    write(path, 2, 3, 4)
    assert read_steps(path) == [1, 2, 3, 4]
    write(path, None, 7)
    assert read_steps(path) == [7]


def test_a_line_that_a_crash_has_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, None, 1, 2)
    with path.open("a") as file:
        file.write('{"step": 3, "split": "tr')
    assert read_steps(path) == [1, 2]
    write(path, 5, 3)
    assert read_steps(path) == [1, 2, 3]


def test_texts_may_have_any_letter(tmp_path):
    """Unicode has ends of lines that are none in JSON lines, and models write them; a crash may cut within a letter."""
    path = tmp_path / "metrics.jsonl"
    texts = [{"prompt": "a\u2028b\x85c\x0bd\r\n", "text": "\u2029é"}]
    records = Records(MetricsFile(path, None), [])
    records.write_texts(1, "samples", texts)
    records.close()
    expected = [{"step": 1, "split": "samples", "texts": texts}]
    assert read_metrics(path) == expected
    with path.open("ab") as file:
        file.write('{"step": 2, "split": "samples", "texts": [{"text": "é'.encode()[:-1])
    assert read_metrics(path) == expected
    MetricsFile(path, 1).close()
    assert read_metrics(path) == expected
    with path.open("ab") as file:
        file.write(b'{"step": 2, "split": "samples\xff"}\n')
    MetricsFile(path, 3).close()
    assert read_metrics(path) == expected


@pytest.mark.parametrize("line", ["[1]", "1", "null", '"step"', "{}", '{"step": 1}', '{"step": "1", "split": "train"}'])
def test_a_line_that_is_no_record(line, tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, None, 1, 2)
    with path.open("a") as file:
        file.write(line + "\n")
    write(path, 5, 3)
    assert read_steps(path) == [1, 2, 3]


def test_the_end_is_measured_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 3, "split": "train"}\n{"step": 3, "split": "test"}\n')
    write(path, 3)
    assert [record["split"] for record in read_metrics(path)] == ["train"]


def test_what_is_no_number_is_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, None)
    file.write({"step": 1, "split": "train", "loss": float("nan"), "rate": 0.1})
    file.close()
    assert path.read_text() == '{"step": 1, "split": "train", "loss": null, "rate": 0.1}\n'


def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tracker,) = open_trackers(["tensorboard"], tmp_path, None, {}, pytest.fail)
    records = Records(None, [tracker])
    records.write(3, "train", {"loss": 2.5, "name": "text"}, tokens=7)
    records.write_usage(3, [{"layer": "a"}], {"entropy/a/head0": 1.25})
    records.write_texts(3, "samples", [{"prompt": "p", "text": "t"}])
    records.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(3, 2.5)]
    assert [event.value for event in events.Scalars("usage/entropy/a/head0")] == [1.25]
    assert events.Tags()["tensors"] == ["samples/0/text_summary"]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_trackers_of_the_other_kind(name, monkeypatch, tmp_path):
    """They have the same functions; here is what they are called with."""
    calls = []
    fake = ModuleType(name)
    fake.__spec__ = json.__spec__
    fake.init = lambda **words: calls.append(("init", words))
    fake.log = lambda values, step: calls.append(("log", values, step))
    fake.finish = lambda: calls.append(("finish",))
    monkeypatch.setitem(sys.modules, name, fake)
    (tracker,) = open_trackers([name], tmp_path, None, {"task": "lm"}, pytest.fail)
    tracker.write(3, "train", {"loss": 2.5})
    tracker.close()
    assert calls[0][1]["config"] == {"task": "lm"}
    assert calls[1:] == [("log", {"train/loss": 2.5}, 3), ("finish",)]


def test_what_is_not_installed(monkeypatch, tmp_path):
    monkeypatch.setattr("latte.train.records.find_spec", lambda name: None)
    notes = []
    assert open_trackers(["tensorboard", "none"], tmp_path, None, {}, notes.append) == []
    assert "pip install tensorboard" in notes[0]
    with pytest.raises(ValueError, match="track is wandb, which is not installed: pip install wandb"):
        open_trackers(["wandb"], tmp_path, None, {}, pytest.fail)
