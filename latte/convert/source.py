"""Where a pretrained model comes from: a folder, the hub, or a GGUF file; and what is copied beside its weights."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedConfig, PreTrainedModel

from latte.convert.gguf import check_architecture
from latte.models.families import check_model_type
from latte.models.loading import INDEX, check_whole, listed, load_config, quiet, read_weight_map

WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
BESIDE = (  # files that go with the weights unchanged: the tokenizer's, its chat template, the licence
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "spiece.model",
    "sentencepiece*", "chat_template*", "additional_chat_templates/*", "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip

NOT_WEIGHTS = "rotary_emb.inv_freq"  # which old checkpoints hold
SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding"}  # Transformers' and GGUF's words


@dataclass(frozen=True)
class Source:
    """A pretrained model on this machine's disk."""

    name: str  # as it was asked for
    folder: Path
    gguf_file: str | None = None

    def config(self) -> PreTrainedConfig:
        """The model's settings, of a folder with a config.json."""
        try:
            settings = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"SOURCE {self.name}: its config.json is no JSON; copy the folder again") from error
        if not isinstance(settings, dict):
            raise ValueError(f"SOURCE {self.name}: its config.json is no JSON object; copy the folder again")
        check_model_type(settings.get("model_type"))  # Transformers' word for it would be that it is out of date
        return load_config(self.folder, f"SOURCE {self.name}")

    def load(self, dtype: str) -> PreTrainedModel:
        """The model in memory, on the CPU."""
        options: dict[str, Any] = {"dtype": dtype}
        if self.gguf_file is not None:
            kind = torch.float32 if dtype == "auto" else getattr(torch, dtype)
            options = {"gguf_file": self.gguf_file, "dtype": kind, "quantization_config": GgufConfig(dequantize=True)}
        elif (self.folder / INDEX).is_file():
            read_weight_map(self.folder / INDEX)
        with quiet(), self._reading():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                self.folder, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
        model, loading = loaded
        check_whole(loading, f"SOURCE {self.name}")
        check_placed(loading["unexpected_keys"], f"SOURCE {self.name}")
        return model

    def tokenizer(self) -> Any:
        """The tokenizer that belongs to the model."""
        if self.gguf_file is not None:
            return self._tokenizer_from_gguf(self.gguf_file)
        try:
            return AutoTokenizer.from_pretrained(self.folder)
        except (OSError, ValueError, KeyError) as error:
            why = " ".join(str(error).split())[:160]
            raise ValueError(f"SOURCE {self.name}: it has no tokenizer that Transformers can load ({why})") from error

    def copy_companions(self, out: Path) -> None:
        """Put tokenizer, chat template and licence into `out`."""
        if self.gguf_file is not None:
            self._tokenizer_from_gguf(self.gguf_file).save_pretrained(out)
            return
        for path in sorted({path for pattern in BESIDE for path in self.folder.glob(pattern) if path.is_file()}):
            target = out / path.relative_to(self.folder)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Name the file in errors of a GGUF file, which are about arrays where it is cut short."""
        try:
            yield
        except (ValueError, IndexError) as error:
            if self.gguf_file is None:
                raise
            why = " ".join(str(error).split())[:200]
            raise ValueError(
                f"SOURCE {self.name}: {self.gguf_file} cannot be read ({why}); it is broken, so copy it again, or of a "
                "kind that this version of Transformers does not know"
            ) from error

    def _tokenizer_from_gguf(self, gguf_file: str) -> Any:
        """Transformers makes a tokenizer of the file's vocabulary; whether texts begin with BOS, the file says."""
        metadata = check_architecture(self.folder / gguf_file)
        with self._reading():
            tokenizer = AutoTokenizer.from_pretrained(self.folder, gguf_file=gguf_file)
        for name, word in SPECIAL_TOKENS.items():  # which Transformers 5.17 does not read
            index = metadata.get(f"tokenizer.ggml.{word}_token_id")
            if index is not None and getattr(tokenizer, f"{name}_token_id") != index:
                tokenizer.add_special_tokens({f"{name}_token": tokenizer.convert_ids_to_tokens(index)})
        if metadata.get("tokenizer.ggml.add_bos_token"):
            tokenizer.add_bos_token = True
        return tokenizer


def check_placed(strangers: Iterable[str], whose: str) -> None:
    """Raise ValueError for tensors for which config.json has no place: all weights are kept, or none are converted."""
    if strangers := sorted(name for name in strangers if not name.endswith(NOT_WEIGHTS)):
        raise ValueError(
            f"{whose}: config.json has no place for its {listed(strangers)}; weights and config.json are of different "
            "models, copy both again, or leave these tensors out"
        )


def find_source(name: str, gguf_file: str | None, note: Callable[[str], None]) -> Source:
    """What `name` means: a folder, a GGUF file, or a model of the hub, which is then downloaded."""
    path = Path(name)
    if path.is_file():
        if gguf_file is not None:
            raise ValueError(f"--gguf-file {gguf_file}: SOURCE is a file already; leave the option out")
        return _gguf_source(name, path.parent, path.name)
    if path.is_dir():
        return _folder_source(name, path, gguf_file)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ValueError(f"SOURCE {name}: there is no such folder or file")
    note(f"{name} is no folder here: looking for it on the hub")
    folder = _download(name, gguf_file)
    return _folder_source(name, folder, gguf_file)


def _folder_source(name: str, folder: Path, gguf_file: str | None) -> Source:
    if gguf_file is not None:
        if not (folder / gguf_file).is_file():
            raise ValueError(f"--gguf-file {gguf_file}: there is no such file in {name}")
        return _gguf_source(name, folder, gguf_file)
    if not (folder / "config.json").is_file():
        found = sorted(path.name for path in folder.glob("*.gguf"))
        if len(found) == 1:
            return _gguf_source(name, folder, found[0])
        if found:
            raise ValueError(f"SOURCE {name}: choose one of its GGUF files with --gguf-file: {', '.join(found)}")
        raise ValueError(f"SOURCE {name}: the folder has neither config.json nor a GGUF file")
    return Source(name, folder)


def _gguf_source(name: str, folder: Path, gguf_file: str) -> Source:
    check_architecture(folder / gguf_file)
    for package in ("gguf", "accelerate"):
        if find_spec(package) is None:
            raise ValueError(f"reading GGUF needs the package {package}; pip install gguf accelerate")
    return Source(name, folder, gguf_file)


def _download(name: str, gguf_file: str | None) -> Path:
    from huggingface_hub import snapshot_download

    wanted = [gguf_file] if gguf_file is not None else [*WEIGHTS, *BESIDE, "config.json", "generation_config.json"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (OSError, ValueError) as error:  # what the hub's errors are
        why = " ".join(str(error).split())[:200]
        raise ValueError(f"SOURCE {name}: no folder, file or model that the hub gives ({why})") from error
