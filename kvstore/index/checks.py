"""Argument checks shared by all index backends."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.core import limits
from kvstore.core.errors import InvalidArgument
from kvstore.core.types import KEY_BYTES, BlockKey, BlockRun, BootId, NamespaceId, NodeId, VolumeId


def check_namespace(namespace: NamespaceId) -> None:
    """Check the length of a namespace id.

    Raises:
        InvalidArgument: it is not 16 bytes long.
    """
    if len(namespace) != KEY_BYTES:
        raise InvalidArgument(f"a namespace id must have {KEY_BYTES} bytes", bytes=len(namespace))


def check_batch(stored: Sequence[BlockRun], removed: Sequence[BlockKey]) -> None:
    """Check one publish batch.

    Raises:
        InvalidArgument: the batch is too large, or a run is invalid.
    """
    if len(removed) + sum(len(run.keys) for run in stored) > limits.MAX_KEYS_PER_CALL:
        raise InvalidArgument("too many keys in one batch: split it", limit=limits.MAX_KEYS_PER_CALL)
    for run in stored:
        check_namespace(run.namespace)
        if run.depth < 0 or run.depth + len(run.keys) > limits.MAX_DEPTH:
            raise InvalidArgument("a run exceeds the maximum chain length", depth=run.depth, limit=limits.MAX_DEPTH)
        if (run.parent is None) != (run.depth == 0):
            raise InvalidArgument("a run has a parent if and only if its depth is above 0", depth=run.depth)
        if run.parent is not None and len(run.parent) != KEY_BYTES:
            raise InvalidArgument(f"a key must have {KEY_BYTES} bytes", bytes=len(run.parent))
        check_keys(run.keys)
    check_keys(removed)


def check_keys(keys: Sequence[BlockKey]) -> None:
    """Check the length of each key.

    Raises:
        InvalidArgument: a key is not 16 bytes long.
    """
    if set(map(len, keys)) - {KEY_BYTES}:
        raise InvalidArgument(f"a key must have {KEY_BYTES} bytes")


def check_packed_keys(keys: bytes) -> None:
    """Check the keys of a lookup.

    Raises:
        InvalidArgument: they are not 16 bytes each, or too many.
    """
    if len(keys) % KEY_BYTES or len(keys) > limits.MAX_KEYS_PER_CALL * KEY_BYTES:
        raise InvalidArgument(
            f"keys must have {KEY_BYTES} bytes each, and not be too many", bytes=len(keys), limit=limits.MAX_KEYS_PER_CALL
        )


def check_volume(volume_id: VolumeId, node_id: NodeId, boot_id: BootId) -> None:
    """Check the names of a volume epoch.

    Raises:
        InvalidArgument: a name is empty or too long, or the boot id is not 16 bytes long.
    """
    for name in (volume_id, node_id):
        if not name or len(name.encode()) > limits.MAX_NAME_BYTES:
            raise InvalidArgument("a volume or node id is empty or too long", limit=limits.MAX_NAME_BYTES)
    if len(boot_id) != KEY_BYTES:
        raise InvalidArgument(f"a boot id must have {KEY_BYTES} bytes", bytes=len(boot_id))


def check_ranges(first: int, count: int) -> None:
    """Check a part of key space.

    Raises:
        InvalidArgument: it is empty or exceeds key space.
    """
    if count < 1 or not 0 <= first < first + count <= limits.DIGEST_RANGES:
        raise InvalidArgument("no such ranges of key space", first=first, count=count, ranges=limits.DIGEST_RANGES)
