"""Proto messages to value types and back: the door at which everything from outside is checked.

Each ``…_from_proto`` validates before it allocates: lengths and counts against ``kvstore.core.limits`` first, then the content.
What it returns can be trusted as far as shape goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, cast

import numpy as np
import numpy.typing as npt

from kvproto.v1 import common_pb2
from kvstore.core import limits
from kvstore.core.errors import InvalidArgument
from kvstore.core.spec import CacheSpec, HashAlgorithm
from kvstore.core.types import KEY_BYTES, BlockKey, BlockRun, NamespaceId, StoreOutcome, Tier, unpack_keys

UInt64s = npt.NDArray[np.uint64]
_STORE_OUTCOMES: Final = frozenset(StoreOutcome)


# ---- ids and keys ----
def check_id(value: bytes, name: str) -> bytes:
    """A 16-byte id (boot, namespace, operation, session), unchanged.

    Raises:
        InvalidArgument: it has another length.
    """
    if len(value) != KEY_BYTES:
        raise InvalidArgument(f"{name} takes {KEY_BYTES} bytes", got=len(value))
    return value


def check_name(value: str, name: str) -> str:
    """A node, volume or client name, unchanged.

    Raises:
        InvalidArgument: it is empty, too long, or has control characters (it ends up in logs and file names).
    """
    if not value or len(value.encode()) > limits.MAX_NAME_BYTES or not value.isprintable():
        raise InvalidArgument(f"{name} takes 1 to {limits.MAX_NAME_BYTES} bytes of printable text", got=value[:64])
    return value


def count_keys(packed: bytes, name: str = "keys", limit: int = limits.MAX_KEYS_PER_CALL) -> int:
    """How many keys a packed list has, without cutting it apart.

    Raises:
        InvalidArgument: its length is no multiple of 16, or it has more keys than the limit.
    """
    count, rest = divmod(len(packed), KEY_BYTES)
    if rest:
        raise InvalidArgument(f"{name} takes {KEY_BYTES} bytes a key", got=len(packed))
    if count > limit:
        raise InvalidArgument(f"too many {name} in one call", got=count, limit=limit)
    return count


def keys_from_packed(packed: bytes, name: str = "keys", limit: int = limits.MAX_KEYS_PER_CALL) -> list[BlockKey]:
    """Cuts packed keys apart, checked as by :func:`count_keys`."""
    count_keys(packed, name, limit)
    return unpack_keys(packed)


# ---- runs of blocks ----
def run_from_proto(message: common_pb2.BlockRun) -> BlockRun:
    """A run of blocks.

    Raises:
        InvalidArgument: wrong lengths, no keys, too deep, or a parent where there can be none (or none where one must be).
    """
    count = count_keys(message.keys)
    if count == 0:
        raise InvalidArgument("a run of blocks takes at least one key")
    if message.depth + count > limits.MAX_DEPTH:
        raise InvalidArgument("a chain is too deep", depth=message.depth, keys=count, limit=limits.MAX_DEPTH)
    if message.depth == 0 and message.parent:
        raise InvalidArgument("the head of a chain has no parent")
    if message.depth > 0:
        check_id(message.parent, "parent")
    return BlockRun(
        namespace=NamespaceId(check_id(message.namespace_id, "namespace_id")),
        parent=BlockKey(message.parent) if message.depth > 0 else None,
        depth=message.depth,
        keys=tuple(unpack_keys(message.keys)),
    )


def runs_from_proto(messages: Sequence[common_pb2.BlockRun], limit: int = limits.MAX_KEYS_PER_CALL) -> list[BlockRun]:
    """Runs whose keys together stay within the limit.

    Raises:
        InvalidArgument: as :func:`run_from_proto`, or too many keys in all.
    """
    count = sum(len(message.keys) for message in messages) // KEY_BYTES
    if len(messages) > limit or count > limit:
        raise InvalidArgument("too many keys in one call", got=max(count, len(messages)), limit=limit)
    return [run_from_proto(message) for message in messages]


def run_to_proto(run: BlockRun) -> common_pb2.BlockRun:
    """As it travels."""
    return common_pb2.BlockRun(namespace_id=run.namespace, parent=run.parent or b"", depth=run.depth, keys=b"".join(run.keys))


# ---- cache specs ----
def spec_from_proto(message: common_pb2.CacheSpec) -> CacheSpec:
    """A cache domain.

    Every field is taken as sent: what is missing is empty or zero, never a default, so that both sides compute one digest.

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
    """As it travels."""
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
    """A tier.

    Raises:
        InvalidArgument: unspecified, or one that this build does not know.
    """
    try:
        return Tier(value)
    except ValueError as error:
        raise InvalidArgument(f"{name} is unspecified or unknown", got=value) from error


def tier_to_proto(tier: Tier) -> common_pb2.Tier:
    """As it travels: the numbers are the same."""
    return cast("common_pb2.Tier", int(tier))


# ---- packed arrays ----
def pack_u64(values: UInt64s | Iterable[int]) -> bytes:
    """Little-endian uint64, 8 bytes a value: checksums, arena offsets."""
    array = values if isinstance(values, np.ndarray) else np.fromiter(values, np.uint64)
    return array.astype("<u8", copy=False).tobytes()


def unpack_u64(packed: bytes, name: str, count: int | None = None) -> UInt64s:
    """A read-only view of packed little-endian uint64 values: nothing is copied.

    Args:
        packed: as it travelled.
        name: what it is, for the error.
        count: how many there must be; None: any number.

    Raises:
        InvalidArgument: its length is no multiple of 8, or not ``count`` values.
    """
    if len(packed) % 8 or (count is not None and len(packed) != 8 * count):
        raise InvalidArgument(f"{name} takes 8 bytes a value", got=len(packed), expected="any" if count is None else 8 * count)
    return np.frombuffer(packed, "<u8")


def pack_store_outcomes(outcomes: Iterable[StoreOutcome]) -> bytes:
    """One byte a key."""
    return bytes(outcomes)


def unpack_store_outcomes(packed: bytes, count: int) -> list[StoreOutcome]:
    """What became of each key of a store.

    Raises:
        InvalidArgument: not one byte a key, or a value that this build does not know.
    """
    if len(packed) != count or not _STORE_OUTCOMES.issuperset(packed):
        raise InvalidArgument("outcomes take one known value a key", got=len(packed), expected=count)
    return [StoreOutcome(value) for value in packed]
