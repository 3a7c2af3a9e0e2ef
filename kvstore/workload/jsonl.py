"""Lines of a file that may be hostile: plain or zstd by content, streamed, every size bounded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import zstandard

from kvstore.core.errors import InvalidArgument

MAX_LINE_BYTES = 4 << 20
"""A request of 65,536 blocks, one id each, takes about a quarter of it."""

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_MAX_WINDOW_BYTES = 128 << 20
_COMPRESSED_CHUNK = 1 << 10
"""Compressed bytes a step: zstd may blow 4 bytes up to 128 KiB, so a step yields at most 32 MiB."""
_PLAIN_CHUNK = 256 << 10


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields (line number from 1, line without its end), blank lines left out.

    Raises:
        InvalidArgument: the file cannot be read, its compressed stream is damaged or cut off, or a line is too long.
    """
    number = 0
    rest = b""
    for chunk in _chunks(path):
        lines = (rest + chunk).split(b"\n")
        rest = lines.pop()
        for line in lines:
            number += 1
            _check_length(path, number, line)
            if line.strip():
                yield number, line
        _check_length(path, number + 1, rest)
    if rest.strip():
        yield number + 1, rest


def _check_length(path: Path, number: int, line: bytes) -> None:
    if len(line) > MAX_LINE_BYTES:
        raise InvalidArgument("line is too long for a trace", file=path, line=number, limit_bytes=MAX_LINE_BYTES)


def _chunks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            compressed = file.read(len(_ZSTD_MAGIC)) == _ZSTD_MAGIC
            file.seek(0)
            if compressed:
                yield from _decompressed(path, file)
            else:
                while chunk := file.read(_PLAIN_CHUNK):
                    yield chunk
    except OSError as error:
        raise InvalidArgument(f"cannot read the trace: {error.strerror}", file=path) from error


def _decompressed(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Decompresses all frames; the plain stream reader would take a cut-off frame for the end."""
    whole = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
    frame = whole.decompressobj()
    inside = False  # within a frame, whose end must still come
    try:
        while data := file.read(_COMPRESSED_CHUNK):
            while data:
                inside = True
                if plain := frame.decompress(data):
                    yield plain
                if not frame.eof:
                    break
                data = frame.unused_data
                frame = whole.decompressobj()
                inside = False
    except zstandard.ZstdError as error:
        raise InvalidArgument(f"damaged zstd stream: {error}", file=path) from error
    if inside:
        raise InvalidArgument("zstd stream is cut off", file=path)
