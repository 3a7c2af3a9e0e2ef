"""Engines that store and load all the time, check every byte, and say how long each request waited."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from kvclient import KVClient
from kvstore.core.types import BlockKey, Outcome
from kvstore.workload.payload import Payloads

BLOCKS = 8
"""Of a request."""
REMEMBERED = 24
"""Requests whose blocks are loaded again: the latest."""
PAUSE_S = 0.03
STORES = 0.3
"""Share of requests that store something new; the others load."""
END_S = 60.0


@dataclass(frozen=True, slots=True)
class Request:
    """One store or load of an engine."""

    engine: str
    kind: str
    begin_s: float
    wait_s: float
    moved_bytes: int
    held_blocks: int
    """Hits of a load, or stored blocks of a store."""
    wrong_blocks: int


@dataclass(frozen=True)
class Phase:
    """Requests of all engines of a span of time."""

    name: str
    requests: tuple[Request, ...]

    def of(self, engine: str) -> Phase:
        """Those of one engine."""
        return Phase(self.name, tuple(one for one in self.requests if one.engine == engine))

    @property
    def moved_bytes(self) -> int:
        return sum(one.moved_bytes for one in self.requests)

    @property
    def longest_s(self) -> float:
        return max((one.wait_s for one in self.requests), default=0.0)

    def __str__(self) -> str:
        if not self.requests:
            return f"{self.name:<22} no requests"
        waits = np.array([one.wait_s for one in self.requests]) * 1e3
        loads = [one for one in self.requests if one.kind == "load"]
        hit = sum(one.held_blocks for one in loads) / max(1, BLOCKS * len(loads))
        return (
            f"{self.name:<22} {len(waits):>4} requests {self.moved_bytes / 2**20:>7.1f} MiB  hit {100 * hit:>5.1f} %"
            f"  wait ms p50 {np.percentile(waits, 50):>7.1f} p99 {np.percentile(waits, 99):>8.1f} max {waits.max():>8.1f}"
        )


class Load:
    """Engines at work. A context manager.

    Args:
        clients: the engines by name; they stay the caller's.
        threads: of each engine.
    """

    def __init__(self, clients: dict[str, KVClient], threads: int = 2) -> None:
        self.engines = tuple(clients)
        self._lock = threading.Lock()
        self._done: list[Request] = []
        self._begun: dict[int, tuple[str, float]] = {}
        self._chains: list[list[BlockKey]] = []
        self._ending = threading.Event()
        self._failed: list[BaseException] = []
        self._next = 0
        self._threads = [
            threading.Thread(target=self._run, args=(name, client, number), name=f"load-{name}-{number}", daemon=True)
            for name, client in clients.items()
            for number in range(threads)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(END_S)
        assert not any(thread.is_alive() for thread in self._threads), "a request did not end"
        assert not self._failed, f"an engine met an exception: {self._failed!r}"

    # ---------------------------------------------------------------- looking
    def ended(self, name: str, begin_s: float, end_s: float) -> Phase:
        """Requests that ended within a span."""
        return self._select(name, lambda begun_s, ended_s: begin_s <= ended_s < end_s)

    def begun(self, name: str, begin_s: float, end_s: float = math.inf) -> Phase:
        """Requests that began within a span. A pending one counts with its wait until now."""
        return self._select(name, lambda begun_s, ended_s: begin_s <= begun_s < end_s)

    def under_way(self, name: str, begin_s: float, end_s: float) -> Phase:
        """Requests in flight at any time of a span. A pending one counts with its wait until now."""
        return self._select(name, lambda begun_s, ended_s: begun_s < end_s and ended_s >= begin_s)

    def _select(self, name: str, wanted: Callable[[float, float], bool]) -> Phase:
        now_s = time.monotonic()
        with self._lock:
            found = [one for one in self._done if wanted(one.begin_s, one.begin_s + one.wait_s)]
            waiting = [Request(engine, "waits", begun_s, now_s - begun_s, 0, 0, 0) for engine, begun_s in self._begun.values()]
        assert not self._failed, f"an engine met an exception: {self._failed!r}"
        return Phase(name, (*found, *(one for one in waiting if wanted(one.begin_s, math.inf))))

    def moved_since(self, begin_s: float) -> dict[str, int]:
        """Bytes by engine, of requests begun since."""
        phase = self.begun("", begin_s)
        return {engine: phase.of(engine).moved_bytes for engine in self.engines}

    def hits_since(self, begin_s: float) -> dict[str, int]:
        """Blocks that loads begun since found, by engine."""
        loads = [one for one in self.begun("", begin_s).requests if one.kind == "load"]
        return {engine: sum(one.held_blocks for one in loads if one.engine == engine) for engine in self.engines}

    @property
    def wrong_blocks(self) -> int:
        """All requests until now."""
        with self._lock:
            return sum(one.wrong_blocks for one in self._done)

    def report(self, phases: Sequence[Phase]) -> str:
        """A table of phases, for assertion messages."""
        rows = [str(phase) for phase in phases]
        rows += [f"  {engine:<8} {phase.of(engine)}" for phase in phases for engine in self.engines]
        return "\n".join(["", *rows])

    # ---------------------------------------------------------------- an engine
    def _run(self, name: str, client: KVClient, number: int) -> None:
        rng = np.random.default_rng([*name.encode(), number])
        payloads = Payloads(client.spec.block_bytes)
        space = np.zeros((BLOCKS, client.spec.block_bytes), np.uint8)
        try:
            while not self._ending.wait(PAUSE_S):
                with self._lock:
                    chain = self._chains[int(rng.integers(len(self._chains)))] if self._chains else None
                    if fresh := chain is None or rng.random() < STORES:
                        self._next += 1
                        seed = self._next
                if fresh:
                    chain = client.keys(
                        np.random.default_rng(seed).integers(0, 1 << 17, BLOCKS * client.spec.block_tokens, np.uint32)
                    )
                    payloads.fill(chain, space)
                else:
                    space[:] = 0
                assert chain is not None
                self._request(name, client, "store" if fresh else "load", chain, space, payloads)
        except BaseException as error:  # noqa: BLE001  # told to the test
            self._failed.append(error)

    def _request(
        self,
        name: str,
        client: KVClient,
        kind: str,
        chain: list[BlockKey],
        space: np.ndarray,  # type: ignore[type-arg]
        payloads: Payloads,
    ) -> None:
        me, begin_s = threading.get_ident(), time.monotonic()
        with self._lock:
            self._begun[me] = (name, begin_s)
        wrong = 0
        if kind == "store":
            stored = client.store(chain, space)
            wait_s = time.monotonic() - begin_s
            moved, held = stored.bytes_stored, stored.held_blocks
        else:
            loaded = client.load(chain, space)
            wait_s = time.monotonic() - begin_s
            moved, held = loaded.bytes_loaded, loaded.hit_blocks
            hits = np.flatnonzero(loaded.outcomes == Outcome.HIT)
            wrong = len(payloads.wrong_blocks([chain[at] for at in hits], space[hits]))
        with self._lock:
            del self._begun[me]
            self._done.append(Request(name, kind, begin_s, wait_s, moved, held, wrong))
            if kind == "store" and held == BLOCKS:
                self._chains = [*self._chains, chain][-REMEMBERED:]
