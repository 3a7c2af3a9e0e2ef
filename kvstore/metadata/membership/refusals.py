"""Rejected calls in nodes' names, so that operators see why a node is silent. Shared among servers without a common clock.

Each refusal has a random number. A server that reads another number than before knows that a call was rejected since, and notes
on its own clock when it read so. The refusals in the index at a server's start may be old, so they are not shown.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import Final

from kvstore.core.limits import MAX_REASON
from kvstore.core.types import NodeId
from kvstore.index.contract import PrefixIndex
from kvstore.metadata.membership.records import REFUSED_PREFIX, CallRefusal, refused_note

REFUSED_S: Final = 10.0
"""How long a silent node is shown as refused after a rejected call. A node repeats the call within 2 seconds."""


class NodeRefusals:
    """The last rejected call in each known node's name.

    Args:
        index: the index.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._known: dict[NodeId, CallRefusal] = {}
        self._noted_s: dict[NodeId, float] = {}
        self._unshared: set[NodeId] = set()
        self._was_read = False

    def record(self, node_id: NodeId, why: str, now_s: float) -> bool:
        """A call was rejected by this server.

        Returns:
            Whether it is the first one for a while.
        """
        first = not self.reason(node_id, now_s)
        self._known[node_id] = CallRefusal(secrets.randbits(64), why[:MAX_REASON])
        self._noted_s[node_id] = now_s
        self._unshared.add(node_id)
        return first

    def reason(self, node_id: NodeId, now_s: float) -> str:
        """Why the last call was rejected; empty: none was lately."""
        noted_s = self._noted_s.get(node_id)
        return "" if noted_s is None or now_s - noted_s > REFUSED_S else self._known[node_id].why

    # ---- other servers ----
    def take_unshared(self) -> dict[str, bytes]:
        """Notes about the refusals since the last call, to be written."""
        notes = {refused_note(node_id): self._known[node_id].encode() for node_id in self._unshared}
        self._unshared.clear()
        return notes

    def read_others(self, nodes: Collection[NodeId], now_s: float) -> None:
        """Read the refusals by other servers.

        Args:
            nodes: nodes that are known. Others are forgotten, so that strangers cannot make the table grow.
            now_s: time now.

        Raises:
            Unavailable: the index does not answer.
        """
        for name, note in self._index.notes(REFUSED_PREFIX).items():
            node_id, refusal = NodeId(name.removeprefix(REFUSED_PREFIX)), CallRefusal.decode(note)
            if refusal is None or node_id in self._unshared or refusal == self._known.get(node_id):
                continue
            self._known[node_id] = refusal
            if self._was_read:
                self._noted_s[node_id] = now_s
        self._was_read = True
        for node_id in self._known.keys() - nodes:
            del self._known[node_id]
            self._noted_s.pop(node_id, None)
            self._unshared.discard(node_id)
