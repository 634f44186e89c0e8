"""The `latte` command: parse, call, print."""

from latte.cli.app import main

__all__ = ["main"]
