"""Text to tokens, and what stands before the first of them."""

from typing import Any, Literal

Beginning = Literal["auto", "always", "never"]


class Encoder:
    """A tokenizer as evaluation uses it: no special tokens but the one that begins a text.

    `bos` is put before a text. With "auto" it is the tokenizer's own where the tokenizer itself would put it (Gemma's
    does, and Gemma's models need it), and None elsewhere. `prefix` is for what must be scored from its very first
    token: the beginning token, or else the one that ends a text, or None if there is neither. A tokenizer without
    special tokens is one of bytes.
    """

    def __init__(self, tokenizer: Any, beginning: Beginning = "auto") -> None:
        self.tokenizer = tokenizer
        self.of_bytes = not hasattr(tokenizer, "bos_token_id")
        own = getattr(tokenizer, "bos_token_id", None)
        self.end: int | None = getattr(tokenizer, "eos_token_id", None)
        if beginning == "always" and own is None:
            raise ValueError("the tokenizer has no token that begins a text; leave out --bos always")
        wanted = beginning == "always" or (beginning == "auto" and own is not None and self._begins_with(own))
        self.bos: int | None = own if wanted else None
        self.prefix: int | None = own if own is not None else self.end

    def _begins_with(self, token: int) -> bool:
        return list(self.tokenizer("a")["input_ids"][:1]) == [token]

    def encode(self, text: str) -> list[int]:
        if self.of_bytes:
            return list(self.tokenizer.encode(text.encode()))
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def encode_after(self, context: str, text: str) -> tuple[list[int], list[int]]:
        """The tokens of both, split where the context's own end: a space belongs to the word after it."""
        before = self.encode(context)
        return before, self.encode(context + text)[len(before) :]

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens)

    def begin(self, tokens: list[int]) -> list[int]:
        return tokens if self.bos is None else [self.bos, *tokens]
