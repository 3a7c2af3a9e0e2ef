"""A node without its daemon: real arena, volumes, table, write-back and loaders, driven by a test."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import cached_property, partial
from pathlib import Path

from kvstore.core.chain import ChainSlice
from kvstore.core.clock import ManualClock, MonotonicClock
from kvstore.core.spec import CacheSpec
from kvstore.core.types import BlockKey, BlockRun, BlockShape, NamespaceId, NodeId, Outcome, StoreOutcome, VolumeId
from kvstore.node.control.admission_gate import AdmissionGate
from kvstore.node.durability.recovery import recover
from kvstore.node.durability.writeback import LocalTarget
from kvstore.node.loads.loader import Loader
from kvstore.node.loads.mounts import Mounts
from kvstore.node.loads.peers import Peers
from kvstore.node.loads.runs import BlockRequest, LoadedRun, Runs
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.node.state.grants import SlotGrant
from kvstore.node.state.model import Block, NodeVolume
from kvstore.node.state.namespaces import NamespaceRegistry, NodeNamespace
from kvstore.node.state.residency import Residency
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.testing.faulty_volume import FaultPlan, FaultyVolume
from kvstore.tiers.arena import DramArena
from kvstore.tiers.contract import DurableVolume, Slot
from kvstore.tiers.eviction.policy import make_policy
from kvstore.tiers.nvme.slab import NvmeSlab
from kvstore.transport.tcp.peer import TcpPeer
from support.chains import checksums_of, key_of, payload_of

SHAPE = BlockShape(2, 2048)
MIB = 1 << 20
DRAM = VolumeId("n/dram")
NODE_ID = NodeId("n")
BATCH_BYTES = 1 << 30


def volume_id(number: int) -> VolumeId:
    """Return the id of a volume of the harness."""
    return VolumeId(f"n/nvme{number}")


class NodeHarness:
    """One node. ``close`` checks the table's invariants.

    Args:
        folder: of the volumes; volume ``i`` is in ``nvme<i>``. Needed if there are volumes.
        volumes: capacity of each volume.
        policy: eviction policy of all tiers.
        shapes: one namespace per shape.
        specs: namespaces with specs, in place of ``shapes``.
        registry: knows the namespaces; default: one without quotas.
        arena_bytes: size of the arena.
        clock: default: a manual clock.
        slab: class of the volumes.
        faulty: volumes that follow ``faults``.
        stall_s: volumes are guarded, and an I/O may take this long; None: guards have their default.
        cache_loads: loaded blocks stay in DRAM.
        publishes: the change log keeps changes.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        volumes: Sequence[int] = (),
        policy: str = "lru",
        shapes: Sequence[BlockShape] = (SHAPE,),
        specs: Sequence[CacheSpec] = (),
        registry: NamespaceRegistry | None = None,
        arena_bytes: int = MIB,
        clock: ManualClock | MonotonicClock | None = None,
        slab: type[NvmeSlab] = NvmeSlab,
        faulty: Sequence[int] = (),
        stall_s: float | None = None,
        cache_loads: bool = True,
        publishes: bool = False,
    ) -> None:
        self.counters, self.faults = Counters(), FaultPlan()
        self.clock = clock or ManualClock()
        self.arena = DramArena(volume_id=DRAM, capacity_bytes=arena_bytes)
        assert folder is not None or not volumes
        self._folder = folder
        self.slabs = [
            slab.open(folder / f"nvme{number}", volume_id=volume_id(number), capacity_bytes=size, io_threads=1)
            for number, size in enumerate(volumes)
            if folder is not None
        ]
        wrapped: list[DurableVolume] = [
            FaultyVolume(one, self.faults) if number in faulty else one for number, one in enumerate(self.slabs)
        ]
        self.volumes = [NodeVolume(volume) for volume in wrapped]
        if stall_s is not None:
            for volume in self.volumes:
                volume.set_guard(self.counters, stall_s=stall_s, readers=2)
        self.log = ReplicaChangeLog([DRAM, *(one.volume_id for one in self.slabs)], self.counters, self.clock, keep=publishes)
        self.registry = registry or NamespaceRegistry()
        residency = Residency(
            self.arena,
            make_policy(policy),
            self.volumes,
            self.log,
            self.counters,
            self.clock,
            make_durable_policy=partial(make_policy, policy),
            accounts=None if registry is None else registry.accounts,
        )
        self.table = BlockTable(residency, writes_back=bool(volumes), cache_loads=cache_loads)
        recover(self.table, self.registry, self.counters)
        self.namespaces: list[NodeNamespace] = (
            [self.registry.find(spec.namespace) or self.registry.of_spec(spec) for spec in specs]
            if specs
            else [self.registry.of_shape(NamespaceId(bytes([number]) * 16), shape) for number, shape in enumerate(shapes)]
        )
        self._namespace_count = len(self.namespaces)
        self.target = LocalTarget(self.table, self.counters, self.clock)
        self._closers: list[Callable[[], None]] = []
        self.expected_bugs = 0
        """Blocks whose eviction a test makes fail unexpectedly."""

    # ---- parts that not every test needs
    @cached_property
    def gate(self) -> AdmissionGate:
        return AdmissionGate(self.table, self.counters)

    @cached_property
    def peers(self) -> Peers:
        peers = Peers(lambda address, _: TcpPeer(address.data_address, breaker_failures=1000))
        self._closers.append(peers.close)
        return peers

    @cached_property
    def loader(self) -> Loader:
        mounts = Mounts([])
        made = Loader(NODE_ID, self.table, self.peers, mounts, self.counters, self.clock, window_bytes=MIB, threads=4)
        self._closers.append(made.close)
        return made

    # ---- keys
    @property
    def namespace(self) -> NodeNamespace:
        return self.namespaces[0]

    def keys(self, chain: int | str, count: int, namespace: int = 0) -> list[BlockKey]:
        """Return the first keys of a chain. Chains of several namespaces differ."""
        name = chain * self._namespace_count + namespace if isinstance(chain, int) else f"{chain}/{namespace}"
        return [key_of(name, depth) for depth in range(count)]

    def run(self, chain: int | str, first: int, count: int, namespace: int = 0) -> BlockRun:
        """Return blocks of a chain as a run."""
        keys = self.keys(chain, first + count, namespace)
        found = self.namespaces[namespace]
        return BlockRun(found.namespace_id, keys[first - 1] if first else None, first, tuple(keys[first:]))

    # ---- stores
    def prepare(self, chain: int | str, first: int, count: int, namespace: int = 0) -> SlotGrant:
        """Begin a store, without a wait for slots."""
        run = self.run(chain, first, count, namespace)
        return self.table.prepare(self.namespaces[namespace], run, self.clock.now_s())

    def write(self, grant: SlotGrant) -> None:
        """Write the payloads of granted blocks to their slots."""
        shape = grant.namespace.shape
        for key, slot in grant.slots.items():
            self.arena.view(slot, shape.block_bytes)[:] = payload_of(key, shape)

    def complete(self, grant: SlotGrant) -> list[StoreOutcome]:
        """Complete all granted blocks."""
        keys = list(grant.slots)
        return self.table.complete(grant, keys, [checksums_of(key, grant.namespace.shape) for key in keys])

    def store(self, chain: int | str, first: int, count: int, namespace: int = 0) -> list[StoreOutcome]:
        """Store blocks of a chain in DRAM."""
        grant = self.prepare(chain, first, count, namespace)
        self.write(grant)
        self.complete(grant)
        return list(grant.outcomes)

    def store_durably(self, chain: int | str, count: int, namespace: int = 0) -> list[BlockKey]:
        """Store the head of a chain, and write all dirty blocks to the volumes."""
        assert self.store(chain, 0, count, namespace) == [StoreOutcome.STORED] * count
        self.write_back()
        return self.keys(chain, count, namespace)

    def write_back(self, batch_blocks: int = 16) -> int:
        """Write all dirty blocks that wait. Returns how many waited."""
        written = 0
        while blocks := self.table.take_pending(batch_blocks, BATCH_BYTES, 0.0):
            self.target.persist(blocks, lambda: None)
            written += len(blocks)
        return written

    # ---- blocks
    def block(self, key: BlockKey) -> Block:
        """Return a block that the node holds."""
        return next(block for block in self.table.snapshot() if block.key == key)

    def coldest_on(self, node_volume: NodeVolume) -> list[BlockKey]:
        """Return the keys of the idle blocks on a volume, coldest first."""
        residency = self.table.residency
        with residency.lock:
            return [key for key, _ in residency.volume_evictor.coldest(node_volume, residency.is_idle)]

    def after_restart(self, number: int, folder: Path) -> dict[BlockKey, Slot]:
        """Recover a copy of a volume in ``folder``. Returns the slots of its blocks. No write may be in progress."""
        assert self._folder is not None
        copy = shutil.copytree(self._folder / f"nvme{number}", folder / "copy")
        capacity = self.slabs[number].usage().capacity_bytes
        with closing(NvmeSlab.open(copy, volume_id=volume_id(number), capacity_bytes=capacity, io_threads=1)) as slab:
            return {record.key: slot for slot, record in slab.recover()}

    def is_resident(self, keys: Sequence[BlockKey], namespace: int = 0) -> list[bool]:
        """Use blocks in DRAM. Returns which were there."""
        blocks = self.table.pin_resident(self.namespaces[namespace], keys)
        self.table.unpin([block for block in blocks if block is not None])
        return [block is not None for block in blocks]

    def is_right(self, block: Block) -> bool:
        """Return whether a resident block has its payload."""
        assert block.dram is not None
        shape = block.namespace.shape
        return bytes(self.arena.view(block.dram, shape.block_bytes)) == payload_of(block.key, shape)

    # ---- loads
    def request(self, keys: Sequence[BlockKey], wait_s: float, **options: object) -> BlockRequest:
        """Return a load of keys at the head of a chain."""
        chain = ChainSlice(self.namespace.namespace_id, list(keys))
        return BlockRequest(self.namespace, chain, self.clock.now_s() + wait_s, **options)  # type: ignore[arg-type]

    def outcomes(self, runs: Runs | Iterator[LoadedRun], count: int) -> list[Outcome | None]:
        """Run a load to its end, check the bytes of its hits, and unpin them."""
        found: list[Outcome | None] = [None] * count
        for run in runs:
            found[run.first : run.first + len(run.outcomes)] = run.outcomes
            assert all(self.is_right(block) for block in run.pinned())
            self.table.unpin(run.pinned())
        return found

    def close(self) -> None:
        self.faults.clear()
        self.faults.release_hangs()
        for close in reversed(self._closers):
            close()
        assert self.counters.get("eviction_bugs_total") == self.expected_bugs
        self.table.validate()
        self.table.close()
        for volume in self.volumes:
            volume.guard.close()
            volume.volume.close()
        self.arena.close()
