"""Readers of recorded request traces: Mooncake's JSON lines, and run-length JSON lines.

* Mooncake: one line per request, ``{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [id, …]}``;
  one id per block of 512 tokens, the last block may be partial; an equal id means an equal prefix up to and including that
  block.
* Run-length: first ``{"meta": {"name": …, "block_size": tokens}}``, then ``{"s": session, "i": turn, "st": stream, "ts": ms,
  "in": tokens, "out": tokens, "h": [[first_id, count], …]}``; a pair means ids first_id … first_id + count - 1, one per
  block of ``in``, with or without a partial last one.

Both may be compressed with zstd. A file is untrusted input: every line is checked before anything is expanded.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.core.errors import InvalidArgument
from kvstore.core.limits import MAX_BLOCK_TOKENS, MAX_KEYS_PER_CALL, MAX_NAME_BYTES
from kvstore.workload.jsonl import read_lines
from kvstore.workload.requests import BlockIds, TraceInfo, TraceRequest

MOONCAKE_BLOCK_TOKENS = 512
MAX_REQUESTS = 10_000_000
MAX_BLOCKS = 1 << 28
"""Maximum blocks of all requests together, more than in any recorded trace. They require two gigabytes of memory."""
_MAX_TRACE_NAME = MAX_NAME_BYTES // 2
"""Maximum bytes of a trace's name: a replay's namespace contains it after a prefix."""
_MAX_INT = (1 << 63) - 1

_Row = dict[str, Any]
_Parser = Callable[[_Row, int], TraceRequest]


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace file. Each iteration reads the file again, request by request, in the order of the file."""

    path: Path
    info: TraceInfo

    def __iter__(self) -> Iterator[TraceRequest]:
        tokens = self.info.block_tokens
        parse = (lambda row, at: _parse_rle(row, at, tokens)) if self.info.format == "rle" else _parse_mooncake
        lines = read_lines(self.path)
        if self.info.format == "rle":
            next(lines)  # the meta row, already read by open_trace
        blocks = 0
        for position, (number, line) in enumerate(lines):
            request = _request(self.path, number, line, parse, position)
            blocks += len(request.block_ids)
            if position >= MAX_REQUESTS or blocks > MAX_BLOCKS:
                raise InvalidArgument(
                    "the trace is too long: read the beginning of it with a limit",
                    file=self.path, line=number, limit_requests=MAX_REQUESTS, limit_blocks=MAX_BLOCKS,
                )  # fmt: skip
            yield request


def open_trace(path: Path | str) -> Trace:
    """Detect the format of a trace by its first line.

    Raises:
        InvalidArgument: the file cannot be read or is not a trace; names file and line. Wrong later lines raise it during the
            iteration.
    """
    path = Path(path)
    for number, line in itertools.islice(read_lines(path), 1):
        row = _row(path, number, line)
        if "meta" in row:
            return Trace(path, _meta(path, number, row))
        _request(path, number, line, _parse_mooncake, 0)
        return Trace(path, TraceInfo(_name_of(path), MOONCAKE_BLOCK_TOKENS, "mooncake"))
    raise InvalidArgument("not a trace: the file is empty", file=path)


def _name_of(path: Path) -> str:
    name = path.name.split(".", 1)[0] or path.name
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def _row(path: Path, number: int, line: bytes) -> _Row:
    try:
        row = json.loads(line)
    except UnicodeDecodeError as error:
        raise InvalidArgument("not a trace: no text, plain or compressed with zstd", file=path, line=number) from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"not a trace: no JSON object ({error})", file=path, line=number) from error
    if not isinstance(row, dict):
        raise InvalidArgument("not a trace: each line must be one JSON object", file=path, line=number)
    return row


def _meta(path: Path, number: int, row: _Row) -> TraceInfo:
    try:
        return _info(row["meta"], _name_of(path))
    except InvalidArgument as error:
        raise _not_a_trace(path, number, error) from error


def _info(meta: object, default_name: str) -> TraceInfo:
    if not isinstance(meta, dict):
        raise InvalidArgument("'meta' is not an object")
    tokens = _count(meta, "block_size")
    if not 1 <= tokens <= MAX_BLOCK_TOKENS:
        raise InvalidArgument("'block_size' is out of range", block_size=tokens, limit=MAX_BLOCK_TOKENS)
    name = meta.get("name", default_name)
    if not isinstance(name, str) or not name.isprintable() or len(name.encode(errors="replace")) > _MAX_TRACE_NAME:
        raise InvalidArgument("'name' must be a short printable text", name=_shown(name))
    return TraceInfo(name, tokens, "rle")


def _request(path: Path, number: int, line: bytes, parse: _Parser, position: int) -> TraceRequest:
    row = _row(path, number, line)
    try:
        return parse(row, position)
    except InvalidArgument as error:
        raise _not_a_trace(path, number, error) from error


def _not_a_trace(path: Path, number: int, error: InvalidArgument) -> InvalidArgument:
    return InvalidArgument(f"not a trace: {error.message}", file=path, line=number, **error.fields)


def _count(row: _Row, name: str) -> int:
    """Check an integer from 0 to ``_MAX_INT``."""
    if name not in row:
        raise InvalidArgument(f"'{name}' is missing")
    value = row[name]
    if type(value) is not int or not 0 <= value <= _MAX_INT:
        raise InvalidArgument(f"'{name}' must be a whole number from 0 to {_MAX_INT}", value=_shown(value))
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _parse_mooncake(row: _Row, position: int) -> TraceRequest:
    ids = row.get("hash_ids")
    if not isinstance(ids, list):
        raise InvalidArgument("'hash_ids' is missing or no list")
    if len(ids) > MAX_KEYS_PER_CALL:
        raise InvalidArgument("too many blocks in one request", blocks=len(ids), limit=MAX_KEYS_PER_CALL)
    for value in ids:
        if type(value) is not int or not 0 <= value <= _MAX_INT:
            raise InvalidArgument(f"a block id must be a whole number from 0 to {_MAX_INT}", value=_shown(value))
    return TraceRequest(
        session=f"request-{position}",  # the trace does not group requests into sessions
        turn=0,
        timestamp_ms=_count(row, "timestamp"),
        input_tokens=_count(row, "input_length"),
        output_tokens=_count(row, "output_length"),
        block_ids=np.array(ids, dtype=np.int64),
    )


def _parse_rle(row: _Row, position: int, block_tokens: int) -> TraceRequest:
    if "meta" in row:
        raise InvalidArgument("only the first line may be a 'meta' object; remove it from the traces that were appended")
    session, stream = row.get("s"), row.get("st", "main")
    if type(session) not in (int, str):
        raise InvalidArgument(f"'s', the session of request {position}, must be a text or an integer", value=_shown(session))
    if not isinstance(stream, str):
        raise InvalidArgument(f"'st', the stream of request {position}, must be a text, or missing", value=_shown(stream))
    name = str(session) if stream == "main" else f"{session}/{stream}"
    if len(name.encode(errors="replace")) > MAX_NAME_BYTES:
        raise InvalidArgument("the session's name is too long", limit_bytes=MAX_NAME_BYTES)
    ids, tokens = _expand(row.get("h")), _count(row, "in")
    if not tokens // block_tokens <= len(ids) <= -(-tokens // block_tokens):
        raise InvalidArgument(
            "'in' and 'h' do not match: one id per block, with or without a partial last one",
            input_tokens=tokens, blocks=len(ids), block_tokens=block_tokens,
        )  # fmt: skip
    return TraceRequest(
        session=name,
        turn=_count(row, "i"),
        timestamp_ms=_count(row, "ts"),
        input_tokens=tokens,
        output_tokens=_count(row, "out"),
        block_ids=ids,
    )


def _expand(runs: object) -> BlockIds:
    """Expand ``[[first, count], …]`` after checking the total size, before allocation."""
    if not isinstance(runs, list):
        raise InvalidArgument("'h' is missing or no list")
    total = 0
    for run in runs:
        if not isinstance(run, list) or len(run) != 2 or type(run[0]) is not int or type(run[1]) is not int:
            raise InvalidArgument("a run of blocks must be [first id, count]", value=_shown(run))
        first, count = run
        if first < 0 or count < 1 or first + count > _MAX_INT:
            raise InvalidArgument("a run's ids or count are out of range", value=_shown(run))
        total += count
        if total > MAX_KEYS_PER_CALL:
            raise InvalidArgument("too many blocks in one request", limit=MAX_KEYS_PER_CALL)
    out = np.empty(total, dtype=np.int64)
    at = 0
    for first, count in runs:
        out[at : at + count] = np.arange(first, first + count, dtype=np.int64)
        at += count
    return out
