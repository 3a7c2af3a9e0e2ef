"""Which nodes are alive, as one server judges: a pure core. It reads no clock, and compares no times of other processes.

Theory of operation.

1. A node counts its heartbeats. Any server may receive one, and records (boot, counter) in the index, where all servers read it.
2. A server *hears* a boot when a heartbeat arrives at it, when it reads another record than before that another server wrote of
   the boot, and when it first sees the boot registered. It notes when that was, on its own clock.
3. A boot that was not heard for the time to live becomes silent, at a tick and never between ticks. A boot that is heard becomes
   alive at once.
4. A server that could not hear must not conclude anything from silence. After a pause of the process or the host, and after the
   index did not answer or rejected changes, all boots get a time to live from then on. Until then, no boot becomes silent. A
   server that starts sees all boots for the first time.

All methods get the time as ``now_s``, in seconds of any clock that does not go backwards.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvstore.core.types import BootId, NodeId
from kvstore.index.contract import Beat


class LivenessChange(NamedTuple):
    """A node became alive, or silent."""

    node_id: NodeId
    alive: bool


@dataclass(slots=True)
class _HeardBoot:
    """A registered boot.

    Attributes:
        boot_id: the boot.
        heard_s: when it was last heard.
        left: whether it has unregistered. Then no heartbeat makes it alive.
        alive: whether it is alive.
        read: last record that was read from the index.
    """

    boot_id: BootId
    heard_s: float
    left: bool
    alive: bool
    read: Beat | None = None


class Liveness:
    """Judges which registered boots are alive.

    Args:
        ttl_s: silence after which a boot is not alive.
    """

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s: Final = ttl_s
        self._boots: dict[NodeId, _HeardBoot] = {}
        self._observing_since_s = float("-inf")
        """Silence before this time means nothing: this server could not hear."""
        self._index_away = False

    # ---- events ----
    def registered(self, boots: Mapping[NodeId, BootId], left: Container[NodeId], now_s: float) -> list[LivenessChange]:
        """These boots are registered; those in ``left`` have unregistered since. Other boots are no longer followed."""
        changes = []
        for node_id in self._boots.keys() - boots.keys():
            del self._boots[node_id]
        for node_id, boot_id in boots.items():
            known, stays = self._boots.get(node_id), node_id not in left
            was_alive = known is not None and known.alive
            if known is None or known.boot_id != boot_id or (known.left and stays):
                known = self._boots[node_id] = _HeardBoot(boot_id, now_s, left=not stays, alive=stays)
            elif not stays:
                known.left, known.alive = True, False
            if known.alive != was_alive:
                changes.append(LivenessChange(node_id, known.alive))
        return changes

    def heartbeat_arrived(self, node_id: NodeId, boot_id: BootId, now_s: float) -> list[LivenessChange]:
        """A heartbeat arrived at this server. No effect if its boot is not registered."""
        known = self._boots.get(node_id)
        return [] if known is None or known.boot_id != boot_id else _heard(node_id, known, now_s)

    def beats_read(self, beats: Mapping[NodeId, Beat], now_s: float) -> list[LivenessChange]:
        """The records that other servers wrote were read from the index."""
        changes = []
        for node_id, beat in beats.items():
            known = self._boots.get(node_id)
            if known is None or beat == known.read:
                continue
            known.read = beat
            if beat.boot_id == known.boot_id:
                changes += _heard(node_id, known, now_s)
        return changes

    def paused(self, now_s: float) -> None:
        """This process or its host was stopped until now."""
        self._observing_since_s = now_s

    def index_failed(self) -> None:
        """The records cannot be read, or not be written."""
        self._index_away = True

    def index_answered(self, now_s: float) -> None:
        """The records can be read."""
        if self._index_away:
            self._index_away = False
            self._observing_since_s = now_s

    def tick(self, now_s: float) -> list[LivenessChange]:
        """Find boots that became silent. Call it right after the records were read."""
        if self._index_away:
            return []
        changes = []
        for node_id, known in self._boots.items():
            if known.alive and self._silence_s(known, now_s) > self._ttl_s:
                known.alive = False
                changes.append(LivenessChange(node_id, alive=False))
        return changes

    # ---- answers ----
    def alive(self) -> frozenset[NodeId]:
        """Nodes that are alive."""
        return frozenset(node_id for node_id, known in self._boots.items() if known.alive)

    def heard_s(self, node_id: NodeId) -> float | None:
        """When a followed node was last heard; None: it is not followed."""
        known = self._boots.get(node_id)
        return None if known is None else known.heard_s

    def silence_s(self, node_id: NodeId, now_s: float) -> float | None:
        """How long a followed node was silent while this server could hear it; None: it is not followed."""
        known = self._boots.get(node_id)
        return None if known is None else self._silence_s(known, now_s)

    def _silence_s(self, known: _HeardBoot, now_s: float) -> float:
        return now_s - max(known.heard_s, self._observing_since_s)


def _heard(node_id: NodeId, known: _HeardBoot, now_s: float) -> list[LivenessChange]:
    known.heard_s = now_s
    if known.alive or known.left:
        return []
    known.alive = True
    return [LivenessChange(node_id, alive=True)]
