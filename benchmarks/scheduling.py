"""Measure request scheduling over gRPC by a real metadata server process: requests per second, and the wait of a router.

A request runs through all steps: a router submits it and waits, a prefill and a decode group fetch it and report that its prompt
is computed and that it is done. Routers (asyncio clients with a given number of requests in flight) and leaders run in separate
processes. Two of the six engines are for prefill; the engines of a role form one group. Leaders report again after each answer
(rate) or every 5 ms (wait). Engines are never full, so that requests wait for the scheduler only.

The peer in the same run is the same set of rules, called directly without a planner. The limit is a gRPC server that answers with
a constant, with the same number of calls in flight and one call per request.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import statistics
import tempfile
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

from harness import Figure, Options, Reference, interleave, options
from kvclient import AsyncSchedulerClient, EngineFigures, EngineRequest
from kvclient.scheduling.types import EngineRole
from kvproto.v1.metadata_pb2 import LookupRequest, LookupResponse
from kvproto.v1.metadata_pb2_grpc import MetadataStub
from kvstore.core.errors import KVStoreError
from kvstore.dualpath.groups import Engine, EngineKind
from kvstore.dualpath.scheduler import EngineReport, NewRequest, Scheduler, SchedulerLimits
from kvstore.rpc.client import call_aio, connect_aio
from peers.bare_grpc import BareGrpc
from rig import start_metadata_server

GROUPS: dict[str, tuple[EngineRole, int]] = {"prefill-group": ("prefill", 2), "decode-group": ("decode", 4)}
TOKENS = 30_000
HIT_TOKENS = 29_000
ENOUGH = 1 << 40
DEADLINE_S = 30.0
IN_FLIGHT = 256
POLL_S = 0.005


async def lead(client: AsyncSchedulerClient, group: str, pause_s: float) -> None:
    """Run a leader whose engines finish a request as soon as they get it."""
    role, count = GROUPS[group]
    space = ENOUGH if role == "decode" else 0
    engines = [
        EngineFigures(f"{group}-{number}", f"node-{number}", hbm_tokens=space, tokens=0, sequences=0) for number in range(count)
    ]
    leader = client.leader(group, role)
    done: list[int] = []
    while True:
        news = await leader.report(engines, **{"finished" if role == "decode" else "prefilled": done}, deadline_s=DEADLINE_S)
        done = [one.generation for one in news.assigned if one.prefill is not None and one.decode is not None]
        if pause_s or not done:
            await asyncio.sleep(pause_s or 0.0005)


async def lead_all(address: str, pause_s: float) -> None:
    """Run the leaders of all groups until the process is stopped."""
    async with AsyncSchedulerClient(address) as client:
        await asyncio.gather(*(lead(client, group, pause_s) for group in GROUPS))


def engines_process(address: str, pause_s: float) -> None:
    """Run the process of the leaders."""
    try:
        asyncio.run(lead_all(address, pause_s))
    except (KeyboardInterrupt, KVStoreError):
        return


async def ask(client: AsyncSchedulerClient, names: itertools.count[int], until_s: float, waits_s: list[float]) -> None:
    """Submit sequential requests."""
    while time.perf_counter() < until_s:
        begun_s = time.perf_counter()
        await client.assign(EngineRequest(f"r{next(names)}", TOKENS, HIT_TOKENS, 500), DEADLINE_S)
        waits_s.append(time.perf_counter() - begun_s)


def router_process(address: str, pipe: Connection) -> None:
    """Run the process of routers: read (seconds, requests in flight), write the waits in seconds."""

    async def ask_all(seconds: float, in_flight: int) -> list[float]:
        waits_s: list[float] = []
        until_s = time.perf_counter() + seconds
        async with AsyncSchedulerClient(address) as client:
            await asyncio.gather(*(ask(client, names, until_s, waits_s) for _ in range(in_flight)))
        return waits_s

    names = itertools.count()
    while (told := pipe.recv()) is not None:
        pipe.send(asyncio.run(ask_all(*told)))


class Bed:
    """A server process, a process of leaders, and a process of routers."""

    def __init__(self, folder: Path, pause_s: float) -> None:
        ready = folder / f"ready-{pause_s}"
        index = folder / f"index-{pause_s}"
        self._server = start_metadata_server(ready, index_path=index, alpha_tokens=ENOUGH, beta_tokens=ENOUGH)
        address = json.loads(ready.read_text(encoding="utf-8"))["address"]
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._engines = context.Process(target=engines_process, args=(address, pause_s), daemon=True)
        self._router = context.Process(target=router_process, args=(address, theirs), daemon=True)
        self._engines.start()
        self._router.start()

    def waits_s(self, seconds: float, in_flight: int) -> list[float]:
        """Measure the waits of requests for ``seconds`` seconds."""
        self._pipe.send((seconds, in_flight))
        waits: list[float] = self._pipe.recv()
        return waits

    def close(self) -> None:
        """Stop all three processes."""
        self._pipe.send(None)
        self._router.join(10)
        self._engines.terminate()
        self._engines.join(10)
        self._server.terminate()
        self._server.wait(30)


def pure_rate(seconds: float) -> float:
    """Measure the requests per second of the rules alone: submitted, fetched twice, computed, done."""
    scheduler = Scheduler(SchedulerLimits(ENOUGH, ENOUGH))
    for group, (role, count) in GROUPS.items():
        for number in range(count):
            scheduler.join(Engine(f"{group}-{number}", EngineKind(role), group, f"node-{number}", ENOUGH))
    names, served = itertools.count(), 0
    begun_s = time.perf_counter()
    while time.perf_counter() - begun_s < seconds:
        for _ in range(IN_FLIGHT // 8):
            scheduler.submit(NewRequest(f"r{next(names)}", TOKENS, TOKENS + 500))
        for group, (_, count) in GROUPS.items():
            reports = [EngineReport(f"{group}-{number}", read_tokens=0) for number in range(count)]
            fetched = scheduler.fetch(group, reports)
        for pair in fetched.pairs:
            scheduler.prefill_done(pair.request_id, pair.generation)
            scheduler.finish(pair.request_id, pair.generation)
        served += len(fetched.pairs)
    return served / (time.perf_counter() - begun_s)


def bare_rate(bare: BareGrpc, seconds: float) -> float:
    """Measure the calls per second of a server that answers with a constant."""

    async def ask_all() -> int:
        async with connect_aio(bare.address) as channel:
            stub = MetadataStub(channel)
            until_s = time.perf_counter() + seconds
            calls = 0

            async def ask_on() -> None:
                nonlocal calls
                while time.perf_counter() < until_s:
                    await call_aio(stub.Lookup, LookupRequest(), DEADLINE_S)
                    calls += 1

            await asyncio.gather(*(ask_on() for _ in range(IN_FLIGHT)))
            return calls

    begun_s = time.perf_counter()
    return asyncio.run(ask_all()) / (time.perf_counter() - begun_s)


def measure(opts: Options, folder: Path) -> None:
    """Measure both figures."""
    seconds = opts.pick(full=1.5, quick=1.0, smoke=0.2)
    with ExitStack() as stack:
        busy, polled = Bed(folder, 0.0), Bed(folder, POLL_S)
        stack.callback(busy.close)
        stack.callback(polled.close)
        bare = stack.enter_context(BareGrpc(LookupResponse(hit_blocks=1)))
        rates = interleave(
            {
                "rpc": lambda: len(busy.waits_s(seconds, IN_FLIGHT)) / seconds,
                "pure": lambda: pure_rate(seconds),
                "bare": lambda: bare_rate(bare, seconds),
            },
            opts.repetitions,
        )
        opts.keep(
            Figure("scheduling_rate", "Requests scheduled over gRPC", {"engines": 6, "in_flight": IN_FLIGHT}, "1/s"),
            rates["rpc"],
            limit=Reference("bare gRPC, one call", rates["bare"]),
            peer=Reference("the rules alone", rates["pure"]),
            transport="gRPC, loopback TCP",
        )
        waits = interleave({"p50": lambda: statistics.median(polled.waits_s(seconds, 8)) * 1e3}, opts.repetitions)
        opts.keep(
            Figure(
                "scheduling_wait",
                "Wait of a router for its engines, p50",
                {"engines": 6, "in_flight": 8, "poll_ms": POLL_S * 1e3},
                "ms",
                lower_is_better=True,
            ),
            waits["p50"],
            transport="gRPC, loopback TCP",
        )


def main() -> None:
    """Measure in a scratch folder."""
    opts = options("scheduling", __doc__)
    with tempfile.TemporaryDirectory(dir=opts.scratch) as folder:
        measure(opts, Path(folder))


if __name__ == "__main__":
    main()
