"""Restart of the redundant servers of a local cluster: while one is away, the others serve."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from kvstore.core.errors import KVStoreError
from kvstore.embedded.cluster import LocalCluster

AWAY_S: Final = 1.0
"""How long a server is away at least."""
UNREPLACED_S: Final = 8.0
"""Time after which a primary is started without its contents: its replica, which would have replaced it, is lost too."""


class RedundantServers:
    """Finds servers that ended, and starts them again. Use it in one thread: the servers it starts end with that thread.

    Args:
        cluster: a running cluster. Its metadata servers are redundant if there are several; its Valkey servers have replicas, and
            there are at least three shards, so that a replica can replace its primary.
        report: called with a sentence per event.
    """

    def __init__(self, cluster: LocalCluster, report: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._report = report
        names = list(cluster.metadata_addresses)
        self.names: list[str] = names if len(names) > 1 else []
        """Metadata servers that are started again."""
        self._away_since_s: dict[str, float] = {}

    @property
    def away(self) -> frozenset[str]:
        """Names of the servers that have ended and were not started again."""
        return frozenset(self._away_since_s)

    def poll(self) -> None:
        """Note which servers have ended, and start those that were away long enough."""
        for name in self.names:
            if self._is_due(name, self._cluster.node(name).process.poll()):
                self._start_metadata(name)
        valkey = self._cluster.valkey
        for server in [] if valkey is None else valkey.servers:
            name = f"Valkey server {server.address}"
            if not self._is_due(name, server.process.poll()) or valkey is None:
                continue
            if not valkey.is_replaced(server):
                if time.monotonic() < self._away_since_s[name] + UNREPLACED_S:
                    continue
                self._report(f"{name} was not replaced by its replica; starting it without its contents")
            valkey.restart(server)
            self._note_start(name, server.process.pid)

    def _is_due(self, name: str, code: int | None) -> bool:
        """Whether a server was away long enough. ``code`` is its exit code; None: it runs."""
        if code is None:
            return False
        if name not in self._away_since_s:
            self._away_since_s[name] = time.monotonic()
            again = "starting it again" if name in self.names else "it starts again after its replica has replaced it"
            self._report(f"{name} ended with code {code}; {again}")
        return time.monotonic() >= self._away_since_s[name] + AWAY_S

    def _start_metadata(self, name: str) -> None:
        try:
            daemon = self._cluster.start_metadata(name)
        except KVStoreError as error:
            self._away_since_s[name] = time.monotonic()
            self._report(f"{name} did not start: {str(error).splitlines()[0]}")
        else:
            self._note_start(name, daemon.process.pid)

    def _note_start(self, name: str, pid: int) -> None:
        del self._away_since_s[name]
        self._report(f"{name} runs again (pid {pid})")
