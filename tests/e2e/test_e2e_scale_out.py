"""The demo on two metadata servers and three Valkey shards, while random servers are killed with SIGKILL and started again."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from kvstore.embedded.cluster import LocalCluster
from kvstore.embedded.restarts import ClusterSupervisor
from kvstore.embedded.valkey import ValkeyServers, find_server
from kvstore.replay.demo import DemoPlan, demo_cluster, run_workload
from kvstore.rpc.failover.selection import PROBE_MAX_S
from samples import sample
from support.wait import wait_until

PLAN = DemoPlan(sessions=3, max_turns=sample(20, of=40), servers=2, shards=3)
PAUSE_S = (0.1, 1.5)
"""Time between two kills."""
TURN_S = 0.4
"""A turn takes at least this long, so that the workload outlasts many kills."""
KNOWN_S = PROBE_MAX_S + 1.0
"""Time after the start of a metadata server in which every client has found it, by a probe."""
MOST_LOST = 0.002
"""Share of hit blocks that may be missing. Until a replica has replaced its primary, a lookup does not know the records of that
shard: a hit whose last block is one of them ends at the block before it, on average half a block earlier with three shards. One
lookup that fails would cost more than this share."""

pytestmark = pytest.mark.skipif(find_server() is None, reason="no valkey-server or redis-server on this machine")


class Killer(threading.Thread):
    """Kills random servers of a cluster and starts them again. A context manager.

    One metadata server and one Valkey server may be away at a time. A metadata server is killed only after clients have had time
    to find that the other one is back. A Valkey server is killed only while all others run and every replica has the contents of
    its primary.
    """

    def __init__(self, cluster: LocalCluster, seed: int) -> None:
        super().__init__(name="killer")
        assert cluster.valkey is not None
        self._cluster = cluster
        self._valkey: ValkeyServers = cluster.valkey
        self._random = random.Random(seed)
        self._ended = threading.Event()
        self.story: list[str] = []
        self.kills = {"metadata": 0, "primary": 0, "replica": 0}
        self._metadata_since_s = time.monotonic()
        """When all metadata servers were found running."""
        self.failed: list[BaseException] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        try:
            self._kill_and_restart()
        except BaseException as error:
            self.failed.append(error)
            raise

    def _kill_and_restart(self) -> None:
        redundant = ClusterSupervisor(self._cluster, self._tell)
        next_s = time.monotonic()
        while not self._ended.wait(0.05):
            were_away = redundant.away
            redundant.poll()  # starts servers, which takes a while
            if (were_away | redundant.away) & set(self._cluster.metadata_addresses):
                self._metadata_since_s = time.monotonic()
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + self._random.uniform(*PAUSE_S)
                self._kill_one(redundant.away)

    def _kill_one(self, away: frozenset[str]) -> None:
        known = time.monotonic() - self._metadata_since_s > KNOWN_S
        metadata = sorted(self._cluster.metadata_addresses)
        victims = [*(metadata if known else []), *(self._valkey.servers if not away - {*metadata} and self._valkey.whole else [])]
        if not victims:
            return
        victim = self._random.choice(victims)
        if isinstance(victim, str):
            self.kills["metadata"] += 1
            self._tell(f"kill {victim}")
            self._cluster.node(victim).process.kill()
            self._metadata_since_s = time.monotonic()
        else:
            role = "primary" if b"role:master" in bytes(victim.call("INFO", "replication")) else "replica"  # type: ignore[call-overload]
            self.kills[role] += 1
            self._tell(f"kill Valkey {role} {victim.address}")
            victim.end()

    def _tell(self, event: str) -> None:
        self.story.append(f"{time.monotonic():.2f} {event}")


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(2, 6))])
def test_demo_servers_killed_serves_right_bytes(tmp_path: Path, seed: int) -> None:
    with demo_cluster(PLAN, tmp_path) as cluster, Killer(cluster, seed) as killer:
        began_s = time.monotonic()

        def pace(done: int, _note: str, _total: int | None = None) -> None:
            time.sleep(max(0.0, began_s + done * TURN_S - time.monotonic()))

        result = run_workload(cluster, PLAN, pace)
    print(f"seed {seed}: killed {killer.kills}; {result.to_json()}", *killer.story, sep="\n")
    assert killer.failed == []
    assert sum(killer.kills.values()) >= 5
    assert result.problem is None
    assert result.tally.wrong_bytes == 0
    assert dict(result.tally.errors) == {}
    assert result.possible_hits - result.tally.blocks_hit <= MOST_LOST * result.possible_hits


def test_shard_lost_with_replica_is_started_again(tmp_path: Path) -> None:
    story: list[str] = []
    with LocalCluster([], tmp_path, servers=2, shards=3) as cluster:
        redundant = ClusterSupervisor(cluster, story.append)
        assert cluster.valkey is not None
        for server in (cluster.valkey.primaries[1], cluster.valkey.replicas[1]):
            server.end()

        def is_whole() -> bool:
            redundant.poll()
            return not redundant.away and cluster.valkey is not None and cluster.valkey.whole

        wait_until(is_whole, "the shard runs again", timeout_s=60.0)
    assert any("was not replaced by its replica" in event for event in story), story
