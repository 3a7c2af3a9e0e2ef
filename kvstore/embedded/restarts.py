"""Restart of the servers and daemons of a local cluster that have ended, as a supervisor of services would do it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.core.errors import Internal, KVStoreError
from kvstore.embedded.cluster import LocalCluster

AWAY_S: Final = 1.0
"""How long a server is away at least."""
UNREPLACED_S: Final = 8.0
"""Time after which a primary is started without its contents: its replica, which would have replaced it, is lost too."""
MOST_ENDS: Final = 5
"""Ends of a sole daemon within ``ENDS_WITHIN_S``, failed starts included, after which it is not started again."""
ENDS_WITHIN_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class SoleDaemon:
    """A daemon without a substitute.

    Attributes:
        name: its name in the cluster.
        loss: the cost of its end, as a clause.
        vital: whether the store must stop if the daemon ends again and again.
    """

    name: str
    loss: str
    vital: bool = True


class ClusterSupervisor:
    """Finds servers that ended, and starts them again. Use it in one thread: the servers it starts end with that thread.

    Redundant servers are started again without limit, because the others serve. Sole daemons are started again at most
    ``MOST_ENDS`` times within ``ENDS_WITHIN_S``.

    Args:
        cluster: a running cluster. Its metadata servers are redundant if there are several; its Valkey servers have replicas, and
            there are at least three shards, so that a replica can replace its primary.
        report: called with a sentence per event.
        sole: other daemons of the cluster that are started again.
    """

    def __init__(self, cluster: LocalCluster, report: Callable[[str], None], sole: Sequence[SoleDaemon] = ()) -> None:
        self._cluster = cluster
        self._report = report
        names = list(cluster.metadata_addresses)
        self._redundant: list[str] = names if len(names) > 1 else []
        self._sole = {one.name: one for one in sole}
        self._ends_s: dict[str, deque[float]] = {name: deque(maxlen=MOST_ENDS) for name in self._sole}
        self._away_since_s: dict[str, float] = {}

    @property
    def away(self) -> frozenset[str]:
        """Names of the servers that have ended and were not started again."""
        return frozenset(self._away_since_s)

    def poll(self) -> None:
        """Note which servers have ended, and start those that were away long enough.

        Raises:
            Internal: a vital daemon has ended too often. The message says why, and what to do.
        """
        for name in (*self._redundant, *self._sole):
            daemon = self._cluster.node(name)
            if daemon.process.poll() is None:
                continue
            if name not in self._away_since_s:
                self._note_end(name, daemon.ending())
            elif self._is_due(name):
                self._start(name)
        valkey = self._cluster.valkey
        for server in [] if valkey is None else valkey.servers:
            name = f"Valkey server {server.address}"
            code = server.process.poll()
            if code is None or valkey is None:
                continue
            if name not in self._away_since_s:
                self._away_since_s[name] = time.monotonic()
                then = "" if valkey.is_replaced(server) else " after its replica has replaced it"  # a replica needs none
                self._report(f"{name} ended with code {code}; it starts again{then}")
            if not self._is_due(name):
                continue
            if not valkey.is_replaced(server):
                if time.monotonic() < self._away_since_s[name] + UNREPLACED_S:
                    continue
                self._report(f"{name} was not replaced by its replica; starting it without its contents")
            try:
                valkey.restart(server)
            except (KVStoreError, OSError) as error:
                self._note_failure(name, error)
            else:
                self._note_start(name, server.process.pid)

    def _is_due(self, name: str) -> bool:
        """Whether an ended server was away long enough."""
        return time.monotonic() >= self._away_since_s[name] + AWAY_S

    def _start(self, name: str) -> None:
        try:
            daemon = self._cluster.restart(name)
        except (KVStoreError, OSError) as error:
            self._note_failure(name, error)
        else:
            self._note_start(name, daemon.process.pid)

    def _note_end(self, name: str, how: str) -> None:
        """Record an end, after which the server is started again, or given up if it ended too often.

        Raises:
            Internal: it is vital, and given up.
        """
        now_s = self._away_since_s[name] = time.monotonic()
        sole = self._sole.get(name)
        if sole is None:
            self._report(f"{name} {how}; starting it again")
            return
        ends_s = self._ends_s[name]
        ends_s.append(now_s)
        if len(ends_s) < MOST_ENDS or now_s - ends_s[0] > ENDS_WITHIN_S:
            self._report(f"{name} {how}; starting it again ({sole.loss})")
            return
        often = f"{name} {how}; it ended {MOST_ENDS} times within {ENDS_WITHIN_S / 60:g} minutes"
        log_path = self._cluster.node(name).log_path
        if sole.vital:
            raise Internal(
                f"{often}, so the store stops. Log: {log_path}. Remove the cause, then start the store again with the same"
                " command: blocks on the volume are kept."
            )
        del self._sole[name], self._away_since_s[name]
        self._report(f"{often} and is not started again ({sole.loss}). Log: {log_path}. To get it back, restart the store.")

    def _note_failure(self, name: str, error: Exception) -> None:
        """Record a failed start, which is repeated after the same pause."""
        why = f"did not start: {str(error).splitlines()[0]}"
        if name in self._sole:
            self._note_end(name, why)
            return
        self._away_since_s[name] = time.monotonic()
        self._report(f"{name} {why}")

    def _note_start(self, name: str, pid: int) -> None:
        del self._away_since_s[name]
        self._report(f"{name} runs again (pid {pid})")
