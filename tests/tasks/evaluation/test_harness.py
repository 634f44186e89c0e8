"""Tasks of lm-evaluation-harness."""

import json
import sys

import pytest
import torch

from latte.tasks.evaluation import harness
from latte.tasks.evaluation.harness import check_tasks, scores
from tests.tasks.evaluation.small import byte_tokenizer, make_model, slow_losses

TASK = """
task: cups
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
"""


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ValueError, match=r"pip install 'lm_eval\[hf\]'"):
        harness(make_model("llama"), byte_tokenizer(), ["hellaswag"])


def test_unknown_tasks():
    with pytest.raises(ValueError, match="'helaswag'; did you mean 'hellaswag'"):
        check_tasks(["helaswag"], ["hellaswag", "arc_easy"])
    with pytest.raises(ValueError, match="--include-path"):
        check_tasks(["zzz"], ["hellaswag"])


def test_scores_have_their_errors():
    results = {"a": {"alias": "a", "acc,none": 0.5, "acc_stderr,none": 0.1, "f1,strict": 1, "f1_stderr,strict": "N/A"}}
    found = scores(results, {"a": {"original": 9, "effective": 4}})
    assert [(s.task, s.metric, s.value, s.error, s.samples) for s in found] == [
        ("a", "acc", 0.5, 0.1, 4), ("a", "f1,strict", 1.0, None, 4)
    ]  # fmt: skip


@pytest.mark.filterwarnings("default")  # the package's own
def test_a_local_task(tmp_path):
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    rows = [{"question": f"cup {n}:", "choices": ["milk", "tea"], "answer": n % 2} for n in range(6)]
    data = tmp_path / "cups.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "cups.yaml").write_text(TASK.format(data=data))
    model, tokenizer = make_model("macchiato"), byte_tokenizer()
    (score,) = harness(model, tokenizer, ["cups"], include_path=tmp_path)
    assert (score.task, score.metric, score.samples) == ("cups", "acc", 6)
    right = 0
    for row in rows:
        before = tokenizer(row["question"])["input_ids"]
        whole = [torch.tensor(tokenizer(f"{row['question']} {choice}")["input_ids"]) for choice in row["choices"]]
        losses = [float(slow_losses(model, tokens[None])[0, len(before) - 1 :].sum()) for tokens in whole]
        right += losses[row["answer"]] == min(losses)
    assert score.value == pytest.approx(right / 6)
