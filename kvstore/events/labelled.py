"""Events of labelled blocks of one model, for routers that index blocks by tokens. Pure, apart from a lock.

A block is published if the store holds all its parts, its label is known, and its parent is published. So what is published is
always a set of whole prefixes, as an engine could load them. Parents are published before their children and removed with them.
Blocks of several label namespaces (weights epochs, tenants, engines run differently) may have the same hash: it is removed with
the last of them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

import numpy as np

from kvclient.events import BlockMirror, Change, MirroredVolume
from kvclient.events.block_groups import BlockGroup, GroupBlockId
from kvclient.events.labels import BlockLabel, LabelNamespace
from kvstore.core.types import BlockKey, NamespaceId
from kvstore.events.label_retries import Block
from kvstore.events.translation import MEDIA
from kvstore.events.wire import BlockHash, BlockRemoved, BlockStored, Event

_HASHES_PER_EVENT: Final = 512
_HASHES_PER_BATCH: Final = 2_048
_INT_BYTES: Final = 8

_MOST_CHANGES: Final = 100_000
"""Changed blocks between two updates. Beyond that, the next update reads the whole mirror."""
_LABEL_BYTES: Final = 1_024
"""Estimated memory of one label, besides hashes, tokens and extra keys."""
_OBJECT_BYTES: Final = 64


def engine_hash(raw: bytes) -> BlockHash:
    """Return a hash as vLLM publishes it by default: the last eight bytes as a number."""
    return int.from_bytes(raw[-_INT_BYTES:], "big")


@dataclass(slots=True)
class _Labelled:
    """Blocks of one label namespace."""

    namespace: LabelNamespace
    group: BlockGroup
    labels: dict[GroupBlockId, BlockLabel] = field(default_factory=dict)
    held: dict[GroupBlockId, int] = field(default_factory=dict)
    """Tiers of each block whose parts are all held, as bits."""
    published: dict[GroupBlockId, int] = field(default_factory=dict)
    by_hash: dict[bytes, set[GroupBlockId]] = field(default_factory=dict)
    """By the last hash of a label: its blocks; several, if engines compute equal hashes for different KV."""
    children: dict[bytes, set[GroupBlockId]] = field(default_factory=dict)
    """By parent's hash."""
    unlabelled: set[GroupBlockId] = field(default_factory=set)
    """Held, without a known label."""
    wanted: dict[GroupBlockId, None] = field(default_factory=dict)
    """Those of them whose label can be read, oldest first."""

    def forget_if_gone(self, block: GroupBlockId) -> int:
        """Forget the label of a block that is not held, and return its memory. It is read again if the block returns."""
        label = self.labels.get(block)
        if label is None or block in self.held or block in self.published:
            return 0
        del self.labels[block]
        for table, name in ((self.by_hash, label.hashes[-1]), (self.children, label.parent)):
            table[name].discard(block)
            if not table[name]:
                del table[name]
        return _memory_of(label)

    def is_published(self, block_hash: bytes) -> bool:
        """Whether a block with this last hash is published."""
        return not self.published.keys().isdisjoint(self.by_hash.get(block_hash, ()))


class LabelledTranslator:
    """Keeps the published state of each labelled block, and translates changes.

    The watcher's thread calls ``on_change``. One other thread calls the rest.

    Args:
        accept: which volumes count.
        most_label_bytes: memory of labels. Blocks whose labels do not fit are not published.
    """

    def __init__(
        self, accept: Callable[[MirroredVolume], bool] = lambda _volume: True, *, most_label_bytes: int = 1 << 30
    ) -> None:
        self._accept = accept
        self._most_label_bytes = most_label_bytes
        self.label_bytes = 0
        """Estimated memory of labels."""
        self._spaces: dict[NamespaceId, _Labelled] = {}
        self._of: dict[NamespaceId, list[NamespaceId]] = {}
        """By namespace of blocks or labels: label namespaces."""
        self._lock = threading.Lock()
        self._dirty: set[Block] = set()
        self._whole = False
        self._counts: Counter[tuple[BlockHash, str]] = Counter()
        """Published blocks by hash and medium."""

    def __len__(self) -> int:
        """Return the number of published blocks."""
        return sum(len(space.published) for space in self._spaces.values())

    @property
    def unlabelled(self) -> int:
        """Blocks that are held but not published, for lack of a label."""
        return sum(len(space.unlabelled) for space in self._spaces.values())

    @property
    def has_space(self) -> bool:
        """Whether another label may fit."""
        return self.label_bytes < self._most_label_bytes

    @property
    def wanted(self) -> dict[NamespaceId, int]:
        """By label namespace: the number of labels that are missing and can be read."""
        return {mine: len(space.wanted) for mine, space in self._spaces.items() if space.wanted}

    @property
    def namespaces(self) -> list[NamespaceId]:
        """All namespaces to watch: of labels, and of labelled blocks."""
        return list(self._of)

    def use(self, namespaces: Iterable[LabelNamespace]) -> bool:
        """Publish the blocks of these label namespaces too. Returns whether any was new. They are kept for ever."""
        new = [one for one in namespaces if one.spec.namespace not in self._spaces]
        with self._lock:
            for one in new:
                mine = one.spec.namespace
                self._spaces = {**self._spaces, mine: _Labelled(one, BlockGroup(one.labelled))}  # other threads iterate over it
                for namespace in (mine, *one.labelled):
                    self._of.setdefault(namespace, []).append(mine)
            self._whole |= bool(new)
        return bool(new)

    def refresh(self) -> None:
        """Read the state of all blocks again with the next ``update``, and ask for missing labels again."""
        with self._lock:
            self._whole = True

    # ---- the watcher's thread ----
    def on_change(self, mirror: BlockMirror, change: Change) -> None:
        """Note which blocks changed. The state itself is read later."""
        with self._lock:
            self._whole |= change.whole
            if self._whole:
                self._dirty.clear()
                return
            for run in change.runs:
                for mine in self._of.get(run.namespace, ()):
                    self._dirty.update((mine, self._block(mine, run.namespace, key)) for key in run.keys)
            for key in change.keys:
                self._note_key(mirror, key)
            if len(self._dirty) > _MOST_CHANGES:
                self._whole = True
                self._dirty.clear()

    def _block(self, mine: NamespaceId, namespace: NamespaceId, key: BlockKey) -> GroupBlockId:
        block = self._spaces[mine].group.id_in(namespace, key)
        return block if block is not None else self._block_of_label(mine, key)

    def _block_of_label(self, mine: NamespaceId, key: BlockKey) -> GroupBlockId:
        return GroupBlockId(bytes(self._spaces[mine].namespace.key(GroupBlockId(key))))  # XOR undoes itself

    def _note_key(self, mirror: BlockMirror, key: BlockKey) -> None:
        place = mirror.place(key)
        if place is not None:
            for mine in self._of.get(place[0], ()):
                self._dirty.add((mine, self._block(mine, place[0], key)))
            return
        for mine, space in self._spaces.items():  # removed, so its namespace is unknown
            for block in space.group.ids_of(key):
                if block in space.labels or block in space.unlabelled:
                    self._dirty.add((mine, block))

    # ---- the other thread ----
    def update(self, mirror: BlockMirror, most: int) -> tuple[list[list[Event]], dict[NamespaceId, list[GroupBlockId]]]:
        """Publish what has changed.

        Args:
            mirror: does not change during the call.
            most: maximum number of blocks in the second result, per label namespace.

        Returns:
            Batches of events, and by label namespace, blocks whose labels must be read: see ``add_labels``.
        """
        if not mirror.complete:
            return [], {}
        with self._lock:
            dirty, self._dirty = self._dirty, set()
            whole, self._whole = self._whole, False
        if whole:
            dirty = set(self._all_blocks(mirror))
        for mine, block in dirty:
            self._refresh(mirror, mine, block)
        before = self._settle(dirty)
        batches = self._events(before)
        for mine, block in (*dirty, *before):
            self.label_bytes -= self._spaces[mine].forget_if_gone(block)
        wanted = {mine: list(islice(space.wanted, most)) for mine, space in self._spaces.items() if space.wanted}
        return batches, wanted

    def add_labels(self, mine: NamespaceId, labels: Mapping[GroupBlockId, BlockLabel]) -> list[GroupBlockId]:
        """Add labels that were read; the next ``update`` publishes their blocks. Returns blocks whose labels do not fit."""
        space = self._spaces[mine]
        refused: list[GroupBlockId] = []
        for block, label in labels.items():
            space.wanted.pop(block, None)
            if block in space.labels:
                continue
            if not self.has_space:
                refused.append(block)
                continue
            self.label_bytes += _memory_of(label)
            space.unlabelled.discard(block)
            space.labels[block] = label
            space.by_hash.setdefault(label.hashes[-1], set()).add(block)
            space.children.setdefault(label.parent, set()).add(block)
        with self._lock:
            self._dirty.update((mine, block) for block in labels if block in space.labels)
        return refused

    def give_up(self, mine: NamespaceId, blocks: Iterable[GroupBlockId]) -> None:
        """Ask for the labels of these blocks no more, until they change, or ``ask_again`` or ``refresh`` is called."""
        for block in blocks:
            self._spaces[mine].wanted.pop(block, None)

    def ask_again(self, mine: NamespaceId, block: GroupBlockId) -> bool:
        """Ask for the label of a block again. False: its label is known, or the store dropped the block."""
        space = self._spaces[mine]
        if block not in space.unlabelled:
            return False
        space.wanted[block] = None
        return True

    def everything(self, most: int) -> list[list[Event]]:
        """The whole published state, in ``most`` batches at most."""
        untold = set(self._counts)
        events: list[Event] = []
        for space in self._spaces.values():
            stored = [(space.labels[block], bits) for block, bits in space.published.items()]
            events += _stored(space.namespace, stored, untold)
        batches = list(_batches(events))
        each = -(-len(batches) // most) or 1
        return [[event for batch in batches[at : at + each] for event in batch] for at in range(0, len(batches), each)]

    def _all_blocks(self, mirror: BlockMirror) -> Iterator[Block]:
        for mine, space in self._spaces.items():
            yield from ((mine, block) for block in [*space.labels, *space.unlabelled])
        for key in mirror:
            place = mirror.place(key)
            if place is not None:
                yield from ((mine, self._block(mine, place[0], key)) for mine in self._of.get(place[0], ()))

    def _refresh(self, mirror: BlockMirror, mine: NamespaceId, block: GroupBlockId) -> None:
        """Read the tiers of a block, and whether its label can be read."""
        space = self._spaces[mine]
        bits = space.group.held_tiers(mirror, block, self._accept)
        if bits:
            space.held[block] = bits
        else:
            space.held.pop(block, None)
        if not bits or block in space.labels:
            space.unlabelled.discard(block)
            space.wanted.pop(block, None)
            return
        space.unlabelled.add(block)
        if any(volume.served for volume in mirror.replicas(space.namespace.key(block))):
            space.wanted.setdefault(block)
        else:
            space.wanted.pop(block, None)

    def _settle(self, dirty: Iterable[Block]) -> dict[Block, int]:
        """Publish or remove blocks, and their descendants with them.

        Args:
            dirty: blocks whose tiers or labels changed.

        Returns:
            By block that changed: the tiers that were published before.
        """
        before: dict[Block, int] = {}
        pending = list(dirty)
        while pending:
            mine, block = pending.pop()
            space = self._spaces[mine]
            label = space.labels.get(block)
            if label is None:
                continue
            bits = space.held.get(block, 0)
            if label.parent and not space.is_published(label.parent):
                bits = 0
            old = space.published.get(block, 0)
            if bits == old:
                continue
            before.setdefault((mine, block), old)
            if bits:
                space.published[block] = bits
            else:
                del space.published[block]
            if not bits or not old:
                pending += [(mine, child) for child in space.children.get(label.hashes[-1], ())]
        return before

    def _events(self, before: Mapping[Block, int]) -> list[list[Event]]:
        """Return the events for blocks whose published tiers changed: stored ones, then removed ones."""
        changes: Counter[tuple[BlockHash, str]] = Counter()
        stored: dict[NamespaceId, list[tuple[BlockLabel, int]]] = {}
        for (mine, block), old in before.items():
            space = self._spaces[mine]
            label, new = space.labels[block], space.published.get(block, 0)
            changes.update(_pairs(label, new & ~old))
            changes.subtract(_pairs(label, old & ~new))
            if new & ~old:
                stored.setdefault(mine, []).append((label, new & ~old))
        untold: set[tuple[BlockHash, str]] = set()
        removed: dict[str, list[BlockHash]] = {}
        for pair, change in changes.items():
            old_count = self._counts[pair]
            self._counts[pair] += change
            if not old_count and change > 0:
                untold.add(pair)
            elif old_count and not self._counts[pair]:
                removed.setdefault(pair[1], []).append(pair[0])
            if not self._counts[pair]:
                del self._counts[pair]
        events: list[Event] = []
        for mine, pairs in stored.items():
            events += _stored(self._spaces[mine].namespace, pairs, untold)
        events += [
            BlockRemoved(hashes[at : at + _HASHES_PER_EVENT], medium)
            for medium, hashes in removed.items()
            for at in range(0, len(hashes), _HASHES_PER_EVENT)
        ]
        return list(_batches(events))


def _stored(
    namespace: LabelNamespace, blocks: Iterable[tuple[BlockLabel, int]], untold: set[tuple[BlockHash, str]]
) -> list[Event]:
    """Return events for blocks and tiers: parents first, and a run of blocks in one event.

    Args:
        namespace: of the labels.
        blocks: labels, and tiers as bits.
        untold: hashes and media to publish; those that are returned are taken out.
    """
    runs: list[_Run] = []
    open_runs: dict[tuple[bytes, str, str], _Run] = {}
    for label, bits in sorted(blocks, key=lambda pair: pair[0].position):
        for tier, medium in MEDIA.items():
            if not bits & 1 << tier:
                continue
            for part in _untold_parts(label, medium, untold):
                run = open_runs.pop((part.parent, medium, part.lora_name), None)
                if run is None or not part.parent or not run.continues(part):
                    run = _Run(medium)
                    runs.append(run)
                run.add(part)
                open_runs[part.hashes[-1], medium, part.lora_name] = run
    return [run.event(namespace.kind) for run in runs]


def _untold_parts(label: BlockLabel, medium: str, untold: set[tuple[BlockHash, str]]) -> Iterator[BlockLabel]:
    """Yield the hashes of a block that are to be published, one by one or all in one, and take them out of ``untold``.

    Some may be published already: other engines may have blocks of another number of hashes.
    """
    pairs = [(engine_hash(one), medium) for one in label.hashes]
    if untold.issuperset(pairs):
        untold.difference_update(pairs)
        yield label
        return
    each = len(label.tokens) // len(pairs)
    for at, pair in enumerate(pairs):
        if pair in untold:
            untold.discard(pair)
            yield replace(
                label,
                hashes=(label.hashes[at],),
                parent=label.hashes[at - 1] if at else label.parent,
                tokens=label.tokens[at * each : (at + 1) * each],
                extra_keys=None if label.extra_keys is None else (label.extra_keys[at],),
            )


@dataclass(slots=True)
class _Run:
    """Consecutive blocks of one chain in one medium."""

    medium: str
    labels: list[BlockLabel] = field(default_factory=list)
    hashes: int = 0

    def continues(self, label: BlockLabel) -> bool:
        """Whether a block may be in the same event: space for it, equal block sizes, and extras in both or in neither."""
        last = self.labels[-1]
        return (
            self.hashes + len(label.hashes) <= _HASHES_PER_EVENT
            and (last.extra_keys is None) == (label.extra_keys is None)
            and len(last.tokens) * len(label.hashes) == len(label.tokens) * len(last.hashes)
        )

    def add(self, label: BlockLabel) -> None:
        """Append a block."""
        self.labels.append(label)
        self.hashes += len(label.hashes)

    def event(self, kind: str) -> BlockStored:
        """Return the event of all blocks."""
        first = self.labels[0]
        tokens = np.frombuffer(b"".join(label.tokens for label in self.labels), "<u4").tolist()
        extra_keys = None
        if first.extra_keys is not None:
            extra_keys = [one for label in self.labels for one in label.extra_keys or ()]
        return BlockStored(
            [engine_hash(one) for label in self.labels for one in label.hashes],
            engine_hash(first.parent) if first.parent else None,
            tokens,
            len(first.tokens) // 4 // len(first.hashes),
            None,
            self.medium,
            first.lora_name or None,
            extra_keys=extra_keys,
            kv_cache_spec_kind=kind or None,
        )


def _memory_of(label: BlockLabel) -> int:
    """Return the estimated memory of a label."""
    hashes = (len(label.hashes) + 1) * (_OBJECT_BYTES + len(label.hashes[0]))
    return _LABEL_BYTES + hashes + len(label.tokens) + _memory_of_value(label.extra_keys)


def _memory_of_value(value: object) -> int:
    """Return the estimated memory of extra keys: these are nested a few levels."""
    if isinstance(value, list | tuple):
        return _OBJECT_BYTES + sum(map(_memory_of_value, value))
    return _OBJECT_BYTES + (4 * len(value) if isinstance(value, str) else 0)


def _pairs(label: BlockLabel, bits: int) -> Iterator[tuple[BlockHash, str]]:
    """Yield hash and medium of a block in tiers."""
    for tier, medium in MEDIA.items():
        if bits & 1 << tier:
            yield from ((engine_hash(one), medium) for one in label.hashes)


def _batches(events: Sequence[Event]) -> Iterator[list[Event]]:
    """Group events into batches of a bounded size."""
    batch: list[Event] = []
    hashes = 0
    for event in events:
        assert isinstance(event, BlockStored | BlockRemoved)
        size = len(event.block_hashes)
        if batch and hashes + size > _HASHES_PER_BATCH:
            yield batch
            batch, hashes = [], 0
        batch.append(event)
        hashes += size
    if batch:
        yield batch
