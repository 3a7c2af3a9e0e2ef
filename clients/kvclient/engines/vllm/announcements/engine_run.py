"""Consecutive blocks of one request, as its engine knows them. No vLLM types."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvclient.events.block_groups import GroupBlockId
from kvclient.events.labels import BlockLabel

_OBJECT_BYTES: Final = 64
"""Estimated memory of a short bytes object, with its reference."""
_EXTRA_KEYS_BYTES: Final = 512
"""Estimated memory of the extra keys of one hash."""


@dataclass(frozen=True, slots=True, eq=False)
class EngineRun:
    """Consecutive blocks of one request.

    Attributes:
        first: position of the first block in its chain.
        ids: of the blocks.
        hashes: the engine's hashes, the same number for each block.
        parent: the engine's hash before the first; empty: none.
        tokens: token ids of all blocks.
        lora_id: vLLM's number of the adapter.
        lora_name: its name; empty: no adapter.
        extra_keys: per hash, its inputs besides tokens; None: nothing.
        keys: vLLM's offload keys of the blocks, in the tier.
        group: KV cache group of the blocks, in the tier.
    """

    first: int
    ids: tuple[GroupBlockId, ...]
    hashes: tuple[bytes, ...] = ()
    parent: bytes = b""
    tokens: array[int] = field(default_factory=lambda: array("I"))
    lora_id: int | None = None
    lora_name: str = ""
    extra_keys: tuple[Any, ...] | None = None
    keys: tuple[bytes, ...] = ()
    group: int = 0

    @property
    def memory_bytes(self) -> int:
        """Approximate memory of the run: tokens, hashes, and the objects around them."""
        each_hash = _OBJECT_BYTES + (len(self.hashes[0]) if self.hashes else 0)
        extras = 0 if self.extra_keys is None else len(self.extra_keys) * _EXTRA_KEYS_BYTES
        return len(self.tokens) * self.tokens.itemsize + len(self.hashes) * each_hash + len(self.ids) * _OBJECT_BYTES + extras

    def part(self, start: int, stop: int) -> EngineRun:
        """Return the blocks from ``start`` to ``stop``."""
        count = len(self.ids)
        each, size = len(self.hashes) // count, len(self.tokens) // count
        return replace(
            self,
            first=self.first + start,
            ids=self.ids[start:stop],
            hashes=self.hashes[start * each : stop * each],
            parent=self.hashes[start * each - 1] if start and each else self.parent,
            tokens=self.tokens[start * size : stop * size],
            extra_keys=None if self.extra_keys is None else self.extra_keys[start * each : stop * each],
            keys=self.keys[start:stop],
        )

    def labels(self) -> Iterator[tuple[GroupBlockId, BlockLabel]]:
        """Yield the blocks and their labels."""
        each, size = len(self.hashes) // len(self.ids), len(self.tokens) // len(self.ids)
        for at, block in enumerate(self.ids):
            start, stop = at * each, (at + 1) * each
            yield (
                block,
                BlockLabel(
                    self.first + at,
                    self.hashes[start:stop],
                    self.hashes[start - 1] if at else self.parent,
                    self.tokens[at * size : (at + 1) * size].tobytes(),
                    self.lora_name,
                    None if self.extra_keys is None else self.extra_keys[start:stop],
                ),
            )
