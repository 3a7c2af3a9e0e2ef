"""Health of engines: a pure state machine. Time is always an argument.

How it works:

1. An engine is HEALTHY, EJECTED or PROBING. ``TRANSITIONS`` lists every change; other events leave the state as it is.
2. Active checks: ``failed_checks`` consecutive failures eject an engine. A new engine starts in PROBING.
3. Outlier detection, after Envoy's: ``gateway_failures`` consecutive gateway failures (connect error, reset, timeout, 502, 503,
   504) eject an engine. So do ``server_errors`` consecutive 5xx responses; a gateway failure counts as one of those as well.
4. A completed 2xx response resets both counters. A 4xx response is the client's error: it changes nothing.
5. The n-th ejection lasts n times ``ejection_time_s``, at most ``max_ejection_time_s``. After it the engine is PROBING until a
   check succeeds. An engine that stays healthy for ``max_ejection_time_s`` starts again at n = 1.
6. Outlier detection ejects at most ``max_ejected_share`` of a role's engines (at least one), and never the last healthy engine.
   This rule does not protect prefill engines, because decode engines can compute prompts, nor engines that fail checks.
7. Panic mode: if no engine of a role is healthy, requests may use all of its engines. Prefill engines are excluded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvstore.router.engines import EngineConfig, HealthLimits, Role


class HealthState(StrEnum):
    """State of one engine."""

    HEALTHY = "healthy"
    EJECTED = "ejected"
    PROBING = "probing"


class HealthEvent(StrEnum):
    """Event that can change an engine's state."""

    FAILED_CHECKS = "failed_checks"
    GATEWAY_FAILURES = "gateway_failures"
    SERVER_ERRORS = "server_errors"
    EJECTION_EXPIRED = "ejection_expired"
    CHECK_SUCCEEDED = "check_succeeded"


TRANSITIONS: Final[Mapping[tuple[HealthState, HealthEvent], HealthState]] = {
    (HealthState.HEALTHY, HealthEvent.FAILED_CHECKS): HealthState.EJECTED,
    (HealthState.HEALTHY, HealthEvent.GATEWAY_FAILURES): HealthState.EJECTED,
    (HealthState.HEALTHY, HealthEvent.SERVER_ERRORS): HealthState.EJECTED,
    (HealthState.EJECTED, HealthEvent.EJECTION_EXPIRED): HealthState.PROBING,
    (HealthState.PROBING, HealthEvent.CHECK_SUCCEEDED): HealthState.HEALTHY,
}
"""All state changes. An event without an entry for the current state has no effect."""


@dataclass(slots=True)
class EngineHealth:
    """Health of one engine.

    Attributes:
        config: the engine.
        state: current state.
        reason: why the engine is not healthy; empty if it is.
        models: names of the models that it serves, from its last check; empty if the engine does not list them.
        failed_checks: consecutive failed checks.
        gateway_failures: consecutive gateway failures.
        server_errors: consecutive 5xx responses and gateway failures.
        ejections: recent ejections; they determine the duration of the next one.
        ejected_until_s: end of the ejection.
        healthy_since_s: time of the last change to HEALTHY.
    """

    config: EngineConfig
    state: HealthState = HealthState.PROBING
    reason: str = "not checked yet"
    models: tuple[str, ...] = ()
    failed_checks: int = 0
    gateway_failures: int = 0
    server_errors: int = 0
    ejections: int = 0
    ejected_until_s: float = 0.0
    healthy_since_s: float = 0.0

    @property
    def healthy(self) -> bool:
        """Whether the engine is in normal use."""
        return self.state is HealthState.HEALTHY


@dataclass(frozen=True, slots=True)
class Ejection:
    """An engine reached a limit.

    Attributes:
        event: the limit.
        seconds: duration of the ejection; 0 if the engine was kept because too few others are healthy.
    """

    event: HealthEvent
    seconds: float


class EngineHealthTable:
    """Health of all engines of one router.

    Args:
        engines: the engines.
        limits: when engines are ejected, and for how long.
    """

    def __init__(self, engines: Sequence[EngineConfig], limits: HealthLimits) -> None:
        self._limits = limits
        self.engines = {engine.name: EngineHealth(engine) for engine in engines}
        self._changed = asyncio.Event()

    # ---- queries
    def healthy(self, role: Role, model: str | None = None) -> list[str]:
        """Healthy engines, in the order of the configuration.

        Args:
            role: required role.
            model: required model; None if any will do. Engines that list the model are preferred to those that list nothing.
        """
        return _serving([engine for engine in self._of(role) if engine.healthy], model)

    def candidates(self, role: Role, model: str | None = None) -> list[str]:
        """Engines that a request may use: the healthy ones, or all of them in panic mode. Arguments as for ``healthy``."""
        engines = self._of(role)
        return self.healthy(role, model) if not self.in_panic(role) else _serving(engines, model)

    def in_panic(self, role: Role) -> bool:
        """Whether none of a role's engines is healthy, so that all of them are used."""
        return role is not Role.PREFILL and not any(engine.healthy for engine in self._of(role))

    def models(self) -> list[str]:
        """Models that the engines list, without duplicates."""
        return list(dict.fromkeys(model for engine in self.engines.values() for model in engine.models))

    async def changed(self) -> None:
        """Wait for the next change of an engine's state or models."""
        await self._changed.wait()

    # ---- active checks
    def check_succeeded(self, name: str, now_s: float, models: Sequence[str] = ()) -> bool:
        """Record a successful check.

        Returns:
            Whether the engine became healthy by it.
        """
        engine = self.engines[name]
        engine.failed_checks = 0
        if engine.models != tuple(models):
            engine.models = tuple(models)
            self._notify()
        if engine.healthy and now_s - engine.healthy_since_s >= self._limits.max_ejection_time_s:
            engine.ejections = 0
        self._expire(engine, now_s)
        if not self._apply(engine, HealthEvent.CHECK_SUCCEEDED):
            return False
        engine.gateway_failures = engine.server_errors = 0
        engine.healthy_since_s, engine.reason = now_s, ""
        return True

    def check_failed(self, name: str, now_s: float, reason: str) -> Ejection | None:
        """Record a failed check.

        Returns:
            The ejection that it caused, if any.
        """
        engine = self.engines[name]
        engine.failed_checks += 1
        self._expire(engine, now_s)
        if not engine.healthy:
            engine.reason = reason
            return None
        if engine.failed_checks < self._limits.failed_checks:
            return None
        return self._eject(engine, HealthEvent.FAILED_CHECKS, now_s, reason)

    # ---- outcomes of requests
    def request_succeeded(self, name: str) -> None:
        """Record a complete 2xx response."""
        engine = self.engines[name]
        engine.gateway_failures = engine.server_errors = 0

    def request_failed(self, name: str, now_s: float, reason: str, *, gateway: bool) -> Ejection | None:
        """Record a failed request.

        Args:
            name: the engine.
            now_s: current time.
            reason: for people.
            gateway: a gateway failure; otherwise another 5xx response.

        Returns:
            The ejection that it caused or would have caused, if any.
        """
        engine = self.engines[name]
        if not engine.healthy:
            return None
        engine.gateway_failures = engine.gateway_failures + 1 if gateway else 0
        engine.server_errors += 1
        if engine.gateway_failures >= self._limits.gateway_failures:
            event = HealthEvent.GATEWAY_FAILURES
        elif engine.server_errors >= self._limits.server_errors:
            event = HealthEvent.SERVER_ERRORS
        else:
            return None
        return self._eject(engine, event, now_s, reason) if self._may_eject(engine) else Ejection(event, 0.0)

    # ---- state changes
    def _may_eject(self, engine: EngineHealth) -> bool:
        """Whether outlier detection may eject this healthy engine, in view of its role's other engines."""
        if engine.config.role is Role.PREFILL:
            return True
        peers = self._of(engine.config.role)
        ejected = sum(not peer.healthy for peer in peers)
        return ejected + 1 < len(peers) and ejected + 1 <= max(1, int(self._limits.max_ejected_share * len(peers)))

    def _eject(self, engine: EngineHealth, event: HealthEvent, now_s: float, reason: str) -> Ejection:
        engine.ejections += 1
        seconds = min(self._limits.ejection_time_s * engine.ejections, self._limits.max_ejection_time_s)
        engine.ejected_until_s, engine.reason = now_s + seconds, reason
        self._apply(engine, event)
        return Ejection(event, seconds)

    def _expire(self, engine: EngineHealth, now_s: float) -> None:
        if now_s >= engine.ejected_until_s:
            self._apply(engine, HealthEvent.EJECTION_EXPIRED)

    def _apply(self, engine: EngineHealth, event: HealthEvent) -> bool:
        """Change the state as ``TRANSITIONS`` says; return whether it changed."""
        after = TRANSITIONS.get((engine.state, event))
        if after is None:
            return False
        engine.state = after
        self._notify()
        return True

    def _of(self, role: Role) -> list[EngineHealth]:
        return [engine for engine in self.engines.values() if engine.config.role is role]

    def _notify(self) -> None:
        """Wake all tasks in ``changed``."""
        self._changed.set()
        self._changed = asyncio.Event()


def _serving(engines: Sequence[EngineHealth], model: str | None) -> list[str]:
    """Names of the engines that list a model; if none does, of those that list nothing."""
    if model is not None:
        listed = [engine for engine in engines if model in engine.models]
        engines = listed or [engine for engine in engines if not engine.models]
    return [engine.config.name for engine in engines]
