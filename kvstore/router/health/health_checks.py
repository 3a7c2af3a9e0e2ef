"""Active checks: ask each engine periodically whether it is alive, which models it serves, and for its metrics."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace

from kvstore.core import limits
from kvstore.core.errors import KVStoreError
from kvstore.observe.metric_definitions import router as router_metrics
from kvstore.router.context import RouterContext
from kvstore.router.health.engine_metrics import parse_metrics

_log = logging.getLogger(__name__)

_MAX_MODELS = 4_096
_MAX_LOGGED_CHARS = 512
_RESTARTED_S = 1.0
"""Two start times of an engine's process that differ by more mean a restart."""


class HealthChecks:
    """Checks every engine in a separate task, so that an engine that hangs delays no other check.

    Args:
        context: the router's state.
    """

    def __init__(self, context: RouterContext) -> None:
        self._context = context
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Check every engine once, then continue in the background."""
        names = list(self._context.upstreams)
        await asyncio.gather(*(self._check(name) for name in names))
        self._tasks = [asyncio.create_task(self._run(name)) for name in names]

    async def stop(self) -> None:
        """Stop the checks."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _run(self, name: str) -> None:
        while True:
            await asyncio.sleep(self._context.config.check_interval_ms / 1000)
            try:
                await self._check(name)
            except Exception:  # noqa: BLE001  # task edge: without checks, an ejected engine would never return
                self._context.counters.add(router_metrics.BACKGROUND_BUGS)
                _log.exception("check of an engine failed: %s", name)

    async def _check(self, name: str) -> None:
        context, timeout_s = self._context, self._context.config.check_timeout_ms / 1000
        try:
            await context.upstreams[name].get("/health", timeout_s)
        except KVStoreError as error:
            context.counters.add(router_metrics.CHECKS_FAILED)
            context.record_ejection(name, context.health.check_failed(name, context.now_s(), str(error)), str(error))
            engine = context.health.engines[name]
            if engine.failed_checks == 1 and not engine.healthy:  # an ejection by checks has a line, and no first failure
                _log.warning("engine not usable: %s (reason=%s); it is checked until it responds", name, error)
            return
        models = await self._models(name, timeout_s)
        await self._read_metrics(name, timeout_s)
        if context.health.check_succeeded(name, context.now_s(), models):
            _log.info("engine healthy: %s (models=%s)", name, ", ".join(models)[:_MAX_LOGGED_CHARS] or "not listed")

    async def _models(self, name: str, timeout_s: float) -> list[str]:
        """Return the models that an engine lists; empty if it does not (it may require a key)."""
        try:
            response = json.loads(await self._context.upstreams[name].get("/v1/models", timeout_s))
            models = [entry["id"] for entry in response["data"][:_MAX_MODELS]]
        except (KVStoreError, ValueError, KeyError, TypeError, RecursionError):
            self._context.counters.add(router_metrics.MODELS_UNKNOWN)
            return []
        return [model for model in models if isinstance(model, str) and len(model) <= limits.MAX_NAME_BYTES]

    async def _read_metrics(self, name: str, timeout_s: float) -> None:
        """Read an engine's metrics.

        If that fails, its load counts as zero, but its capacity and start time stay. With another capacity it would be a new
        engine to the scheduler, which would then release all requests of the old one.
        """
        context = self._context
        before = context.metrics.get(name)
        try:
            text = await context.upstreams[name].get("/metrics", timeout_s)
        except KVStoreError:
            context.counters.add(router_metrics.METRICS_UNKNOWN)
            context.foreign_work.pop(name, None)
            if before is not None:
                context.metrics[name] = replace(before, running=0, waiting=0, used_tokens=0)
            return
        context.foreign_work.pop(name, None)
        metrics = context.metrics[name] = parse_metrics(text)
        foreign = metrics.foreign_work(context.inflight.work(name))
        if foreign is not None:
            context.foreign_work[name] = foreign
        if before is not None and abs(metrics.started_s - before.started_s) > _RESTARTED_S:
            context.memory.forget(name)
            _log.info("engine restarted: %s (prefix memory cleared)", name)
