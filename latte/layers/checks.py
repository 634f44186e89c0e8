"""Checks of settings: each raises ValueError naming the setting, what it was and what it should be."""

from collections.abc import Iterable


def check_count(name: str, value: object, remedy: str = "") -> None:
    """`value` must be an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1{remedy}")


def check_multiple(name: str, value: int, of: str, divisor: int, remedy: str) -> None:
    if value % divisor:
        raise ValueError(f"{name} is {value}, which is no multiple of {of}, {divisor}; {remedy}")


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    if value not in (choices := tuple(choices)):
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")
