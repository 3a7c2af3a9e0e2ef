"""Consecutive blocks of one chain, or heads of several chains, as one value that lookups, loads and stores pass on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self, cast

from kvstore.core.errors import InvalidArgument
from kvstore.core.limits import MAX_DEPTH, MAX_KEYS_PER_CALL
from kvstore.core.types import KEY_BYTES, BlockKey, NamespaceId, pack_keys, unpack_keys


@dataclass(frozen=True, slots=True, init=False)
class ChainSlice:
    """Consecutive blocks of one chain, or heads of separate chains. ``len`` is the number of blocks.

    The constructor checks its arguments once and copies the keys; ``part`` does not check again.

    Attributes:
        namespace: the cache domain of the keys.
        keys: one 16-byte key per block.
        packed: all keys in one ``bytes``, as they travel.
        parent: key of the block before the first; None if the first block is the head of the chain.
        depth: position of the first block in the chain.
        heads: each block is the head of a separate chain.
    """

    namespace: NamespaceId
    keys: Sequence[BlockKey] = field(compare=False)
    packed: bytes
    parent: BlockKey | None
    depth: int
    heads: bool

    def __init__(
        self,
        namespace: NamespaceId,
        keys: Sequence[BlockKey] | bytes,
        parent: BlockKey | None = None,
        depth: int = 0,
        *,
        heads: bool = False,
    ) -> None:
        """Check and keep the arguments.

        Args:
            namespace: see the class.
            keys: 16-byte keys, or all of them packed in one ``bytes``.
            parent: see the class.
            depth: see the class.
            heads: see the class.

        Raises:
            InvalidArgument: a malformed key, too many keys, a parent at depth 0, no parent at another depth, or heads at a depth.
        """
        check_position(parent, depth)
        if heads and depth:
            raise InvalidArgument("`heads` requires depth 0", depth=depth)
        self._set(namespace, *_both_forms(keys), parent, depth, heads)

    def __len__(self) -> int:
        return len(self.keys)

    def key(self, index: int) -> BlockKey:
        """Return the key of block ``index`` of this slice."""
        return self.keys[index]

    def parent_of(self, index: int) -> BlockKey | None:
        """Return the key before block ``index`` of this slice, or None at the head of the chain.

        ``index`` may be ``len(self)``: the result is the parent of the block that would follow.
        """
        return self.keys[index - 1] if index and not self.heads else self.parent

    def depth_of(self, index: int) -> int:
        """Return the position of block ``index`` of this slice in its chain."""
        return 0 if self.heads else self.depth + index

    def part(self, start: int, stop: int) -> Self:
        """Return blocks ``[start, stop)`` of this slice."""
        if start == 0 and stop == len(self.keys):
            return self
        part = object.__new__(type(self))
        part._set(
            self.namespace,
            self.keys[start:stop],
            self.packed[start * KEY_BYTES : stop * KEY_BYTES],
            self.parent_of(start),
            self.depth_of(start),
            self.heads,
        )
        return part

    def _set(
        self,
        namespace: NamespaceId,
        keys: Sequence[BlockKey],
        packed: bytes,
        parent: BlockKey | None,
        depth: int,
        heads: bool,
    ) -> None:
        object.__setattr__(self, "namespace", namespace)
        object.__setattr__(self, "keys", keys)
        object.__setattr__(self, "packed", packed)
        object.__setattr__(self, "parent", parent)
        object.__setattr__(self, "depth", depth)
        object.__setattr__(self, "heads", heads)


def _both_forms(keys: Sequence[BlockKey] | bytes) -> tuple[Sequence[BlockKey], bytes]:
    """Return keys as a sequence and packed.

    Raises:
        InvalidArgument: not keys, a key of another length, or too many keys.
    """
    if isinstance(keys, bytes):
        packed = keys
        if len(packed) % KEY_BYTES:
            raise InvalidArgument("packed keys must have 16 bytes each", bytes=len(packed))
        separate: Sequence[BlockKey] = unpack_keys(packed)
    elif not isinstance(keys, Sequence) or isinstance(keys, str | bytearray | memoryview):
        raise InvalidArgument("keys must be a sequence of bytes, or packed in one bytes", got=type(keys).__name__)
    else:
        # copied: the caller may change its list while the call waits for a thread
        separate = list(cast("Sequence[BlockKey]", keys))
        if not set(map(type, separate)) <= {bytes}:  # no bytearrays either: keys are kept, and used in dictionaries
            raise InvalidArgument("every key must be bytes", got=sorted({type(key).__name__ for key in separate}))
        packed = pack_keys(separate)
        if not set(map(len, separate)) <= {KEY_BYTES}:
            raise InvalidArgument("every key must have 16 bytes")
    if len(separate) > MAX_KEYS_PER_CALL:
        raise InvalidArgument("too many keys in one call; split it", keys=len(separate), limit=MAX_KEYS_PER_CALL)
    return separate, packed


def check_position(parent: BlockKey | None, depth: int) -> None:
    """Check a position in a chain.

    Raises:
        InvalidArgument: a parent at depth 0, none at another depth, or a value of another type.
    """
    if not isinstance(depth, int) or isinstance(depth, bool) or not isinstance(parent, bytes | None):
        raise InvalidArgument(
            "depth must be an integer and parent a key", depth=type(depth).__name__, parent=type(parent).__name__
        )
    if not 0 <= depth <= MAX_DEPTH or (parent is None) != (depth == 0) or (parent is not None and len(parent) != KEY_BYTES):
        raise InvalidArgument("a parent (16 bytes) is required if depth is above 0, and only then", depth=depth)
