"""Which engines can be sent requests: pure book-keeping of health, events in, decisions out.

An engine is *in* once a check has succeeded. It is *out* after some failed checks or failed requests in a row, or one refused
connection; it comes in again with the first check that succeeds after its time out, which doubles with each time until it has
stayed in for as long as the longest. Failed requests alone never put the last engine out that can do something: an engine that
answers checks and fails at requests may fail because of the requests. Without a prefill engine decode engines compute prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.router.config import EngineConfig, HealthLimits, Role


@dataclass(slots=True)
class EngineHealth:
    """How one engine is.

    Attributes:
        config: who it is.
        up: requests may go there.
        models: names that it serves, as of its last check; empty: it does not say, and anything goes.
        failed_checks: in a row.
        failed_requests: in a row.
        out_until_s: not before.
        busy_until_s: it said that it has no room; others first until then.
        limited: requests in a row that it refused for a limit.
        ejections: how often it was put out lately: the exponent of the next time out.
        up_since_s: when it last came in.
        why: it is out.
    """

    config: EngineConfig
    up: bool = False
    models: tuple[str, ...] = ()
    failed_checks: int = 0
    failed_requests: int = 0
    out_until_s: float = 0.0
    busy_until_s: float = 0.0
    limited: int = 0
    ejections: int = 0
    up_since_s: float = 0.0
    why: str = "not checked yet"


class Pool:
    """All engines of a router.

    Args:
        engines: who they are.
        limits: when they are out.
    """

    def __init__(self, engines: Sequence[EngineConfig], limits: HealthLimits) -> None:
        self._limits = limits
        self.engines = {engine.name: EngineHealth(engine) for engine in engines}
        self._change = asyncio.Event()

    async def changed(self) -> None:
        """Waits for the next change of who is in, or of what somebody serves; changes before the call are not noticed."""
        await self._change.wait()

    def candidates(self, role: Role, now_s: float, model: str | None = None) -> list[str]:
        """Engines of a role that requests may go to, in the order of the configuration; those with room, if there are any.

        Args:
            role: wanted.
            now_s: the time.
            model: that they serve; None: any.
        """
        up = [
            health
            for health in self.engines.values()
            if health.up and health.config.role is role and (model is None or not health.models or model in health.models)
        ]
        free = [health for health in up if health.busy_until_s <= now_s]
        return [health.config.name for health in free or up]

    def models(self) -> list[str]:
        """What the engines that are in serve, in order."""
        return list(dict.fromkeys(model for health in self.engines.values() if health.up for model in health.models))

    # ---- active checks
    def check_succeeded(self, name: str, now_s: float, models: Sequence[str] = ()) -> bool:
        """An engine answered a check; says whether it came in by that."""
        health = self.engines[name]
        health.failed_checks = 0
        if health.models != tuple(models):
            health.models = tuple(models)
            self._tell()
        if health.up:
            if now_s - health.up_since_s > self._limits.eject_most_s:
                health.ejections = 0
            return False
        if now_s < health.out_until_s:
            return False
        health.up, health.up_since_s, health.failed_requests, health.why = True, now_s, 0, ""
        self._tell()
        return True

    def check_failed(self, name: str, now_s: float, why: str) -> bool:
        """An engine did not answer a check; says whether it went out by that."""
        health = self.engines[name]
        health.failed_checks += 1
        if health.up and health.failed_checks >= self._limits.failed_checks:
            self._eject(health, now_s, why)
            return True
        if not health.up:
            health.why = why
        return False

    # ---- what requests met
    def succeeded(self, name: str) -> None:
        """A request was answered."""
        health = self.engines[name]
        health.failed_requests = health.limited = 0

    def refused(self, name: str, now_s: float, why: str) -> bool:
        """A connection was refused: nobody is there. Says whether the engine went out by that."""
        health = self.engines[name]
        if not health.up:
            return False
        self._eject(health, now_s, why)
        return True

    def failed(self, name: str, now_s: float, why: str) -> bool:
        """A request was lost; says whether the engine went out by that."""
        health = self.engines[name]
        health.failed_requests += 1
        role = health.config.role
        others = role is Role.PREFILL or any(
            other.up and other is not health and other.config.role is role for other in self.engines.values()
        )
        if not health.up or not others or health.failed_requests < self._limits.failed_requests:
            return False
        self._eject(health, now_s, why)
        return True

    def busy(self, name: str, now_s: float, seconds: float) -> None:
        """It has no room now: others come first for so long."""
        health = self.engines[name]
        health.busy_until_s = max(health.busy_until_s, now_s + min(seconds, self._limits.eject_most_s))

    def limits(self, name: str, now_s: float, seconds: float) -> None:
        """It refused a request for a limit: that may be one client's own, unless it refuses the next one as well."""
        health = self.engines[name]
        health.limited += 1
        if health.limited > 1:
            self.busy(name, now_s, seconds)

    def shun(self, name: str, now_s: float, seconds: float) -> None:
        """It lost a request: others come first for so long, unless all of them do: that was because of the requests, rather."""
        role = self.engines[name].config.role
        others = [one for one in self.engines.values() if one.up and one.config.role is role and one.config.name != name]
        if not others or any(one.busy_until_s <= now_s for one in others):
            self.busy(name, now_s, seconds)

    def _eject(self, health: EngineHealth, now_s: float, why: str) -> None:
        seconds = min(self._limits.eject_most_s, self._limits.eject_s * 2.0 ** min(health.ejections, 32))
        health.up, health.why, health.out_until_s = False, why, now_s + seconds
        health.ejections += 1
        health.failed_checks = health.failed_requests = 0
        self._tell()

    def _tell(self) -> None:
        """Wakes all who wait for a change; who comes later waits for the next one."""
        self._change.set()
        self._change = asyncio.Event()
