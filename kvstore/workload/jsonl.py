"""Lines of a file that may be hostile: plain or zstd by content, streamed, every size bounded."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import zstandard

from kvstore.core.errors import InvalidArgument

MAX_LINE_BYTES = 4 << 20
"""A request of 65,536 blocks, one id each, takes about a quarter of it."""

MAX_BLANK_LINES = 1_000
"""In a row. A kilobyte of zstd may be gigabytes of line ends, which would be read for hours."""

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPABLE = b"\x2a\x4d\x18"
"""Last three bytes of the magic of a frame to be skipped, with which some writers begin a file."""
_MAX_WINDOW_BYTES = 128 << 20
_COMPRESSED_CHUNK = 1 << 10
"""Compressed bytes a step: zstd may blow 4 bytes up to 128 KiB, so a step yields at most 32 MiB."""
_PLAIN_CHUNK = 256 << 10
_PIECE = 1 << 20
"""What was decompressed is cut into lines a piece at a time, so that the list of lines stays small as well."""


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields (line number from 1, line without its end), blank lines left out.

    Raises:
        InvalidArgument: the file cannot be read or is no regular one, its compressed stream is damaged or cut off, a line is too
            long, or too many are blank. Names the file and, but for what befalls the file as a whole, the line.
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
    """Raises OSError, ZstdError (damage) or EOFError (cut off), and InvalidArgument for a pipe or a device."""
    with open(path, "rb", opener=_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise InvalidArgument("a trace is a regular file, which is read more than once: save what a pipe brings", file=path)
        start = file.read(len(_ZSTD_MAGIC))
        file.seek(0)
        if start == _ZSTD_MAGIC or (start[1:] == _ZSTD_SKIPPABLE and start[0] >> 4 == 5):
            for plain in _decompressed(file):
                yield from (plain[at : at + _PIECE] for at in range(0, len(plain), _PIECE))
        else:
            while chunk := file.read(_PLAIN_CHUNK):
                yield chunk


def _at_once(path: str, flags: int) -> int:
    """Opens; a pipe that nobody writes to as well, which would be waited for without an end."""
    return os.open(path, flags | os.O_NONBLOCK)


def _decompressed(file: BinaryIO) -> Iterator[bytes]:
    """Decompresses all frames; the plain stream reader would take a cut-off frame for the end."""
    whole = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
    frame = whole.decompressobj()
    inside = False  # within a frame, whose end must still come
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
