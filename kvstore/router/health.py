"""Active checks: asks each engine in turn whether it lives, what it serves and how it is."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace

from kvstore.core import limits
from kvstore.core.errors import KVStoreError
from kvstore.router.engine_metrics import parse_metrics
from kvstore.router.parts import Parts

_log = logging.getLogger(__name__)

_MAX_MODELS = 4_096
_RESTARTED_S = 1.0
"""Starts of a process that lie further apart are two."""


class HealthChecks:
    """Checks all engines, each on its own beat, so that one that hangs holds up no other.

    Args:
        parts: of the router.
        first: set once every engine was checked.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Checks every engine once, then goes on in the background."""
        names = list(self._parts.upstreams)
        await asyncio.gather(*(self._check(name) for name in names))
        self._tasks = [asyncio.create_task(self._go_on(name)) for name in names]

    async def stop(self) -> None:
        """Ends the checks."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _go_on(self, name: str) -> None:
        while True:
            await asyncio.sleep(self._parts.config.health.interval_s)
            await self._check(name)

    async def _check(self, name: str) -> None:
        parts, timeout_s = self._parts, self._parts.config.health.timeout_s
        upstream = parts.upstreams[name]
        try:
            await upstream.get("/health", timeout_s)
        except KVStoreError as error:
            parts.counters.add("router_checks_failed_total")
            if parts.pool.check_failed(name, parts.now_s(), str(error)):
                _log.warning("engine %s is out: %s", name, error)
            return
        models = await self._models(name, timeout_s)
        await self._figures(name, timeout_s)
        if parts.pool.check_succeeded(name, parts.now_s(), models):
            _log.info("engine %s is in: %s", name, ", ".join(models)[:512] or "it does not say what it serves")

    async def _models(self, name: str, timeout_s: float) -> list[str]:
        """What it serves; empty where it does not say (it may ask for a key): then anything goes there."""
        try:
            answer = json.loads(await self._parts.upstreams[name].get("/v1/models", timeout_s))
            models = [entry["id"] for entry in answer["data"][:_MAX_MODELS]]
        except (KVStoreError, ValueError, KeyError, TypeError, RecursionError):
            self._parts.counters.add("router_models_unknown_total")
            return []
        return [model for model in models if isinstance(model, str) and len(model) <= limits.MAX_NAME_BYTES]

    async def _figures(self, name: str, timeout_s: float) -> None:
        """How it is; without an answer, what it was doing no longer counts, and what it is (its room, its start) still does.

        Meanwhile the last answer stands: with other room it would be another engine to the scheduler, which takes all from it.
        """
        before = self._parts.metrics.get(name)
        try:
            text = await self._parts.upstreams[name].get("/metrics", timeout_s)
        except KVStoreError:
            self._parts.counters.add("router_metrics_unknown_total")
            self._parts.foreign.pop(name, None)
            if before is not None:
                self._parts.metrics[name] = replace(before, running=0, waiting=0, used_tokens=0)
            return
        self._parts.foreign.pop(name, None)
        metrics = self._parts.metrics[name] = parse_metrics(text)
        beyond = metrics.beyond(self._parts.ledger.load(name))
        if beyond is not None:
            self._parts.foreign[name] = beyond
        if before is not None and abs(metrics.started_s - before.started_s) > _RESTARTED_S:
            self._parts.memory.forget(name)
            _log.info("engine %s was restarted: what its cache held is forgotten", name)
