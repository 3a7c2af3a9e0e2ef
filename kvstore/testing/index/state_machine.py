"""Model-based test of a prefix index: random histories of nodes, held against ``IndexModel`` after every step.

Subclass a machine, give it ``open_index``, and run its ``TestCase``::

    class MyMachine(ClosedIndexMachine):
        def open_index(self, place): return MyIndex(place)

    TestMyIndex = MyMachine.TestCase

``ClosedIndexMachine`` behaves as nodes do: a volume stores blocks after their parents and drops leaves first. Then every hit is
exact, every run true in all its blocks, and each volume is found as far as it holds the chain. ``TornIndexMachine`` publishes
and removes anywhere: then the answers are only as good as ``IndexModel.check`` says.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.core.limits import DIGEST_RANGES
from kvstore.core.types import BlockKey, BlockRun, BootId, NamespaceId, NodeId, Tier, VolumeId
from kvstore.index.contract import Beat, PrefixIndex, ReplicaRun, VolumeEpoch
from kvstore.testing.index.model import Chain, IndexModel

LENGTH = 24
_ONE, _OTHER = NamespaceId(b"1" * 16), NamespaceId(b"2" * 16)
CHAINS = (
    Chain.of(_ONE, ["a"] * LENGTH),
    Chain.of(_ONE, ["a"] * 9 + ["b"] * (LENGTH - 9)),
    Chain.of(_ONE, ["a"] * 9 + ["b"] * 4 + ["c"] * (LENGTH - 13)),
    Chain.of(_ONE, ["d"] * LENGTH),
    Chain.of(_OTHER, ["a"] * LENGTH),
)
"""A small forest: chains that share beginnings, and one of another namespace with the same path."""

chains = st.sampled_from(CHAINS)
positions = st.integers(0, LENGTH)
choices = st.integers(0, 1_000)
names = st.sampled_from(["n", "n/", "n/a", "n/ab", "o/" + "a" * 500, "o/" + "a" * 501])
node_ids = st.sampled_from([NodeId("a"), NodeId("b"), NodeId("c" * 512)])
boot_ids = st.sampled_from([BootId(b"1" * 16), BootId(b"2" * 16)])
counters = st.integers(0, 2**64 - 1)


class IndexMachine(RuleBasedStateMachine):
    """Steps that both machines share."""

    persistent = True
    """Whether closing and opening the index again at one place brings its content back."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = Path(tempfile.mkdtemp(prefix="index-machine-"))
        self.index = self.open_index(self._folder)
        self.epoch = self.index.epoch
        self.model = IndexModel()
        self.ever: set[VolumeEpoch] = set()
        self.boots = 0
        self.last: tuple[VolumeEpoch, list[BlockRun], list[BlockKey]] | None = None
        self.notes: dict[str, bytes] = {}
        self.beats: dict[NodeId, Beat] = {}

    def open_index(self, place: Path) -> PrefixIndex:
        """Open the index at a place: the same content for the same place."""
        raise NotImplementedError

    def teardown(self) -> None:
        self.index.close()
        shutil.rmtree(self._folder)

    def volume_epoch(self, choice: int) -> VolumeEpoch:
        """One of the open volume epochs."""
        volume_epochs = sorted(self.model.held)
        return volume_epochs[choice % len(volume_epochs)]

    def publish(self, volume_epoch: VolumeEpoch, stored: list[BlockRun], removed: list[BlockKey]) -> None:
        """To index and model."""
        self.index.publish(volume_epoch, stored, removed)
        self.model.publish(volume_epoch, stored, removed)
        self.last = (volume_epoch, stored, removed)

    @initialize()
    def begin(self) -> None:
        self.begin_volume_epoch(0)
        self.begin_volume_epoch(1)

    @rule(volume=st.integers(0, 3))
    def begin_volume_epoch(self, volume: int) -> None:
        self.boots += 1
        boot = BootId(self.boots.to_bytes(16, "big"))
        volume_epoch = self.index.open_volume_epoch(VolumeId(f"v{volume}"), NodeId("n"), Tier.DRAM, boot)
        assert volume_epoch not in self.ever, "numbers of volume epochs are never used twice"
        assert self.index.open_volume_epoch(VolumeId(f"v{volume}"), NodeId("n"), Tier.DRAM, boot) == volume_epoch
        self.ever.add(volume_epoch)
        self.model.held[volume_epoch] = {}

    @precondition(lambda self: len(self.model.held) > 2)
    @rule(choice=choices)
    def end_volume_epoch(self, choice: int) -> None:
        volume_epoch = self.volume_epoch(choice)
        self.index.close_volume_epoch(volume_epoch)
        del self.model.held[volume_epoch]
        if self.last is not None and self.last[0] == volume_epoch:
            self.last = None

    @precondition(lambda self: self.last is not None)
    @rule()
    def publish_again(self) -> None:
        assert self.last is not None
        before = (
            [self.index.lookup(chain.namespace, chain.packed, self.ever).blocks for chain in CHAINS],
            self.index.stats().blocks,
        )
        self.index.publish(*self.last)
        after = (
            [self.index.lookup(chain.namespace, chain.packed, self.ever).blocks for chain in CHAINS],
            self.index.stats().blocks,
        )
        assert after == before

    @rule(entries=st.integers(1, 30))
    def sweep(self, entries: int) -> None:
        done = self.index.sweep(entries)
        assert done == (self.index.stats().dead_volume_epochs == 0)

    @rule()
    def sweep_all(self) -> None:
        while not self.index.sweep(7):
            pass
        assert self.index.stats().blocks == len(self.model.all_keys())

    @precondition(lambda self: self.persistent)
    @rule()
    def open_again(self) -> None:
        self.index.close()
        self.index = self.open_index(self._folder)
        assert self.index.epoch == self.epoch

    @rule(notes=st.dictionaries(names, st.none() | st.binary(max_size=40), max_size=4), announce=st.booleans())
    def put_notes(self, notes: dict[str, bytes | None], announce: bool) -> None:
        revision, before = self.index.revision, dict(self.notes)
        self.index.put_notes(notes, announce=announce)
        self.notes = {name: value for name, value in {**self.notes, **notes}.items() if value is not None}
        assert (self.index.revision > revision) == (announce and self.notes != before)

    @rule(prefix=names)
    def read_notes(self, prefix: str) -> None:
        expected = {name: value for name, value in self.notes.items() if name.startswith(prefix)}
        assert self.index.notes(prefix) == expected
        assert self.index.note(prefix) == self.notes.get(prefix)

    @rule(beats=st.dictionaries(node_ids, st.none() | st.builds(Beat, boot_ids, counters, counters), max_size=4))
    def put_beats(self, beats: dict[NodeId, Beat | None]) -> None:
        revision = self.index.revision
        self.index.put_beats(beats)
        self.beats = {node_id: beat for node_id, beat in {**self.beats, **beats}.items() if beat is not None}
        assert self.index.revision == revision

    @invariant()
    def small_records_are_as_written(self) -> None:
        assert self.index.notes("") == self.notes
        assert self.index.beats() == self.beats

    @rule(choice=choices)
    def compare_inventory(self, choice: int) -> None:
        volume_epoch = self.volume_epoch(choice)
        mine = self.model.held[volume_epoch]
        for key_range in {int.from_bytes(key[:2], "big") >> 4 for key in self.model.all_keys()} | {0, DIGEST_RANGES - 1}:
            expected = {key for key in mine if int.from_bytes(key[:2], "big") >> 4 == key_range}
            found = self.index.keys_in_range(volume_epoch, key_range)
            assert len(found) == len(set(found))
            assert set(found) == expected

    @rule(most=st.integers(1, 40))
    def read_the_whole(self, most: int) -> None:
        expected = {(key, *place, volume_epoch) for volume_epoch, mine in self.model.held.items() for key, place in mine.items()}
        found: list[tuple[BlockKey, NamespaceId, int, VolumeEpoch]] = []
        position: BlockKey | None = None
        while True:
            blocks, position = self.index.blocks_from(position, most)
            found += [
                (block.key, block.namespace, block.depth, volume_epoch)
                for block in blocks
                for volume_epoch in block.volume_epochs
            ]
            if position is None:
                break
        assert len(found) == len(expected)
        assert set(found) == expected
        assert [key for key, *_ in found] == sorted(key for key, *_ in found)

    @rule(chain=chains, end=positions, hidden=choices)
    def look_at_a_part(self, chain: Chain, end: int, hidden: int) -> None:
        """A shorter request, with one volume epoch out of sight."""
        part = Chain(chain.namespace, chain.keys[:end])
        visible = set(self.model.held) - {self.volume_epoch(hidden)}
        self.model.check(part, visible, self.index.lookup(part.namespace, part.packed, visible))

    @invariant()
    def answers_hold(self) -> None:
        visible = set(self.model.held)
        for chain in CHAINS:
            self.check(chain, visible)

    def check(self, chain: Chain, visible: set[VolumeEpoch]) -> None:
        """Everything that must hold for one chain. Ended volume epochs are named as visible too: they are not."""
        self.model.check(chain, visible, self.index.lookup(chain.namespace, chain.packed, self.ever))

    @invariant()
    def volume_epochs_are_known(self) -> None:
        assert {info.volume_epoch for info in self.index.volume_epochs()} == set(self.model.held)


class ClosedIndexMachine(IndexMachine):
    """Nodes as they are: parents come first, leaves go first."""

    @rule(choice=choices, chain=chains, end=positions, cut=positions)
    def store(self, choice: int, chain: Chain, end: int, cut: int) -> None:
        """A volume epoch extends a chain that it holds; in one run or two."""
        volume_epoch = self.volume_epoch(choice)
        have = self._prefix(volume_epoch, chain)
        if end > have:
            cut = min(max(cut, have), end)
            self.publish(volume_epoch, [chain.run(start, stop) for start, stop in ((have, cut), (cut, end)) if start < stop], [])

    @rule(choice=choices, chain=chains, start=positions, end=positions)
    def store_again(self, choice: int, chain: Chain, start: int, end: int) -> None:
        """Store blocks that the epoch already holds, from any position."""
        volume_epoch = self.volume_epoch(choice)
        end = min(end, self._prefix(volume_epoch, chain))
        if start < end:
            self.publish(volume_epoch, [chain.run(start, end)], [])

    @rule(choice=choices, count=st.integers(1, 20), pick=choices)
    def drop_leaves(self, choice: int, count: int, pick: int) -> None:
        volume_epoch = self.volume_epoch(choice)
        removed: list[BlockKey] = []
        left = set(self.model.held[volume_epoch])
        for _ in range(min(count, len(left))):
            parents = {chain.keys[at - 1] for chain in CHAINS for at in range(1, LENGTH) if chain.keys[at] in left}
            leaves = sorted(left - parents)
            removed.append(leaves[pick % len(leaves)])
            left.remove(removed[-1])
        self.publish(volume_epoch, [], removed)

    def check(self, chain: Chain, visible: set[VolumeEpoch]) -> None:
        super().check(chain, visible)
        hit = self.index.lookup(chain.namespace, chain.packed, self.ever)
        self.model.check_true(chain, hit)
        expected = {ReplicaRun(0, have, volume_epoch) for volume_epoch in visible if (have := self._prefix(volume_epoch, chain))}
        assert set(hit.runs) == expected

    def _prefix(self, volume_epoch: VolumeEpoch, chain: Chain) -> int:
        return self.model.prefix(chain, {volume_epoch})


class TornIndexMachine(IndexMachine):
    """Nodes were lost, ranges repaired: anything is held anywhere."""

    @rule(
        choice=choices, chain=chains, start=positions, end=positions, others=st.lists(st.sampled_from(CHAINS[0].keys), max_size=3)
    )
    def store(self, choice: int, chain: Chain, start: int, end: int, others: list[BlockKey]) -> None:
        stored = [chain.run(start, end)] if start < end else []
        self.publish(self.volume_epoch(choice), stored, others)

    @rule(choice=choices, chain=chains, start=positions, end=positions)
    def drop(self, choice: int, chain: Chain, start: int, end: int) -> None:
        self.publish(self.volume_epoch(choice), [], list(chain.keys[start:end]))
