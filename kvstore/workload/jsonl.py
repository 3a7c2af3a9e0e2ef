"""Lines of an untrusted file: plain or zstd by content, streamed, every size bounded."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import zstandard

from kvstore.core.errors import InvalidArgument

MAX_LINE_BYTES = 4 << 20
"""A request of 65,536 blocks with one id each needs about a quarter of it."""

MAX_BLANK_LINES = 1_000
"""Consecutive blank lines. A kilobyte of zstd may contain gigabytes of line ends."""

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPABLE = b"\x2a\x4d\x18"
"""Last three bytes of the magic number of a skippable frame; some writers begin a file with one."""
_MAX_WINDOW_BYTES = 128 << 20
_COMPRESSED_CHUNK = 1 << 10
"""Compressed bytes per step: zstd may expand 4 bytes to 128 KiB, so a step yields at most 32 MiB."""
_PLAIN_CHUNK = 256 << 10
_PIECE = 1 << 20
"""Decompressed bytes are divided into lines piece by piece, so that the list of lines stays small."""


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, line without its end), without blank lines.

    Raises:
        InvalidArgument: the file cannot be read or is not a regular file, its compressed stream is damaged or truncated, a line
            is too long, or too many are blank. Names the file and, if one is at fault, the line.
    """
    number = blank = 0
    rest = b""
    chunks = _chunks(path)
    while True:
        try:
            chunk = next(chunks)
        except StopIteration:
            break
        except OSError as error:
            raise InvalidArgument(f"cannot read the trace: {error.strerror}", file=path) from error
        except zstandard.ZstdError as error:
            raise InvalidArgument(f"damaged zstd stream: {error}", file=path, line=number + 1) from error
        except EOFError as error:
            raise InvalidArgument("zstd stream is cut off", file=path, line=number + 1) from error
        lines = (rest + chunk).split(b"\n")
        rest = lines.pop()
        for line in lines:
            number += 1
            _check_length(path, number, line)
            if line.strip():
                blank = 0
                yield number, line
            elif (blank := blank + 1) > MAX_BLANK_LINES:
                raise InvalidArgument("too many blank lines for a trace", file=path, line=number, limit=MAX_BLANK_LINES)
        _check_length(path, number + 1, rest)
    if rest.strip():
        yield number + 1, rest


def _check_length(path: Path, number: int, line: bytes) -> None:
    if len(line) > MAX_LINE_BYTES:
        raise InvalidArgument("line is too long for a trace", file=path, line=number, limit_bytes=MAX_LINE_BYTES)


def _chunks(path: Path) -> Iterator[bytes]:
    """Read chunks. Raises OSError, ZstdError (damage) or EOFError (truncation), and InvalidArgument for a pipe or a device."""
    with open(path, "rb", opener=_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise InvalidArgument(
                "the trace must be a regular file, because it is read twice; save the output of a pipe to a file first", file=path
            )
        start = file.read(len(_ZSTD_MAGIC))
        file.seek(0)
        if start == _ZSTD_MAGIC or (start[1:] == _ZSTD_SKIPPABLE and start[0] >> 4 == 5):
            for plain in _decompressed(file):
                yield from (plain[at : at + _PIECE] for at in range(0, len(plain), _PIECE))
        else:
            while chunk := file.read(_PLAIN_CHUNK):
                yield chunk


def _at_once(path: str, flags: int) -> int:
    """Open without blocking, even a pipe without a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _decompressed(file: BinaryIO) -> Iterator[bytes]:
    """Decompress all frames; the plain stream reader would accept a truncated frame as the end."""
    whole = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
    frame = whole.decompressobj()
    inside = False  # within a frame: its end is missing
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
    if inside:
        raise EOFError
