"""``kvstore stress``: passes against a real store, the removal of its blocks, and the sums of its results."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from kvclient import KVClient
from kvstore.cli.app import root
from kvstore.cli.commands.workloads.stress import pace
from kvstore.core.errors import InvalidArgument
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.replay.engine import ReplayTotals
from kvstore.stress.limits import MemcpyLimit, SocketLimit
from kvstore.stress.plan import OperationKind, OperationMix, StressChains, StressPlan
from kvstore.stress.run import run_stress
from kvstore.stress.summary import LatencyHistogram, PassSummary, StressResult
from kvstore.stress.worker import warm_operations
from nursery import cli
from support.wait import wait_until

WAIT_S = 60.0
SMALL = ("--block-size", "64KiB", "--request-blocks", "4", "--size", "2MiB")


def plan(**changes: Any) -> StressPlan:
    usual: dict[str, Any] = {
        "metadata": "127.0.0.1:1", "node": None, "tls": None, "token_file": None, "tenant": "", "host": "here", "run": 7,
        "clients": 2, "block_bytes": 4096, "layers": 4, "request_blocks": 4, "requests": 3,
    }  # fmt: skip
    return StressPlan(**usual | changes)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster([NodeSpec("a", dram_bytes=64 << 20)], tmp_path_factory.mktemp("store")) as cluster:
        yield cluster


@pytest.fixture
def own_store(tmp_path: Path) -> Iterator[LocalCluster]:
    """A store for one test, whose blocks stay in it."""
    with LocalCluster([NodeSpec("a", dram_bytes=64 << 20)], tmp_path) as cluster:
        yield cluster


def stress(store: LocalCluster, *arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(root, ["stress", "--metadata", store.metadata_address, *SMALL, *arguments, "-o", "json"])
    assert done.exit_code == 0, done.output
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def stored_blocks(store: LocalCluster) -> int:
    done = CliRunner().invoke(root, ["status", "--metadata", store.metadata_address, "-o", "json"])
    return int(json.loads(done.stdout)["blocks"])


def test_stress_stores_loads_checks_and_removes(store: LocalCluster) -> None:
    found = stress(store)
    assert (found["ok"], found["wrong_bytes"], found["local_nodes"]) == (True, 0, ["a"])
    assert found["cold"]["stored_bytes"] == found["stored_set_bytes"] == 2 << 20
    assert (found["warm"]["hit_ratio"], found["warm"]["loaded_bytes"]) == (1.0, 2 << 20)
    assert (found["warm"]["by_tier"], found["warm"]["by_path"]) == ({"dram": 2 << 20}, {"local": 2 << 20})
    assert found["limit"]["kind"] == "memcpy"
    assert found["limit"]["bytes_per_s"] > 0
    assert found["removed_blocks"] == 32
    wait_until(lambda: stored_blocks(store) == 0, WAIT_S)


def test_stress_without_node_loads_over_tcp(store: LocalCluster) -> None:
    found = stress(store, "--node", "none", "--hits", "0.5", "--clients", "1", "--duration", "500ms")
    assert (found["local_nodes"], found["limit"]["kind"]) == ([], "socket")
    assert found["warm"]["hit_ratio"] == found["expected_hit_ratio"] == 0.5
    assert list(found["warm"]["by_path"]) == ["prefill"]


def test_stress_table_shows_limit_and_wrong_bytes(store: LocalCluster) -> None:
    done = CliRunner().invoke(root, ["stress", "--metadata", store.metadata_address, *SMALL])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[1].split() == ["PASS", "REQUESTS", "THROUGHPUT", "P50", "P99", "HITS", "WRONG_BYTES"]
    assert [line.split()[0] for line in lines[2:5]] == ["cold:", "warm:", "limit:"]
    assert [line.split()[1] for line in lines[2:5]] == ["store", "load", "memcpy"]
    assert lines[3].split()[-2:] == ["100.0%", "0"]


def test_stress_mix_at_a_rate_counts_each_operation(store: LocalCluster) -> None:
    found = stress(store, "--mix", "1:1:1", "--rate", "100", "--sessions", "2", "--clients", "1", "--duration", "1s")
    warm = found["warm"]
    assert (found["sessions"], found["mix"], found["rate"]) == (2, "1:1:1", 100.0)
    assert set(warm["operations"]) == {"lookup", "load", "store"}
    assert sum(one["count"] for one in warm["operations"].values()) == warm["requests"] <= 100
    assert (warm["hit_ratio"], warm["wrong_bytes"]) == (1.0, 0)
    assert warm["stored_bytes"] == warm["operations"]["store"]["count"] * 4 * (64 << 10)


def test_stress_latency_at_a_rate_is_of_calls_alone(store: LocalCluster) -> None:
    """All operations are due at once. So the last one waits for the calls of all others, but not for the making of bytes."""
    warm = stress(store, "--mix", "0:0:1", "--rate", "1000000", "--clients", "1")["warm"]
    in_calls_ms = 1000 * warm["stored_bytes"] / warm["bytes_per_s"]
    assert 0.9 * in_calls_ms < warm["operations"]["store"]["latency_ms"]["max"] < in_calls_ms + 0.01


def test_stress_rate_not_reached_is_said() -> None:
    assert pace(60.0, None) == "60.0/s"
    assert pace(198.0, 200.0) == "198.0/s of 200/s wanted"
    assert "not reached" in pace(60.0, 200.0)


@pytest.mark.parametrize("mix", ["1:2", "0:0:0", "a:1:1", "-1:1:1", "", f"1:1:{10**400}"])
def test_stress_wrong_mix_is_a_usage_error(mix: str) -> None:
    done = CliRunner().invoke(root, ["stress", f"--mix={mix}"])
    assert done.exit_code == 2
    assert "--mix" in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--clients", "64", "--sessions", "8"], "is 512; a node takes at most 256 sessions"),
        (["--clients", "32", "--sessions", "8", "--node", "127.0.0.1:1"], "is 256; a node takes at most 128 sessions over TCP"),
        (["--clients", "32", "--sessions", "8", "--node", "none"], "is 256; a node takes at most 128 sessions over TCP"),
        (["--clients", "8", "--sessions", "2"], "--size is less than one request per session: 16 sessions"),
    ],
)
def test_stress_impossible_sizes_are_usage_errors(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(root, ["stress", "--metadata", "127.0.0.1:1", *SMALL, *arguments])
    assert done.exit_code == 2
    assert words in " ".join(done.output.replace("│", " ").split())


def test_stress_unreachable_store_says_why() -> None:
    done = CliRunner().invoke(root, ["stress", "--metadata", "127.0.0.1:1"])
    assert done.exit_code == 1
    assert "connection refused" in done.output


def test_stress_ended_early_removes_its_blocks(store: LocalCluster) -> None:
    command = [*cli(), "stress", "--metadata", store.metadata_address, *SMALL, "--duration", "10m"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            wait_until(lambda: stored_blocks(store) == 32, WAIT_S)
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 128 + signal.SIGTERM
        finally:
            process.kill()
    wait_until(lambda: stored_blocks(store) == 0, WAIT_S)


def test_stress_second_run_of_a_host_is_refused(store: LocalCluster) -> None:
    import socket

    spec = plan(host=socket.gethostname()[:48], block_bytes=64 << 10, layers=32).spec()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(f"\0kvstore-stress-{spec.namespace.hex()}")
        done = CliRunner().invoke(root, ["stress", "--metadata", store.metadata_address, *SMALL])
    assert done.exit_code == 1
    assert "another kvstore stress" in done.output


# ---- parts ----
def test_chains_are_equal_in_every_process_and_unique() -> None:
    chains, again = StressChains(plan()), StressChains(plan())
    assert chains.stored(0, 1) == again.stored(0, 1)
    keys = [key for client in range(2) for request in range(3) for key in chains.stored(client, request)]
    keys += StressChains(plan(run=8)).stored(0, 0)
    assert len(set(keys)) == len(keys)


def test_warm_chain_shares_the_stored_prefix() -> None:
    chains = StressChains(plan(hit_share=0.5))
    stored, warm, next_warm = chains.stored(0, 0), chains.warm(0, 0, 0), chains.warm(0, 0, 1)
    assert warm[:2] == stored[:2]
    assert not set(warm[2:]) & set(stored)
    assert not set(warm[2:]) & set(next_warm[2:])


def test_mix_draws_by_weight_and_repeats() -> None:
    mix = OperationMix(lookup=1, load=2, store=1)
    drawn = list(itertools.islice(mix.kinds(3), 4_000))
    assert drawn == list(itertools.islice(mix.kinds(3), 4_000))
    assert drawn.count(OperationKind.LOAD) == pytest.approx(2_000, rel=0.1)
    assert set(itertools.islice(OperationMix(load=1).kinds(3), 100)) == {OperationKind.LOAD}


def test_operations_store_new_blocks_alone() -> None:
    """Lookups and loads take stored prompts; no block is stored twice, in any session."""
    mixed = plan(mix=OperationMix(1, 1, 2), sessions=2, hit_share=0.5, requests=20)
    chains, stored = StressChains(mixed), list[bytes]()
    for session in range(mixed.all_sessions):
        cold = [chains.stored(session, request) for request in range(mixed.requests)]
        stored += [key for keys in cold for key in keys]
        for at, (kind, keys) in enumerate(warm_operations(mixed, session)):
            if kind is OperationKind.STORE:
                stored += keys
            else:
                assert keys[:2] == cold[at][:2]
    assert len(set(stored)) == len(stored)


def test_rate_spreads_operations_over_sessions() -> None:
    timed = plan(rate=10.0, clients=2, sessions=2)
    due = sorted(timed.due_s(session, at) for session in range(4) for at in range(5))
    assert due == pytest.approx([number / 10 for number in range(20)])


def test_plan_too_large_a_request_is_rejected() -> None:
    with pytest.raises(InvalidArgument, match="too large"):
        plan(block_bytes=64 << 20, request_blocks=8)


def test_latency_percentiles_are_within_two_percent() -> None:
    latencies = LatencyHistogram()
    seconds = np.random.default_rng(1).lognormal(-5, 1, 5_000)
    latencies.add(seconds.tolist())
    for percent in (50, 99):
        found = latencies.percentile_ms(percent)
        assert found is not None
        assert found == pytest.approx(1000 * float(np.percentile(seconds, percent)), rel=0.03)
    assert LatencyHistogram().percentile_ms(50) is None


def test_wrong_bytes_are_a_problem_of_the_run() -> None:
    warm = PassSummary("warm", hits=1)
    result = StressResult(plan(), PassSummary("cold", stored_bytes=1), warm)
    assert result.problem is None
    warm.add(0, ReplayTotals(wrong_bytes=3), {})
    assert result.problem == "3 wrong bytes were loaded"


def test_result_without_stores_on_a_full_store_is_a_problem() -> None:
    warm = PassSummary("warm", requests=2, outcomes=Counter(skipped=8))
    result = StressResult(plan(mix=OperationMix(store=1)), PassSummary("cold", stored_bytes=1), warm)
    assert str(result.problem).startswith("nothing was stored after the first pass: the store is full or drains")
    warm.outcomes["stored"] = 1
    assert result.problem is None


def test_lookups_that_all_fail_are_a_problem() -> None:
    warm = PassSummary("warm")
    result = StressResult(plan(mix=OperationMix(lookup=1)), PassSummary("cold", stored_bytes=1), warm)
    warm.add(0, ReplayTotals(requests=2, errors=Counter(Unavailable=2)), {}, failed=2)
    assert result.problem is not None
    assert result.problem.startswith("every operation failed: Unavailable: 2")
    warm.add(0, ReplayTotals(requests=1), {})
    assert result.problem is None


def test_totals_are_taken_once() -> None:
    totals = ReplayTotals(requests=2, load_s=[0.5])
    assert totals.take() == ReplayTotals(requests=2, load_s=[0.5])
    assert totals == ReplayTotals()


@pytest.mark.parametrize("kind", [MemcpyLimit, SocketLimit])
def test_limit_moves_the_bytes_of_a_request(kind: type[MemcpyLimit | SocketLimit]) -> None:
    limit = kind(1 << 20)
    try:
        assert all(limit.sample() > 0 for _ in range(3))
    finally:
        limit.close()


def test_client_checks_each_loaded_byte(store: LocalCluster) -> None:
    """Damage in the caller's buffer counts: the check compares with bytes that follow from the key."""
    from kvstore.replay.engine import RequestRunner

    tally = ReplayTotals()
    spec = plan().spec()
    with KVClient.connect(store.metadata_address, spec, node=None) as client:
        keys = StressChains(plan()).stored(0, 0)
        wrong = np.zeros((len(keys), spec.block_bytes), np.uint8)
        assert client.store(keys, wrong, wait_visible=True).held_blocks == len(keys)
        wait_until(lambda: client.lookup(keys).hit_blocks == len(keys), WAIT_S)
        RequestRunner(client, tally, len(keys)).load(keys)
    assert tally.wrong_blocks == len(keys)


def test_stress_pass_without_operations_has_no_limit(own_store: LocalCluster) -> None:
    """A pass that ends before the first operation."""
    ended = plan(metadata=own_store.metadata_address, node="auto", duration_s=0.0)
    found = run_stress(ended, lambda _: nullcontext(lambda _: None))
    assert (found.cold.requests, found.warm.requests, found.limit_bytes_per_s, found.problem) == (6, 0, 0, None)
