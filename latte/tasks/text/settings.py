"""What a person may choose about a text and its windows."""

from dataclasses import dataclass, field
from typing import Any, Literal


def setting(default: Any, explanation: str) -> Any:
    return field(default=default, metadata={"help": explanation})


@dataclass(frozen=True)
class LanguageModellingSettings:
    data: tuple[str, ...] = setting(
        (),
        "Text to learn: files, folders, globs, or Hugging Face datasets (a hub name or a saved folder). "
        "Default: the Python standard library's source.",
    )
    validation: tuple[str, ...] = setting((), "Text to be measured on. Default: documents held out of the data.")
    held_out: float = setting(0.05, "Share of the data's documents held out where no validation text is named.")
    tokenizer: str = setting(
        "bytes", "'bytes', 'bpe:N' (N entries, trained on the data), a tokenizer.json, a folder, or a hub name."
    )
    separator: str | None = setting(None, "Token after each document. Default: the tokenizer's end-of-text token.")
    context: int = setting(512, "Tokens in a window.")
    documents: Literal["joined", "separate"] = setting(
        "joined",
        "'joined': windows read on from one document into the next; 'separate': attention ends with a document.",
    )
    text_field: str = setting("text", "Field or column with the text, in JSON lines, Parquet files and datasets.")
    subset: str | None = setting(None, "Configuration of a hub dataset.")
    split: str = setting("train", "Split of a Hugging Face dataset to learn.")
    validation_split: str = setting("validation", "Split of a Hugging Face dataset named as validation text.")
    cache: str | None = setting(None, "Folder for tokenised text. Default: latte/tasks in the user's cache folder.")
    workers: int = setting(0, "Processes that tokenise; 0: one for each core where the text is worth it.")
    verify: bool = setting(False, "Check the SHA-256 of all tokenised text before it is used.")
    prompts: tuple[str, ...] = setting((), "Texts to be continued as the model learns. Default: chosen by the data.")

    def __post_init__(self) -> None:
        if self.context < 2:
            raise ValueError(f"context is {self.context}; a window needs at least 2 tokens")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out is {self.held_out}; it must be a share between 0 and 1, such as 0.05")
        if self.documents not in ("joined", "separate"):
            raise ValueError(f"documents is {self.documents!r}; it must be 'joined' or 'separate'")
        if self.workers < 0:
            raise ValueError(f"workers is {self.workers}; it must be 0, for one process a core, or their number")
        if "" in (*self.data, *self.validation, *self.prompts):
            raise ValueError("data, validation or prompts have an empty name or text in them; leave it out")
        if isinstance(self.data, str) or isinstance(self.validation, str) or isinstance(self.prompts, str):
            raise ValueError("data, validation and prompts are tuples of strings, even where there is only one")
