"""Offline check and repair: each kind of damage is found, only repair changes the volume, and a repaired volume serves again."""

from __future__ import annotations

import errno
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest

from kvstore.core.checksum import layer_checksums
from kvstore.core.errors import Conflict, CorruptBlock, NotFound, Unavailable
from kvstore.core.types import BlockKey, BlockShape, NamespaceId, NodeId, VolumeId
from kvstore.process.lmdb_meta import parse_meta
from kvstore.testing.volume_suite import NAMESPACE, Item, assert_reads_back, block_key, block_payload, block_record, items_for
from kvstore.tiers.nvme.catalog import Catalog
from kvstore.tiers.nvme.fsck import check_volume
from kvstore.tiers.nvme.ownership import claim
from kvstore.tiers.nvme.slab import NvmeSlab
from kvstore.tiers.nvme.slab_io import SlabFile
from kvstore.tiers.nvme.slot_header import header_bytes, pack_header
from kvstore.tiers.nvme.superblock import DATA_START, UnknownVersion

CAPACITY = 16 << 20
SHAPES = (BlockShape(3, 20_000), BlockShape(600, 16), BlockShape(1, 100))
OTHER_NAMESPACE = NamespaceId(b"other namespace!")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "volume"


def open_slab(folder: Path) -> NvmeSlab:
    return NvmeSlab.open(folder, volume_id=VolumeId("v"), capacity_bytes=CAPACITY)


def make_volume(folder: Path, count: int = 10) -> list[Item]:
    """A volume with blocks of all shapes, and with removed blocks."""
    slab = open_slab(folder)
    list(slab.recover())
    kept: list[Item] = []
    for at, shape in enumerate(SHAPES):
        items = items_for(slab.allocate(shape, 2 * count) or [], range(at * 100, at * 100 + 2 * count), shape)
        slab.write(items)
        slab.commit([(slot, record) for slot, record, _ in items], [])
        slab.commit([], [record.key for _, record, _ in items[count:]])
        slab.free([slot for slot, _, _ in items[count:]])
        # a few slots are reused by other blocks of the same size
        fresh = items_for(slab.allocate(shape, 3) or [], range(at * 100 + 50, at * 100 + 53), shape)
        slab.write(fresh)
        slab.commit([(slot, record) for slot, record, _ in fresh], [])
        kept += items[:count] + fresh
    slab.close()
    return kept


def poke(folder: Path, position: int, data: bytes) -> None:
    fd = os.open(folder / "slab.kv", os.O_RDWR)
    try:
        os.pwrite(fd, data, position)
    finally:
        os.close(fd)


def assert_serves(folder: Path, kept: list[Item], *, exactly: bool = True) -> None:
    slab = open_slab(folder)
    found = {record.key: (slot, record) for slot, record in slab.recover()}
    expected = {record.key: (slot, record) for slot, record, _ in kept}
    assert found == expected if exactly else expected.items() <= found.items()
    for shape in SHAPES:
        assert_reads_back(slab, [item for item in kept if item[1].shape == shape])
    slab.close()


def test_check_intact_volume_finds_nothing(folder: Path) -> None:
    kept = make_volume(folder)
    before = {path.name: path.read_bytes() for path in folder.rglob("*.kv")}
    steps: list[tuple[int, int]] = []
    report = check_volume(folder, progress=lambda done, total: steps.append((done, total)))
    assert report.ok
    assert (report.blocks, report.good, report.bad, report.orphans) == (len(kept), len(kept), {}, 0)
    assert steps[-1] == (len(kept), len(kept))
    assert before == {path.name: path.read_bytes() for path in folder.rglob("*.kv")}
    assert_serves(folder, kept)


def test_bad_blocks_are_found_and_dropped(folder: Path) -> None:
    kept = make_volume(folder)
    poke(folder, DATA_START + kept[1][0].offset + 50, b"X")  # a header
    poke(folder, DATA_START + kept[2][0].offset + 4096 + 50_000, b"XYZ")  # a payload
    report = check_volume(folder)
    assert not report.ok
    assert report.bad == {"header or payload differs": 2}
    assert report.dropped == 0
    report = check_volume(folder, repair=True)
    assert report.ok
    assert report.dropped == 2
    assert check_volume(folder).bad == {}
    assert_serves(folder, kept[:1] + kept[3:])


def test_check_invalid_entries_are_reported(folder: Path) -> None:
    """Malformed, foreign, misplaced and overlapping entries, each reported by its key."""
    kept = make_volume(folder)
    slab = open_slab(folder)
    list(slab.recover())
    slot, record, _ = kept[0]
    first_chunk, chunks = slab.slot_pool.span_at(slot.offset)
    slab.close()
    catalog = Catalog(folder / "catalog", map_bytes=256 << 20)
    superblock = catalog.superblock()
    assert superblock is not None
    uid, shape = superblock.uid, SHAPES[0]
    entries = [
        (block_key(900), b"malformed"),
        (block_key(901), pack_header(b"f" * 16, slot, first_chunk, chunks, block_record(901, shape))),
        (block_key(902), pack_header(uid, slot, first_chunk, chunks, block_record(902, shape))),  # overlaps kept[0]
        (block_key(903), pack_header(uid, slot._replace(offset=1 << 40), first_chunk, chunks, block_record(903, shape))),
        (block_key(904), pack_header(uid, slot, first_chunk, chunks, record)),
    ]
    catalog.commit(entries, [])
    catalog.close()
    report = check_volume(folder, repair=True)
    assert report.bad == {"malformed entry": 1, "foreign entry": 2, "misplaced or overlapping entry": 2}
    assert report.ok
    assert_serves(folder, kept)


def test_check_orphans_are_counted_and_kept(folder: Path) -> None:
    slab = open_slab(folder)
    list(slab.recover())
    shape = SHAPES[0]
    slots = slab.allocate(shape, 3) or []
    items = [
        (slot, block_record(number, shape, parent), memoryview(block_payload(number, shape)))
        for slot, number, parent in zip(slots, (1, 2, 4), (None, 1, 3), strict=True)
    ]
    assert slab.write(items) == [None] * 3
    slab.commit([(slot, record) for slot, record, _ in items], [])
    slab.close()
    report = check_volume(folder, repair=True)
    assert (report.orphans, report.good, report.ok) == (1, 3, True)


@pytest.mark.parametrize("loss", ["deleted", "garbage", "empty", "foreign"])
def test_repair_lost_catalog_is_rebuilt(folder: Path, tmp_path: Path, loss: str) -> None:
    """Every block is found again. Evicted blocks that were not yet overwritten may return too, with valid content."""
    kept = make_volume(folder)
    data = folder / "catalog" / "data.mdb"
    if loss == "deleted":
        shutil.rmtree(folder / "catalog")
    elif loss == "garbage":
        data.write_bytes(os.urandom(64 << 10))
    elif loss == "empty":
        data.write_bytes(b"")
    else:
        make_volume(tmp_path / "other")
        shutil.copy(tmp_path / "other" / "catalog" / "data.mdb", data)
    before = check_volume(folder)
    assert not before.ok
    assert before.damage
    report = check_volume(folder, repair=True)
    assert report.ok
    assert len(report.mended) == 1
    assert check_volume(folder).ok
    highest = max(slot.generation for slot, _, _ in kept)
    assert_serves(folder, kept, exactly=False)
    slab = open_slab(folder)
    assert len(list(slab.recover())) > len(kept)  # evicted blocks came back
    assert (slab.allocate(SHAPES[0], 1) or [])[0].generation > highest
    slab.close()


def test_repair_brings_no_invalid_block_back(folder: Path) -> None:
    """Neither blocks that were removed because of it, nor those that were evicted before. What is stored later is found."""
    make_volume(folder)
    slab = open_slab(folder)
    held = list(slab.recover())
    slab.note_invalid(OTHER_NAMESPACE)
    slab.note_invalid(NAMESPACE)
    slab.commit([], [record.key for _, record in held])
    slab.free([slot for slot, _ in held])
    later = items_for(slab.allocate(SHAPES[2], 4) or [], range(900, 904), SHAPES[2])
    assert slab.write(later) == [None] * 4
    slab.commit([(slot, record) for slot, record, _ in later], [])
    slab.close()
    shutil.rmtree(folder / "catalog")
    report = check_volume(folder, repair=True)
    assert (report.good, report.ok) == (4, True)
    assert_serves(folder, later)


def test_adopter_rebuild_brings_no_invalid_block_back(folder: Path) -> None:
    """The old owner noted it. What the new one notes does not replace that."""
    make_noted_volume(folder)
    assert claim(folder, 1, NodeId("adopter"))
    slab = NvmeSlab.open(folder, volume_id=VolumeId("v"), capacity_bytes=0, node_id=NodeId("adopter"))
    list(slab.recover())
    slab.note_invalid(OTHER_NAMESPACE)
    slab.close()
    shutil.rmtree(folder / "catalog.1")
    assert check_volume(folder, repair=True, token=1).good == 0


def make_noted_volume(folder: Path) -> None:
    """Make a volume whose blocks were invalidated."""
    make_volume(folder)
    slab = open_slab(folder)
    list(slab.recover())
    slab.note_invalid(NAMESPACE)
    slab.close()


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty"])
def test_repair_damaged_notes_are_reported(folder: Path, damage: str) -> None:
    make_noted_volume(folder)
    shutil.rmtree(folder / "catalog")
    notes = folder / "invalid"
    content = notes.read_bytes()
    notes.write_bytes({"flipped": content[:-1] + b"\xff", "cut": content[:-5], "empty": b""}[damage])
    with pytest.raises(CorruptBlock, match="move it away and invalidate the namespaces again"):
        check_volume(folder, repair=True)
    notes.write_bytes(content.replace(b"kvinval2", b"kvinval3"))
    with pytest.raises(UnknownVersion, match="another version of kvstore"):
        check_volume(folder, repair=True)
    notes.unlink()
    assert check_volume(folder, repair=True).good > 0


def test_repair_ignores_notes_of_an_earlier_volume(folder: Path, tmp_path: Path) -> None:
    make_noted_volume(folder)
    kept = make_volume(tmp_path / "new")
    shutil.copy(folder / "invalid", tmp_path / "new")
    shutil.rmtree(tmp_path / "new" / "catalog")
    assert check_volume(tmp_path / "new", repair=True).ok
    assert_serves(tmp_path / "new", kept, exactly=False)


def leaves_with(content: bytes, key: bytes) -> list[int]:
    """Pages of a catalog that are leaves (flag 2) and name a key."""
    pages = range(len(content) // 4096)
    return [page for page in pages if content[page * 4096 + 10] == 2 and key in content[page * 4096 : (page + 1) * 4096]]


def recover(folder: Path) -> None:
    slab = open_slab(folder)
    try:
        list(slab.recover())
    finally:
        slab.close()


@pytest.mark.parametrize("damage", ["cut-12288", "cut-8192", "pages", "leaf", "metas", "free-list"])
def test_repair_damaged_catalog_is_rebuilt(folder: Path, damage: str) -> None:
    """Checked in a process of the command, because a mapped read beyond the end of the file would kill it."""
    kept = make_volume(folder, count=40)
    data = folder / "catalog" / "data.mdb"
    size = data.stat().st_size
    if damage.startswith("cut"):
        os.truncate(data, int(damage.removeprefix("cut-")))
    else:
        content = data.read_bytes()
        meta = parse_meta(content)
        assert meta is not None
        pages = {
            "pages": range(2, size // 4096),
            "metas": range(2),
            "leaf": leaves_with(content, kept[-1][1].key),
            "free-list": [meta.free_root],
        }[damage]
        with data.open("r+b") as file:
            for page in pages:
                file.seek(page * 4096)
                file.write(random.Random(page).randbytes(4096))
    with pytest.raises(CorruptBlock, match="kvstore volumes repair"):
        recover(folder)
    before = check_volume(folder)
    if damage != "free-list":  # seen only by those who write
        assert (before.ok, len(before.damage)) == (False, 1)
    report = check_volume(folder, repair=True)
    assert (report.ok, len(report.mended)) == (True, 1)
    assert check_volume(folder).ok
    assert_serves(folder, kept, exactly=False)


def test_catalog_ending_before_last_page_is_intact(tmp_path: Path) -> None:
    """Pages that a transaction allocates at the end and frees again are never written; this is not damage."""
    rng, known, short = random.Random(3), [], 0
    for _ in range(40):
        fresh = [(BlockKey(rng.randbytes(16)), rng.randbytes(rng.choice((100, 1500, 5000)))) for _ in range(200)]
        with lmdb.open(str(tmp_path), map_size=256 << 20, max_dbs=2) as environment:
            blocks = environment.open_db(b"blocks")
            with environment.begin(blocks, write=True) as txn:
                for entry in fresh:
                    txn.put(*entry)
                known += [key for key, _ in fresh]
                rng.shuffle(known)
                while len(known) > 60:
                    txn.delete(known.pop())
            needed = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
            short += (tmp_path / "data.mdb").stat().st_size < needed
        catalog = Catalog(tmp_path, map_bytes=256 << 20)
        assert {key for key, _ in catalog.entries()} == set(known)
        catalog.close()
    assert short


def test_repair_ignores_headers_inside_payloads(folder: Path) -> None:
    """A tenant stores bytes that look like a slot of another namespace; a rebuild from headers must not believe them."""
    slab = open_slab(folder)
    list(slab.recover())
    shape = BlockShape(1, 64 << 10)
    slots = slab.allocate(shape, 1) or []
    slot = slots[0]
    inner = BlockShape(1, 4096)
    forged = block_record(7, inner)
    place = slot._replace(offset=slot.offset + 8192, size=8192)
    payload = bytearray(shape.block_bytes)
    payload[4096 : 4096 + 176] = pack_header(b"?" * 16, place, *slab.slot_pool.span_at(slot.offset), forged)
    payload[4096 + header_bytes(1) : 4096 + header_bytes(1) + 4096] = block_payload(7, inner)
    items = items_for(slots, [1], shape)
    items[0][2][:] = payload
    record = replace(block_record(1, shape), checksums=layer_checksums(items[0][2], shape))
    assert slab.write([(slot, record, items[0][2])]) == [None]
    slab.commit([(slot, record)], [])
    slab.close()
    shutil.rmtree(folder / "catalog")
    assert check_volume(folder, repair=True).good == 1
    again = open_slab(folder)
    assert list(again.recover()) == [(slot, record)]
    again.close()


def test_rebuild_reads_around_bad_page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that meets it fails, or is short. Only the block on that page is lost, and an adopter leaves all of them."""
    kept = make_volume(folder)
    shutil.rmtree(folder / "catalog")
    before = (folder / "slab.kv").read_bytes()
    lost, read = kept[7], SlabFile.pread

    def failing(file: SlabFile, position: int, size: int) -> bytes:
        left = DATA_START + lost[0].offset - position
        if not 0 <= left < size:
            return read(file, position, size)
        if not left:
            raise OSError(errno.EIO, "Input/output error")
        return read(file, position, left)

    with monkeypatch.context() as patched:
        patched.setattr(SlabFile, "pread", failing)
        with pytest.raises(Unavailable, match="cannot be read"):
            check_volume(folder, repair=True, token=0)
        assert (folder / "slab.kv").read_bytes() == before
        assert not (folder / "catalog").exists()
        report = check_volume(folder, repair=True)
    assert report.damage == ["unreadable pages of the slab: 1", "the catalog is lost"]
    assert report.ok
    assert_serves(folder, [item for item in kept if item is not lost], exactly=False)
    catalog = Catalog(folder / "catalog", map_bytes=256 << 20)
    assert catalog.header(lost[1].key) is None
    catalog.close()


def test_rebuild_file_system_away_changes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_volume(folder)
    shutil.rmtree(folder / "catalog")
    read = SlabFile.pread

    def stale(file: SlabFile, position: int, size: int) -> bytes:
        if position >= DATA_START:
            raise OSError(errno.ESTALE, "Stale file handle")
        return read(file, position, size)

    with monkeypatch.context() as patched:
        patched.setattr(SlabFile, "pread", stale)
        with pytest.raises(OSError, match="Stale"):
            check_volume(folder, repair=True)
    assert not (folder / "catalog").exists()


def test_repair_restores_superblocks_from_catalog(folder: Path) -> None:
    kept = make_volume(folder)
    poke(folder, 0, bytes(8192))
    assert not check_volume(folder).ok
    assert check_volume(folder, repair=True).ok
    assert_serves(folder, kept)


def test_check_truncated_slab(folder: Path) -> None:
    kept = make_volume(folder)
    last = max(kept, key=lambda item: item[0].offset)
    os.truncate(folder / "slab.kv", DATA_START + last[0].offset + 100)
    report = check_volume(folder, repair=True)
    assert report.ok
    assert report.dropped == 1
    assert_serves(folder, [item for item in kept if item is not last])


def test_check_unidentifiable_volume_raises(folder: Path, tmp_path: Path) -> None:
    make_volume(folder)
    poke(folder, 0, bytes(8192))
    shutil.rmtree(folder / "catalog")
    with pytest.raises(CorruptBlock, match="neither"):
        check_volume(folder, repair=True)
    with pytest.raises(NotFound):
        check_volume(tmp_path / "nowhere")


def test_check_volume_in_use_raises(folder: Path) -> None:
    slab = open_slab(folder)
    with pytest.raises(Conflict):
        check_volume(folder)
    slab.close()


def test_repair_after_killed_rebuild_starts_over(folder: Path) -> None:
    """The catalog has entries, but not yet the note that makes it whole."""
    kept = make_volume(folder)
    shutil.rmtree(folder / "catalog")
    (folder / "catalog").mkdir()
    catalog = Catalog(folder / "catalog", map_bytes=256 << 20)
    catalog.commit([(kept[0][1].key, b"half")], [])
    catalog.close()
    with pytest.raises(CorruptBlock, match="kvstore volumes repair"):
        open_slab(folder)
    assert check_volume(folder, repair=True).ok
    assert_serves(folder, kept, exactly=False)
