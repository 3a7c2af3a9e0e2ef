"""Checks of key ranges that nodes are asked to make by heartbeat, after the index lost records or may have lost some."""

from __future__ import annotations

from kvproto.v1.metadata_pb2 import HeartbeatRequest
from kvproto.v1.metadata_pb2 import RangeCheck as RangeCheckMessage
from kvstore.core.limits import MAX_RANGE_CHECKS
from kvstore.index.contract import PrefixIndex, RangeCheck
from kvstore.metadata.membership.node_table import NodeTable
from kvstore.rpc.codec import ranges_to_bitmap


class RangeChecks:
    """Asks nodes for checks, and reports to the index which checks all living nodes have made. Use on one event loop."""

    def __init__(self, index: PrefixIndex, nodes: NodeTable) -> None:
        self._index = index
        self._nodes = nodes
        self._encoded: tuple[list[RangeCheck], list[RangeCheckMessage]] = ([], [])

    def messages(self, request: HeartbeatRequest) -> list[RangeCheckMessage]:
        """The checks that the sender of a heartbeat is to make."""
        checks = list(self._index.range_checks()[:MAX_RANGE_CHECKS])
        if checks != self._encoded[0]:
            made = [RangeCheckMessage(token=one.token, ranges=ranges_to_bitmap(one.ranges), lost=one.lost) for one in checks]
            self._encoded = checks, made
        return [message for message in self._encoded[1] if message.token not in request.checked]

    def tick(self) -> None:
        """Find the checks that all living nodes have made."""
        if not self._index.range_checks():
            return
        common: set[int] | None = None
        for _, heartbeat in self._nodes.live_nodes():
            made = set[int]() if heartbeat is None else set(heartbeat.checked)
            common = made if common is None else common & made
        if common:
            self._index.end_range_checks(common)
