"""Adoption at a node: when an owner counts as absent, and how a volume joins and leaves the block table while the node runs."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import cast

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproto.v1 import common_pb2, metadata_pb2, node_pb2
from kvstore.core.errors import Conflict, CorruptBlock, Unavailable
from kvstore.core.types import BlockKey, NamespaceId, NodeId, StoreOutcome, Tier, VolumeId
from kvstore.node.base.volume_guard import VolumeGuard
from kvstore.node.control.migrator import BlockMigrator, MigrationRound
from kvstore.node.control.pull_client import PullClient
from kvstore.node.durability import adoption
from kvstore.node.durability.adoption import GAP_S, AdoptionParts, OwnerPresence, OwnerTimer, VolumeAdopter, findings
from kvstore.node.durability.recovery import VolumeFolder
from kvstore.node.durability.volume_watch import VolumeWatch
from kvstore.node.eviction.operator_requests import evict_tier, invalidate
from kvstore.node.eviction.volume_commits import by_volume
from kvstore.node.loads.locate import pin_stored
from kvstore.node.state.block_states import DramState
from kvstore.node.state.model import Block, NodeVolume
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.observe.limited_log import LimitedLog
from kvstore.tiers.contract import BlockRecord
from kvstore.tiers.nvme.catalog import Catalog
from kvstore.tiers.nvme.ownership import Claim, ClaimsMissing, Owner, claim, claim_in_force
from kvstore.tiers.nvme.slab import NvmeSlab
from kvstore.tiers.nvme.slab_io import SlabFile
from kvstore.tiers.nvme.superblock import UnknownVersion
from support.chains import checksums_of, payload_of
from support.node_harness import MIB, NODE_ID, SHAPE, NodeHarness, volume_id
from support.wait import wait_until

OTHER, THIRD = NodeId("other"), NodeId("third")
THEIRS = VolumeId("other/nvme0")
AFTER_S = 10.0


class Registered:
    """Records the changes of a registration."""

    def __init__(self) -> None:
        self.changes: list[str] = []

    def add_volume(self, volume: common_pb2.VolumeInfo) -> None:
        self.changes.append(f"+{volume.volume_id}")

    def remove_volume(self, volume_id: VolumeId) -> None:
        self.changes.append(f"-{volume_id}")


class Bed:
    """A node, the folder of another node's volume, and the answers about that node."""

    def __init__(self, folder: Path, volumes: Sequence[int] = (4 * MIB,)) -> None:
        self.folder = folder / "shared"
        self.node = NodeHarness(folder, volumes=volumes, publishes=True)
        self.away = False
        self.open = True
        self.registered = Registered()
        self.mounted: list[VolumeId] = []

    def make_theirs(self, keys: list[BlockKey]) -> None:
        """Create the other node's volume with blocks."""
        slab = NvmeSlab.open(self.folder, volume_id=THEIRS, capacity_bytes=4 * MIB, io_threads=1)
        assert list(slab.recover()) == []
        slots = slab.allocate(SHAPE, len(keys))
        assert slots is not None
        records = [
            BlockRecord(self.node.namespace.namespace_id, key, keys[at - 1] if at else None, at, SHAPE, checksums_of(key, SHAPE))
            for at, key in enumerate(keys)
        ]
        payloads = [memoryview(payload_of(key, SHAPE)) for key in keys]
        assert slab.write(list(zip(slots, records, payloads, strict=True))) == [None] * len(keys)
        slab.commit(list(zip(slots, records, strict=True)), [])
        slab.close()

    def adopter(
        self,
        location: VolumeFolder | None = None,
        held: NodeVolume | None = None,
        open_volume: Callable[[VolumeFolder], NvmeSlab] | None = None,
        stopping: threading.Event | None = None,
    ) -> VolumeAdopter:
        node = self.node
        parts = AdoptionParts(
            node_id=NODE_ID,
            after_s=AFTER_S,
            table=node.table,
            namespaces=node.registry,
            replica_log=node.log,
            is_away=lambda _owner, _home: self.away,
            may_adopt=lambda: self.open,
            open_volume=open_volume or self.open_volume,
            make_guard=lambda _: None,
            mount=lambda location: self.mounted.append(location.volume_id),
            counters=node.counters,
            clock=node.clock,
            registration=self.registered,
            stopping=stopping or threading.Event(),
        )
        return VolumeAdopter(location or VolumeFolder(THEIRS, self.folder), parts, held)

    def open_volume(self, location: VolumeFolder) -> NvmeSlab:
        return NvmeSlab.open(
            location.path,
            volume_id=location.volume_id,
            capacity_bytes=location.capacity_bytes,
            node_id=NODE_ID,
            io_threads=1,
            counters=self.node.counters,
        )

    def look_until_absent(self, adopter: VolumeAdopter) -> None:
        """Look every second until the owner has been away for long enough."""
        self.away = True
        for _ in range(int(AFTER_S) + 1):
            adopter.look()
            self.node.clock.advance(1.0)  # type: ignore[union-attr]

    def loaded(self, keys: list[BlockKey]) -> int:
        """Load blocks, each compared with its bytes. Returns the number of hits."""
        for key in keys:
            block = self.node.block(key)
            assert block.nvme_volume is not None
            assert block.nvme is not None
            payload = memoryview(bytearray(SHAPE.block_bytes))
            [(outcome, _)] = block.nvme_volume.volume.read_with_checksums([(block.nvme, block.record(), payload)])
            assert outcome == 1
            assert bytes(payload) == payload_of(key, SHAPE)
        return len(keys)


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    made = Bed(tmp_path)
    yield made
    for node_volume in made.node.table.node_volumes:
        if node_volume not in made.node.volumes:
            node_volume.guard.close()
            node_volume.volume.close()
    made.node.close()


# ---- when an owner is absent
observations = st.lists(st.tuples(st.sampled_from([OTHER, THIRD]), st.booleans(), st.floats(0.1, 15.0)), max_size=40)


@given(observations)
def test_owner_is_absent_only_after_unbroken_absence(seen: list[tuple[NodeId, bool, float]]) -> None:
    timer = OwnerTimer(AFTER_S)
    now_s, history = 0.0, list[tuple[float, NodeId, bool]]()
    for node_id, away, step_s in seen:
        now_s += step_s
        history.append((now_s, node_id, away))
        verdict = timer.judge(node_id, away=away, now_s=now_s)
        absent_since_s = now_s
        for (at_s, who, gone), later_s in zip(reversed(history), [now_s, *(at for at, _, _ in reversed(history))], strict=False):
            if not gone or who != node_id or later_s - at_s > GAP_S:
                break
            absent_since_s = at_s
        expected = away and now_s - absent_since_s >= AFTER_S
        assert verdict is (Owner.ABSENT if expected else Owner.PRESENT)


def node_status(**fields: object) -> metadata_pb2.NodeStatus:
    return metadata_pb2.NodeStatus(node=common_pb2.NodeInfo(node_id=OTHER), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "home", "away"),
    [
        ([], OTHER, True),
        ([node_status()], OTHER, True),
        ([node_status(alive=True)], OTHER, False),
        ([node_status(stopped=True)], OTHER, False),
        ([node_status(stopped=True)], THIRD, True),
        ([node_status(refused="its token has expired")], OTHER, False),
    ],
)
def test_owner_presence_follows_metadata_server(
    monkeypatch: pytest.MonkeyPatch, found: list[metadata_pb2.NodeStatus], home: NodeId, away: bool
) -> None:
    monkeypatch.setattr(adoption, "call", lambda *_: metadata_pb2.ListNodesResponse(nodes=found))
    presence = OwnerPresence(lambda: grpc.insecure_channel("127.0.0.1:1"))
    assert presence.is_away(OTHER, home) is away
    assert presence.is_away(NodeId(""), home), "an unreadable claim names no node"
    presence.close()


def test_owner_presence_without_metadata_server_no_owner_is_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(adoption, "_limited", LimitedLog(adoption.log))
    presence = OwnerPresence(lambda: grpc.insecure_channel("127.0.0.1:1"))
    assert not presence.is_away(OTHER, OTHER)
    assert "volume not adopted: liveness of its owner is unknown (owner=other, error=" in caplog.text
    presence.close()


# ---- taking a volume
def test_volume_of_absent_owner_is_adopted(bed: Bed) -> None:
    keys = bed.node.keys("theirs", 40)
    bed.make_theirs(keys)
    adopter = bed.adopter()
    adopter.look()
    assert not adopter.adopted, "its owner is present"
    bed.look_until_absent(adopter)
    assert adopter.adopted
    assert claim_in_force(bed.folder, OTHER) == Claim(1, NODE_ID)
    assert bed.registered.changes == [f"+{THEIRS}"]
    assert bed.loaded(keys) == 40
    assert bed.node.log.range_digests(THEIRS).counts.count(0) < 4096
    assert [found.code.name for found in findings([adopter])] == ["VOLUME_ADOPTED"]
    bed.node.table.validate()
    adopter.look()
    assert bed.registered.changes == [f"+{THEIRS}"]
    assert bed.node.counters.get("adopted_volumes_total") == 1


def test_adopted_volume_is_written_and_evicted_like_own(bed: Bed) -> None:
    bed.make_theirs(bed.node.keys("theirs", 8))
    bed.look_until_absent(bed.adopter())
    for number in range(60):
        bed.node.store_durably(f"c{number}", 16)
    used = {block.nvme_volume.volume_id for block in bed.node.table.snapshot() if block.nvme_volume is not None}
    assert used == {THEIRS, volume_id(0)}
    bed.node.table.validate()


def test_first_volume_ends_protection_in_dram(tmp_path: Path) -> None:
    """Blocks that hints protect in DRAM, the last tier, may leave it after the node has adopted a volume."""
    bed = Bed(tmp_path, volumes=())
    node = bed.node
    node.store("chat", 0, 16)
    keys = node.keys("chat", 16)
    node.namespace.hinted = dict.fromkeys(keys, 1)
    for number in range(60):
        node.store(f"c{number}", 0, 16)
    assert all(node.is_resident(keys))
    bed.make_theirs(node.keys("theirs", 8))
    adopter = bed.adopter()
    bed.look_until_absent(adopter)
    assert adopter.adopted
    for number in range(60, 120):
        node.store(f"c{number}", 0, 16)
    assert not any(node.is_resident(keys))
    for node_volume in node.table.node_volumes:
        node_volume.guard.close()
        node_volume.volume.close()
    node.close()


def test_folder_of_another_volume_is_not_claimed(bed: Bed) -> None:
    """A mount names the wrong folder: a claim there would fence the owner of the volume that it has."""
    bed.make_theirs(bed.node.keys("theirs", 4))
    adopter = bed.adopter(VolumeFolder(VolumeId("gone/nvme0"), bed.folder))
    with pytest.raises(Conflict, match="has volume other/nvme0"):
        bed.look_until_absent(adopter)
    assert claim_in_force(bed.folder, OTHER) == Claim(0, OTHER)


class Waits(threading.Event):
    """Notes how long a thread waits, and ends it after some waits."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.seconds = most, list[float]()

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout or 0.0)
        return len(self.seconds) >= self.most


def test_failed_attempts_are_ever_further_apart(bed: Bed) -> None:
    """An attempt may read the whole volume."""
    bed.make_theirs(bed.node.keys("theirs", 4))
    assert claim(bed.folder, 1, NODE_ID)
    tries = iter(range(100))

    def failing(location: VolumeFolder) -> NvmeSlab:
        if next(tries) < 6:
            raise Unavailable("the file server is away")
        return bed.open_volume(location)

    waits = Waits(9)
    adopter = bed.adopter(open_volume=failing, stopping=waits)
    adopter.start()
    adopter.stop(30)
    assert waits.seconds == [1, 5, 10, 20, 40, 60, 60, 1, 1]
    assert adopter.adopted
    assert bed.node.counters.get("adoptions_failed_total") == 6


def test_busy_node_does_not_adopt(bed: Bed) -> None:
    bed.make_theirs(bed.node.keys("theirs", 4))
    bed.open = False
    adopter = bed.adopter()
    bed.look_until_absent(adopter)
    assert not adopter.adopted
    assert claim_in_force(bed.folder, OTHER) == Claim(0, OTHER)


def test_own_claim_is_continued_without_waiting(bed: Bed) -> None:
    keys = bed.node.keys("theirs", 4)
    bed.make_theirs(keys)
    assert claim(bed.folder, 1, NODE_ID)  # the process died after it
    adopter = bed.adopter()
    adopter.look()
    assert adopter.adopted
    assert bed.loaded(keys) == 4


def test_claim_of_other_candidate_restarts_the_wait(bed: Bed) -> None:
    bed.make_theirs(bed.node.keys("theirs", 4))
    adopter = bed.adopter()
    bed.away = True
    for _ in range(8):
        adopter.look()
        bed.node.clock.advance(1.0)  # type: ignore[union-attr]
    assert claim(bed.folder, 1, THIRD)
    for _ in range(8):
        adopter.look()
        bed.node.clock.advance(1.0)  # type: ignore[union-attr]
    assert not adopter.adopted
    bed.look_until_absent(adopter)
    assert claim_in_force(bed.folder, OTHER) == Claim(2, NODE_ID)


def test_damaged_catalog_is_rebuilt_while_adopting(bed: Bed) -> None:
    keys = bed.node.keys("theirs", 12)
    bed.make_theirs(keys)
    (bed.folder / "catalog" / "data.mdb").write_bytes(b"x" * 8192)
    bed.look_until_absent(bed.adopter())
    assert bed.loaded(keys) == 12
    assert bed.node.counters.get("adopted_catalogs_rebuilt_total") == 1


def test_catalog_damaged_inside_is_rebuilt_while_adopting(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a read of all entries finds the damage."""
    keys = bed.node.keys("theirs", 12)
    bed.make_theirs(keys)
    read = Catalog.entries

    def damaged(catalog: Catalog) -> Iterator[tuple[bytes, bytes]]:
        is_rebuilt = (bed.folder / "catalog.1.damaged.0").exists()
        for number, entry in enumerate(read(catalog)):
            if number == 5 and not is_rebuilt:
                raise CorruptBlock("the catalog is damaged")
            yield entry

    monkeypatch.setattr(Catalog, "entries", damaged)
    bed.look_until_absent(bed.adopter())
    assert bed.loaded(keys) == 12
    assert bed.node.counters.get("adopted_catalogs_rebuilt_total") == 1
    bed.node.table.validate()


@pytest.mark.parametrize("error", [UnknownVersion("format version 9"), ClaimsMissing(Path("volume"), 3)], ids=["newer", "claims"])
def test_volume_that_is_not_damaged_is_not_rebuilt(bed: Bed, monkeypatch: pytest.MonkeyPatch, error: CorruptBlock) -> None:
    bed.make_theirs(bed.node.keys("theirs", 4))

    def refused(_location: VolumeFolder) -> NvmeSlab:
        raise error

    monkeypatch.setattr(adoption, "check_volume", lambda *_, **__: pytest.fail("repaired"))
    adopter = bed.adopter(open_volume=refused)
    with pytest.raises(type(error)):
        bed.look_until_absent(adopter)
    assert not adopter.adopted


def test_blocks_known_already_keep_one_durable_replica(bed: Bed) -> None:
    durable, resident, other = bed.node.keys("d", 4), bed.node.keys("r", 4), bed.node.keys("o", 4)
    assert bed.node.store_durably("d", 4) == durable
    for name in ("r", "o"):
        bed.node.store(name, 0, 4)
    assert bed.node.table.give_up_pending() == 8
    for key in other:  # another engine computed other bytes under the same key
        bed.node.block(key).checksums = bytes(8 * SHAPE.layers)
    bed.make_theirs([*durable, *resident, *other])
    bed.look_until_absent(bed.adopter())
    on = {key: bed.node.block(key).nvme_volume for key in [*durable, *resident, *other]}
    assert [on[key] for key in durable] == [bed.node.volumes[0]] * 4
    assert {volume.volume_id for key in resident if (volume := on[key]) is not None} == {THEIRS}
    assert [on[key] for key in other] == [None] * 4
    assert bed.node.counters.get("adopted_blocks_unused_total") == 4
    assert bed.node.table.node_volumes[1].volume.usage().blocks == 8, "duplicates are freed, blocks left out are not"
    bed.node.table.validate()


def test_invalidated_unused_block_stays_away(bed: Bed) -> None:
    """An adopted block that the table could not use is only in the catalog, where an invalidation does not see it."""
    node = bed.node
    keys = node.keys("o", 4)
    node.store("o", 0, 4)
    assert node.table.give_up_pending() == 4
    for key in keys:  # another engine computed other bytes under the same key
        node.block(key).checksums = bytes(8 * SHAPE.layers)
    bed.make_theirs(keys)
    bed.look_until_absent(bed.adopter())
    assert node.counters.get("adopted_blocks_unused_total") == 4
    assert invalidate(node.table, node.namespace, node.clock.now_s() + 1) == (4, 0)
    adopted = node.table.node_volumes.pop()
    adopted.guard.close()
    adopted.volume.close()
    with closing(bed.open_volume(VolumeFolder(THEIRS, bed.folder))) as slab:
        assert list(slab.recover()) == []
        assert slab.usage().blocks == 0, "their slots are free"


def test_located_volumes_are_those_of_the_session(bed: Bed) -> None:
    """A volume that was adopted since its opening has no number in its list, and one that was dropped keeps its own."""
    node = bed.node
    own, theirs = node.store_durably("own", 4), node.keys("theirs", 4)
    evict_tier(node.table, Tier.DRAM)
    bed.make_theirs(theirs)
    bed.look_until_absent(bed.adopter())

    def numbers(*volume_ids: VolumeId) -> dict[int, int]:
        found = pin_stored(node.table, node.namespace, [*own, *theirs], volume_ids)
        node.table.unpin([block for _, block, _, _ in found])
        return {position: number for position, _, number, _ in found}

    assert numbers(volume_id(0)) == dict.fromkeys(range(4), 0)
    assert numbers(VolumeId("gone/nvme0"), THEIRS, volume_id(0)) == dict.fromkeys(range(4), 2) | dict.fromkeys(range(4, 8), 1)


class Destination:
    """An empty active node that takes every block that a drain moves: in place of ``PullClient``."""

    node = common_pb2.NodeInfo(node_id=NODE_ID)

    def __init__(self) -> None:
        self.pulled: list[BlockKey] = []

    def nodes(self) -> list[metadata_pb2.NodeStatus]:
        status = node_status(alive=True, state=common_pb2.NODE_STATE_ACTIVE)
        status.node.volumes.add(volume_id="other/nvme1", tier=common_pb2.TIER_NVME, capacity_bytes=1 << 30)
        status.usages.add(volume_id="other/nvme1")
        return [status]

    def holders(self, *_: object) -> Iterator[tuple[BlockKey, str]]:
        return iter(())

    def specs(self) -> dict[NamespaceId, common_pb2.CacheSpec]:
        return {}

    def pull(self, _: str, blocks: Sequence[Block], __: object) -> node_pb2.PullBlocksResponse:
        self.pulled += [block.key for block in blocks]
        return node_pb2.PullBlocksResponse(outcomes=bytes([StoreOutcome.STORED] * len(blocks)))


def drained(node: NodeHarness) -> list[BlockKey]:
    """Return the blocks that a drain of a node moves."""
    there = Destination()
    calls = cast("PullClient", there)
    mover = BlockMigrator(calls, node.counters, window_bytes=MIB, bytes_per_s=0, pause=lambda _: False)
    assert mover.round(node.table.snapshot()) == MigrationRound(0, "")
    return there.pulled


def test_adopted_blocks_read_before_are_moved_by_drains(bed: Bed) -> None:
    """The node has read blocks through a mount, so it has copies in DRAM, and adopts their volume afterwards."""
    keys = bed.node.keys("theirs", 4)
    bed.make_theirs(keys)
    table, namespace = bed.node.table, bed.node.namespace
    table.claim(namespace, keys[:2])
    slots = table.reserve(SHAPE, 2, bed.node.clock.now_s())
    assert slots is not None
    for at, slot in enumerate(slots):
        copy = Block(namespace, keys[at], keys[at - 1] if at else None, at, checksums_of(keys[at], SHAPE))
        table.unpin([table.insert_fetched(copy, slot)])
    assert drained(bed.node) == [], "copies of another node's blocks stay"
    bed.look_until_absent(bed.adopter())
    assert drained(bed.node) == keys


def test_copy_on_lost_files_keeps_the_adopted_one(bed: Bed) -> None:
    """The files of this node's volume were removed: its blocks end with the process, the adopted ones do not."""
    keys = bed.node.store_durably("c", 4)
    bed.make_theirs(keys)
    own = bed.node.volumes[0].volume
    (bed.node.slabs[0].path / "slab.kv").unlink()
    assert not own.check_files()
    bed.look_until_absent(bed.adopter())
    adopted = bed.node.table.node_volumes[1]
    adopted.guard.close()
    adopted.volume.close()
    again = bed.open_volume(VolumeFolder(THEIRS, bed.folder))
    assert {record.key for _, record in again.recover()} == set(keys)
    again.close()


def test_block_being_loaded_is_adopted_after_the_load(tmp_path: Path) -> None:
    bed = Bed(tmp_path)
    keys = bed.node.keys("theirs", 4)
    bed.make_theirs(keys)
    assert claim(bed.folder, 1, NODE_ID)
    claimed = bed.node.table.claim(bed.node.namespace, keys[:2])
    adopter = bed.adopter()
    thread = threading.Thread(target=adopter.look)
    thread.start()
    wait_until(lambda: len(bed.node.table.snapshot()) == 2, "the others are there")
    assert not adopter.adopted
    located = pin_stored(bed.node.table, bed.node.namespace, keys, [THEIRS])  # of a session that had the volume before
    assert [position for position, *_ in located] == [2, 3]
    bed.node.table.unpin([block for _, block, *_ in located])
    [(volume, on_it)] = by_volume(bed.node.table.snapshot())
    assert (volume.volume_id, len(on_it)) == (THEIRS, 2)
    bed.node.table.unclaim([keys[at] for at in claimed.claimed_absent], [])
    thread.join(30)
    assert adopter.adopted
    assert bed.loaded(keys) == 4
    adopted = bed.node.table.node_volumes[1]
    adopted.guard.close()
    bed.node.close()
    adopted.volume.close()


def test_usage_is_counted_while_a_volume_is_added(bed: Bed) -> None:
    """Heartbeats count blocks without the table's lock."""
    evictor = bed.node.table.residency.volume_evictor
    added = NodeVolume(bed.node.slabs[0])

    class Namespace:
        def __hash__(self) -> int:
            evictor.add_volume(added)
            return 0

    assert evictor.held(cast("NodeNamespace", Namespace())) == 0
    evictor.remove_volume(added)
    added.guard.close()


# ---- losing a volume
def fenced(bed: Bed) -> VolumeAdopter:
    """The adopter of the node's own volume, which another node has claimed."""
    own = bed.node.volumes[0]
    location = VolumeFolder(own.volume_id, bed.node.slabs[0].path, 4 * MIB)
    assert claim(location.path, 1, THIRD)
    assert own.volume.check_files()
    assert own.volume.adopted_by == THIRD
    return bed.adopter(location, own)


def test_fenced_volume_that_stores_nothing_is_noticed(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_file: SlabFile) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(SlabFile, "sync", fail)
    bed.node.store_durably("chain", 1)
    (slab,) = bed.node.slabs
    assert slab.read_only is not None
    assert claim(slab.path, 1, OTHER)
    VolumeWatch(bed.node.table, bed.node.counters, lambda: None).look()
    assert slab.adopted_by == OTHER


def test_fenced_volume_leaves_the_table(bed: Bed) -> None:
    keys = bed.node.store_durably("c", 8)
    adopter = fenced(bed)
    adopter.look()
    assert bed.node.table.node_volumes == []
    assert [block.nvme_volume for block in bed.node.table.snapshot()] == [None] * 8
    assert bed.node.block(keys[0]).dram_state is DramState.CLEAN
    assert (bed.registered.changes, bed.mounted) == ([f"-{volume_id(0)}"], [volume_id(0)])
    assert volume_id(0) not in bed.node.log.volumes
    assert [found.code.name for found in findings([adopter])] == ["VOLUME_FENCED"]
    bed.node.table.validate()
    adopter.look()
    assert adopter.lost_to == THIRD


def test_fenced_volume_waits_for_reads_in_progress(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    bed.node.store_durably("c", 4)
    adopter = fenced(bed)
    [pinned, *_] = [block for block in bed.node.table.snapshot() if block.depth == 3]
    pinned.pins += 1
    closed: list[str] = []
    close: Callable[[VolumeGuard], None] = VolumeGuard.close
    monkeypatch.setattr(VolumeGuard, "close", lambda guard: (closed.append("closed"), close(guard))[1])
    thread = threading.Thread(target=adopter.look)
    thread.start()
    wait_until(lambda: sum(block.nvme_volume is not None for block in bed.node.table.snapshot()) == 1, "the others are dropped")
    assert not closed
    bed.node.table.unpin([pinned])
    thread.join(30)
    assert closed
    assert bed.node.table.node_volumes == []


def test_fenced_volume_is_closed_after_its_last_read(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    bed.node.store_durably("c", 4)
    adopter = fenced(bed)
    [volume] = bed.node.volumes
    closed: list[str] = []
    monkeypatch.setattr(bed.node.slabs[0], "close", lambda: closed.append("closed"))
    begun, proceed = threading.Event(), threading.Event()
    thread = threading.Thread(target=volume.guard.timed, args=(lambda: (begun.set(), proceed.wait(30)),))
    thread.start()
    assert begun.wait(30)
    adopter.look()
    assert bed.node.table.node_volumes == []
    assert not closed, "a read of it has not returned"
    proceed.set()
    thread.join(30)
    adopter.look()
    adopter.look()
    assert closed == ["closed"]
    monkeypatch.undo()


def test_fenced_volume_is_taken_back_after_its_adopter_is_lost(bed: Bed) -> None:
    keys = bed.node.store_durably("c", 8)
    adopter = fenced(bed)
    adopter.look()
    for key in keys:
        assert bed.node.block(key).nvme_volume is None
    bed.look_until_absent(adopter)
    assert adopter.lost_to is None
    assert not adopter.adopted, "it is its own"
    assert bed.loaded(keys) == 8
    assert bed.registered.changes == [f"-{volume_id(0)}", f"+{volume_id(0)}"]
    assert drained(bed.node) == keys
    bed.node.table.validate()


def test_adopted_volume_is_released_when_node_stops(bed: Bed) -> None:
    bed.make_theirs(bed.node.keys("theirs", 4))
    adopter = bed.adopter()
    bed.look_until_absent(adopter)
    bed.node.table.node_volumes[1].volume.close()
    adopter.release()
    assert claim_in_force(bed.folder, OTHER) == Claim(2, OTHER)


def test_own_volume_is_not_released(bed: Bed) -> None:
    own = VolumeFolder(volume_id(0), bed.node.slabs[0].path, 4 * MIB)
    bed.adopter(own, bed.node.volumes[0]).release()
    assert claim_in_force(own.path, NODE_ID) == Claim(0, NODE_ID)
