"""Three hosts as the documentation sets them up, two engines at work, and everything that an operator is paged for.

One engine has a node on its host, the other has none. The fault is on the first one's host. Whatever happens, no block has wrong
bytes, no exception reaches an engine, the problem is named by the command line, the admin server, a log and the metric of an
alert rule, and bytes move again once it is over.
"""

from __future__ import annotations

import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from load_generator import Load, Phase
from three_hosts import POLL_S, ThreeHosts

from certificates import make_certificates
from support.small_disk import mounted
from support.wait import wait_until

FAULTY = "host-2"
FAULTY_HOST = 2
BEFORE_S = 1.5
UNREACHED = "cannot reach the metadata server at {}: connection refused"
TAKEN_IN_S = 3.0
"""Time until engines detect a fault."""
MOST_WAIT_S = 1.5
"""How much longer than without the fault the longest request may wait within that time ..."""
MOST_LATER_S = 0.8
"""... and after it, when none waits for the faulty host any more: less than it takes to find out that a host hangs."""
AFTER_S = 1.0


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    """A separate file system for the faulty host; None if this user may not mount one."""
    place = tmp_path_factory.mktemp("disk")
    with mounted(place, "256m") as is_mounted:
        yield place if is_mounted else None


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, small_disk: Path | None) -> Iterator[ThreeHosts]:
    disks = {} if small_disk is None else {FAULTY_HOST: small_disk}
    with ThreeHosts(tmp_path_factory.mktemp("three"), disks) as hosts:
        wait_until(lambda: well(hosts), lambda: f"all is well\n{hosts.cli('status').output}")
        yield hosts


@pytest.fixture(scope="module")
def load(hosts: ThreeHosts) -> Iterator[Load]:
    with hosts.connect(FAULTY_HOST) as local, hosts.connect(None) as remote, Load({"local": local, "remote": remote}) as load:
        wait_until(lambda: all(load.moved_since(0.0).values()), "both engines move bytes")
        yield load


def well(hosts: ThreeHosts) -> bool:
    """Return whether the operator sees three nodes and no problem."""
    status, cluster = hosts.admin("/v1/cluster")
    return status == 200 and cluster["health"] == "ok" and cluster["nodes_alive"] == 3


@dataclass
class Course:
    """Observations during one fault."""

    load: Load
    before: Phase
    during: Phase
    late: Phase
    after: Phase
    told_s: dict[str, float] = field(default_factory=dict)
    """When each source reported the fault, in seconds since the fault."""
    well_s: float = 0.0
    """Seconds from the repair until the operator sees no problem."""
    served_s: float = 0.0
    """Seconds from then until loads of both engines hit."""
    last: str = ""
    """Last findings that the admin server named."""

    def __str__(self) -> str:
        told = ", ".join(f"{who} after {seconds:.1f} s" for who, seconds in self.told_s.items())
        return (
            f"{self.load.report([self.before, self.during, self.late, self.after])}\ntold by: {told}"
            f"\nmended: well after {self.well_s:.1f} s, both engines hit {self.served_s:.1f} s later; wrong last: {self.last}"
        )


def run_through(
    hosts: ThreeHosts,
    load: Load,
    *,
    inflict: Callable[[], None],
    told: dict[str, Callable[[], bool]],
    mend: Callable[[], None],
    least_s: float = 3.5,
) -> Course:
    """Inject a fault under load, wait until all sources report it, repair it, and wait until the cluster is healthy.

    Args:
        hosts: the cluster.
        load: at work.
        inflict: begins the fault.
        told: checks of each place that must name the fault; each is repeated until it holds.
        mend: ends the fault.
        least_s: how long the fault lasts at least.
    """
    start_s = time.monotonic()
    time.sleep(BEFORE_S)  # the load's, not a wait for anything
    fault_s = time.monotonic()
    inflict()
    told_s: dict[str, float] = {}

    def all_told() -> bool:
        for who, asked in told.items():
            if who not in told_s and asked():
                told_s[who] = time.monotonic() - fault_s
        return len(told_s) == len(told)

    def said() -> str:
        return f"told so far: {told_s}\n{hosts.cli('status').output}\n{hosts.admin('/v1/cluster')}\n{hosts.log_tail(FAULTY)}"

    try:
        wait_until(all_told, lambda: f"told by {', '.join(told)}\n{said()}")
        while time.monotonic() - fault_s < least_s:
            time.sleep(POLL_S)
    finally:
        mended_s = time.monotonic()
        mend()
    last: list[str] = []

    def well_again() -> bool:
        if well(hosts):
            return True
        last[:] = [str(hosts.admin("/v1/cluster")[1])]
        return False

    wait_until(well_again, lambda: f"all is well again\n{said()}")
    well_s = time.monotonic()
    wait_until(lambda: all(load.hits_since(well_s).values()), lambda: f"loads of both engines hit again\n{said()}")
    served_s = time.monotonic()
    while time.monotonic() - served_s < AFTER_S:
        time.sleep(POLL_S)
    course = Course(
        load,
        load.ended("before", start_s, fault_s),
        load.under_way("during, first 3 s", fault_s, fault_s + TAKEN_IN_S),
        load.begun("during, later", fault_s + TAKEN_IN_S, mended_s),
        load.begun("after", served_s),
        told_s,
        well_s - mended_s,
        served_s - well_s,
        "".join(last)[:300],
    )
    print(course)
    assert load.wrong_blocks == 0, f"WRONG BYTES{course}"
    for engine in load.engines:
        assert course.before.of(engine).moved_bytes > 0, course
        assert course.after.of(engine).moved_bytes > 0, course
    ordinary_s = max(course.before.longest_s, course.after.longest_s)
    assert course.during.longest_s <= ordinary_s + MOST_WAIT_S, f"too long a wait{course}"
    assert course.late.longest_s <= ordinary_s + MOST_LATER_S, f"too long a wait{course}"
    return course


def problem(hosts: ThreeHosts, *words: str) -> dict[str, Callable[[], bool]]:
    """The command line and the admin server name the problem in one of some ways."""

    def said(problems: Iterable[str]) -> bool:
        return any(some in problem.lower() for problem in problems for some in words)

    return {
        "kvstore status": lambda: said(line for line in hosts.cli("status").output.splitlines() if line.startswith("  ")),
        "admin": lambda: said(one["facts"] for one in hosts.admin("/v1/cluster")[1].get("findings", ())),
    }


def logged(hosts: ThreeHosts, daemon: str, words: str) -> dict[str, Callable[[], bool]]:
    """Return a check for a new line in a daemon's log."""
    at = hosts.log_size(daemon)
    return {f"log of {daemon}": lambda: words in hosts.log_since(daemon, at)}


def not_reported(hosts: ThreeHosts) -> dict[str, Callable[[], bool]]:
    """The node counts as not reporting, which differs from being refused."""
    return {
        **problem(hosts, f"node {FAULTY} has not reported for"),
        **logged(hosts, "metadata", f"node silent: {FAULTY}"),
    }


def no_heartbeat(hosts: ThreeHosts) -> dict[str, Callable[[], bool]]:
    """The metric of KVStoreNodeSilent grows."""
    return {"KVStoreNodeSilent": lambda: hosts.alert("KVStoreNodeSilent", "metadata", node=FAULTY) > 2.0}


def test_cluster_prometheus_targets_answer(hosts: ThreeHosts) -> None:
    targets = hosts.metrics_targets()
    assert len(targets) == 4
    for target in targets:
        with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
            assert b"kvstore_build_info" in answer.read()


def test_cluster_node_stopped_is_told_and_recovers(hosts: ThreeHosts, load: Load) -> None:
    run_through(
        hosts,
        load,
        inflict=lambda: hosts.signal(FAULTY, signal.SIGSTOP),
        told={**not_reported(hosts), **no_heartbeat(hosts)},
        mend=lambda: hosts.signal(FAULTY, signal.SIGCONT),
        least_s=6.0,
    )


def test_cluster_node_killed_is_told_and_recovers(hosts: ThreeHosts, load: Load) -> None:
    run_through(
        hosts,
        load,
        inflict=lambda: hosts.stop(FAULTY, signal.SIGKILL),
        told={**not_reported(hosts), **no_heartbeat(hosts)},
        mend=lambda: hosts.start(FAULTY),
    )


def test_cluster_metadata_killed_is_told_and_recovers(hosts: ThreeHosts, load: Load) -> None:
    run_through(
        hosts,
        load,
        inflict=lambda: hosts.stop("metadata", signal.SIGKILL),
        told={
            "kvstore status": lambda: UNREACHED.format(hosts.metadata_address) in hosts.cli("status").output,
            "admin": lambda: UNREACHED.format(hosts.metadata_address) in hosts.admin("/v1/cluster")[1].get("detail", ""),
            **logged(hosts, FAULTY, hosts.metadata_address),
            "KVStoreMetadataUnreachable": lambda: hosts.alert("KVStoreMetadataUnreachable", FAULTY) == 0,
        },
        mend=lambda: hosts.start("metadata"),
    )


def test_cluster_token_wrong_is_told_and_recovers(hosts: ThreeHosts, load: Load) -> None:
    token = hosts.hosts[FAULTY_HOST].etc / "nodes.token"
    right = token.read_text()
    refused = hosts.alert("KVStoreCallersRefused", "metadata", kind="unauthenticated")

    def replace(text: str) -> None:
        fresh = token.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(token)

    run_through(
        hosts,
        load,
        inflict=lambda: replace("f" * 32),
        told={
            **problem(hosts, f"node {FAULTY} is refused"),
            **logged(hosts, FAULTY, f"{token} is not known to the metadata server"),
            **logged(hosts, "metadata", f"call of a node rejected: {FAULTY} (reason=the token is not known to this server"),
            "KVStoreCallersRefused": lambda: (
                hosts.alert("KVStoreCallersRefused", "metadata", kind="unauthenticated") > max(0.0, refused)
            ),
        },
        mend=lambda: replace(right),
    )


def test_cluster_certificate_foreign_is_told_and_recovers(hosts: ThreeHosts, load: Load, tmp_path: Path) -> None:
    """The node restarts with a certificate of another authority."""
    theirs, folder = make_certificates(tmp_path), hosts.hosts[FAULTY_HOST].etc / "tls"
    kept = {path: path.read_bytes() for path in folder.iterdir()}

    def inflict() -> None:
        hosts.stop(FAULTY, signal.SIGKILL)
        for path in (theirs.ca, theirs.cert, theirs.key):
            (folder / path.name).write_bytes(path.read_bytes())
        hosts.start(FAULTY, wait=False)  # for a while it waits itself, for the metadata server

    def mend() -> None:
        hosts.stop(FAULTY, signal.SIGKILL)
        for path, content in kept.items():
            path.write_bytes(content)
        hosts.start(FAULTY)

    run_through(
        hosts,
        load,
        inflict=inflict,
        told={
            **problem(hosts, f"node {FAULTY} has not reported for", "its heartbeats have not arrived for"),
            **logged(
                hosts, FAULTY, f"{hosts.metadata_address}: its certificate is not signed by [node.tls] ca {folder / 'ca.crt'}"
            ),
            **no_heartbeat(hosts),
        },
        mend=mend,
    )


def test_cluster_volume_full_is_told_and_recovers(hosts: ThreeHosts, load: Load, small_disk: Path | None) -> None:
    if small_disk is None:
        pytest.skip("a separate file system requires root and mounts: a full volume was NOT tested")
    filler = small_disk / "filler"

    def inflict() -> None:
        done = subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=64K"], capture_output=True, text=True, check=False)
        assert "No space left" in done.stderr, done.stderr

    run_through(
        hosts,
        load,
        inflict=inflict,
        told={
            **problem(hosts, f"{FAULTY}/nvme0"),
            **logged(hosts, FAULTY, f"write-back failed: volume {FAULTY}/nvme0"),
            "KVStoreVolumeFull": lambda: hosts.alert("KVStoreVolumeFull", FAULTY) == 1,
        },
        mend=filler.unlink,
    )
