"""What all calls of one client share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvclient.incidents import Incidents
from kvclient.options import ClientOptions
from kvclient.remote import PeerPool
from kvclient.session import LocalNode
from kvstore.core.clock import Clock
from kvstore.core.errors import InvalidArgument
from kvstore.core.limits import MAX_KEYS_PER_CALL
from kvstore.core.spec import CacheSpec
from kvstore.core.types import KEY_BYTES, BlockKey, BlockShape, NamespaceId, pack_keys, unpack_keys


@dataclass(frozen=True, slots=True)
class Core:
    """The parts that loads and stores work with."""

    spec: CacheSpec
    shape: BlockShape
    namespace: NamespaceId
    clock: Clock
    options: ClientOptions
    incidents: Incidents
    local: LocalNode | None
    peers: PeerPool


def check_keys(keys: Sequence[BlockKey] | bytes) -> tuple[Sequence[BlockKey], bytes]:
    """Keys of a call, cut apart and packed.

    Args:
        keys: 16-byte keys, or all of them packed in one ``bytes``.

    Raises:
        InvalidArgument: a key of another length, or too many.
    """
    if isinstance(keys, bytes):
        packed = keys
        if len(packed) % KEY_BYTES:
            raise InvalidArgument("packed keys take 16 bytes each", bytes=len(packed))
        keys = unpack_keys(packed)
    else:
        try:
            packed = pack_keys(keys)  # type: ignore[arg-type]  # any sequence of bytes joins
        except TypeError as error:
            raise InvalidArgument("keys take bytes") from error
        if len(packed) != KEY_BYTES * len(keys) or any(map(KEY_BYTES.__ne__, map(len, keys))):
            raise InvalidArgument("every key takes 16 bytes")
    if len(keys) > MAX_KEYS_PER_CALL:
        raise InvalidArgument("too many keys in one call: split it", keys=len(keys), limit=MAX_KEYS_PER_CALL)
    return keys, packed


def check_place(parent: BlockKey | None, depth: int) -> None:
    """A place in a chain.

    Raises:
        InvalidArgument: a parent at the head, or none behind it.
    """
    if depth < 0 or (parent is None) != (depth == 0) or (parent is not None and len(parent) != KEY_BYTES):
        raise InvalidArgument("a parent (16 bytes) is given exactly where depth is above 0", depth=depth)
