"""What callers may give to an index, whichever it is."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.core import limits
from kvstore.core.errors import InvalidArgument
from kvstore.core.types import KEY_BYTES, BlockKey, BlockRun, NamespaceId


def check_namespace(namespace: NamespaceId) -> None:
    """A namespace's id, not its spec.

    Raises:
        InvalidArgument: none.
    """
    if len(namespace) != KEY_BYTES:
        raise InvalidArgument("a namespace id takes 16 bytes", bytes=len(namespace))


def check_batch(stored: Sequence[BlockRun], removed: Sequence[BlockKey]) -> None:
    """One batch to publish.

    Raises:
        InvalidArgument: too large, or a run that no chain can have.
    """
    if len(removed) + sum(len(run.keys) for run in stored) > limits.MAX_KEYS_PER_CALL:
        raise InvalidArgument("too many keys in one batch: split it", limit=limits.MAX_KEYS_PER_CALL)
    for run in stored:
        check_namespace(run.namespace)
        if run.depth < 0 or run.depth + len(run.keys) > limits.MAX_DEPTH:
            raise InvalidArgument("a run lies outside of what a chain may be", depth=run.depth, limit=limits.MAX_DEPTH)
        if (run.parent is None) != (run.depth == 0):
            raise InvalidArgument("a run has a parent exactly where it does not begin its chain", depth=run.depth)
        if run.parent is not None and len(run.parent) != KEY_BYTES:
            raise InvalidArgument("a key takes 16 bytes", bytes=len(run.parent))
        check_keys(run.keys)
    check_keys(removed)


def check_keys(keys: Sequence[BlockKey]) -> None:
    """Keys, their number aside.

    Raises:
        InvalidArgument: one that is none.
    """
    if set(map(len, keys)) - {KEY_BYTES}:
        raise InvalidArgument("a key takes 16 bytes")
