"""What a GGUF file says about itself: enough to tell, before minutes of reading, whether it can be converted."""

import struct
from pathlib import Path
from typing import Any, BinaryIO

from latte.models.families import FAMILIES

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # struct's letters for GGUF's types of values
STRING, ARRAY = 8, 9
ARCHITECTURES = {"gemma3": "gemma3_text"}  # where GGUF's word for a family is not Transformers'


def read_metadata(path: Path) -> dict[str, Any]:
    """Keys and values from the head of a GGUF file; arrays, which hold the vocabulary, are left out."""
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise ValueError(f"{path} is no GGUF file: it does not begin with {MAGIC.decode()}")
        try:
            version, _, entries = struct.unpack("<IQQ", _take(file, 20))
            if version not in VERSIONS:
                raise ValueError(f"{path} is GGUF of version {version}; known are {', '.join(map(str, VERSIONS))}")
            pairs = [(_string(file), _value(file)) for _ in range(entries)]
        except EOFError as error:
            raise ValueError(f"{path} ends in the middle of its head; copy the file again") from error
    return {key: value for key, value in pairs if value is not None}


def check_architecture(path: Path) -> dict[str, Any]:
    """The file's metadata; raises ValueError unless it is a language model of a family that can be converted."""
    metadata = read_metadata(path)
    found = metadata.get("general.architecture")
    if ARCHITECTURES.get(str(found), found) not in FAMILIES:
        known = ", ".join(family.name for family in FAMILIES.values())
        raise ValueError(f"{path} is a GGUF file of type {found!r}, which cannot be converted; those can: {known}")
    return metadata


def _take(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) != count:
        raise EOFError
    return data


def _string(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", _take(file, 8))
    return _take(file, length).decode(errors="replace")


def _value(file: BinaryIO, kind: int | None = None) -> Any:
    if kind is None:
        (kind,) = struct.unpack("<I", _take(file, 4))
    if kind == STRING:
        return _string(file)
    if kind == ARRAY:
        kind, count = struct.unpack("<IQ", _take(file, 12))
        if kind in (STRING, ARRAY):
            for _ in range(count):
                _value(file, kind)
        else:
            file.seek(count * struct.calcsize("<" + _letter(kind)), 1)
        return None
    letter = _letter(kind)
    return struct.unpack("<" + letter, _take(file, struct.calcsize("<" + letter)))[0]


def _letter(kind: int) -> str:
    if kind not in SCALARS:
        raise ValueError(f"GGUF has a value of unknown type {kind}; the file is broken, or newer than this program")
    return SCALARS[kind]
