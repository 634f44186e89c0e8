"""Reviews and pairs of papers, read byte by byte from files of each form."""

import bz2
import gzip
import json
import lzma

import numpy as np
import pytest
import torch

from latte.models import LatteConfig, LatteForPairClassification, LatteForSequenceClassification
from latte.tasks.lra import Retrieval, RetrievalSettings, TextClassification, TextSettings

REVIEWS = [(f"Review {number}: " + "schön " * (number + 1), number % 2) for number in range(11)]
PAIRS = [(number % 2, f"Paper {number} " + "é" * number, f"Paper {number // 3} é cites") for number in range(7)]


def open_zstandard(*arguments, **options):
    return pytest.importorskip("zstandard").open(*arguments, **options)


def write_reviews(folder, packing: str = "") -> None:
    opens = {"": open, ".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open, ".zst": open_zstandard}
    for split in ("train", "test"):
        rows = REVIEWS if split == "train" else REVIEWS[:5]
        with opens[packing](folder / f"{split}.jsonl{packing}", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows)


def write_original(folder) -> None:
    for split in ("train", "test"):
        for label, name in enumerate(("neg", "pos")):
            (folder / split / name).mkdir(parents=True)
            for number, (text, truth) in enumerate(REVIEWS if split == "train" else REVIEWS[:5]):
                if truth == label:
                    (folder / split / name / f"{number}_7.txt").write_text(text, encoding="utf-8")


def as_texts(split) -> list[tuple[bytes, int]]:
    return sorted((bytes(example["input_ids"].tolist()), int(example["labels"])) for example in split)


@pytest.mark.parametrize("form", ["", ".xz", ".gz", ".bz2", ".zst", "original", "hub"])
def test_reviews_of_every_form_are_the_same(tmp_path, monkeypatch, form):
    folder = tmp_path / "imdb"
    folder.mkdir()
    if form == "original":
        write_original(folder)
    else:
        write_reviews(folder, "" if form == "hub" else form)
    if form == "hub":  # which takes a folder of files for a dataset, too
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    name = f"hub:{folder}" if form == "hub" else str(folder)
    data = TextClassification(TextSettings(data=name, length=40, validation_examples=3)).prepare()
    expected = sorted((text.encode()[:40], label) for text, label in REVIEWS)
    assert sorted(as_texts(data.train) + as_texts(data.validation)) == expected
    assert (len(data.train), len(data.validation), len(data.test)) == (8, 3, 5)
    assert as_texts(data.test) == sorted((text.encode()[:40], label) for text, label in REVIEWS[:5])


def test_validation_is_held_out_by_the_seed(tmp_path):
    write_reviews(tmp_path)

    def held_out(seed: int):
        data = TextClassification(TextSettings(data=str(tmp_path), validation_examples=3), seed=seed).prepare()
        return data.fingerprint, as_texts(data.validation)

    assert held_out(0) == held_out(0)
    assert held_out(0) != held_out(1)


def test_reviews_make_batches_for_a_model(tmp_path):
    write_reviews(tmp_path)
    task = TextClassification(TextSettings(data=str(tmp_path), length=50, validation_examples=2))
    data = task.prepare()
    batch = data.collate([data.train[index] for index in range(4)])
    assert batch["input_ids"].shape == (4, 50)  # 64 is the next multiple, and 50 the most
    model = LatteForSequenceClassification(
        LatteConfig.from_preset("latte-tiny", num_hidden_layers=1, **data.model)
    ).eval()
    with torch.no_grad():
        alone = model(input_ids=data.train[2]["input_ids"][None]).logits
        torch.testing.assert_close(model(**batch).logits[2:3], alone, rtol=1e-4, atol=1e-4)
        assert task.measure(model, batch)["accuracy"][1] == 4


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"review": "a", "stars": 3}', "line 2 has no column 'text', 'label'; it has 'review', 'stars'"),
        ('{"text": "a", "label": 2}', "line 2: label is 2; it must be 0 or 1"),
        ('{"text": "", "label": 1}', "line 2: text is ''"),
        ('{"text": "a", ', "line 2: no JSON"),
        ("[1]", "line 2: a list, where an object is wanted"),
    ],
)
def test_reviews_that_are_none(tmp_path, line, message):
    write_reviews(tmp_path)
    (tmp_path / "train.jsonl").write_text(f'{{"text": "a", "label": 0}}\n{line}\n')
    with pytest.raises(ValueError, match=message) as caught:
        TextClassification(TextSettings(data=str(tmp_path))).prepare()
    assert "\n" not in str(caught.value)


def test_reviews_that_are_missing(tmp_path):
    with pytest.raises(ValueError, match="no such file or folder"):
        TextClassification(TextSettings(data=str(tmp_path / "a"))).prepare()
    with pytest.raises(ValueError, match=r"has no train\.jsonl; it has nothing"):
        TextClassification(TextSettings(data=str(tmp_path))).prepare()
    write_reviews(tmp_path)
    with pytest.raises(ValueError, match="validation_examples is 2500, and there are 11 reviews"):
        TextClassification(TextSettings(data=str(tmp_path))).prepare()
    (tmp_path / "train.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="there are no reviews"):
        TextClassification(TextSettings(data=str(tmp_path))).prepare()


def test_a_packed_file_that_is_cut_off(tmp_path):
    write_reviews(tmp_path, ".xz")
    path = tmp_path / "train.jsonl.xz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"train\.jsonl\.xz is damaged after line"):
        TextClassification(TextSettings(data=str(tmp_path))).prepare()


@pytest.mark.parametrize("packing", [".xz", ".gz", ".bz2", ".zst"])
def test_a_packed_file_that_is_none(tmp_path, packing):
    write_reviews(tmp_path, packing)
    path = tmp_path / f"train.jsonl{packing}"
    path.write_bytes(path.read_bytes()[:12] + b"something else" * 9)
    with pytest.raises(ValueError, match=rf"train\.jsonl\{packing} is damaged after line 0: \w+"):
        TextClassification(TextSettings(data=str(tmp_path))).prepare()


def write_pairs(folder, lines: list[str] | None = None, prefix: str = "new_aan_pairs.") -> None:
    if lines is None:
        lines = [f"{float(label)}\tA{n}\tB{n}\t{first}\t{second}" for n, (label, first, second) in enumerate(PAIRS)]
    for split in ("train", "eval", "test"):
        (folder / f"{prefix}{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.parametrize("prefix", ["new_aan_pairs.", ""])
def test_pairs_of_the_official_release(tmp_path, prefix):
    write_pairs(tmp_path, prefix=prefix)
    task = Retrieval(RetrievalSettings(data=str(tmp_path), length=15, cache=str(tmp_path / "cache")))
    data = task.prepare()
    assert data.head == "pair-classification"
    assert data.facts["papers"] == len({text[:15] for _, *both in PAIRS for text in (t.encode() for t in both)})
    for split in (data.train, data.validation, data.test):
        for example, (label, first, second) in zip(split, PAIRS, strict=True):
            assert bytes(example["input_ids"].tolist()) == first.encode()[:15]
            assert bytes(example["input_ids_b"].tolist()) == second.encode()[:15]
            assert example["labels"] == label
    batch = data.collate([data.train[index] for index in range(4)])
    assert batch["attention_mask"].sum(1).tolist() == [len(data.train[index]["input_ids"]) for index in range(4)]
    assert batch["attention_mask_b"].sum(1).tolist() == [len(data.train[index]["input_ids_b"]) for index in range(4)]
    model = LatteForPairClassification(LatteConfig.from_preset("latte-tiny", num_hidden_layers=1, **data.model)).eval()
    with torch.no_grad():
        sums, outputs = task.measure(model, batch), model(**batch)
    assert sums["loss"][0] / 4 == pytest.approx(outputs.loss.item(), rel=1e-4)


def test_pairs_from_the_hub(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    (tmp_path / "aan").mkdir()
    for split in ("train", "validation", "test"):
        rows = [{"label": label, "text1": first, "text2": second} for label, first, second in PAIRS]
        (tmp_path / "aan" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Retrieval(RetrievalSettings(data=f"hub:{tmp_path / 'aan'}", cache=str(tmp_path / "cache"))).prepare()
    assert bytes(data.test[6]["input_ids"].tolist()) == PAIRS[6][1].encode()
    assert np.array_equal([example["labels"] for example in data.train], [label for label, *_ in PAIRS])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["1.0\tA\tB\tonly one"], "line 1 has 4 columns; label, id1, id2, text1, text2 are wanted"),
        (["1.0\tA\tB\ta\tb", "yes\tA\tB\ta\tb"], "line 2: label is 'yes'"),
        (["1.0\tA\tB\t\tb"], "line 1: a text is empty"),
    ],
)
def test_pairs_that_are_none(tmp_path, lines, message):
    write_pairs(tmp_path, lines)
    with pytest.raises(ValueError, match=message):
        Retrieval(RetrievalSettings(data=str(tmp_path), cache=str(tmp_path / "cache"))).prepare()
    assert not list((tmp_path / "cache").iterdir())


def test_pairs_that_are_missing(tmp_path):
    with pytest.raises(ValueError, match=r"has no new_aan_pairs\.train\.tsv or train\.tsv; it has nothing"):
        Retrieval(RetrievalSettings(data=str(tmp_path))).prepare()
    write_pairs(tmp_path)
    (tmp_path / "new_aan_pairs.eval.tsv").write_text("")
    with pytest.raises(ValueError, match=r"eval\.tsv is empty"):
        Retrieval(RetrievalSettings(data=str(tmp_path), cache=str(tmp_path / "cache"))).prepare()
