"""Operator settings of several metadata servers: a small value that all of them share, and a copy in a file of each.

1. A change replaces the shared value if it still is what the change was made from. So of two changes at the same time one is
   made again on top of the other, and conditions of a change (``If-Match``) hold over all servers.
2. Each server copies the shared value to its file, and hands out its copy while it cannot reach the value.
3. A server that finds the value missing, or finds a value from which its copy was made, restores it. So settings survive the loss
   of all shared values and of all servers but one.
4. If neither the copy nor the value was made from the other, the shared value stays and the difference is logged. That happens
   if changes were made on both sides of a split network, and Valkey kept those of the majority.

``reconcile`` decides and is pure. ``SharedSettings`` acts.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Final, Protocol

from kvstore.core.errors import Conflict, KVStoreError
from kvstore.metadata.retention.settings_store import (
    FileSettings,
    OperatorSettings,
    SettingsEdit,
    SettingsStore,
    unreadable,
)
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import metadata as metadata_metrics

logger: Final = logging.getLogger(__name__)
limited: Final = LimitedLog(logger)

POLL_S: Final = 0.25
"""Interval at which a server reads the shared value."""
MAX_RACES: Final = 32
"""Attempts to make a change while others change the settings."""


class SettingsValue(Protocol):
    """A value that all servers share. It may be lost, or become older than it was."""

    async def read(self) -> bytes | None:
        """The value; None: there is none.

        Raises:
            Unavailable: it cannot be reached.
        """

    async def replace(self, before: bytes | None, after: bytes) -> bool:
        """Replace the value if it is ``before`` (None: absent). Returns whether it is ``after`` now.

        Raises:
            Unavailable: it cannot be reached; the value may have been replaced.
        """


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """What a server does after it has read its copy and the shared value.

    Args:
        settings: the settings in force; the copy becomes these.
        write_shared: whether the shared value must become these settings.
        lost: a copy with changes that the settings lack; None: there are none.
    """

    settings: OperatorSettings
    write_shared: bool
    lost: OperatorSettings | None = None


def reconcile(copy: OperatorSettings, shared: OperatorSettings | None) -> Reconciliation:
    """Decide which settings are in force. Pure.

    Args:
        copy: this server's copy.
        shared: the shared value; None: it is missing.
    """
    if shared is None:
        return Reconciliation(copy, write_shared=copy != OperatorSettings())
    if shared.descends_from(copy):
        return Reconciliation(shared, write_shared=False)
    if copy.descends_from(shared):
        return Reconciliation(copy, write_shared=True)
    return Reconciliation(shared, write_shared=False, lost=None if copy == shared else copy)


class SharedSettings(SettingsStore):
    """A shared value with a copy in a file.

    Args:
        file: the copy.
        value: the shared value.
        counters: counters of this process.
    """

    def __init__(self, file: FileSettings, value: SettingsValue, counters: Counters) -> None:
        super().__init__(file.path)
        self._file = file
        self._value = value
        self._counters = counters
        self._newest = OperatorSettings()  # newer than the file if that could not be written
        self._task: asyncio.Task[None] | None = None

    def read(self) -> OperatorSettings | None:
        copy = self._file.read()
        self.problem = self._file.problem
        return copy if copy is None or copy.descends_from(self._newest) else self._newest

    async def change(self, edit: SettingsEdit) -> tuple[OperatorSettings, OperatorSettings]:
        for _ in range(MAX_RACES):
            raw = await self._value.read()
            before = reconcile(self._copy(), self._decode(raw)).settings
            after = before.edited(edit)
            if after is before:
                return before, before
            if await self._value.replace(raw, after.encode()):
                await self._keep(after)
                return before, after
        raise Conflict("the settings change too often: try again", attempts=MAX_RACES)

    async def start(self) -> None:
        try:
            await self.synchronise()
        except KVStoreError as error:
            limited.warning("settings not synchronised: %s", error)
        self._task = asyncio.create_task(self._follow(), name="metadata-settings")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def synchronise(self) -> None:
        """Make the copy and the shared value the newest of both.

        Raises:
            Unavailable: the shared value cannot be reached.
            Conflict: one of both cannot be read.
        """
        raw = await self._value.read()
        decision = reconcile(self._copy(), self._decode(raw))
        if decision.lost is not None:
            self._counters.add(metadata_metrics.SETTINGS_LOST)
            logger.error(
                "settings in conflict: two servers changed the same settings while they were apart (kept=%s, dropped=%s)",
                decision.settings.encode(),
                decision.lost.encode(),
            )
        if decision.write_shared and await self._value.replace(raw, decision.settings.encode()):
            self._counters.add(metadata_metrics.SETTINGS_RESTORED)
            logger.warning("settings restored: from the copy of this server (revision=%d)", decision.settings.revision)
        present = self._file.read()
        if present is None or (present, present.changes) != (decision.settings, decision.settings.changes):
            await self._keep(decision.settings)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self.synchronise()
            except KVStoreError as error:
                limited.warning("settings not synchronised: %s", error)
            except Exception:  # process edge: without this task, this server would hand out old settings
                self._counters.add(metadata_metrics.BACKGROUND_BUGS)
                logger.exception("settings not synchronised: unexpected error, trying again")

    def _copy(self) -> OperatorSettings:
        copy = self.read()
        if copy is None:
            raise unreadable(self.path, self.problem)
        return copy

    async def _keep(self, settings: OperatorSettings) -> None:
        """Copy settings that are in force. If the file cannot be written, they stay in memory until it can."""
        if not self._newest.descends_from(settings):
            self._newest = settings
        try:
            await self._file.keep(settings)
            self.copy_problem = ""
        except KVStoreError as error:
            self.copy_problem = str(error)
            limited.warning("settings in force, but not copied to %s: %s", self.path, error)

    @staticmethod
    def _decode(raw: bytes | None) -> OperatorSettings | None:
        try:
            return None if raw is None else OperatorSettings.decode(raw)
        except ValueError as error:
            raise Conflict(
                "the shared settings cannot be read: another version of this software wrote them", reason=error
            ) from error
