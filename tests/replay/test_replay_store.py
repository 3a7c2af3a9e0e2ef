"""Replays and the demo with real processes: exact hits, checked bytes, and a failing store."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from kvclient import KVClient
from kvstore.cli.app import root
from kvstore.core.errors import InvalidArgument
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.replay import plan
from kvstore.replay.capacity import StoreCapacity, space_for
from kvstore.replay.demo import DemoPlan, run_demo
from kvstore.replay.engine import ReplayTotals, RequestRunner
from kvstore.replay.plan import Workload, read_workload
from kvstore.replay.run import NODE_ID, replay
from kvstore.workload.generator import PROFILES, AgentWorkload
from kvstore.workload.requests import TraceInfo, TraceRequest
from kvstore.workload.traces import open_trace


@pytest.fixture(autouse=True)
def _root_logger_as_before() -> Iterator[None]:
    """Commands set up logs of the whole process."""
    logger = logging.getLogger()
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


def small_workload(sessions: int = 4, block_bytes: int = 4096, layers: int = 2) -> Workload:
    source = AgentWorkload(PROFILES["agentic-32k"], sessions, max_turns=10, shared_prefix_tokens=512)
    return read_workload(source.info, source, block_bytes, layers, None)


def test_replay_on_used_folder_is_rejected(tmp_path: Path) -> None:
    workload = small_workload(sessions=1)
    space = StoreCapacity(4 << 20, 16 << 20, limited=True)
    first = replay(workload, space, "lru", tmp_path)
    assert first.best is not None
    assert first.tally.blocks_hit <= first.best.hit_blocks <= workload.unbounded.hit_blocks
    with pytest.raises(InvalidArgument, match=r"would count as hits.*volume="):
        replay(workload, space, "lru", tmp_path)


def test_replay_with_too_many_distinct_blocks_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = small_workload().unique_blocks
    monkeypatch.setattr(plan, "MAX_DISTINCT_BLOCKS", blocks)
    small_workload()
    monkeypatch.setattr(plan, "MAX_DISTINCT_BLOCKS", blocks - 1)
    with pytest.raises(InvalidArgument, match="--limit"):
        small_workload()


def test_replay_with_full_capacity_has_exact_hits(tmp_path: Path) -> None:
    workload = small_workload()
    done: list[int] = []
    shown = replay(
        workload,
        space_for(workload.unique_blocks, workload.spec.shape, tmp_path),
        "s3-fifo",
        tmp_path,
        report=lambda count, _note, _total=None: done.append(count),
    )
    assert shown.exact
    assert shown.tally.wrong_bytes == 0
    assert shown.tally.bytes_loaded == workload.unbounded.hit_blocks * 4096
    assert shown.tally.bytes_stored == workload.unique_blocks * 4096
    assert done == list(range(1, len(workload.chains) + 1))
    as_json = shown.to_json()
    assert as_json["by_tier"] == {"dram": shown.tally.bytes_loaded}
    assert as_json["by_node"] == {NODE_ID: shown.tally.bytes_loaded}
    assert as_json["belady_hit_ratio"] is None
    json.dumps(as_json)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "s3-fifo"])
def test_replay_with_small_capacity_reports_best_hits(tmp_path: Path, policy: str) -> None:
    workload = small_workload(sessions=12, block_bytes=32 << 10)
    shown = replay(workload, StoreCapacity(24 << 20, limited=True), policy, tmp_path)
    assert shown.best is not None
    assert 0 < shown.tally.blocks_hit <= shown.best.hit_blocks <= workload.unbounded.hit_blocks
    assert shown.tally.wrong_bytes == 0


@pytest.mark.slow
def test_replay_loads_blocks_from_nvme(tmp_path: Path) -> None:
    workload = small_workload(sessions=8, block_bytes=32 << 10)
    shown = replay(workload, StoreCapacity(24 << 20, 512 << 20, limited=True), "lru", tmp_path)
    assert shown.exact
    assert shown.tally.wrong_bytes == 0
    assert shown.tally.bytes_by_tier["nvme"] > 0


def test_replay_store_failure_costs_only_hits(tmp_path: Path) -> None:
    """The node is killed during the replay: the engine continues, and no wrong byte passes."""
    workload = small_workload(sessions=2)
    tally = ReplayTotals()
    with (
        LocalCluster([NodeSpec("n", dram_bytes=64 << 20)], tmp_path) as cluster,
        KVClient.connect(cluster.metadata_address, workload.spec, node=cluster.node("n").local_socket) as client,
    ):
        runner = RequestRunner(client, tally, workload.largest_request)
        requests = list(workload.requests())
        for keys in requests[:8]:
            runner.serve(keys)
        hits = tally.blocks_hit
        cluster.kill("n")
        for keys in requests[8:12]:
            runner.serve(keys)
    assert hits > 0
    assert tally.requests == 12
    assert tally.wrong_bytes == 0
    assert tally.errors


def test_replay_detects_wrong_bytes(tmp_path: Path) -> None:
    """Blocks stored under keys whose payload they are not: the store serves what it was given, the check sees it."""
    info = TraceInfo("tiny", 64, "generated")
    workload = read_workload(info, [TraceRequest("s", 0, 0, 0, 0, np.arange(5, dtype=np.int64))], 4096, 1, None)
    keys = next(workload.requests())
    tally = ReplayTotals()
    with (
        LocalCluster([NodeSpec("n", dram_bytes=64 << 20)], tmp_path) as cluster,
        KVClient.connect(cluster.metadata_address, workload.spec, node=cluster.node("n").local_socket) as client,
    ):
        client.store(keys, np.ones((5, 4096), dtype=np.uint8), wait_visible=True)
        RequestRunner(client, tally, 5).serve(keys)
    assert tally.wrong_blocks == tally.blocks_hit == 5
    assert tally.wrong_bytes > 5 * 4000


def test_demo_small_run_succeeds(tmp_path: Path) -> None:
    shown = run_demo(DemoPlan(sessions=2, max_turns=6), tmp_path)
    assert shown.problem is None
    assert shown.tally.blocks_hit == shown.possible_hits
    assert set(shown.tally.bytes_by_node) >= {"prefill-1"}
    assert shown.tally.wrong_bytes == 0


def test_replay_commands_print_results(tmp_path: Path) -> None:
    runner = CliRunner()
    trace = tmp_path / "chat.jsonl"
    row = {"timestamp": 0, "input_length": 1500, "output_length": 1, "hash_ids": [0, 1, 2]}
    trace.write_text("".join(json.dumps({**row, "hash_ids": [0, 1, tail]}) + "\n" for tail in (2, 2, 3)))
    shown = runner.invoke(root, ["replay", str(trace), "--data-dir", str(tmp_path / "d")])
    assert shown.exit_code == 0, shown.output
    assert "wrong bytes" in shown.stdout
    shown = runner.invoke(root, ["replay", str(trace), "-o", "json"])
    assert shown.exit_code == 0, shown.output
    result = json.loads(shown.stdout)
    expected = {"requests": 3, "blocks_total": 9, "blocks_hit": 5, "wrong_bytes": 0, "bytes_loaded": 5 * 4096}
    assert {name: result[name] for name in expected} == expected
    assert set(result["load_ms"]) == {"p50", "p90", "p99", "max"}
    assert {"hit_ratio", "bytes_stored", "seconds", "by_tier", "commit", "policy"} <= set(result)

    demo = runner.invoke(root, ["demo", "--sessions", "1", "--turns", "3", "-o", "json"])
    assert demo.exit_code == 0, demo.output
    assert json.loads(demo.stdout)["wrong_bytes"] == 0


@pytest.mark.trace
def test_replay_part_of_public_trace_is_exact(traces: Path, tmp_path: Path) -> None:
    for name in ("mooncake_conversation.jsonl.zst", "weka_smoke_20s.rle.jsonl.zst"):
        source = open_trace(traces / name)
        workload = read_workload(source.info, source, 4096, 1, 150)
        shown = replay(workload, space_for(workload.unique_blocks, workload.spec.shape, tmp_path), "s3-fifo")
        assert shown.exact, name
        assert shown.tally.wrong_bytes == 0


@pytest.mark.trace
@pytest.mark.slow
def test_replay_whole_public_trace_is_exact(traces: Path, tmp_path: Path) -> None:
    source = open_trace(traces / "weka_smoke_20s.rle.jsonl.zst")
    workload = read_workload(source.info, source, 4096, 1, None)
    shown = replay(workload, space_for(workload.unique_blocks, workload.spec.shape, tmp_path), "s3-fifo")
    assert (shown.tally.blocks_hit, shown.tally.wrong_bytes) == (408_206, 0)
