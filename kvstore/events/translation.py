"""Translate changes of a mirror of the store into events with the store's own keys: which blocks are in which medium. Pure.

The format has one holder and three media. A block is *stored* in a medium when the first readable volume of that tier has it,
and *removed* when the last one loses it or falls silent. To distinguish nodes, run one publisher per node. After a
resynchronisation of the mirror, only the difference is published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

from kvclient.events import BlockMirror, Change
from kvstore.core.types import BlockKey, BlockRun, NamespaceId, Tier
from kvstore.events.wire import BlockHash, BlockRemoved, BlockStored, Event

T = TypeVar("T")

MEDIA: Final = {Tier.HBM: "GPU", Tier.DRAM: "CPU", Tier.NVME: "STORAGE"}
_HASHES_PER_EVENT: Final = 1_024
_HASHES_PER_BATCH: Final = 4_096

State = tuple[int, int]
"""Media of one block (one bit per tier), and its tokens."""
_GONE: Final[State] = (0, 0)


def whole_key(key: BlockKey) -> BlockHash:
    """The key itself."""
    return bytes(key)


def last_eight_bytes(key: BlockKey) -> BlockHash:
    """The last eight bytes as a big-endian number: vLLM's default for its own hashes."""
    return int.from_bytes(key[-8:], "big")


class Translator:
    """Keeps the published state of each block, and translates changes.

    Args:
        hash_of: returns the hash of a block.
        block_tokens: returns the tokens per block of a namespace; 0: unknown.
    """

    def __init__(self, hash_of: Callable[[BlockKey], BlockHash], block_tokens: Callable[[NamespaceId], int]) -> None:
        self._hash_of = hash_of
        self._block_tokens = block_tokens
        self._published: dict[BlockKey, State] = {}
        self._states: dict[State, State] = {}  # one tuple for all blocks with an equal state

    def __len__(self) -> int:
        return len(self._published)

    def take(self, mirror: BlockMirror, change: Change) -> list[list[Event]]:
        """Batches for a change of the mirror; none while the mirror is incomplete."""
        if not mirror.complete:
            return []
        stored: list[BlockStored] = []
        loose: dict[tuple[str, int], list[BlockKey]] = {}
        removed: dict[str, list[BlockKey]] = {}
        for run in change.runs:
            self._take_run(mirror, run, stored, removed)
        keys: Iterable[BlockKey] = change.keys
        if change.whole:
            keys = [*(key for key in self._published if key not in mirror), *mirror]
        for key in keys:
            old, new = self._update(mirror, key)
            for tier, medium in MEDIA.items():
                if new[0] & ~old[0] & 1 << tier:
                    loose.setdefault((medium, new[1]), []).append(key)
                elif old[0] & ~new[0] & 1 << tier:
                    removed.setdefault(medium, []).append(key)
        dropped = [
            BlockRemoved([self._hash_of(key) for key in part], medium)
            for medium, removed_keys in removed.items()
            for part in _parts(removed_keys, _HASHES_PER_EVENT)
        ]
        return list(_batches([*dropped, *stored, *self._loose(loose)]))

    def everything(self, most: int) -> list[list[Event]]:
        """The whole published state, in ``most`` batches at most."""
        alike: dict[tuple[str, int], list[BlockKey]] = {}
        for key, state in self._published.items():
            for tier, medium in MEDIA.items():
                if state[0] & 1 << tier:
                    alike.setdefault((medium, state[1]), []).append(key)
        batches = list(_batches(self._loose(alike)))
        each = -(-len(batches) // most) or 1
        return [[event for batch in part for event in batch] for part in _parts(batches, each)]

    def _loose(self, alike: dict[tuple[str, int], list[BlockKey]]) -> list[BlockStored]:
        """Events for blocks without a known parent."""
        return [
            BlockStored([self._hash_of(key) for key in part], None, [], tokens, None, medium, None)
            for (medium, tokens), keys in alike.items()
            for part in _parts(keys, _HASHES_PER_EVENT)
        ]

    def _update(self, mirror: BlockMirror, key: BlockKey) -> tuple[State, State]:
        """The published and the present state of a block. The present state becomes the published one."""
        old = self._published.get(key, _GONE)
        place = mirror.place(key)
        media = 0
        for volume in mirror.replicas(key):
            if volume.served:
                media |= 1 << volume.tier
        if place is None or not media:
            self._published.pop(key, None)
            return old, _GONE
        new = (media, old[1] or self._block_tokens(place[0]))
        self._published[key] = self._states.setdefault(new, new)
        return old, new

    def _take_run(
        self, mirror: BlockMirror, run: BlockRun, stored: list[BlockStored], removed: dict[str, list[BlockKey]]
    ) -> None:
        updates = [self._update(mirror, key) for key in run.keys]
        hashes = [self._hash_of(key) for key in run.keys]
        for tier, medium in MEDIA.items():
            begun = None
            for at in range(len(updates) + 1):
                old, new = updates[at] if at < len(updates) else (_GONE, _GONE)
                if new[0] & ~old[0] & 1 << tier:
                    begun = at if begun is None else begun
                    continue
                if old[0] & ~new[0] & 1 << tier:
                    removed.setdefault(medium, []).append(run.keys[at])
                if begun is not None:
                    parent = run.keys[begun - 1] if begun else run.parent
                    stored += self._chain(hashes[begun:at], parent, updates[begun][1][1], medium)
                    begun = None

    def _chain(self, hashes: list[BlockHash], parent: BlockKey | None, tokens: int, medium: str) -> Iterator[BlockStored]:
        before = None if parent is None else self._hash_of(parent)
        for part in _parts(hashes, _HASHES_PER_EVENT):
            yield BlockStored(part, before, [], tokens, None, medium, None)
            before = part[-1]


def _parts(items: Sequence[T], most: int) -> Iterator[list[T]]:
    for at in range(0, len(items), most):
        yield list(items[at : at + most])


def _batches(events: Iterable[BlockStored | BlockRemoved]) -> Iterator[list[Event]]:
    """Group events into batches of a bounded size."""
    batch: list[Event] = []
    hashes = 0
    for event in events:
        size = len(event.block_hashes)
        if batch and hashes + size > _HASHES_PER_BATCH:
            yield batch
            batch, hashes = [], 0
        batch.append(event)
        hashes += size
    if batch:
        yield batch
