"""The roles that a server holds, and which server holds the others.

Servers of several hosts that share an index agree by leases in it: each tries to take all roles, renews those that it holds once
per second, and sees within 0.1 s if a role is free. An index that only processes of one host can open does not support leases:
there, each process sweeps, and plans and divides quotas for its own callers.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Protocol

from kvstore.core.clock import Clock
from kvstore.core.errors import KVStoreError
from kvstore.index.contract import LeaseHolder, PrefixIndex, ServerRole
from kvstore.metadata.indexing.index_thread import IndexThread
from kvstore.metadata.roles.lease import Lease, LeaseChange
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import metadata as metadata_metrics

logger = logging.getLogger(__name__)
limited = LimitedLog(logger)

TTL_S: Final = 3.0
MARGIN_S: Final = 0.3
"""Clocks of two hosts differ by less within the time to live."""
RENEW_S: Final = 1.0
TICK_S: Final = 0.1


class Roles(Protocol):
    """The roles of one server process."""

    def holds(self, role: ServerRole) -> bool:
        """Whether this process does the work of a role now."""


class AllRoles:
    """Roles of a process whose index does not support leases."""

    def holds(self, role: ServerRole) -> bool:  # noqa: ARG002  # it holds every role
        return True


class LeasedRoles:
    """Roles of a server that shares its index with servers of other hosts.

    Args:
        index: the index.
        clock: the host's clock that also counts while the host is suspended.
        counters: counters of this process.
        on_change: called on the event loop after a role was taken or lost.
        on_failure: called on the event loop after leases could not be renewed. Other servers may be unable to write to the index,
            too, so nothing follows from what they do not write.
    """

    def __init__(
        self,
        index: PrefixIndex,
        clock: Clock,
        counters: Counters,
        on_change: Callable[[ServerRole, LeaseChange], None],
        on_failure: Callable[[], None],
    ) -> None:
        self._index = index
        self._clock = clock
        self._counters = counters
        self._on_change = on_change
        self._on_failure = on_failure
        self.on_tick: Callable[[], None] | None = None
        """Called several times per second."""
        self._me = LeaseHolder(secrets.token_hex(8), "")
        self._leases = {role: Lease(TTL_S, MARGIN_S) for role in ServerRole}
        self._sent_s = 0.0
        self._thread = IndexThread("metadata-leases")
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def server_id(self) -> str:
        """Id of this server process."""
        return self._me.server

    def holds(self, role: ServerRole) -> bool:
        return self._leases[role].is_valid(self._clock.now_s())

    def owner(self, role: ServerRole) -> LeaseHolder | None:
        """Another server that holds a role; None: none is known. The answer may be 0.1 s old."""
        holder = self._index.lease_holders().get(role)
        return None if holder is None or holder.server == self._me.server else holder

    async def start(self, address: str) -> None:
        """Try to take all roles, and keep them from then on.

        Args:
            address: where other servers reach this one.
        """
        self._me = self._me._replace(address=address)
        await self._renew()
        self._tasks = [
            asyncio.create_task(self._watch(), name="metadata-watch-roles"),
            asyncio.create_task(self._renew_when_due(), name="metadata-renew-leases"),
        ]

    async def stop(self) -> None:
        """Give all roles up, so that other servers take them at once."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        now_s = self._clock.now_s()
        held = False
        for role, lease in self._leases.items():
            changes = lease.released(now_s)
            held = held or bool(changes)
            self._report(role, changes, "the server stops", logging.INFO)
        if held:
            with suppress(KVStoreError):  # else the leases end by themselves
                await self._thread.run(self._index.free_leases, list(ServerRole), self._me)
        await self._thread.close()

    async def _watch(self) -> None:
        while True:
            try:
                now_s = self._clock.now_s()
                for role, lease in self._leases.items():
                    self._report(role, lease.tick(now_s), "not renewed in time")
                if self.on_tick is not None:
                    self.on_tick()
            except Exception:  # process edge: without this task, no lost role would be noticed
                self._counters.add(metadata_metrics.BACKGROUND_BUGS)
                logger.exception("watch of roles failed: unexpected error, trying again")
            await asyncio.sleep(TICK_S)

    async def _renew_when_due(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                a_role_is_free = len(self._index.lease_holders()) < len(self._leases)
                if a_role_is_free or self._clock.now_s() - self._sent_s >= RENEW_S:
                    await self._renew()
            except Exception:  # process edge: without this task, this server would lose its roles and never take them again
                self._counters.add(metadata_metrics.BACKGROUND_BUGS)
                logger.exception("renewal of leases failed: unexpected error, trying again")

    async def _renew(self) -> None:
        self._sent_s = self._clock.now_s()
        renewals = {role: lease.renewal_sent(self._sent_s) for role, lease in self._leases.items()}
        try:
            holders = await self._thread.run(self._index.take_leases, list(ServerRole), self._me, TTL_S)
        except KVStoreError as error:
            self._counters.add(metadata_metrics.LEASE_FAILURES)
            limited.warning("leases not renewed: %s", error)
            self._on_failure()
            return
        now_s = self._clock.now_s()
        for role, lease in self._leases.items():
            holder = holders.get(role)
            if holder == self._me:
                self._report(role, lease.renewal_granted(renewals[role], now_s), "not renewed in time")
            else:
                self._report(role, lease.renewal_refused(renewals[role], now_s), f"another server holds it: {holder}")

    def _report(self, role: ServerRole, changes: Sequence[LeaseChange], reason: str, level: int = logging.WARNING) -> None:
        for change in changes:
            if change is LeaseChange.TAKEN:
                self._counters.add(metadata_metrics.ROLES_TAKEN[role.value])
                logger.info("role taken: %s (server=%s, address=%s)", role, self._me.server, self._me.address)
            else:
                self._counters.add(metadata_metrics.ROLES_LOST[role.value])
                logger.log(level, "role lost: %s (server=%s, reason=%s)", role, self._me.server, reason)
            self._on_change(role, change)
