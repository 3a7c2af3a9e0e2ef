"""From a mirror of the store to what vLLM's format can say: which blocks are in which medium, whoever holds them. Pure.

The format knows one holder and three media. So a block is *stored* in a medium when the first volume of that tier that can be
read has it, and *removed* when the last is gone or falls silent; to tell nodes apart, run one publisher a node. After the mirror
began anew, only the difference is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

from kvclient.events import BlockMirror, Change
from kvstore.core.types import BlockKey, BlockRun, NamespaceId, Tier
from kvstore.events.wire import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event

T = TypeVar("T")

MEDIA: Final = {Tier.HBM: "GPU", Tier.DRAM: "CPU", Tier.NVME: "STORAGE"}
_HASHES_PER_EVENT: Final = 1_024
_HASHES_PER_BATCH: Final = 4_096

State = tuple[int, int]
"""Of one block: in which media it is (a bit a tier), and its tokens."""
_GONE: Final[State] = (0, 0)


def whole_key(key: BlockKey) -> BlockHash:
    """The key, as it is."""
    return bytes(key)


def last_eight_bytes(key: BlockKey) -> BlockHash:
    """The last eight bytes as a big-endian number: what vLLM makes of its own hashes unless told otherwise."""
    return int.from_bytes(key[-8:], "big")


class Translator:
    """Knows what was told.

    Args:
        hash_of: what stands for a block.
        block_tokens: tokens a block of a namespace; 0: not known.
    """

    def __init__(self, hash_of: Callable[[BlockKey], BlockHash], block_tokens: Callable[[NamespaceId], int]) -> None:
        self._hash_of = hash_of
        self._block_tokens = block_tokens
        self._told: dict[BlockKey, State] = {}
        self._states: dict[State, State] = {}  # one tuple for all blocks that are alike
        self._begun = False

    def __len__(self) -> int:
        return len(self._told)

    def take(self, mirror: BlockMirror, change: Change) -> list[list[Event]]:
        """Batches that tell what a change of the mirror means; none while it is not complete."""
        if not mirror.complete:
            return []
        stored: list[Event] = []
        loose: dict[tuple[str, int], list[BlockKey]] = {}
        removed: dict[str, list[BlockKey]] = {}
        for run in change.runs:
            self._take_run(mirror, run, stored, removed)
        keys: Iterable[BlockKey] = change.keys
        if change.whole:
            keys = [*(key for key in self._told if key not in mirror), *mirror]
        for key in keys:
            old, new = self._turn(mirror, key)
            for tier, medium in MEDIA.items():
                if new[0] & ~old[0] & 1 << tier:
                    loose.setdefault((medium, new[1]), []).append(key)
                elif old[0] & ~new[0] & 1 << tier:
                    removed.setdefault(medium, []).append(key)
        gone: list[Event] = [
            BlockRemoved([self._hash_of(key) for key in part], medium)
            for medium, those in removed.items()
            for part in _parts(those, _HASHES_PER_EVENT)
        ]
        if not self._begun:
            self._begun = True
            gone = [AllBlocksCleared()]  # what a publisher before this one told, if there was one
        elif gone and not self._told:
            gone = [AllBlocksCleared()]
        return list(_batches([*gone, *stored, *self._loose(loose)]))

    def everything(self, most: int) -> list[list[Event]]:
        """All that was told and still holds, from nothing, in ``most`` batches at most."""
        alike: dict[tuple[str, int], list[BlockKey]] = {}
        for key, state in self._told.items():
            for tier, medium in MEDIA.items():
                if state[0] & 1 << tier:
                    alike.setdefault((medium, state[1]), []).append(key)
        batches = list(_batches([AllBlocksCleared(), *self._loose(alike)]))
        each = -(-len(batches) // most)
        return [[event for batch in part for event in batch] for part in _parts(batches, each)]

    def _loose(self, alike: dict[tuple[str, int], list[BlockKey]]) -> list[Event]:
        """Blocks whose parents nobody told."""
        return [
            BlockStored([self._hash_of(key) for key in part], None, [], tokens, None, medium, None)
            for (medium, tokens), keys in alike.items()
            for part in _parts(keys, _HASHES_PER_EVENT)
        ]

    def _turn(self, mirror: BlockMirror, key: BlockKey) -> tuple[State, State]:
        """A block's state as it was told, and as it is now, which is taken as told."""
        old = self._told.get(key, _GONE)
        place = mirror.place(key)
        media = 0
        for volume in mirror.replicas(key):
            if volume.served:
                media |= 1 << volume.tier
        if place is None or not media:
            self._told.pop(key, None)
            return old, _GONE
        new = (media, old[1] or self._block_tokens(place[0]))
        self._told[key] = self._states.setdefault(new, new)
        return old, new

    def _take_run(self, mirror: BlockMirror, run: BlockRun, stored: list[Event], removed: dict[str, list[BlockKey]]) -> None:
        turns = [self._turn(mirror, key) for key in run.keys]
        hashes = [self._hash_of(key) for key in run.keys]
        for tier, medium in MEDIA.items():
            begun = None
            for at in range(len(turns) + 1):
                old, new = turns[at] if at < len(turns) else (_GONE, _GONE)
                if new[0] & ~old[0] & 1 << tier:
                    begun = at if begun is None else begun
                    continue
                if old[0] & ~new[0] & 1 << tier:
                    removed.setdefault(medium, []).append(run.keys[at])
                if begun is not None:
                    parent = run.keys[begun - 1] if begun else run.parent
                    stored += self._chain(hashes[begun:at], parent, turns[begun][1][1], medium)
                    begun = None

    def _chain(self, hashes: list[BlockHash], parent: BlockKey | None, tokens: int, medium: str) -> Iterator[BlockStored]:
        before = None if parent is None else self._hash_of(parent)
        for part in _parts(hashes, _HASHES_PER_EVENT):
            yield BlockStored(part, before, [], tokens, None, medium, None)
            before = part[-1]


def _parts(items: Sequence[T], most: int) -> Iterator[list[T]]:
    for at in range(0, len(items), most):
        yield list(items[at : at + most])


def _batches(events: Iterable[Event]) -> Iterator[list[Event]]:
    """Events in batches of a bounded size."""
    batch: list[Event] = []
    hashes = 0
    for event in events:
        size = 0 if isinstance(event, AllBlocksCleared) else len(event.block_hashes)
        if batch and hashes + size > _HASHES_PER_BATCH:
            yield batch
            batch, hashes = [], 0
        batch.append(event)
        hashes += size
    if batch:
        yield batch
