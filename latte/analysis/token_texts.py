"""The piece of text that each token stands for."""

from collections.abc import Callable, Sequence


def token_texts(ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """A text for each token, which put together are the decoded text.

    A token's text may depend on the one before it, as spaces do, so two are decoded together. Of tokens that make up
    one letter the last has the letter and the others are empty.
    """
    texts = []
    before = shown = 0  # text is decoded from `before`, and was given out up to `shown`
    for stop in range(1, len(ids) + 1):
        known = decode(list(ids[before:shown]))
        text = decode(list(ids[before:stop]))
        whole = not text.endswith("\N{REPLACEMENT CHARACTER}") or stop - shown > LONGEST_LETTER or stop == len(ids)
        texts.append(text[len(known) :] if whole else "")
        if whole:
            before, shown = shown, stop
    return texts


LONGEST_LETTER = 4  # bytes in UTF-8; what is not whole by then is no letter
