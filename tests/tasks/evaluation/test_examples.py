"""LAMBADA and BLiMP, against every sentence scored by itself."""

import json
import math
import tarfile

import pytest
import torch
import torch.nn.functional as F

from latte.tasks.evaluation import Encoder, Pair, Scorer, blimp, choose_pairs, lambada, read_pairs, read_passages
from latte.tasks.evaluation.batches import Example, batches_by_length, score_examples
from latte.tasks.evaluation.lambada import last_word
from tests.tasks.evaluation.small import NAMES, byte_tokenizer, make_model, random_tokens, slow_losses

PASSAGES = ["the cup is full of milk", "a much longer passage, it ends with a word: latte", "no no", "ü ö ä"]
PAIRS = [
    Pair("The cats sleep.", "The cats sleeps.", "agreement", "plural"),
    Pair("The cat sleeps.", "The cat sleep.", "agreement", "singular"),
    Pair("No one ever came to the harbour.", "Everyone ever came to the harbour.", "npi", "ever"),
]


def slow_score(model, tokens: list[int], scored: int) -> tuple[float, bool]:
    row = torch.tensor([tokens])
    with torch.no_grad():
        logits = model(row, use_cache=False).logits[0, :-1]
    targets = row[0, 1:]
    losses = F.cross_entropy(logits, targets, reduction="none")[scored - 1 :]
    return float(losses.sum()), bool((logits.argmax(-1) == targets)[scored - 1 :].all())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch_tokens", [1, 60, 10_000])
def test_a_batch_is_as_good_as_one_by_one(name, batch_tokens):
    model = make_model(name)
    examples = [Example(random_tokens(n, seed=n).tolist(), scored) for n, scored in ((2, 1), (31, 3), (17, 16), (9, 1))]
    examples.append(greedy_example(model))
    scores = score_examples(Scorer(model), examples, batch_tokens)
    for example, score in zip(examples, scores, strict=True):
        loss, greedy = slow_score(model, example.tokens, example.scored)
        assert score.loss == pytest.approx(loss, rel=1e-4, abs=1e-4)
        assert score.greedy == greedy
    assert scores[-1].greedy


def greedy_example(model) -> Example:
    tokens = random_tokens(1, 6)
    with torch.no_grad():
        for _ in range(3):
            tokens = torch.cat([tokens, model(tokens, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return Example(tokens[0].tolist(), 6)


def test_the_longest_come_first():
    examples = [Example([0] * n) for n in (3, 9, 2, 7, 5)]
    found = list(batches_by_length(examples, 14))
    assert found == [[1], [3, 4], [0, 2]]


@pytest.mark.parametrize("begins", [True, False])
def test_lambada(begins):
    model, tokenizer = make_model("macchiato"), byte_tokenizer(begins)
    report = lambada(model, Encoder(tokenizer), PASSAGES)
    losses, hits = [], []
    for passage in PASSAGES:
        tokens = tokenizer(passage)["input_ids"]
        word = passage.split(" ")[-1]
        loss, hit = slow_score(model, tokens, len(tokens) - 1 - len(word.encode()))
        losses.append(loss)
        hits.append(hit)
    assert report.passages == 4
    assert report.accuracy.value == sum(hits) / 4
    assert report.perplexity.value == pytest.approx(math.exp(sum(losses) / 4), rel=1e-3)


def test_the_last_word_has_the_space_before_it():
    example = last_word(Encoder(byte_tokenizer()), "a cup of milk")
    tokenizer = byte_tokenizer()
    assert example.tokens[0] == tokenizer.bos_token_id
    assert tokenizer.decode(example.tokens[example.scored :]) == " milk"


@pytest.mark.parametrize("special", [True, False])
def test_blimp(special):
    model, tokenizer = make_model("llama"), byte_tokenizer(begins=False, special=special)
    report = blimp(model, Encoder(tokenizer), PAIRS, batch_tokens=50)
    first = [tokenizer.bos_token_id] if special else []

    def loss(sentence: str) -> float:
        tokens = first + tokenizer(sentence)["input_ids"]
        return float(slow_losses(model, torch.tensor([tokens])).sum())

    right = [loss(pair.good) < loss(pair.bad) for pair in PAIRS]
    assert report.accuracy.value == pytest.approx(sum(right) / 3)
    assert [(group.name, group.pairs) for group in report.phenomena] == [("agreement", 2), ("npi", 1)]
    assert report.phenomena[0].accuracy.value == sum(right[:2]) / 2
    assert {group.name: group.accuracy.value for group in report.paradigms} == {
        "plural": right[0], "singular": right[1], "ever": right[2]
    }  # fmt: skip


@pytest.fixture
def blimp_folder(tmp_path):
    folder = tmp_path / "blimp"
    folder.mkdir()
    for pair in PAIRS:
        row = {"sentence_good": pair.good, "sentence_bad": pair.bad, "UID": pair.paradigm}
        row["linguistics_term"] = pair.phenomenon
        (folder / f"{pair.paradigm}.jsonl").write_text(2 * (json.dumps(row) + "\n"))
    return folder


def test_pairs_from_a_folder_a_file_and_an_archive(blimp_folder, tmp_path):
    pairs = read_pairs(blimp_folder)
    assert sorted(set(pairs), key=PAIRS.index) == PAIRS
    assert len(pairs) == 6
    assert read_pairs(blimp_folder / "plural.jsonl") == 2 * PAIRS[:1]
    for name, mode in (("b.tar", "w"), ("b.tar.xz", "w:xz"), ("b.tgz", "w:gz")):
        with tarfile.open(tmp_path / name, mode) as archive:
            archive.add(blimp_folder, "data")
        assert sorted(map(repr, read_pairs(tmp_path / name))) == sorted(map(repr, pairs))
    assert len(choose_pairs(pairs, 1, 0)) == 3


def test_phenomena_are_those_of_the_paper(tmp_path):
    """Which counts the two paradigms that the data calls s-selection as argument structure: 12 phenomena, not 13."""
    row = {"sentence_good": "a", "sentence_bad": "b", "linguistics_term": "s-selection", "UID": "animate_subject_trans"}
    (tmp_path / "one.jsonl").write_text(json.dumps(row))
    assert read_pairs(tmp_path) == [Pair("a", "b", "argument_structure", "animate_subject_trans")]


def test_bad_files(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "one two"}\n\n{"words": "x"}\n')
    with pytest.raises(ValueError, match="line 3 has no text in field 'text'; its fields are 'words'"):
        read_passages(path)
    with pytest.raises(ValueError, match="line 1 has no text in field 'sentence_good'"):
        read_pairs(path)
    path.write_text('{"text": "single"}')
    with pytest.raises(ValueError, match="has one word"):
        read_passages(path)
    path.write_text("")
    with pytest.raises(ValueError, match="no passages"):
        read_passages(path)
    with pytest.raises(ValueError, match="no pairs"):
        read_pairs(tmp_path / "..") if not any(tmp_path.parent.rglob("*.jsonl")) else read_pairs(path)
    archive = tmp_path / "b.tar.xz"
    archive.write_bytes(b"this is no archive")
    with pytest.raises(ValueError, match="no readable tar"):
        read_pairs(archive)
    with pytest.raises(ValueError, match="no such file"):
        read_pairs(tmp_path / "nothing")


def test_bad_examples():
    scorer = Scorer(make_model("llama"))
    with pytest.raises(ValueError, match="do not match"):
        score_examples(scorer, [Example([0, 300])])
    with pytest.raises(ValueError, match="a token before the first"):
        score_examples(scorer, [Example([0])])
