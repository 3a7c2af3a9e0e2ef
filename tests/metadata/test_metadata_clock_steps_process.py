"""The time of day of metadata servers and of Valkey servers is set an hour on or back, in real processes: nothing happens."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import IO

import pytest
from metadata_harness import Peer, ServerProcess, run_of, server_process

from kvproto.v1 import metadata_pb2 as pb
from kvstore.core.errors import KVStoreError
from kvstore.embedded import children
from kvstore.embedded.valkey import SLOTS, ServerHost, ServerStarter, ValkeyServer, ValkeyServers, find_server
from kvstore.index.valkey.keys import SMALL_SLOT
from kvstore.rpc.client import call_aio, connect_aio
from samples import sample
from support.chains import chain
from support.stepped_clock import SteppedClock, build
from support.wait import wait_until_async

HOUR_S = 3_600
KEYS = chain("clocks", 60)
SERVERS = 2
SHARDS = 3
CALM_S = 3.5
"""Longer than a lease, the time to live of a node and the timeout of Valkey servers."""
TAKE_OVER_S = 6.0
MOST_FAILED_PLANS = 5

pytestmark = [
    pytest.mark.skipif(find_server() is None, reason="no valkey-server or redis-server here"),
    pytest.mark.timeout(600),
]


class Store:
    """Servers whose clocks can be set."""

    def __init__(self, folder: Path, stack: ExitStack, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.valkey_clocks = [SteppedClock(library, folder / f"valkey-{number}") for number in range(SHARDS)]
        self.clocks = [SteppedClock(library, folder / f"metadata-{number}") for number in range(SERVERS)]
        hosts = [ServerHost(start=_starter(clock)) for clock in self.valkey_clocks]
        self.valkey = stack.enter_context(ValkeyServers(folder / "valkey", shards=SHARDS, replicas=1, hosts=hosts))
        self.servers: list[ServerProcess] = []
        for number, clock in enumerate(self.clocks):
            home = folder / f"server-{number}"
            home.mkdir()
            with monkeypatch.context() as patch:
                for name, value in clock.environment.items():
                    patch.setenv(name, value)
                made = server_process(home, engine=self.valkey.url, lookup_shard_ms=200)
                self.servers.append(stack.enter_context(made))


def _starter(clock: SteppedClock) -> ServerStarter:
    def begin(
        argv: Sequence[str], *, stdout: IO[bytes], stderr: IO[bytes], cwd: Path | None, env: Mapping[str, str] | None
    ) -> subprocess.Popen[bytes]:
        return children.start(argv, stdout=stdout, stderr=stderr, cwd=cwd, env={**(env or os.environ), **clock.environment})

    return begin


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    library = build(tmp_path)
    if library is None:
        pytest.skip("no C compiler here")
    with ExitStack() as stack:
        yield Store(tmp_path, stack, library, monkeypatch)


class Watch:
    """A node that beats at both servers in turn, and figures of its callers."""

    def __init__(self, peers: list[Peer]) -> None:
        self.peers = peers
        self.fewest = len(KEYS)
        self.failed_lookups = 0
        self.failed_plans = 0
        self.lookups = 0

    def __str__(self) -> str:
        return (
            f"{self.lookups} lookups, {self.failed_lookups} failed, fewest blocks {self.fewest}, {self.failed_plans} failed plans"
        )

    async def run(self) -> None:
        while True:
            for peer in self.peers:
                with suppress(KVStoreError):
                    await peer.beat()
                try:
                    self.fewest = min(self.fewest, await peer.hit(KEYS))
                    self.lookups += 1
                except KVStoreError:
                    self.failed_lookups += 1
                try:
                    await plan(peer)
                except KVStoreError:
                    self.failed_plans += 1
            await asyncio.sleep(0.05)


async def plan(peer: Peer) -> None:
    request = pb.PlanLoadRequest(
        operation_id=secrets.token_bytes(16), prefill_node="host-1", blocks=1, block_bytes=1, block_tokens=1, budget_ms=60_000
    )
    await call_aio(peer.stub.PlanLoad, request, 1.0)


async def test_wall_clocks_step_an_hour_nothing_happens(store: Store) -> None:
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(connect_aio(server.address)) for server in store.servers]
        peers = [Peer(channel) for channel in channels]
        for peer in peers:
            peer.boot_id = peers[0].boot_id
        await peers[0].register()
        await peers[0].publish(peers[0].nvme, run_of(KEYS), sync_end=True)
        for peer in peers:
            await wait_until_async(lambda peer=peer: _plans(peer))  # type: ignore[misc]
            await wait_until_async(lambda peer=peer: _finds_all(peer))  # type: ignore[misc]
        small = SMALL_SLOT * SHARDS // SLOTS
        hosts = {"metadata 0": store.clocks[0], f"Valkey {small}": store.valkey_clocks[small]}
        others = {f"Valkey {number}": clock for number, clock in enumerate(store.valkey_clocks) if number != small}
        steps = [({**hosts}, offset_s) for offset_s in (HOUR_S, -HOUR_S)]
        more = [({name: clock}, offset_s) for name, clock in (hosts | others).items() for offset_s in (HOUR_S, 0, -HOUR_S)]
        for clocks, offset_s in steps + more[: sample(0, of=len(more))]:
            watch = Watch(peers)
            task = asyncio.create_task(watch.run())
            for clock in clocks.values():
                clock.step(offset_s)
            await asyncio.sleep(CALM_S)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            print(f"{', '.join(clocks)} at {offset_s:+} s: {watch}")
            assert (watch.failed_lookups, watch.fewest) == (0, len(KEYS))
            assert watch.failed_plans <= MOST_FAILED_PLANS, "a lease ended early, and was taken again"
        assert _difference_s(store.valkey.primaries[small]) < -HOUR_S / 2, "its clock is wrong"
        assert store.valkey.whole
        assert [(await peer.counters()).get("metadata_nodes_expired_total", 0) for peer in peers] == [0, 0]
        owner = [await _holds_plan(peer) for peer in peers].index(True)
        store.valkey_clocks[small].step(-2 * HOUR_S)  # so its leases do not end by themselves
        store.servers[owner].stop(signal.SIGKILL)
        began_s = time.monotonic()
        await wait_until_async(lambda: _plans(peers[1 - owner]))
        print(f"another server plans {time.monotonic() - began_s:.1f} s after the owner was killed")
        assert time.monotonic() - began_s < TAKE_OVER_S


def _difference_s(server: ValkeyServer) -> float:
    """Difference between the clock of a server and that of this process."""
    answer = server.call("TIME")
    assert isinstance(answer, list)
    return int(answer[0]) - time.time()


async def _holds_plan(peer: Peer) -> bool:
    counters = await peer.counters()
    return counters.get("metadata_roles_taken_plan_total", 0) > counters.get("metadata_roles_lost_plan_total", 0)


async def _finds_all(peer: Peer) -> bool:
    return await peer.hit(KEYS) == len(KEYS)


async def _plans(peer: Peer) -> bool:
    """Whether a server plans for a node that is alive."""
    with suppress(KVStoreError):
        await peer.beat()
        await plan(peer)
        return True
    return False
