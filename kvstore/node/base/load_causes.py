"""Causes of slow loads, each with an action: one table for the log, the command line, REST and the web page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvstore.core.types import NodeId

FAST_S: Final = 0.02
"""A load that took less needs no explanation."""
_MIN_SHARE: Final = 0.5
"""A node is the cause if the wait for it takes this share of the time in question."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Cause of most of a load's time.

    Attributes:
        reason: the cause in a few words, with its share of the time.
        action: what to do; empty: nothing.
        source: the node whose data the load waited for, which is this node if the load waited for its volumes; None: neither.
    """

    reason: str
    action: str = ""
    source: NodeId | None = None


MOUNT: Final = "mount"
"""The part of the time spent waiting for mounted volumes, which other nodes own."""
_NOT_LOADED: Final = "none"
_OTHER: Final = "other"
_TABLE: Final[Mapping[str, tuple[str, str]]] = {
    "dram": ("waiting for DRAM or the block table", "DRAM is short: raise node.dram, or look for leases that are not released."),
    "nvme": ("reading from this node's volumes", "The drives limit: check them with iostat -x, or add DRAM or volumes."),
    MOUNT: (
        "reading from mounted volumes",
        "The storage behind node.mounts limits: check it, and the network to it.",
    ),
    "peer": (
        "reading from other nodes",
        "The network limits: check the links of this node in `kvstore top`, and node.compute_cap.",
    ),
    _NOT_LOADED: ("waiting for blocks that were not loaded", "Look at the missing blocks, and at `kvstore status`."),
    "engine": ("delivering to the engine", "The engine reads slowly: check the CPU of its host."),
    _OTHER: ("outside of tiers, nodes and the engine", "The process may have waited for CPU: check the load of the host."),
}
"""Sentence and action for each part of the time. ``_explain_peers`` names the node in those of other nodes."""


def find_cause(
    seconds: float,
    waited_s: Mapping[str, float],
    by_peer_s: Mapping[NodeId, float],
    silent: tuple[NodeId, float] | None,
    home: NodeId,
) -> Cause:
    """Return what took most of the time of a load; time that no part explains counts as a part.

    Args:
        seconds: duration of the load.
        waited_s: seconds waited for ``dram``, ``nvme``, ``mount`` (mounted volumes), ``peer``, ``none`` (blocks that were not
            loaded) and ``engine``.
        by_peer_s: seconds waited for each other node that delivered blocks.
        silent: the node that left a read without an answer for the longest time, and that time; None: all answered.
        home: this node.
    """
    if seconds < FAST_S:
        return Cause("fast: no cause to look for")
    parts = {**waited_s, _OTHER: max(0.0, seconds - sum(waited_s.values()))}
    # the wait for a node that does not answer ends without blocks, or in blocks that were not loaded
    unexplained_s = parts[_OTHER] + parts[_NOT_LOADED]
    explained_s = max(spent_s for name, spent_s in waited_s.items() if name != _NOT_LOADED)
    if silent is not None and unexplained_s > explained_s and silent[1] >= unexplained_s * _MIN_SHARE:
        node, silent_s = silent
        reason = f"{_share(silent_s, seconds)} of the time waiting for node {node}, which did not answer"
        return Cause(reason, f"Check node {node}: its process, its host, and the network to it.", node)
    part = max(parts, key=lambda name: parts[name])
    if part == "peer" and by_peer_s:
        return _explain_peers(seconds, parts[part], by_peer_s)
    words, action = _TABLE[part]
    is_main = parts[part] >= seconds * _MIN_SHARE
    return Cause(f"{_share(parts[part], seconds)} of the time {words}", action, home if part == "nvme" and is_main else None)


def _explain_peers(seconds: float, peers_s: float, by_peer_s: Mapping[NodeId, float]) -> Cause:
    node = max(by_peer_s, key=lambda one: by_peer_s[one])
    if len(by_peer_s) == 1:
        reason = f"{_share(peers_s, seconds)} of the time reading from node {node}"
    else:
        reason = (
            f"{_share(peers_s, seconds)} of the time reading from {len(by_peer_s)} other nodes,"
            f" {_share(by_peer_s[node], seconds)} from node {node}"
        )
    if by_peer_s[node] < seconds * _MIN_SHARE:
        return Cause(reason, _TABLE["peer"][1])
    action = f"Node {node} or the network to it is slow: check its CPU, its disks and its links, and node.compute_cap."
    return Cause(reason, action, node)


def _share(part_s: float, seconds: float) -> str:
    return f"{min(1.0, part_s / seconds) * 100:.0f} %"
