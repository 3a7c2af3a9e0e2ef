"""The network between the servers of an index splits: three hosts with Valkey servers, and an index of a metadata server on two.

Each host has a primary and the replica of another host's primary. The host that is cut off has the primary of the small state.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from netlab_hosts import HostThread

from kvstore.core.errors import KVStoreError, NotFound
from kvstore.core.types import BlockRun, BootId, NamespaceId, NodeId, Tier, VolumeId
from kvstore.embedded.valkey import SLOTS, ServerHost, ValkeyServers, find_server
from kvstore.index.contract import VolumeEpoch
from kvstore.index.loop_thread import LoopThread
from kvstore.index.valkey.address import ValkeyAddress
from kvstore.index.valkey.index import ValkeyIndex
from kvstore.index.valkey.keys import SETTINGS, SMALL_SLOT
from kvstore.metadata.retention.settings_store import FileSettings, QuotaSetting
from kvstore.metadata.retention.shared_settings import SharedSettings
from kvstore.netlab.lab import HostSpec, LabHost, NetLab
from kvstore.observe.counters import Counters
from samples import sample
from support.chains import chain
from support.wait import wait_until

pytestmark = [
    pytest.mark.skipif(find_server() is None, reason="no valkey-server or redis-server here"),
    pytest.mark.timeout(600),
]

NAMESPACE = NamespaceId(b"n" * 16)
CHAIN = chain("split", 1_000)
PACKED = b"".join(CHAIN)
RUN = BlockRun(NAMESPACE, None, 0, tuple(CHAIN))
TURNS = sample(1, of=20)
SPLIT_S = 5.0
LAST_S = 3.0
"""Time after which Valkey servers of the minority have stopped serving: twice their timeout, and some."""
HEAL_S = 30.0


class Side:
    """A metadata server's index on a host, and the numbers that it drew."""

    def __init__(self, name: str, host: LabHost, cluster: ValkeyServers, folder: Path) -> None:
        self.name = name
        self.thread = HostThread(host)
        self.loop = self.thread.run(lambda: LoopThread(name))
        self.index = self.loop.run(ValkeyIndex.start(ValkeyAddress(cluster.seeds), lookup_budget_s=0.1), HEAL_S)
        self.drawn: list[VolumeEpoch] = []
        value = self.index.shared_value(SETTINGS)
        self.settings = SharedSettings(FileSettings(folder / f"{name}.json"), value, Counters())
        self.loop.run(self.settings.start(), HEAL_S)

    def order(self, tenant: str) -> None:
        """Set a quota of a tenant."""
        quota = QuotaSetting(dram=1)
        self.loop.run(self.settings.change(lambda before: before.with_quota(tenant, quota)), HEAL_S)

    def orders(self) -> set[str]:
        """Tenants whose quota is in force."""
        found = self.settings.read()
        return set() if found is None else set(found.quotas)

    def primaries(self) -> set[str]:
        """Addresses of the primaries that it knows and reaches."""
        return {one.address for one in self.index.backend().servers if one.primary and one.away_s is None}

    def draw(self) -> VolumeEpoch:
        """Open a volume epoch that no other has."""
        volume = VolumeId(f"{self.name}-{len(self.drawn)}")
        epoch = self.index.open_volume_epoch(volume, NodeId(self.name), Tier.DRAM, BootId(os.urandom(16)))
        self.drawn.append(epoch)
        return epoch

    def draw_until(self, deadline_s: float) -> float:
        """Draw numbers as fast as they come. Returns when the last one was drawn."""
        last_s = 0.0
        while time.monotonic() < deadline_s:
            try:
                self.draw()
                last_s = time.monotonic()
            except KVStoreError:
                time.sleep(0.05)
        return last_s

    def hit(self, epoch: VolumeEpoch) -> int:
        try:
            return self.loop.run(self.index.lookup_async(NAMESPACE, PACKED, {epoch}), HEAL_S).blocks
        except KVStoreError:
            return -1

    def close(self) -> None:
        self.loop.run(self.settings.stop(), HEAL_S)
        self.loop.run(self.index.close_async(), HEAL_S)
        self.loop.stop()
        self.thread.close()


class Split:
    """The lab, the cluster and both sides."""

    def __init__(self, lab: NetLab, folder: Path, stack: ExitStack) -> None:
        hosts = [ServerHost(host.compute_ip, host.popen) for host in lab.hosts]
        number = SMALL_SLOT * len(hosts) // SLOTS
        self.minority = lab.hosts[number]
        majority = next(host for host in lab.hosts if host is not self.minority)
        starter = HostThread(majority)
        stack.callback(starter.close)
        self.cluster = starter.run(lambda: ValkeyServers(folder, shards=len(hosts), replicas=1, hosts=hosts))
        stack.callback(self.cluster.close)
        self.small = self.cluster.primaries[number]
        self.starter = starter
        self.alone = Side("alone", self.minority, self.cluster, folder)
        self.others = Side("others", majority, self.cluster, folder)
        self.known_lost: set[VolumeEpoch] = set()
        stack.callback(self.alone.close)
        stack.callback(self.others.close)

    def cut(self) -> None:
        """Cut the minority off, with the primary of the small state."""
        self.starter.run(self._promote)
        for side in (self.alone, self.others):
            wait_until(lambda side=side: self.small.address in side.primaries(), "the server knows its primary")  # type: ignore[misc]
        self.minority.cut("compute")

    def _promote(self) -> None:
        if not self._is_primary():
            assert self.small.call("CLUSTER", "FAILOVER") == b"OK"
            wait_until(self._is_primary, "it is the primary again")
        wait_until(lambda: self.cluster.whole, "each shard has its replica", HEAL_S)

    def _is_primary(self) -> bool:
        role = self.small.call("ROLE")
        return isinstance(role, list) and role[0] == b"master"

    def wait_whole(self) -> None:
        """Wait until each shard has its replica again."""
        self.starter.run(lambda: wait_until(lambda: self.cluster.whole, "each shard has its replica", HEAL_S))


@pytest.fixture(scope="module")
def split(lab_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    with ExitStack() as stack:
        lab = stack.enter_context(NetLab([HostSpec(name) for name in ("a", "b", "c")]))
        yield Split(lab, tmp_path_factory.mktemp("splits"), stack)


def ordered(side: Side, tenant: str) -> bool:
    """Set a quota. Returns whether that was acknowledged."""
    try:
        side.order(tenant)
    except KVStoreError:
        return False
    return True


def split_and_heal(split: Split, turn: int) -> str:
    """Split the network while both sides draw numbers, look up and take orders, and let it heal. Returns what happened."""
    alone, others = split.alone, split.others
    mine, theirs = alone.draw(), others.draw()
    alone.index.publish(mine, [RUN], [])
    others.index.publish(theirs, [RUN], [])
    before = len(alone.drawn), len(others.drawn)
    split.cut()
    began_s = time.monotonic()
    until_s = began_s + SPLIT_S
    drawing = [side.thread.begin(lambda side=side: side.draw_until(until_s)) for side in (alone, others)]  # type: ignore[misc]
    with ThreadPoolExecutor(
        1
    ) as operator:  # its second order makes the settings of the minority newer than those of the majority
        ordering = operator.submit(lambda: [ordered(alone, f"alone {turn} {number}") for number in range(2)])
        hits, hits_alone = [], []
        while time.monotonic() < until_s:
            hits.append(others.hit(theirs))
            hits_alone.append(alone.hit(mine))
            time.sleep(0.02)
        acknowledged = ordering.result()
    last_s = [max(0.0, future.result() - began_s) for future in drawing]
    wait_until(lambda: ordered(others, f"others {turn}"), "the majority takes an order", HEAL_S)
    split.minority.restore("compute")
    assert min(hits) >= 0.99 * len(CHAIN), "for the majority, a shard was lost"
    assert len(others.drawn) > before[1], "the majority goes on"
    assert last_s[0] < LAST_S, "the minority draws nothing"
    assert hits_alone[-1] <= 0
    assert any(acknowledged), "the server of the minority did not know yet that it is cut off"
    healed_s = wait_until(lambda: alone.hit(theirs) == len(CHAIN) == others.hit(theirs), "both find all again", HEAL_S)
    drawn = alone.drawn + others.drawn
    assert len(set(drawn)) == len(drawn), "a number was drawn twice"
    kept, kept_alone = ({info.volume_epoch for info in side.index.volume_epochs()} for side in (others, alone))
    assert kept == kept_alone <= set(drawn)
    lost = set(drawn) - kept
    assert lost <= set(alone.drawn), "the majority lost nothing"
    for epoch in lost - split.known_lost:
        with pytest.raises(NotFound):
            alone.index.publish(epoch, [RUN], [])
    split.known_lost |= lost
    for side in (alone, others):
        epoch = side.draw()
        side.index.publish(epoch, [RUN], [])
        assert side.hit(epoch) == len(CHAIN)
    split.wait_whole()
    wait_until(lambda: alone.orders() == others.orders(), lambda: f"{alone.orders()}, {others.orders()}", HEAL_S)
    assert others.orders() == {f"others {number}" for number in range(turn + 1)}
    return (
        f"the minority drew {len(alone.drawn) - before[0]} numbers, the last after {last_s[0]:.1f} s, and the majority"
        f" {len(others.drawn) - before[1]}; hits of the majority: at least {min(hits)}; healed after {healed_s:.1f} s;"
        f" {sum(acknowledged)} orders of the minority were acknowledged and lost"
    )


def test_split_majority_goes_on_and_minority_heals(split: Split) -> None:
    """No volume epoch number is drawn twice, and orders of the majority stay."""
    for turn in range(TURNS):
        print(f"turn {turn}: {split_and_heal(split, turn)}")
