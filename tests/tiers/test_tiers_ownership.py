"""Claims, fencing and adoption of a volume, with real files: slabs in one process stand for nodes on several hosts."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
from pathlib import Path

import pytest

from kvstore.core.errors import CorruptBlock, Unavailable, Unsupported
from kvstore.core.types import NodeId, Outcome, VolumeId
from kvstore.observe.counters import Counters
from kvstore.testing.mount_suite import Held, drop, fetch, known, put
from kvstore.testing.volume_suite import SHAPES, block_payload, empty_memory, items_for
from kvstore.tiers.nvme import slab as slab_module
from kvstore.tiers.nvme import superblock as superblock_module
from kvstore.tiers.nvme.catalog import Catalog
from kvstore.tiers.nvme.fsck import check_volume
from kvstore.tiers.nvme.mounted import MountedSlab
from kvstore.tiers.nvme.ownership import Claim, VolumeAdopted, claim, claim_in_force, newest_catalog, read_superblock, release
from kvstore.tiers.nvme.slab import NvmeSlab
from kvstore.tiers.nvme.slab_io import SlabFile, SlotIO
from kvstore.tiers.nvme.superblock import SUPERBLOCK_BYTES, UnknownVersion, pack_superblock

NAME = VolumeId("owner/nvme0")
OWNER, ADOPTER, OTHER = NodeId("owner"), NodeId("adopter"), NodeId("other")
SHAPE = SHAPES[0]


def opened(folder: Path, node_id: NodeId = OWNER, counters: Counters | None = None) -> tuple[NvmeSlab, Held]:
    """Open the volume of a folder as a node. Returns the blocks found, by number."""
    capacity = 4 << 20 if node_id == OWNER else 0
    slab = NvmeSlab.open(folder, volume_id=NAME, capacity_bytes=capacity, node_id=node_id, counters=counters)
    return slab, {int.from_bytes(record.key, "big"): (slot, record) for slot, record in slab.recover()}


def adopt(folder: Path, node_id: NodeId = ADOPTER) -> tuple[NvmeSlab, Held]:
    assert claim(folder, claim_in_force(folder, OWNER).token + 1, node_id)
    return opened(folder, node_id)


def adopted(folder: Path) -> NvmeSlab:
    """Let an owner store blocks 0 to 3 and end, and another node adopt the volume."""
    owner, _ = opened(folder)
    put(owner, range(4), SHAPE)
    owner.close()
    return adopt(folder)[0]


def good(slab: NvmeSlab, held: Held) -> list[int]:
    """Read blocks. Returns the numbers of the hits, each compared byte for byte."""
    views = empty_memory(len(held), SHAPE, aligned=True) if held else []
    items = [(slot, record, view) for (slot, record), view in zip(held.values(), views, strict=True)]
    hits = []
    for number, view, outcome in zip(held, views, slab.read(items), strict=True):
        if outcome is Outcome.HIT:
            assert bytes(view) == block_payload(number, SHAPE), "WRONG BYTES"
            hits.append(number)
    return hits


def test_claim_many_threads_one_succeeds(tmp_path: Path) -> None:
    won: list[NodeId] = []
    start = threading.Barrier(16)

    def race(node_id: NodeId) -> None:
        start.wait()
        if claim(tmp_path, 1, node_id):
            won.append(node_id)

    threads = [threading.Thread(target=race, args=(NodeId(f"n{number}"),)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert [claim_in_force(tmp_path, OWNER)] == [Claim(1, node_id) for node_id in won]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["claim.1"]


def test_claim_in_force_is_the_highest_one(tmp_path: Path) -> None:
    assert claim_in_force(tmp_path, OWNER) == Claim(0, OWNER)
    for token, node_id in ((1, ADOPTER), (9, OTHER), (10, ADOPTER)):
        assert claim(tmp_path, token, node_id)
    assert not claim(tmp_path, 10, OTHER)
    assert claim_in_force(tmp_path, OWNER) == Claim(10, ADOPTER)
    (tmp_path / "claim.11").touch()
    assert claim_in_force(tmp_path, OWNER) == Claim(11, NodeId(""))


def test_adopter_has_all_durable_blocks_and_owner_is_refused(tmp_path: Path) -> None:
    counters = Counters()
    owner, _ = opened(tmp_path, counters=counters)
    stored = put(owner, range(40), SHAPE)
    adopter, held = adopt(tmp_path)
    assert good(adopter, held) == sorted(stored) == list(range(40))
    slots = owner.allocate(SHAPE, 3)
    assert slots is not None
    put(adopter, range(40, 60), SHAPE)
    late = items_for(slots, range(100, 103), SHAPE)
    assert [type(error) for error in owner.write(late)] == [Unavailable] * 3
    with pytest.raises(Unavailable, match="read-only"):
        owner.commit([(slot, record) for slot, record, _ in late], [])
    assert owner.allocate(SHAPE, 1) is None
    assert owner.adopted_by == ADOPTER
    assert "adopter has adopted it" in (owner.read_only or "")
    assert not owner.resume()
    assert owner.check_files()
    assert good(owner, stored) == list(range(40)), "its blocks can still be read"
    assert counters.get("fenced_volumes_total") == 1
    assert counters.get("fenced_writes_refused_total") >= 1
    owner.close()
    with pytest.raises(VolumeAdopted, match="belongs to node adopter") as refused:
        opened(tmp_path)
    assert (refused.value.node_id, refused.value.token) == (ADOPTER, 1)
    adopter.close()


@pytest.mark.parametrize("idle", [True, False])
def test_paused_owner_notices_before_next_write(tmp_path: Path, idle: bool) -> None:
    owner, _ = opened(tmp_path)
    put(owner, range(5), SHAPE)
    slots = owner.allocate(SHAPE, 1)
    assert slots is not None
    items = items_for(slots, [7], SHAPE)
    before = (tmp_path / "slab.kv").read_bytes()
    adopter, held = adopt(tmp_path)
    if idle:
        owner.check_files()
    [error] = owner.write(items)
    assert isinstance(error, Unavailable)
    after = (tmp_path / "slab.kv").read_bytes()
    assert after[1 << 20 :] == before[1 << 20 :], "no slot was written"
    assert good(adopter, held) == list(range(5))
    for slab in (owner, adopter):
        slab.close()


def test_late_write_of_fenced_owner_is_never_wrong_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner is paused between its check and its writes, and continues after the adopter has filled the same slots."""
    owner, _ = opened(tmp_path)
    put(owner, range(5), SHAPE)
    numbers = range(100, 120)
    slots = owner.allocate(SHAPE, len(numbers))
    assert slots is not None
    late = items_for(slots, numbers, SHAPE)
    adopter, held = adopt(tmp_path)
    mount = MountedSlab(tmp_path, NAME)
    theirs = put(adopter, range(200, 220), SHAPE)
    assert {slot.offset for slot, _ in theirs.values()} == {slot.offset for slot in slots}
    with monkeypatch.context() as paused:
        paused.setattr(NvmeSlab, "_owned", lambda _self: True)
        paused.setattr(slab_module, "_is_at", lambda _path, _file: True)
        assert owner.write(late) == [None] * len(late)
        owner.commit([(slot, record) for slot, record, _ in late], [])
    assert good(adopter, theirs) == [], "they are misses"
    assert good(adopter, held) == list(range(5))
    mount.catch_up()
    assert known(mount, range(100, 120), SHAPE) == [], "no reader finds late slots"
    assert fetch(mount, range(220), SHAPE) == list(range(5))
    for part in (mount, owner, adopter):
        part.close()
    again, held = opened(tmp_path, ADOPTER)
    assert sorted(held) == [*range(5), *range(200, 220)], "late commits reach no catalog that is in use"
    again.close()


def test_commit_during_adoption_counts_only_if_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node adopts the volume while a commit changes the old catalog: the commit is not reported durable."""
    owner, _ = opened(tmp_path)
    put(owner, range(3), SHAPE)
    commit = Catalog.commit
    adopted: list[tuple[NvmeSlab, Held]] = []

    def late(catalog: Catalog, *arguments: object) -> None:
        monkeypatch.setattr(Catalog, "commit", commit)
        adopted.append(adopt(tmp_path))
        commit(catalog, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Catalog, "commit", late)
    with pytest.raises(Unavailable):
        put(owner, range(3, 6), SHAPE)
    [(adopter, held)] = adopted
    assert good(adopter, held) == list(range(3))
    for slab in (owner, adopter):
        slab.close()


def test_late_superblocks_of_fenced_node_are_replaced(tmp_path: Path) -> None:
    counters = Counters()
    owner, _ = opened(tmp_path)
    old = read_superblock(tmp_path)
    owner.close()
    assert claim(tmp_path, 1, ADOPTER)
    adopter, _ = opened(tmp_path, ADOPTER, counters)
    with (tmp_path / "slab.kv").open("r+b") as file:
        file.write(2 * pack_superblock(old))
    assert read_superblock(tmp_path).token == 0
    put(adopter, range(4), SHAPE)
    restored = read_superblock(tmp_path)
    assert restored.token == 1
    assert restored.epoch > old.epoch + 2, "no epoch is used again"
    assert counters.get("fencing_tokens_restored_total") == 1
    adopter.close()
    again, held = opened(tmp_path, ADOPTER)
    assert good(again, held) == list(range(4))
    again.close()


def test_failed_sync_of_restored_token_stops_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports a lost page once, to the first sync after it."""
    counters = Counters()
    owner, _ = opened(tmp_path)
    old = read_superblock(tmp_path)
    owner.close()
    assert claim(tmp_path, 1, ADOPTER)
    adopter, _ = opened(tmp_path, ADOPTER, counters)
    slots = adopter.allocate(SHAPE, 1)
    assert slots is not None
    [(slot, record, payload)] = items_for(slots, [1], SHAPE)
    assert adopter.write([(slot, record, payload)]) == [None]
    with (tmp_path / "slab.kv").open("r+b") as file:
        file.write(2 * pack_superblock(old))

    def lost(_fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", lost)
        assert adopter.check_files()
    assert "a sync of its slab failed" in (adopter.read_only or "")
    assert counters.get("nvme_sync_errors_total") == 1
    with pytest.raises(Unavailable, match="a sync of its slab failed"):
        adopter.commit([(slot, record)], [])
    adopter.close()


def test_lost_slab_of_claimed_volume_is_not_replaced(tmp_path: Path) -> None:
    """Its file system may be mounted late: the volume is there again with the slab."""
    adopter = adopted(tmp_path)
    adopter.close()
    slab = (tmp_path / "slab.kv").rename(tmp_path / "away")
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(CorruptBlock, match="the slab of this volume is lost"):
        NvmeSlab.open(tmp_path, volume_id=NAME, capacity_bytes=4 << 20, node_id=ADOPTER)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    slab.rename(tmp_path / "slab.kv")
    again, held = opened(tmp_path, ADOPTER)
    assert good(again, held) == list(range(4))
    again.close()


def test_claim_without_opening_is_continued_by_claimant(tmp_path: Path) -> None:
    owner, _ = opened(tmp_path)
    put(owner, range(4), SHAPE)
    assert claim(tmp_path, 1, ADOPTER)
    assert claim(tmp_path, 2, OTHER)  # the first one died
    with pytest.raises(VolumeAdopted):
        opened(tmp_path, ADOPTER)
    other, held = opened(tmp_path, OTHER)
    assert good(other, held) == list(range(4))
    assert newest_catalog(tmp_path, 9) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "catalog.2", "claim.1", "claim.2", "lock.2", "roster.2", "slab.kv",
    ]  # fmt: skip
    for slab in (owner, other):
        slab.close()


def test_released_volume_goes_back_to_its_first_owner(tmp_path: Path) -> None:
    adopter = adopted(tmp_path)
    put(adopter, range(4, 8), SHAPE)
    adopter.close()
    assert release(tmp_path, NAME, adopter.token)
    with pytest.raises(VolumeAdopted):
        opened(tmp_path, ADOPTER)
    owner, held = opened(tmp_path)
    assert owner.token == 2
    assert good(owner, held) == list(range(8))
    owner.close()


@pytest.mark.parametrize("damage", ["lost", "garbage"])
def test_damaged_catalog_is_rebuilt_for_adopter(tmp_path: Path, damage: str) -> None:
    owner, _ = opened(tmp_path)
    put(owner, range(12), SHAPE)
    if damage == "lost":
        shutil.rmtree(tmp_path / "catalog")
    else:
        (tmp_path / "catalog" / "data.mdb").write_bytes(b"x" * 8192)
    assert claim(tmp_path, 1, ADOPTER)
    with pytest.raises(CorruptBlock):
        opened(tmp_path, ADOPTER)
    assert check_volume(tmp_path, repair=True).good == 12
    adopter, held = opened(tmp_path, ADOPTER)
    assert good(adopter, held) == list(range(12))
    for slab in (owner, adopter):
        slab.close()


def test_repair_of_lost_claim_changes_nothing(tmp_path: Path) -> None:
    """A candidate is paused before it repairs the catalog. Another node claims and opens the volume meanwhile."""
    opened(tmp_path)[0].close()
    assert claim(tmp_path, 1, OTHER)
    adopter, _ = adopt(tmp_path)
    put(adopter, range(4), SHAPE)
    with pytest.raises(VolumeAdopted, match=f"volume {re.escape(str(tmp_path))} belongs to node adopter"):
        check_volume(tmp_path, repair=True, token=1)
    adopter.close()
    again, held = opened(tmp_path, ADOPTER)
    assert good(again, held) == list(range(4))
    again.close()


@pytest.mark.parametrize("lost", ["catalog", "superblock"])
def test_repair_ends_at_a_later_claim(tmp_path: Path, lost: str) -> None:
    owner, _ = opened(tmp_path)
    put(owner, range(4), SHAPE)
    owner.close()
    if lost == "catalog":
        shutil.rmtree(tmp_path / "catalog")
    else:
        with (tmp_path / "slab.kv").open("r+b") as file:
            file.write(bytes(2 * SUPERBLOCK_BYTES))
    before = (tmp_path / "slab.kv").read_bytes()
    assert claim(tmp_path, 1, ADOPTER)
    reads = SlabFile.pread

    def paused(file: SlabFile, offset: int, size: int) -> bytes:
        if not (tmp_path / "claim.2").exists():
            assert claim(tmp_path, 2, OTHER)
        return reads(file, offset, size)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SlabFile, "pread", paused)
        with pytest.raises(VolumeAdopted, match="belongs to node other"):
            check_volume(tmp_path, repair=True, token=1)
    assert (tmp_path / "slab.kv").read_bytes() == before


def test_unattended_repair_drops_no_unreadable_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, _ = opened(tmp_path)
    put(owner, range(12), SHAPE)
    owner.close()
    shutil.rmtree(tmp_path / "catalog")
    assert claim(tmp_path, 1, ADOPTER)
    read = SlabFile.read

    def failing(file: SlabFile, slots: list[SlotIO], *, verify: bool) -> None:
        read(file, slots, verify=verify)
        slots[3].outcome = Outcome.UNAVAILABLE

    with monkeypatch.context() as patched:
        patched.setattr(SlabFile, "read", failing)
        with pytest.raises(Unavailable, match="cannot be read"):
            check_volume(tmp_path, repair=True, token=1)
    assert check_volume(tmp_path, repair=True, token=1).good == 12


def test_repair_leaves_unknown_formats_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer build has published its token and died before it wrote a catalog: the catalog still has the known format."""
    owner, _ = opened(tmp_path)
    put(owner, range(4), SHAPE)
    current = read_superblock(tmp_path)
    owner.close()
    with monkeypatch.context() as newer:
        newer.setattr(superblock_module, "VERSION", superblock_module.VERSION + 1)
        page = pack_superblock(current)
    with (tmp_path / "slab.kv").open("r+b") as file:
        file.write(2 * page)
    before = (tmp_path / "slab.kv").read_bytes()
    with pytest.raises(UnknownVersion):
        check_volume(tmp_path, repair=True)
    assert (tmp_path / "slab.kv").read_bytes() == before


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_claim_without_hard_links_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(_self: Path, _target: Path) -> None:
        raise OSError(number, "refused")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    with pytest.raises(Unsupported, match=r"hard links.*node\.adopt_mounts"):
        claim(tmp_path, 1, ADOPTER)
    assert list(tmp_path.iterdir()) == []


def test_claim_on_full_disk_is_not_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim cut off in the node's name would name another node: storage-10, storage-1."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:9]))
    with pytest.raises(OSError, match="No space left"):
        claim(tmp_path, 1, NodeId("storage-10"))
    assert list(tmp_path.iterdir()) == []


def test_unreadable_superblock_leaves_fencing_to_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, _ = opened(tmp_path)
    monkeypatch.setattr(SlabFile, "pread", lambda *_: bytes(2 * SUPERBLOCK_BYTES))
    put(owner, range(3), SHAPE)
    assert claim(tmp_path, 1, ADOPTER)
    with pytest.raises(AssertionError):
        put(owner, range(3, 6), SHAPE)
    assert owner.adopted_by == ADOPTER
    owner.close()


def test_unreadable_claims_after_commit_stop_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit may count or not, so its slots are not named again by another commit."""
    counters = Counters()
    owner, _ = opened(tmp_path, counters=counters)
    slots = owner.allocate(SHAPE, 2)
    assert slots is not None
    items = items_for(slots, range(2), SHAPE)
    assert owner.write(items) == [None, None]

    def fail(_path: Path, _token: int) -> bool:
        raise OSError(5, "no such luck")

    with monkeypatch.context() as failing:
        failing.setattr(slab_module, "is_claimed", fail)
        with pytest.raises(Unavailable):
            owner.commit([(slot, record) for slot, record, _ in items], [])
    assert counters.get("fencing_checks_failed_total") == 1
    owner.free(slots)
    assert owner.allocate(SHAPE, 1) is None
    assert owner.read_only is not None
    assert "restart the node" in owner.read_only
    owner.close()
    again, held = opened(tmp_path)
    assert set(good(again, held)) <= {0, 1}
    again.close()


def test_unreadable_claims_after_removal_count_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, _ = opened(tmp_path)
    held = put(owner, range(4), SHAPE)

    def fail(_path: Path, _token: int) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as failing:
        failing.setattr(slab_module, "is_claimed", fail)
        drop(owner, {number: held.pop(number) for number in (0, 1)})
    assert owner.read_only is None
    held |= put(owner, range(10, 12), SHAPE)
    adopter, adopted = adopt(tmp_path)
    assert adopted.keys() == held.keys(), "a removal that was reported is in the catalog that an adopter copies"
    with pytest.raises(Unavailable):
        owner.commit([], [record.key for _, record in held.values()])
    owner.close()
    adopter.close()


def test_lost_claims_are_refused(tmp_path: Path) -> None:
    opened(tmp_path)[0].close()
    adopt(tmp_path)[0].close()
    (tmp_path / "claim.1").unlink()
    with pytest.raises(CorruptBlock, match=r"claims of this volume are missing.*write the owner's name to claim\.1"):
        opened(tmp_path)
    (tmp_path / "claim.1").write_text("adopter\n")
    opened(tmp_path, ADOPTER)[0].close()


def test_torn_token_is_published_again(tmp_path: Path) -> None:
    """The adopter died between the two copies of the superblock, and the first copy is torn."""
    owner, _ = opened(tmp_path)
    put(owner, range(4), SHAPE)
    owner.close()
    assert claim(tmp_path, 1, ADOPTER)
    with (tmp_path / "slab.kv").open("r+b") as file:
        file.write(bytes(SUPERBLOCK_BYTES // 2))
    adopter, held = opened(tmp_path, ADOPTER)
    assert good(adopter, held) == list(range(4))
    assert read_superblock(tmp_path).token == 1
    adopter.close()


def test_mount_follows_volume_to_new_owner(tmp_path: Path) -> None:
    owner, _ = opened(tmp_path)
    put(owner, range(4), SHAPE)
    mount = MountedSlab(tmp_path, NAME)
    assert claim(tmp_path, 1, ADOPTER)
    mount.catch_up()
    assert fetch(mount, range(10), SHAPE) == list(range(4))
    adopter, _ = opened(tmp_path, ADOPTER)
    put(adopter, range(4, 8), SHAPE)
    mount.catch_up()
    assert fetch(mount, range(10), SHAPE) == list(range(8))
    for part in (mount, owner, adopter):
        part.close()


def test_catalog_that_keeps_changing_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner that is not fenced still commits: the copy would be torn."""
    owner, _ = opened(tmp_path)
    put(owner, range(4), SHAPE)
    assert claim(tmp_path, 1, ADOPTER)
    copy = shutil.copyfile
    number = iter(range(100, 200))

    def busy(source: Path, target: Path) -> object:
        copied = copy(source, target)
        with monkeypatch.context() as blind:
            blind.setattr(NvmeSlab, "_owned", lambda _self: True)
            put(owner, [next(number)], SHAPE)
        return copied

    monkeypatch.setattr(shutil, "copyfile", busy)
    with pytest.raises(Unavailable, match=r"still changes its catalog|must be taken over"):
        opened(tmp_path, ADOPTER)
    monkeypatch.undo()
    adopter, held = opened(tmp_path, ADOPTER)
    assert set(range(4)) <= set(good(adopter, held))
    for slab in (owner, adopter):
        slab.close()
