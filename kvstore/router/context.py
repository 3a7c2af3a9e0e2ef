"""State that the modules of one router share."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstore.config.router import RouterConfig
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import router as router_metrics
from kvstore.router.health.engine_health import Ejection, EngineHealthTable
from kvstore.router.health.engine_metrics import EngineMetrics
from kvstore.router.placement.inflight import EngineWork, InflightTokens
from kvstore.router.prompts.prefix_memory import PrefixMemory
from kvstore.router.proxy.upstream import AttemptFailure, Upstream

_logger = logging.getLogger(__name__)
_log = LimitedLog(_logger)


@dataclass(slots=True)
class RouterContext:
    """State of one router, used only on its event loop.

    Attributes:
        config: the configuration.
        health: state of each engine.
        inflight: work that this router or the scheduler gave to each engine.
        memory: prefixes that each engine saw recently.
        upstreams: HTTP connections, by engine.
        counters: counters of events.
        metrics: metrics that engines last exported, by engine.
        foreign_work: estimated work from other sources, by engine.
        background: tasks that outlive their request; cancelled when the router stops.
    """

    config: RouterConfig
    health: EngineHealthTable
    inflight: InflightTokens
    memory: PrefixMemory
    upstreams: Mapping[str, Upstream]
    counters: Counters
    metrics: dict[str, EngineMetrics] = field(default_factory=dict)
    foreign_work: dict[str, EngineWork] = field(default_factory=dict)
    background: set[asyncio.Future[Any]] = field(default_factory=set)

    def run_in_background(self, task: asyncio.Future[Any]) -> None:
        """Keep a reference to a task until it ends; its result is ignored."""
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    def work(self, engine: str) -> EngineWork:
        """All work of an engine, known and estimated."""
        own, foreign = self.inflight.work(engine), self.foreign_work.get(engine)
        if foreign is None:
            return own
        return EngineWork(own.sequences + foreign.sequences, own.tokens + foreign.tokens, own.kv_tokens + foreign.kv_tokens)

    def caches(self, engine: str) -> tuple[str, ...]:
        """Names of an engine's published prefix caches among the store's nodes; empty: it publishes none."""
        metrics = self.metrics.get(engine)
        return () if metrics is None else metrics.caches

    def record_success(self, engine: str) -> None:
        """Record a complete 2xx response of an engine."""
        self.health.request_succeeded(engine)

    def record_failure(self, engine: str, failure: AttemptFailure) -> None:
        """Record a failed attempt: count it, log it, and pass it to outlier detection if the engine is at fault."""
        reason = str(failure.error)
        self.counters.add(router_metrics.ATTEMPTS_FAILED[failure.kind])
        _log.warning("attempt failed: %s (kind=%s, reason=%s)", engine, failure.kind, reason)
        if failure.kind.is_engine_fault:
            gateway = failure.kind.is_gateway_failure
            self.record_ejection(engine, self.health.request_failed(engine, self.now_s(), reason, gateway=gateway), reason)

    def record_ejection(self, engine: str, ejection: Ejection | None, reason: str) -> None:
        """Count and log an ejection, or one that was skipped to keep enough engines. None: the engine was not ejected."""
        if ejection is None:
            return
        if ejection.seconds:
            self.counters.add(router_metrics.EJECTIONS[ejection.event])
            _logger.warning("engine ejected: %s (cause=%s, for_s=%g, last=%s)", engine, ejection.event, ejection.seconds, reason)
        else:
            self.counters.add(router_metrics.EJECTIONS_SKIPPED)
            _log.warning("ejection skipped: %s (cause=%s, too few healthy engines, last=%s)", engine, ejection.event, reason)

    @staticmethod
    def now_s() -> float:
        """Monotonic time, as used for health and load."""
        return time.monotonic()
