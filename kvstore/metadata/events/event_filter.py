"""Which block events a subscriber wants, and the volumes that it knows."""

from __future__ import annotations

from collections.abc import Sequence

from kvproto.v1 import metadata_pb2 as pb
from kvstore.core import limits
from kvstore.core.errors import InvalidArgument
from kvstore.core.types import KEY_BYTES, BlockKey, NamespaceId
from kvstore.index.contract import IndexedBlock, VolumeEpoch
from kvstore.rpc.codec import check_id, check_name, tier_from_proto


class EventFilter:
    """The filter of one subscription.

    Args:
        request: the subscriber's request.
        confined: whether the subscriber may see only the namespaces that it names.

    Raises:
        InvalidArgument: the request is malformed.
    """

    def __init__(self, request: pb.WatchBlocksRequest, *, confined: bool) -> None:
        for names in (request.namespace_ids, request.node_ids, request.tiers):
            if len(names) > limits.MAX_WATCH_FILTER:
                raise InvalidArgument("too many names in a filter", got=len(names), limit=limits.MAX_WATCH_FILTER)
        self._namespaces = frozenset(NamespaceId(check_id(one, "namespace_ids")) for one in request.namespace_ids)
        self._node_ids = frozenset(check_name(one, "node_ids") for one in request.node_ids)
        self._tiers: frozenset[int] = frozenset(tier_from_proto(one) for one in request.tiers)
        self.known_volumes: set[int] = set()
        """Volumes that the subscriber knows, by number."""
        self._confined = confined
        self.withheld = 0
        """Removed keys of unknown namespaces that a confined subscriber did not get."""

    def selects(self, volume: pb.VolumeOpened) -> bool:
        """Whether a volume passes the filter."""
        return (not self._node_ids or volume.node_id in self._node_ids) and (not self._tiers or volume.tier in self._tiers)

    def part(self, event: pb.BlockEvent) -> pb.BlockEvent | None:
        """The part of an event that passes the filter; None: nothing."""
        match event.WhichOneof("what"):
            case "opened":
                if not self.selects(event.opened):
                    return None
                self.known_volumes.add(event.opened.volume)
            case "closed":
                # also for an unknown volume: the subscriber may know it from before it resumed
                self.known_volumes.discard(event.closed.volume)
            case "served":
                return event if event.served.volume in self.known_volumes else None
            case "removed":
                namespace = event.removed.namespace_id
                if event.removed.volume not in self.known_volumes:
                    return None
                if not namespace and self._confined:  # the keys may be another tenant's
                    self.withheld += len(event.removed.keys) // KEY_BYTES
                    return None
                return event if not self._namespaces or not namespace or namespace in self._namespaces else None
            case "stored":
                if event.stored.volume not in self.known_volumes:
                    return None
                if self._namespaces:
                    runs = [run for run in event.stored.runs if run.namespace_id in self._namespaces]
                    if not runs:
                        return None
                    return pb.BlockEvent(stored=pb.BlocksStored(volume=event.stored.volume, runs=runs))
        return event

    def held(self, blocks: Sequence[IndexedBlock]) -> list[pb.BlockEvent]:
        """A page of the index as events, one per volume and namespace."""
        found: dict[tuple[VolumeEpoch, NamespaceId], tuple[list[BlockKey], list[int]]] = {}
        for key, namespace, depth, volume_epochs in blocks:
            if self._namespaces and namespace not in self._namespaces:
                continue
            for volume_epoch in volume_epochs:
                if volume_epoch in self.known_volumes:
                    keys, depths = found.setdefault((volume_epoch, namespace), ([], []))
                    keys.append(key)
                    depths.append(depth)
        return [
            pb.BlockEvent(held=pb.BlocksHeld(volume=volume_epoch, namespace_id=namespace, keys=b"".join(keys), depths=depths))
            for (volume_epoch, namespace), (keys, depths) in found.items()
        ]
