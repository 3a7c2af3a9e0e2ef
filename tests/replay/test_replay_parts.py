"""The parts of a replay that need no store: plans, capacities, reports, progress."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from kvstore.core.errors import CapacityExceeded, InvalidArgument
from kvstore.core.types import BlockShape
from kvstore.replay import capacity
from kvstore.replay.capacity import StoreCapacity, parse_capacity, space_for
from kvstore.replay.demo import DemoPlan, read_turns
from kvstore.replay.engine import ReplayTotals
from kvstore.replay.plan import read_workload
from kvstore.replay.progress import progress
from kvstore.replay.report import milliseconds, tally_json, tally_rows
from kvstore.replay.run import ReplayResult, replay_rows, verdict
from kvstore.workload.generator import PROFILES, AgentWorkload
from kvstore.workload.requests import TraceInfo, TraceRequest

SHAPE = BlockShape(layers=2, layer_block_bytes=2500)


@pytest.mark.parametrize(
    ("text", "dram", "nvme"), [("dram=1GiB", 1 << 30, 0), ("nvme=2GiB, dram=64MiB", 64 << 20, 2 << 30), ("DRAM=5", 5, 0)]
)
def test_capacities(text: str, dram: int, nvme: int) -> None:
    assert parse_capacity(text) == StoreCapacity(dram, nvme, limited=True)
    assert parse_capacity(str(parse_capacity(text))) == parse_capacity(text)


@pytest.mark.parametrize(
    "text", ["", "dram", "dram=", "dram=x", "hbm=1GiB", "nvme=1GiB", "dram=1,dram=2", "dram=0", "dram=1GiB,"]
)
def test_parse_capacity_invalid_text_is_rejected(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_capacity(text)


def test_capacity_counts_whole_slots() -> None:
    assert StoreCapacity(3 * 8192 - 1).blocks(SHAPE) == 2
    assert StoreCapacity(8192, 5 * 12_288).blocks(SHAPE) == 1 + 5


@pytest.mark.parametrize(
    ("text", "given", "least"), [("dram=1", "dram=1 ", "dram=8KiB"), ("dram=8KiB,nvme=8KiB", "nvme=8KiB", "nvme=12KiB")]
)
def test_capacity_below_one_block_names_the_minimum(text: str, given: str, least: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"^{given}.*{least}$"):
        parse_capacity(text).check(SHAPE)
    parse_capacity("dram=8KiB,nvme=12KiB").check(SHAPE)
    parse_capacity("dram=8KiB").check(SHAPE)


def test_space_for_prefers_memory_then_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = BlockShape(1, 1 << 20)
    monkeypatch.setattr(capacity, "memory_available", lambda: 8 << 30)
    assert space_for(1000, block, tmp_path).nvme_bytes == 0
    monkeypatch.setattr(capacity, "memory_available", lambda: 1 << 30)
    on_disk = space_for(1000, block, tmp_path)
    assert on_disk.nvme_bytes > 1000 << 20
    assert on_disk.dram_bytes == 128 << 20
    assert on_disk.blocks(block) >= 1000
    with pytest.raises(CapacityExceeded, match="--capacity"):
        space_for(1 << 40, block, tmp_path)


def requests(*ids: list[int]) -> list[TraceRequest]:
    return [TraceRequest("s", turn, turn, 0, 0, np.array(blocks, dtype=np.int64)) for turn, blocks in enumerate(ids)]


INFO = TraceInfo("tiny", 64, "generated")


def test_workload_counts_its_blocks() -> None:
    workload = read_workload(INFO, requests([1, 2, 3], [1, 2, 4, 5], [9], []), 4096, 2, None)
    assert (workload.unique_blocks, workload.largest_request, workload.unbounded.hit_blocks) == (6, 4, 2)
    keys = list(workload.requests())
    assert [len(request) for request in keys] == [3, 4, 1, 0]
    assert keys[0][:2] == keys[1][:2]
    assert len(list(read_workload(INFO, requests([1], [2]), 4096, 1, 1).requests())) == 1


def test_workload_invalid_block_sizes_are_rejected() -> None:
    with pytest.raises(InvalidArgument, match="divide"):
        read_workload(INFO, requests([1]), 1000, 3, None)
    with pytest.raises(InvalidArgument, match="no requests"):
        read_workload(INFO, [], 4096, 1, None)
    for block_bytes, layers in ((0, 1), (1 << 30, 1), (1 << 30, 2)):
        with pytest.raises(InvalidArgument, match="--block-bytes over --layers"):
            read_workload(INFO, requests([1]), block_bytes, layers, None)


def test_demo_counts_answers_as_stored() -> None:
    plan = DemoPlan(sessions=2, max_turns=5)
    turns, possible = read_turns(plan)
    prompts_only = read_workload(
        INFO, AgentWorkload(PROFILES[plan.profile], 2, max_turns=5, shared_prefix_tokens=2048), 64, 1, None
    )
    assert len(turns) == 10
    assert possible > prompts_only.unbounded.hit_blocks
    assert possible < sum(turn.prompt_blocks for turn in turns)


def result(tally: ReplayTotals, *, limited: bool = False) -> ReplayResult:
    workload = read_workload(INFO, requests([1, 2], [1, 2]), 4096, 1, None)
    return ReplayResult(workload, StoreCapacity(1 << 20, limited=limited), "lru", tally, 1.0, None)


def test_verdicts() -> None:
    good = ReplayTotals(requests=2, blocks_total=4, blocks_hit=2)
    assert verdict(result(good)) is None
    assert "wrong bytes" in (verdict(result(replace(good, wrong_bytes=1, wrong_blocks=1))) or "")
    assert "only 2 are possible" in (verdict(result(replace(good, blocks_hit=3))) or "")
    assert "1 hits are missing" in (verdict(result(replace(good, blocks_hit=1))) or "")
    assert verdict(result(replace(good, blocks_hit=1), limited=True)) is None


def test_report_of_empty_and_failed_runs() -> None:
    empty = ReplayTotals()
    assert tally_json(empty, 0.0)["load_ms"] == {"p50": None, "p90": None, "p99": None, "max": None}
    assert tally_json(empty, 0.0)["hit_ratio"] == 0.0
    trouble = ReplayTotals(short_loads=2, blocks_not_delivered=9)
    trouble.store_outcomes["skipped"] = 5
    trouble.errors["Unavailable"] = 3
    rows = tally_rows(trouble, 1.0)
    assert rows["stores skipped"].startswith("5 blocks")
    assert rows["short loads"].startswith("2 (9 blocks")
    assert rows["failures met"] == "Unavailable: 3"
    assert "hits, best possible" not in replay_rows(result(ReplayTotals()))


def test_times_have_percentiles() -> None:
    times = milliseconds([0.001 * number for number in range(1, 101)])
    assert times == {"p50": 50.5, "p90": 90.1, "p99": 99.01, "max": 100.0}


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_on_terminal_and_file(terminal: bool) -> None:
    out = io.StringIO()
    with progress("work", 3, Console(file=out, force_terminal=terminal, width=120)) as report:
        for done in (1, 2, 3):
            report(done, "50.0% hits")
    shown = out.getvalue()
    assert "work" in shown
    assert "50.0% hits" in shown
    if not terminal:
        assert shown == "work: 3 of 3 requests, 50.0% hits\n"


def test_progress_last_line_is_printed_once() -> None:
    out = io.StringIO()
    with progress("demo", 4, Console(file=out)) as report:
        report(4, "all hits")
        report(4, "all hits")
    assert out.getvalue() == "demo: 4 of 4 requests, all hits\n"
