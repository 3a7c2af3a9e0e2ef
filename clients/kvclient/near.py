"""An engine's own pool of blocks, as its client sees it. ``kvclient.hbm`` has the one there is, and imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from kvclient.operation import Operation
from kvstore.core.buffers import BlockBuffer
from kvstore.core.spec import CacheSpec
from kvstore.core.types import BlockKey

Demote = Callable[[Sequence[BlockKey], BlockKey | None, int, BlockBuffer], bool]
"""``demote(keys, parent, depth, blocks)``: offers a run to the tiers below. Whether they hold all of it now; bounded."""


class NearBlocks(Protocol):
    """The blocks of one namespace in the pool. Thread-safe; failures of the pool are misses and skips, never errors."""

    @property
    def node_id(self) -> str:
        """What the index calls the pool: nobody reads from its own pool over a wire."""

    def fetch(self, keys: Sequence[BlockKey], buffer: BlockBuffer, operation: Operation, *, verify: bool) -> int:
        """Copies leading blocks of some keys into a buffer; on the device, if it is of pages beside the pool.

        Args:
            keys: consecutive keys of a chain.
            buffer: room for them.
            operation: ends the copying early.
            verify: compare checksums of what was copied; what came in without any is left to the tiers below then.

        Returns:
            How many leading blocks are in the buffer now.
        """

    def keep(
        self,
        keys: Sequence[BlockKey],
        parent: BlockKey | None,
        depth: int,
        buffer: BlockBuffer,
        operation: Operation | None,
        *,
        checksums: bool,
    ) -> int:
        """Copies blocks out of a buffer into the pool, as many leading ones as there is room for; colder ones make room.

        Args:
            keys: consecutive keys of a chain.
            parent: key before the first, None at the head.
            depth: position of the first.
            buffer: their bytes.
            operation: ends the copying early; None: nothing does.
            checksums: make checksums of them now, for ``fetch`` to compare; also of those that were there without any.

        Returns:
            How many were copied; those that were there already are not.
        """

    def detach(self) -> None:
        """The client is being closed: nothing is demoted through it any more."""


@runtime_checkable
class NearPool(Protocol):
    """A pool that clients of several namespaces share."""

    def attach(self, spec: CacheSpec, demote: Demote) -> NearBlocks:
        """Makes a namespace known to it.

        Raises:
            InvalidArgument: the pool is closed, or has no room for even one block of this namespace.
        """
