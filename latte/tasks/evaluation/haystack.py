"""Prompts that hide a key in a long text, of an exact number of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from latte.tasks.evaluation.encoding import Encoder

INSTRUCTION = "Somewhere in the following text a pass key is hidden. Find it and remember it.\n\n"
NEEDLE = " The pass key is {key}. Remember it: {key} is the pass key."
QUESTION = "\n\nWhat is the pass key? The pass key is"
DIGITS = 5

PEOPLE = ("The baker", "A sailor", "The old teacher", "My neighbour", "The gardener", "A young painter", "The postman")
DEEDS = ("walked to", "wrote about", "dreamt of", "came back from", "was fond of", "told stories about", "drew")
PLACES = ("the harbour", "the quiet village", "a long river", "the market", "the mountains", "a small garden")
TIMES = ("in the morning", "on a rainy day", "before dinner", "every summer", "last winter", "when it was late")


@dataclass(frozen=True)
class Prompt:
    """`tokens` end with the question; `answers` are the keys' tokens, the right one first."""

    tokens: list[int]
    answers: list[list[int]]
    key: str
    depth: float


def draw_keys(random: Random, count: int) -> list[str]:
    """Different numbers of as many digits."""
    numbers = range(10 ** (DIGITS - 1), 10**DIGITS)
    if count > len(numbers):
        raise ValueError(
            f"there are {len(numbers)} keys of {DIGITS} digits, but {count} are wanted; use fewer distractors"
        )
    return [str(number) for number in random.sample(numbers, count)]


def filler_tokens(encoder: Encoder, random: Random, count: int) -> list[int]:
    """At least `count` tokens of harmless sentences."""
    tokens: list[int] = []
    while len(tokens) < count:
        sentences = (" ".join(map(random.choice, (PEOPLE, DEEDS, PLACES, TIMES))) for _ in range(64))
        tokens += encoder.encode("".join(f" {sentence}." for sentence in sentences))
    return tokens


def make_prompt(
    encoder: Encoder,
    length: int,
    depth: float,
    *,
    random: Random,
    distractors: int = 7,
    haystack: Sequence[int] | None = None,
) -> Prompt:
    """A prompt that has `length` tokens together with the longest answer, with its key at `depth` of the filler.

    Filler is drawn, or, where `haystack` is given, a stretch of those tokens.
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"the depth is {depth}; it must be between 0, the beginning, and 1, the end")
    keys = draw_keys(random, 1 + distractors)
    opening = encoder.begin(encoder.encode(INSTRUCTION))
    needle = encoder.encode(NEEDLE.format(key=keys[0]))
    split = [encoder.encode_after(QUESTION, f" {key}") for key in keys]
    question, answers = split[0][0], [answer for _, answer in split]
    room = length - len(opening) - len(needle) - len(question) - max(map(len, answers))
    if room < 0:
        raise ValueError(f"the length is {length}; a question about a hidden key takes {length - room} tokens at least")
    filler = stretch(haystack, random, room) if haystack is not None else filler_tokens(encoder, random, room)[:room]
    place = round(depth * room)
    tokens = opening + filler[:place] + needle + filler[place:] + question
    return Prompt(tokens, answers, keys[0], depth)


def stretch(haystack: Sequence[int], random: Random, count: int) -> list[int]:
    if len(haystack) < count:
        raise ValueError(f"the haystack has {len(haystack):,} tokens, but {count:,} are needed; use a longer text")
    start = random.randint(0, len(haystack) - count)
    return list(haystack[start : start + count])
