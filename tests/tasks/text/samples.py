"""Texts for tests."""

import random

SYLLABLES = [
    "la",
    "te",
    "mac",
    "chi",
    "a",
    "to",
    "ro",
    "ast",
    "é",
    "bean",
    "Über",
    "9",
    "42",
    "'s",
    "'ll",
    "中文",
    "…",
    "ß",
]


def make_text(characters: int, seed: int = 0) -> str:
    """Words, numbers, apostrophes, odd runs of white space and letters beyond ASCII."""
    draw = random.Random(seed)
    parts: list[str] = []
    length = 0
    while length < characters:
        word = "".join(draw.choices(SYLLABLES, k=draw.randint(1, 4)))
        space = draw.choices([" ", "\n", "  ", "\n\n", " \n ", ", ", ".\n", "\t"], [20, 3, 1, 1, 1, 2, 2, 1])[0]
        parts.append(word + space)
        length += len(word) + len(space)
    return "".join(parts)[:characters]
