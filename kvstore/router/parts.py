"""What the pieces of a router share, and what a request asks of whoever places it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvstore.observe.counters import Counters
from kvstore.router.config import RouterConfig
from kvstore.router.engine_metrics import EngineMetrics
from kvstore.router.ledger import EngineLoad, Ledger
from kvstore.router.pool import Pool
from kvstore.router.prefix_memory import PrefixMemory
from kvstore.router.upstream import Upstream


@dataclass(slots=True)
class Parts:
    """One router's state. Used on its event loop only.

    Attributes:
        config: what it was told.
        pool: who is there.
        ledger: who has how much to do.
        memory: who has seen which prefix.
        upstreams: connections, by engine.
        counters: events.
        metrics: what engines last said of themselves.
        foreign: what engines do that neither this router nor the scheduler knows of, by engine.
        running: work that goes on by itself, to be ended with the router.
    """

    config: RouterConfig
    pool: Pool
    ledger: Ledger
    memory: PrefixMemory
    upstreams: Mapping[str, Upstream]
    counters: Counters
    metrics: dict[str, EngineMetrics] = field(default_factory=dict)
    foreign: dict[str, EngineLoad] = field(default_factory=dict)
    running: set[asyncio.Future[Any]] = field(default_factory=set)

    def keep(self, work: asyncio.Future[Any]) -> None:
        """Lets work end by itself; nobody waits for its result."""
        self.running.add(work)
        work.add_done_callback(self.running.discard)

    def load(self, engine: str) -> EngineLoad:
        """All that an engine has to do."""
        own, foreign = self.ledger.load(engine), self.foreign.get(engine)
        if foreign is None:
            return own
        return EngineLoad(own.sequences + foreign.sequences, own.tokens + foreign.tokens, own.room_tokens + foreign.room_tokens)

    @staticmethod
    def now_s() -> float:
        """The time that health and load go by."""
        return time.monotonic()


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request that needs engines.

    Attributes:
        attempt: names this try of it; unique.
        model: to be served; empty: any.
        prompt_tokens: its length, at least 1; a guess where nobody counted.
        near_tokens: by engine: how much of the prompt is at hand there.
        hit_tokens: how much of it is in the store, at whatever place.
        output_tokens: what its answer will take; a guess.
        avoid: engines that failed it before.
    """

    attempt: str
    model: str
    prompt_tokens: int
    near_tokens: Mapping[str, int]
    hit_tokens: int
    output_tokens: int
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request goes.

    Attributes:
        attempt: see ``Wanted``.
        engine: who answers: a plain engine, or one that decodes.
        prefill: who computes the prompt; None: the engine that answers.
    """

    attempt: str
    engine: str
    prefill: str | None = None


class Placement(Protocol):
    """Decides where requests go. Every placed request is ended by ``done`` or ``dropped``."""

    async def place(self, wanted: Wanted) -> Place:
        """Waits for engines.

        Raises:
            Unavailable: nobody is there.
            DeadlineExceeded: nobody has room in time.
        """
        ...

    def prefilled(self, place: Place) -> None:
        """Its prompt is computed."""
        ...

    def done(self, place: Place) -> None:
        """It was answered."""
        ...

    def dropped(self, place: Place) -> None:
        """It was not, and is no longer wanted there."""
        ...
