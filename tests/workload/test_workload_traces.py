"""Readers of recorded traces: accepted formats, and errors for files that are not traces."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import InvalidArgument
from kvstore.core.limits import MAX_KEYS_PER_CALL
from kvstore.replay.plan import read_workload
from kvstore.workload import traces as traces_module
from kvstore.workload.jsonl import MAX_BLANK_LINES, MAX_LINE_BYTES
from kvstore.workload.traces import open_trace

META = {"meta": {"name": "tiny", "block_size": 64}}
TURN = {"s": 7, "i": 0, "st": "main", "ts": 5, "in": 330, "out": 9, "h": [[10, 3], [90, 2]]}
CHAT = {"timestamp": 3, "input_length": 600, "output_length": 2, "hash_ids": [0, 5]}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_reads_run_length_rows(tmp_path: Path) -> None:
    trace = open_trace(write(tmp_path / "t.jsonl", META, TURN, {**TURN, "s": "x", "st": "sub", "i": 1}))
    assert (trace.info.name, trace.info.block_tokens, trace.info.format) == ("tiny", 64, "rle")
    first, second = trace
    assert first.block_ids.tolist() == [10, 11, 12, 90, 91]
    assert first.block_ids.dtype == np.int64
    assert (first.session, first.turn, first.timestamp_ms, first.input_tokens, first.output_tokens) == ("7", 0, 5, 330, 9)
    assert second.session == "x/sub"


def test_reads_mooncake_rows(tmp_path: Path) -> None:
    trace = open_trace(write(tmp_path / "chat.jsonl", CHAT, {**CHAT, "hash_ids": []}))
    assert (trace.info.name, trace.info.block_tokens, trace.info.format) == ("chat", 512, "mooncake")
    assert [request.block_ids.tolist() for request in trace] == [[0, 5], []]


@pytest.mark.parametrize("frames", [1, 2])
def test_compression_is_recognised_by_content(tmp_path: Path, frames: int) -> None:
    lines = [json.dumps(META).encode() + b"\n\n", json.dumps(TURN).encode()]
    parts = [b"".join(lines)] if frames == 1 else lines
    path = tmp_path / "no-suffix"
    path.write_bytes(b"".join(zstandard.compress(part) for part in parts))
    assert [request.block_ids.tolist() for request in open_trace(path)] == [[10, 11, 12, 90, 91]]


def test_iterating_twice_reads_twice(tmp_path: Path) -> None:
    trace = open_trace(write(tmp_path / "t.jsonl", META, TURN))
    assert len(list(trace)) == len(list(trace)) == 1


def refuse(path: Path, *words: str) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        list(open_trace(path))
    for word in (str(path), *words):
        assert word in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    "content",
    [b"", b"\n\n  \n", b"hello\n", b"[1, 2]\n", b'"x"\n', b"\x00\xff\x00", b'{"a": 1}\n', b"[" * 100_000, b'{"timestamp": 1}\n'],
    ids=["empty", "blank", "text", "list", "string", "binary", "other", "nested", "no ids"],
)
def test_files_that_are_no_traces(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    refuse(path)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    refuse(tmp_path / "none.jsonl", "No such file")
    refuse(tmp_path)


@pytest.mark.parametrize(
    "runs",
    [
        [[0, MAX_KEYS_PER_CALL + 1]],
        [[0, 1 << 62]],
        [[0, 40_000], [100_000, 40_000]],
        [[-1, 2]],
        [[5, 0]],
        [[5, -3]],
        [[(1 << 63) - 2, 5]],
        [[1, 2, 3]],
        [[1.0, 2]],
        [[True, 2]],
        ["ab"],
        [5],
        "ab",
        None,
    ],
)
def test_absurd_runs_are_refused_before_they_are_expanded(tmp_path: Path, runs: Any) -> None:
    refuse(write(tmp_path / "t.jsonl", META, TURN, {**TURN, "h": runs}), "line=3")


@pytest.mark.parametrize("ids", [[-1], [0.5], ["1"], [None], [1 << 63], [True], list(range(MAX_KEYS_PER_CALL + 1)), 3])
def test_absurd_ids_are_refused(tmp_path: Path, ids: Any) -> None:
    refuse(write(tmp_path / "t.jsonl", CHAT, {**CHAT, "hash_ids": ids}), "line=2")


@pytest.mark.parametrize("change", [{"in": -1}, {"ts": "x"}, {"i": 1.5}, {"s": None}, {"s": [1]}, {"st": 3}, {"s": "x" * 600}])
def test_wrong_fields_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    refuse(write(tmp_path / "t.jsonl", META, {**TURN, **change}), "line=2")


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({"s": 1.5}, "must be a text or an integer"),
        ({"st": 0}, "'st', the stream of request 1, must be a text"),
        ({"in": 256}, "'in' and 'h' do not match"),
        ({"in": 385}, "'in' and 'h' do not match"),
        ({"ts": 1 << 63}, f"from 0 to {(1 << 63) - 1}"),
        (META, "only the first line may be a 'meta' object"),
    ],
)
def test_what_is_wanted_is_said(tmp_path: Path, change: dict[str, Any], hint: str) -> None:
    refuse(write(tmp_path / "t.jsonl", META, TURN, {**TURN, **change}), "line=3", hint)


@pytest.mark.parametrize("tokens", [256, 257, 320])
def test_a_partial_last_block_may_have_an_id(tmp_path: Path, tokens: int) -> None:
    ids = [[0, -(-tokens // 64)]]
    assert len(list(open_trace(write(tmp_path / "t.jsonl", META, {**TURN, "in": tokens, "h": ids})))) == 1


@pytest.mark.parametrize(
    "meta",
    [None, [], {}, {"block_size": 0}, {"block_size": 1 << 40}]
    + [{"block_size": 64, "name": name} for name in (3, "a\nb", "\x1b[2J", "\ud800", "x" * 500)],
)
def test_wrong_meta_is_refused(tmp_path: Path, meta: Any) -> None:
    refuse(write(tmp_path / "t.jsonl", {"meta": meta}, TURN), "line=1")


def test_whatever_its_name_a_trace_can_be_read_into_a_workload(tmp_path: Path) -> None:
    for path in (tmp_path / ("x" * 200 + "\n.jsonl"), tmp_path / os.fsdecode(b"\xff.jsonl")):
        trace = open_trace(write(path, CHAT))
        assert "?" in trace.info.name
        assert read_workload(trace.info, trace, 4096, 1, None).unique_blocks == 2
    trace = open_trace(write(tmp_path / "t.jsonl", {"meta": {"block_size": 64, "name": "é" * 128}}, TURN))
    assert read_workload(trace.info, trace, 4096, 1, None).unique_blocks == 5


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refuse(tmp_path / "pipe", "regular file")
    refuse(Path("/dev/null"), "regular file")
    refuse(tmp_path, "directory")


def test_numbers_of_many_digits_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(META) + "\n" + json.dumps(TURN).replace("330", "9" * 10_000) + "\n")
    refuse(path, "line=2")


def test_a_huge_line_is_refused_without_being_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "t.zst"
    path.write_bytes(zstandard.compress(b"{" * (MAX_LINE_BYTES * 64)))
    refuse(path, "too long")


@pytest.mark.parametrize("kept", [5, 20, -1])
def test_a_cut_off_stream_is_told(tmp_path: Path, kept: int) -> None:
    whole = zstandard.compress(b"\n".join(json.dumps(row).encode() for row in [META, *[TURN] * 50]))
    path = tmp_path / "t.zst"
    path.write_bytes(whole[:kept])
    refuse(path)


def test_a_cut_after_readable_lines_is_told_too(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    rows = [{**TURN, "in": 6400, "h": [[int(first), 1] for first in rng.integers(0, 1 << 40, 100)]} for _ in range(400)]
    whole = zstandard.compress(b"\n".join(json.dumps(row).encode() for row in [META, *rows]))
    path = tmp_path / "t.zst"
    path.write_bytes(whole[: len(whole) * 9 // 10])
    requests = iter(open_trace(path))
    assert [len(next(requests).block_ids) for _ in range(100)] == [100] * 100
    with pytest.raises(InvalidArgument, match="cut off"):
        list(requests)


@pytest.mark.parametrize("line", [b"", b" \t"])
def test_a_bomb_of_blank_lines_is_refused_at_once(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "t.zst"
    bomb = zstandard.ZstdCompressor().compressobj()
    with path.open("wb") as file:
        file.write(bomb.compress(json.dumps(META).encode() + b"\n"))
        for _ in range(256):
            file.write(bomb.compress((line + b"\n") * (1 << 20)))
        file.write(bomb.flush())
    assert path.stat().st_size < 1 << 17
    with pytest.raises(InvalidArgument, match="blank lines") as told:
        list(open_trace(path))
    assert told.value.fields["line"] == str(MAX_BLANK_LINES + 2)


def test_endless_traces_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "t.jsonl", META, *[TURN] * 8)
    monkeypatch.setattr(traces_module, "MAX_REQUESTS", 7)
    with pytest.raises(InvalidArgument, match=r"too long.*line=9"):
        list(open_trace(path))
    monkeypatch.setattr(traces_module, "MAX_REQUESTS", 8)
    assert len(list(open_trace(path))) == 8
    monkeypatch.setattr(traces_module, "MAX_BLOCKS", 14)  # five a request
    with pytest.raises(InvalidArgument, match=r"too long.*line=4"):
        list(open_trace(path))


def test_other_compressions_are_told(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(META).encode()))
    refuse(path, "compressed with zstd", "line=1")


def test_frames_to_be_skipped_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "t.zst"
    rows = "\n".join(json.dumps(row) for row in (META, TURN)).encode()
    path.write_bytes(b"\x5a\x2a\x4d\x18\x04\x00\x00\x00note" + zstandard.compress(rows))
    assert len(list(open_trace(path))) == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from([-1, 1 << 62, 1 << 64]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from([*TURN, *CHAT, "meta"]), inner, max_size=4),
    max_leaves=12,
)


@given(
    first=st.sampled_from([META, TURN, CHAT]) | JSON,
    base=st.sampled_from([TURN, CHAT]),
    change=st.dictionaries(st.sampled_from([*TURN, *CHAT]), JSON | st.lists(st.lists(st.integers(-3, 1 << 20))), max_size=3),
    packed=st.booleans(),
)
def test_trace_of_any_json_yields_requests_or_typed_error(
    tmp_path_factory: pytest.TempPathFactory, first: Any, base: dict[str, Any], change: dict[str, Any], packed: bool
) -> None:
    content = "\n".join(json.dumps(row) for row in (first, base, {**base, **change})).encode()
    path = tmp_path_factory.getbasetemp() / "any-json"
    path.write_bytes(zstandard.compress(content) if packed else content)
    refused: InvalidArgument | None = None
    try:
        for request in open_trace(path):
            assert len(request.block_ids) <= MAX_KEYS_PER_CALL
            assert not len(request.block_ids) or request.block_ids.min() >= 0
            assert min(request.turn, request.timestamp_ms, request.input_tokens, request.output_tokens) >= 0
    except InvalidArgument as error:
        refused = error
    assert refused is None or refused.fields["file"] == str(path)
    assert refused is None or refused.fields["line"] in {"1", "2", "3"}


@given(st.binary(max_size=200), st.integers(0, 200))
def test_damage_ends_in_a_typed_error_or_in_requests(tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int) -> None:
    plain = "\n".join(json.dumps(row) for row in (META, TURN, TURN)).encode()
    for name, content in (("plain", plain), ("packed", zstandard.compress(plain))):
        path = tmp_path_factory.getbasetemp() / f"damaged-{name}"
        path.write_bytes(content[:at] + noise + content[at + len(noise) :])
        try:
            requests = list(open_trace(path))
        except InvalidArgument:
            continue
        assert all(len(request.block_ids) <= MAX_KEYS_PER_CALL for request in requests)
