"""Documents out of files, a chunk at a time: plain text, JSON lines and Parquet, compressed or not."""

import codecs
import json
import zlib
from bz2 import BZ2Decompressor
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from lzma import LZMADecompressor, LZMAError
from pathlib import Path
from typing import Any

Chunk = tuple[bytes, bool]  # some of a document's bytes, and whether the document ends with them
Tick = Callable[[int], None]  # is told how many more bytes of the source were read

COMPRESSIONS = (".xz", ".gz", ".bz2", ".zst")
READ_SIZE = 1 << 16  # what a hostile archive can make of it still fits in memory


def read_file(path: Path, text_field: str, as_bytes: bool, tick: Tick) -> Iterator[Chunk]:
    """The documents of a file, of the kind that its name says; `as_bytes`: plain text need not be UTF-8."""
    kind = file_kind(path)
    if kind == "parquet":
        yield from read_parquet(path, text_field, tick)
        return
    chunks = unpacked(path, tick)
    if kind == "json lines":
        yield from read_json_lines(chunks, path, text_field)
        return
    for chunk in chunks if as_bytes else checked_utf8(chunks, path):
        yield chunk, False
    yield b"", True


def file_kind(path: Path) -> str:
    suffixes = [suffix for suffix in path.suffixes if suffix not in COMPRESSIONS]
    match suffixes[-1:]:
        case [".jsonl" | ".json" | ".ndjson"]:
            return "json lines"
        case [".parquet"]:
            return "parquet"
    return "text"


def raw_chunks(path: Path, tick: Tick) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(READ_SIZE):
            yield chunk
            tick(len(chunk))


def unpacked(path: Path, tick: Tick = lambda _: None) -> Iterator[bytes]:
    """The contents of a file, unpacked as its name says."""
    chunks = raw_chunks(path, tick)
    return decompressed(chunks, path) if path.suffix in COMPRESSIONS else chunks


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ValueError("reading .zst files needs zstandard: pip install zstandard") from error
    return zstandard


def decompression(suffix: str) -> tuple[Callable[[], Any], type[Exception]]:
    """What makes an object with `decompress`, `eof` and `unused_data` for one stream, and what it raises."""
    match suffix:
        case ".xz":
            return LZMADecompressor, LZMAError
        case ".gz":
            return partial(zlib.decompressobj, wbits=31), zlib.error
        case ".bz2":
            return BZ2Decompressor, OSError
    return _zstandard().ZstdDecompressor().decompressobj, _zstandard().ZstdError


def decompressed(chunks: Iterable[bytes], path: Path) -> Iterator[bytes]:
    """The contents of an archive of one or more streams. Unlike some file objects, this notices a missing end."""
    new_decompressor, its_error = decompression(path.suffix)
    decompressor = None
    try:
        for chunk in chunks:
            rest = chunk
            while rest:
                if decompressor is None:
                    rest = rest.lstrip(b"\0")  # padding between streams
                    if not rest:
                        break
                    decompressor = new_decompressor()
                yield decompressor.decompress(rest)
                rest = decompressor.unused_data if decompressor.eof else b""
                decompressor = None if decompressor.eof else decompressor
        if decompressor is not None:
            raise EOFError("its end is missing")
    except (EOFError, its_error) as error:
        raise OSError(
            f"{path}: the {path.suffix} archive is damaged or cut short ({error}); fetch or compress it again"
        ) from error


def checked_utf8(chunks: Iterable[bytes], path: Path) -> Iterator[bytes]:
    """The same chunks, whose bytes are known to be UTF-8 all in all."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    for chunk, final in chain(((chunk, False) for chunk in chunks), [(b"", True)]):
        waiting = len(decoder.getstate()[0])
        try:
            decoder.decode(chunk, final)
        except UnicodeDecodeError as error:
            where = offset - waiting + error.start
            raise ValueError(
                f"{path}: byte {where} is not UTF-8 ({error.reason}); convert the file to UTF-8, "
                "or use the tokenizer 'bytes', which takes any"
            ) from error
        offset += len(chunk)
        yield chunk


def lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Lines without their ends; a long line is put together once, not once for each of its chunks."""
    begun: list[bytes] = []
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        begun.append(first)
        for other in others:
            yield b"".join(begun)
            begun = [other]
    if last := b"".join(begun):
        yield last


def read_json_lines(chunks: Iterable[bytes], path: Path, text_field: str) -> Iterator[Chunk]:
    for number, line in enumerate(lines(chunks), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: it is not UTF-8 ({error.reason}); convert the file to UTF-8") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: it is no JSON document ({error}); each line must be one") from error
        if not isinstance(record, dict):
            raise ValueError(f"{where}: it is a {type(record).__name__}; it must be an object with {text_field!r}")
        check_field(where, text_field, record)
        yield text_bytes(where, text_field, record[text_field]), True


def check_field(where: str, text_field: str, found: Iterable[str]) -> None:
    names = list(found)
    if text_field not in names:
        listed = ", ".join(map(repr, names)) or "no fields"
        raise ValueError(f"{where}: there is no {text_field!r} among {listed}; name the text's with text_field")


def text_bytes(where: str, text_field: str, text: Any) -> bytes:
    if not isinstance(text, str):
        raise ValueError(f"{where}: {text_field!r} is a {type(text).__name__}; it must be a string")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: {text_field!r} has half a surrogate pair at {error.start}; repair the text"
        ) from error


def read_parquet(path: Path, text_field: str, tick: Tick) -> Iterator[Chunk]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError("reading Parquet files needs pyarrow: pip install datasets") from error
    size = path.stat().st_size
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            check_field(str(path), text_field, file.schema_arrow.names)
            rows, read = file.metadata.num_rows, 0
            for batch in file.iter_batches(batch_size=256, columns=[text_field]):
                for text in batch.column(0).to_pylist():
                    read += 1
                    yield text_bytes(f"{path}, row {read}", text_field, text), True
                tick(size * batch.num_rows // rows)
    except pyarrow.ArrowInvalid as error:
        raise OSError(f"{path}: the Parquet file is damaged ({error}); fetch it again") from error
