"""Conversion between proto messages and value types, with the validation of everything that a peer sends.

Each ``…_from_proto`` checks lengths and counts against ``kvstore.core.limits`` before it allocates memory, then the content.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from kvproto.v1 import admin_pb2, common_pb2
from kvstore.core import limits
from kvstore.core.errors import InvalidArgument
from kvstore.core.spec import CacheSpec, HashAlgorithm
from kvstore.core.types import KEY_BYTES, BlockKey, BlockRun, NamespaceId, Tier, unpack_keys
from kvstore.observe.history import INTERVAL_S, POINTS, History

UInt64s = npt.NDArray[np.uint64]


# ---- ids and keys ----
def check_id(value: bytes, name: str) -> bytes:
    """Return a 16-byte id (volume epoch, namespace, operation, session) unchanged.

    Raises:
        InvalidArgument: wrong length.
    """
    if len(value) != KEY_BYTES:
        raise InvalidArgument(f"{name} must have {KEY_BYTES} bytes", got=len(value))
    return value


def check_name(value: str, name: str) -> str:
    """Return the name of a node, volume or client unchanged.

    Raises:
        InvalidArgument: the name is empty, too long, or has control characters, which must not reach logs and file names.
    """
    if not value or len(value.encode()) > limits.MAX_NAME_BYTES or not value.isprintable():
        raise InvalidArgument(f"{name} must have 1 to {limits.MAX_NAME_BYTES} bytes of printable text", got=value[:64])
    return value


def count_keys(packed: bytes, name: str = "keys", limit: int = limits.MAX_KEYS_PER_CALL) -> int:
    """Number of keys in a packed list.

    Raises:
        InvalidArgument: the length is not a multiple of 16, or there are more keys than ``limit``.
    """
    count, rest = divmod(len(packed), KEY_BYTES)
    if rest:
        raise InvalidArgument(f"{name} must have {KEY_BYTES} bytes per key", got=len(packed))
    if count > limit:
        raise InvalidArgument(f"too many {name} in one call", got=count, limit=limit)
    return count


def keys_from_packed(packed: bytes, name: str = "keys", limit: int = limits.MAX_KEYS_PER_CALL) -> list[BlockKey]:
    """Unpack keys. Raises as :func:`count_keys`."""
    count_keys(packed, name, limit)
    return unpack_keys(packed)


# ---- runs of blocks ----
def run_from_proto(message: common_pb2.BlockRun) -> BlockRun:
    """One run of blocks.

    Raises:
        InvalidArgument: wrong lengths, no keys, too deep, a parent at depth 0, or no parent at another depth.
    """
    count = count_keys(message.keys)
    if count == 0:
        raise InvalidArgument("a run of blocks must have at least one key")
    if message.depth + count > limits.MAX_DEPTH:
        raise InvalidArgument("a chain is too deep", depth=message.depth, keys=count, limit=limits.MAX_DEPTH)
    if message.depth == 0 and message.parent:
        raise InvalidArgument("parent must be empty at depth 0")
    if message.depth > 0:
        check_id(message.parent, "parent")
    return BlockRun(
        namespace=NamespaceId(check_id(message.namespace_id, "namespace_id")),
        parent=BlockKey(message.parent) if message.depth > 0 else None,
        depth=message.depth,
        keys=tuple(unpack_keys(message.keys)),
    )


def runs_from_proto(messages: Sequence[common_pb2.BlockRun], limit: int = limits.MAX_KEYS_PER_CALL) -> list[BlockRun]:
    """Runs of blocks with at most ``limit`` keys together.

    Raises:
        InvalidArgument: as :func:`run_from_proto`, or too many keys.
    """
    count = sum(len(message.keys) for message in messages) // KEY_BYTES
    if len(messages) > limit or count > limit:
        raise InvalidArgument("too many keys in one call", got=max(count, len(messages)), limit=limit)
    return [run_from_proto(message) for message in messages]


def run_to_proto(run: BlockRun) -> common_pb2.BlockRun:
    """The message of a run of blocks."""
    return common_pb2.BlockRun(namespace_id=run.namespace, parent=run.parent or b"", depth=run.depth, keys=b"".join(run.keys))


# ---- cache specs ----
def spec_from_proto(message: common_pb2.CacheSpec) -> CacheSpec:
    """The spec of a namespace.

    A missing field is empty or zero, never a default, so that both sides compute the same digest.

    Raises:
        InvalidArgument: a field is missing or outside its limits.
    """
    return CacheSpec(
        model=message.model,
        weights_epoch=message.weights_epoch,
        dtype=message.dtype,
        block_tokens=message.block_tokens,
        layers=message.layers,
        layer_block_bytes=message.layer_block_bytes,
        layout=message.layout,
        layout_version=message.layout_version,
        shard_rank=message.shard_rank,
        shard_count=message.shard_count,
        hash_algorithm=_hash_algorithm(message.hash_algorithm),
        tenant=message.tenant,
        salt=message.salt,
    )


def spec_to_proto(spec: CacheSpec) -> common_pb2.CacheSpec:
    """The message of a spec."""
    return common_pb2.CacheSpec(
        model=spec.model,
        weights_epoch=spec.weights_epoch,
        dtype=spec.dtype,
        block_tokens=spec.block_tokens,
        layers=spec.layers,
        layer_block_bytes=spec.layer_block_bytes,
        layout=spec.layout,
        layout_version=spec.layout_version,
        shard_rank=spec.shard_rank,
        shard_count=spec.shard_count,
        hash_algorithm=spec.hash_algorithm.value,
        tenant=spec.tenant,
        salt=spec.salt,
    )


def _hash_algorithm(value: str) -> HashAlgorithm:
    try:
        return HashAlgorithm(value)
    except ValueError as error:
        raise InvalidArgument("unknown hash algorithm", got=value[:64], known=", ".join(HashAlgorithm)) from error


# ---- tiers ----
def tier_from_proto(value: int, name: str = "tier") -> Tier:
    """One tier.

    Raises:
        InvalidArgument: the tier is unspecified, or unknown to this version.
    """
    try:
        return Tier(value)
    except ValueError as error:
        raise InvalidArgument(f"{name} is unspecified or unknown", got=value) from error


def tier_to_proto(tier: Tier) -> common_pb2.Tier:
    """The message value of a tier, which has the same number."""
    return cast("common_pb2.Tier", int(tier))


# ---- packed arrays ----
def pack_u64(values: UInt64s | Iterable[int]) -> bytes:
    """Pack values as little-endian uint64: checksums, arena offsets."""
    array = values if isinstance(values, np.ndarray) else np.fromiter(values, np.uint64)
    return array.astype("<u8", copy=False).tobytes()


def unpack_u64(packed: bytes, name: str, count: int | None = None) -> UInt64s:
    """A read-only view of packed little-endian uint64 values, without a copy.

    Args:
        packed: the packed values.
        name: their name, for the error.
        count: required number of values; None: any.

    Raises:
        InvalidArgument: the length is not a multiple of 8, or not that of ``count`` values.
    """
    if len(packed) % 8 or (count is not None and len(packed) != 8 * count):
        raise InvalidArgument(
            f"{name} must have 8 bytes per value", got=len(packed), expected="any" if count is None else 8 * count
        )
    return np.frombuffer(packed, "<u8")


# ---- figures of the last hour ----
def history_to_proto(history: History, request: admin_pb2.DescribeHistoryRequest) -> admin_pb2.DescribeHistoryResponse:
    """Response of ``DescribeHistory``: the points of a process, by column.

    Raises:
        InvalidArgument: the step is not a multiple of the interval, or exceeds the ring.
    """
    step_s = request.step_seconds or INTERVAL_S
    if step_s % INTERVAL_S or step_s > INTERVAL_S * POINTS:
        raise InvalidArgument(f"step_seconds must be a multiple of {INTERVAL_S}, at most {INTERVAL_S * POINTS}", got=step_s)
    window = history.window(request.since_seconds, step_s)
    points = window.points
    counted = sorted({name for point in points for name in point.counts})
    timed = sorted({name for point in points for name in point.durations})
    measured = sorted({name for point in points for name in point.levels})
    return admin_pb2.DescribeHistoryResponse(
        at_seconds=[point.at_s for point in points],
        lengths_seconds=[point.seconds for point in points],
        counts=[admin_pb2.HistoryCounts(name=name, values=[point.counts.get(name, 0) for point in points]) for name in counted],
        durations=[
            admin_pb2.HistoryDurations(
                name=name,
                bounds_seconds=window.bounds[name],
                counts=[count for point in points for count in point.durations.get(name, [0] * (len(window.bounds[name]) + 1))],
            )
            for name in timed
        ],
        levels=[
            admin_pb2.HistoryLevels(name=name, values=[point.levels.get(name, math.nan) for point in points]) for name in measured
        ],
    )


def ranges_to_bitmap(ranges: Iterable[int]) -> bytes:
    """Encode a set of ranges of key space: range r is bit r % 8 of byte r / 8."""
    bitmap = bytearray(limits.DIGEST_RANGES // 8)
    for number in ranges:
        bitmap[number >> 3] |= 1 << (number & 7)
    return bytes(bitmap)


def ranges_from_bitmap(bitmap: bytes) -> frozenset[int]:
    """Decode a set of ranges of key space. Bits beyond the last range are ignored."""
    bits = int.from_bytes(bitmap[: limits.DIGEST_RANGES // 8], "little")
    return frozenset(number for number in range(limits.DIGEST_RANGES) if bits >> number & 1)
