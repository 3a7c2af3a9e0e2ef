"""Few blocks on volumes that fail, rest, and are adopted and lost: rare orders of write-back and eviction are met often.

``test_node_table`` has many blocks that compete for space. Here, three steps suffice for most pairs of events about one block.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.core.errors import KVStoreError
from kvstore.core.types import BlockKey, BlockRun, Outcome, Tier, VolumeId
from kvstore.node.durability import recovery
from kvstore.node.durability.recovery import drop_blocks, recover_while_running
from kvstore.node.eviction.allocation import allocate_nvme
from kvstore.node.eviction.operator_requests import evict_down_to, evict_tier, invalidate
from kvstore.node.eviction.volume_commits import by_volume, evict_from_volume, quarantine, retry_quarantine
from kvstore.node.state.model import Block, NodeVolume
from kvstore.testing.faulty_volume import VolumeFault, VolumeOperation
from kvstore.tiers.contract import Slot
from kvstore.tiers.nvme.slab import NvmeSlab
from support.chains import key_of
from support.node_harness import MIB, SHAPE, NodeHarness, volume_id

KEYS = [key_of("tree", number) for number in range(7)]
"""A tree: the children of block ``n`` are ``2n + 1`` and ``2n + 2``."""
DEPTHS = [0, 1, 1, 2, 2, 2, 2]
REST_S = 5.0
MEMORY = Path("/dev/shm")
"""The volumes are there if possible, so that no step waits for a disk."""
SPACE = 2
OWN, ADOPTED = (0, 1), 2
amounts, volumes = st.sampled_from([1, 2, len(KEYS)]), st.integers(0, 2)


def parent_of(number: int) -> BlockKey | None:
    """Return the key of the parent of a block of the tree."""
    return KEYS[(number - 1) // 2] if number else None


class VolumeMachine(RuleBasedStateMachine):
    """A node with two volumes and, at times, one that it has adopted."""

    @initialize(policy=st.sampled_from(["lru", "s3-fifo"]))
    def start(self, policy: str) -> None:
        self.folder = tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None)
        path = Path(self.folder.name)
        self.node = NodeHarness(path, volumes=[MIB, MIB], policy=policy, faulty=OWN)
        self.table, self.residency = self.node.table, self.node.table.residency
        self.unused: dict[VolumeId, int] = {}
        """Slots that no block can have."""
        self.most: dict[VolumeId, int] = {}
        """Slots that can be in use at most."""
        for node_volume in self.table.node_volumes:
            self._fill(node_volume)
        self.pinned: list[Block] = []
        self.adopted: NodeVolume | None = None

    def teardown(self) -> None:
        """After all trouble has ended, everything can leave, and no slot is lost but those of corrupt replicas."""
        if not hasattr(self, "node"):
            return
        try:
            self.node.faults.clear()
            self.node.clock.advance(2 * REST_S)
            self.unpin(len(self.pinned))
            self.node.write_back()
            evict_tier(self.table, Tier.DRAM)
            evict_tier(self.table, Tier.NVME)
            self.holds()
            left = invalidate(self.table, self.node.namespace, self.node.clock.now_s())
            assert (left.kept, self.residency.blocks) == (0, {})
            assert self.node.arena.usage().blocks == 0
            for node_volume in self.table.node_volumes:
                retry_quarantine(node_volume, self.node.clock.now_s())
                assert not node_volume.uncommitted
                assert node_volume.volume.usage().blocks == node_volume.quarantined + self.unused[node_volume.volume_id]
        finally:
            if self.adopted is not None:
                self.adopted.volume.close()
                self.residency.remove_volume(self.adopted)
            self.node.close()
            self.folder.cleanup()

    def _fill(self, node_volume: NodeVolume) -> None:
        """Leave space for ``SPACE`` more blocks only."""
        volume = node_volume.volume
        taken: list[Slot] = []
        while slots := volume.allocate(SHAPE, 1):
            taken += slots
        self.most[volume.volume_id] = volume.usage().blocks
        volume.free(taken[-SPACE:])
        held = sum(block.nvme_volume is node_volume for block in self.residency.blocks.values())
        self.unused[volume.volume_id] = volume.usage().blocks - held  # also blocks of an adopted volume that are left out

    def volume(self, number: int) -> NodeVolume:
        """Return a volume: the first one in place of an adopted one that is not here."""
        found = self.table.node_volumes
        return found[min(number, len(found) - 1)]

    # ---- stores, write-back, loads
    @rule(leaf=st.integers(3, 6), first=st.integers(0, 2))
    def store(self, leaf: int, first: int) -> None:
        """Store the end of a path of the tree. Meanwhile, a volume may have rested enough."""
        self.node.clock.advance(1.0)
        path = [0, (leaf - 1) // 2, leaf][first:]
        head = path[0]
        run = BlockRun(self.node.namespace.namespace_id, parent_of(head), DEPTHS[head], tuple(KEYS[at] for at in path))
        grant = self.table.prepare(self.node.namespace, run, self.node.clock.now_s())
        self.node.write(grant)
        self.node.complete(grant)

    @rule(failing=st.integers(0, 1), how=st.sampled_from(["lost", "denied", "corrupt"]))
    def write_back(self, failing: int, how: str) -> None:
        """Some blocks fail, so they stay in DRAM only at most, and those after them, their descendants, become durable."""
        for block in self.table.take_pending(failing, MIB, 0.0) if failing else ():
            self.table.writeback_failed(block, denied=how == "denied", corrupt=how == "corrupt")
        self.node.write_back()

    @rule(leaf=st.integers(3, 6), failing=st.integers(0, 1))
    def store_durably(self, leaf: int, failing: int) -> None:
        """Store a path, also those of its blocks that could not be written before, and write all but ``failing`` ones."""
        evict_down_to(self.table, None, 0)
        self.store(leaf, 0)
        self.write_back(failing, "lost")

    @rule(number=st.integers(0, 6))
    def load(self, number: int) -> None:
        """Load a block from a volume or find it in DRAM, and keep it pinned."""
        if not self.residency.blocks:
            return
        key = list(self.residency.blocks)[number % len(self.residency.blocks)]
        claim = self.table.claim(self.node.namespace, [key])
        self.pinned += claim.resident.values()
        for block in claim.durable.values():
            assert block.nvme is not None
            assert block.nvme_volume is not None
            slots = self.table.reserve(SHAPE, 1, self.node.clock.now_s())
            assert slots is not None
            view = self.node.arena.view(slots[0], SHAPE.block_bytes)
            [(outcome, checksums)] = block.nvme_volume.volume.read_with_checksums([(block.nvme, block.record(), view)])
            assert outcome is Outcome.HIT
            self.table.finish_promotion(block, slots[0], checksums)
            self.pinned.append(block)

    @rule(count=amounts)
    def unpin(self, count: int) -> None:
        self.table.unpin(self.pinned[:count])
        del self.pinned[:count]

    # ---- eviction
    @contextmanager
    def eviction(self, *, fails: bool) -> Iterator[None]:
        """Evict blocks inside. Copies in DRAM that are the only ones then are to be written again."""
        durable = [block for block in self.residency.blocks.values() if block.nvme_volume is not None]
        if fails:
            self.node.faults.add(VolumeFault.IO_ERROR, operation=VolumeOperation.COMMIT, times=1)
        with suppress(OSError, KVStoreError):
            yield
        self.node.faults.clear()
        assert not any(block.clean for block in durable if block.nvme_volume is None)

    @rule(where=st.sampled_from([None, None, 0, 1, 2]), count=amounts, fails=st.sampled_from([False, False, True]))
    def evict(self, where: int | None, count: int, fails: bool) -> None:
        """Evict the coldest blocks of DRAM (None) or of a volume."""
        node_volume = None if where is None else self.volume(where)
        used = self.node.arena.usage().used_bytes if node_volume is None else node_volume.volume.usage().used_bytes
        with self.eviction(fails=fails):
            evict_down_to(self.table, node_volume, used - count * self.node.namespace.slot_bytes)

    @rule(volume=volumes, more=st.integers(1, 2), alone=st.booleans(), fails=st.sampled_from([False, False, True]))
    def make_space(self, volume: int, more: int, alone: bool, fails: bool) -> None:
        """Evict as write-back does for space on one volume: the coldest blocks of all volumes but those that rest."""
        node_volume = self.volume(volume)
        for other in self.table.node_volumes if alone else ():
            self._rest(other, REST_S if other is not node_volume else 0.0)
        free = self.most[node_volume.volume_id] - node_volume.volume.usage().blocks
        slots, victims = allocate_nvme(self.residency, node_volume, SHAPE, free + more, ahead=1)
        assert slots is None
        for each, theirs in by_volume(victims):
            with self.eviction(fails=fails):
                evict_from_volume(self.table, each, theirs)

    @rule(number=st.integers(0, 2))
    def find_corrupt(self, number: int) -> None:
        durable = [block for block in self.residency.blocks.values() if block.nvme_volume is not None]
        aside = [block for block in durable if block.nvme_volume is not None and block.key in block.nvme_volume.aside]
        if found := aside or durable:
            block = found[number % len(found)]
            assert block.nvme_volume is not None
            assert block.nvme is not None
            quarantine(self.table, block.nvme_volume, block, block.nvme, self.node.counters)

    # ---- trouble
    @rule(volume=volumes, how=st.sampled_from(["rests", "rests no more", "fails"]))
    def trouble(self, volume: int, how: str) -> None:
        if how == "fails":
            self.node.faults.add(VolumeFault.IO_ERROR, operation=VolumeOperation.COMMIT, times=1)
        else:
            self._rest(self.volume(volume), REST_S if how == "rests" else 0.0)

    @rule()
    def adopt_or_lose(self) -> None:
        if self.adopted is None:
            self._adopt()
        else:
            self._lose(self.adopted)

    def _rest(self, node_volume: NodeVolume, rest_s: float) -> None:
        node_volume.resting_until_s = self.node.clock.now_s() + rest_s

    def _adopt(self) -> None:
        """The third volume has what was written to it before it was lost."""
        path = Path(self.folder.name) / "adopted"
        adopted = NvmeSlab.open(path, volume_id=volume_id(ADOPTED), capacity_bytes=2 * MIB, io_threads=1)
        self.adopted = NodeVolume(adopted)
        with self.residency.lock:
            self.residency.expect_volume(self.adopted)
        with mock.patch.object(recovery, "ATTACH_WAIT_S", 0.0):
            recover_while_running(self.table, self.adopted, self.node.registry, self.node.counters)
        self._fill(self.adopted)
        with self.residency.lock:
            self.residency.add_volume(self.adopted)

    def _lose(self, adopted: NodeVolume) -> None:
        """Another node takes the volume back. Blocks in use stay until they are not."""
        if drop_blocks(self.table, adopted):
            self.holds()
            self.unpin(len(self.pinned))
            assert not drop_blocks(self.table, adopted)
        self.residency.remove_volume(adopted)
        adopted.guard.close()
        adopted.volume.close()
        self.adopted = None

    @invariant()
    def holds(self) -> None:
        assert self.node.counters.get("eviction_bugs_total") == 0
        self.table.validate()
        for block in self.pinned:
            assert self.node.is_right(block)
        for block in self.residency.blocks.values():
            assert not block.evicting, "an eviction that has not ended"


TestVolumeMachine = VolumeMachine.TestCase
# a failure is not shrunk: that would take minutes
TestVolumeMachine.settings = settings(
    max_examples=40, stateful_step_count=50, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
