"""What all calls of one client share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from kvclient.call.incidents import Incidents
from kvclient.load.accounting import LoadAccounts
from kvclient.memory.engine_pool import NearBlocks
from kvclient.nodes.local_session import LocalNode
from kvclient.nodes.peers import PeerPool
from kvclient.nodes.remote_sessions import Stages
from kvclient.options import ClientOptions
from kvstore.core.clock import Clock
from kvstore.core.errors import InvalidArgument
from kvstore.core.limits import MAX_DEPTH, MAX_KEYS_PER_CALL
from kvstore.core.spec import CacheSpec
from kvstore.core.types import KEY_BYTES, BlockKey, BlockShape, NamespaceId, pack_keys, unpack_keys
from kvstore.transport.liveness import LivenessMonitor


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
    stages: Stages
    liveness: LivenessMonitor
    loads: LoadAccounts
    near: NearBlocks | None = None
    """The engine's own pool, nearer than any node."""


def check_keys(keys: Sequence[BlockKey] | bytes) -> tuple[Sequence[BlockKey], bytes]:
    """Keys of a call, cut apart and packed.

    Args:
        keys: 16-byte keys, or all of them packed in one ``bytes``.

    Raises:
        InvalidArgument: something else than keys, a key of another length, or too many.
    """
    if isinstance(keys, bytes):
        packed = keys
        if len(packed) % KEY_BYTES:
            raise InvalidArgument("packed keys take 16 bytes each", bytes=len(packed))
        chain: Sequence[BlockKey] = unpack_keys(packed)
    elif not isinstance(keys, Sequence) or isinstance(keys, str | bytearray | memoryview):
        raise InvalidArgument("keys take a sequence of bytes, or all packed in one bytes", got=type(keys).__name__)
    else:
        if not set(map(type, keys)) <= {bytes}:  # no bytearrays either: keys are kept, and looked up by
            raise InvalidArgument("every key takes bytes", got=sorted({type(key).__name__ for key in keys}))
        chain = cast("Sequence[BlockKey]", keys)
        packed = pack_keys(chain)  # type: ignore[arg-type]  # any sequence of bytes joins
        if not set(map(len, chain)) <= {KEY_BYTES}:
            raise InvalidArgument("every key takes 16 bytes")
    if len(chain) > MAX_KEYS_PER_CALL:
        raise InvalidArgument("too many keys in one call: split it", keys=len(chain), limit=MAX_KEYS_PER_CALL)
    return chain, packed


def check_place(parent: BlockKey | None, depth: int) -> None:
    """A place in a chain.

    Raises:
        InvalidArgument: a parent at the head, or none behind it; or something else than a key and an integer.
    """
    if not isinstance(depth, int) or isinstance(depth, bool) or not isinstance(parent, bytes | None):
        raise InvalidArgument("depth takes an integer, parent a key", depth=type(depth).__name__, parent=type(parent).__name__)
    if not 0 <= depth <= MAX_DEPTH or (parent is None) != (depth == 0) or (parent is not None and len(parent) != KEY_BYTES):
        raise InvalidArgument("a parent (16 bytes) is given exactly where depth is above 0", depth=depth)
