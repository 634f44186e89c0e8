"""What is kept of runs and evaluations, and the page made of it."""

import json
from pathlib import Path

import pytest

from benchmarks import docs, experiment_docs, experiments

RUN = {
    "task": "mqar",
    "settings": {"length": 64, "pairs": [4, 8], "gap": "power", "data": ["/somewhere/books.txt"]},
    "run": {"preset": "latte++", "learning_rate": 0.5, "output": "runs/x", "teacher": "none", "trainable": "all",
            "distill_layers": 0.0, "tf32": False, "lora_rank": 8, "words": {"num_latents": 3}},
    "versions": {"latte": "1.2.3"},
}  # fmt: skip
RESULT = {
    "step": 2, "tokens": 2048, "seconds": 1.25, "parameters": 77, "validation": {"loss": 1.0, "accuracy": 0.5},
    "test": {"accuracy": 0.75, "accuracy_4_pairs": 0.875, "accuracy_8_pairs": 0.625},
}  # fmt: skip
METRICS = [
    {"split": "train", "step": 1, "tokens": 1024, "loss": 3.0},
    {"split": "validation", "step": 1, "tokens": 1024, "loss": 2.0, "accuracy": 0.25},
    {"split": "validation", "step": 2, "tokens": 2048, "loss": 1.0, "accuracy": 0.5},
]


def number(value: float) -> dict[str, float]:
    return {"value": value, "error": 0.125}


EVALUATED = {
    "dtype": "float32", "parameters": 77, "blimp": None, "speed": None,
    "perplexity": {
        "lengths": [{"length": 2048, "perplexity": number(33.5)}],
        "positions": [{"start": 1, "end": 16, "loss": number(3.5)}],
    },
    "lambada": {"accuracy": number(0.25), "passages": 40},
}  # fmt: skip
EVALUATION = {
    "model": EVALUATED,
    "against": EVALUATED | {"lambada": None},
    "settings": {"mode": "whole", "max_tokens": 4096, "limit": None, "bos": "auto", "text": ["/somewhere/valid.txt"]},
    "versions": {"latte": "1.2.3"},
}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A run and an evaluation on disk, and what is kept of them."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text(json.dumps(RUN))
    (run / "result.json").write_text(json.dumps(RESULT))
    samples = json.dumps({"step": 1, "split": "samples", "texts": [{"text": "a\u2028b"}]}, ensure_ascii=False)
    (run / "metrics.jsonl").write_text("\n".join([*map(json.dumps, METRICS), samples]), encoding="utf-8")
    (tmp_path / "evaluation.json").write_text(json.dumps(EVALUATION))
    output = tmp_path / "results" / "h200-mqar.json"
    output.parent.mkdir()
    code = experiments.main([
        "--title", "Recall", "--machine", "a machine", "--date", "2026-01-02", "--remark", "a remark",
        "--run", f"ours={run}", "--evaluation", f"ours={tmp_path / 'evaluation.json'}", "--output", str(output),
    ])  # fmt: skip
    assert code == 0
    return output


def test_what_is_kept(written: Path) -> None:
    document = json.loads(written.read_text())
    (run,) = document["runs"]
    assert run["metric"] == "accuracy"
    assert run["validation"] == [[1024, 0.25], [2048, 0.5]]
    assert run["final"] == RESULT["test"]
    assert run["settings"] == {
        "preset": "latte++", "learning_rate": 0.5, "trainable": "all", "words": {"num_latents": 3}, "length": 64,
        "pairs": [4, 8], "data": ["books.txt"],
    }  # fmt: skip
    assert "/somewhere" not in written.read_text()
    assert [model["label"] for model in document["evaluations"][0]["models"]] == ["ours", "source"]
    assert document["versions"] == {"latte": "1.2.3"}


def test_the_page(written: Path, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    docs.main(written.parent, tmp_path / "docs")
    page = (tmp_path / "docs" / "experiments.md").read_text()
    for words in (
        "## Recall", "a machine; latte 1.2.3; 2026-01-02.", "- a remark",
        "| ours | 77 | 2 | 2,048 | 1 | accuracy 0.75 |", "| ours | 87.5% | 62.5% |",
        "| ours | 33.50 ± 0.12 |", "| source | 33.50 ± 0.12 |", "| ours | 25.0 ± 12.5 % of 40 |",
        "words (num_latents 3)", "![Accuracy by number of pairs](assets/h200-mqar-accuracy-by-number-of-pairs.svg)",
    ):  # fmt: skip
        assert words in page
    drawn = (tmp_path / "docs" / "assets").glob("h200-mqar-*.svg")
    assert len(list(drawn)) == 4


def test_a_run_that_was_stopped(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text(json.dumps(RUN | {"run": RUN["run"] | {"steps": 9}}))
    rows = [METRICS[0] | {"seconds": 4.5}, *METRICS[1:]]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    kept = experiments.run("ours", run)
    assert (kept["steps"], kept["planned_steps"], kept["seconds"], kept["final"]["accuracy"]) == (1, 9, 4.5, 0.5)
    assert experiment_docs.run_table({"runs": [kept]})[1] == [
        "ours", "", "1, stopped (9 planned)", "1,024", "4", "accuracy 0.5"
    ]  # fmt: skip


def test_bad_input_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--title", "x", "--machine", "x", "--date", "x", "--output", str(tmp_path / "x.json")]
    assert experiments.main([*given, "--run", "nothing"]) == 2
    assert "'nothing' has no '='; write LABEL=PATH" in capsys.readouterr().err
    assert experiments.main([*given, "--run", f"ours={tmp_path / 'absent'}"]) == 2
    assert "absent" in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()


def test_kept_results_make_the_page_that_is_there(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    docs.main(root / "benchmarks" / "results", tmp_path)
    assert (tmp_path / "experiments.md").read_text() == (root / "docs" / "experiments.md").read_text()
