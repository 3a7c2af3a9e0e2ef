"""Faults of the slab: each loses only the affected blocks and is counted, and wrong bytes are never a hit."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.core.errors import CapacityExceeded, Conflict, CorruptBlock, Internal, InvalidArgument, Unavailable
from kvstore.core.types import BlockShape, Outcome, VolumeId
from kvstore.observe.counters import Counters
from kvstore.testing.volume_suite import Item, assert_reads_back, block_key, emptied, items_for
from kvstore.tiers.nvme.catalog import Catalog
from kvstore.tiers.nvme.slab import NvmeSlab
from kvstore.tiers.nvme.slab_io import SlabFile
from kvstore.tiers.nvme.superblock import DATA_START

SHAPE = BlockShape(3, 20_000)
CAPACITY = 16 << 20


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "volume"


def open_slab(folder: Path, counters: Counters | None = None, *, capacity: int = CAPACITY, direct: bool = True) -> NvmeSlab:
    slab = NvmeSlab.open(folder, volume_id=VolumeId("v"), capacity_bytes=capacity, counters=counters, direct=direct)
    list(slab.recover())
    return slab


@pytest.fixture
def slab(folder: Path, counters: Counters) -> Iterator[NvmeSlab]:
    slab = open_slab(folder, counters)
    yield slab
    slab.close()


def stored(slab: NvmeSlab, count: int = 12, shape: BlockShape = SHAPE, first: int = 0) -> list[Item]:
    items = items_for(slab.allocate(shape, count) or [], range(first, first + count), shape)
    assert slab.write(items) == [None] * count
    slab.commit([(slot, record) for slot, record, _ in items], [])
    return items


def poke(folder: Path, position: int, data: bytes) -> None:
    """Write to the file directly, as a failing disk would."""
    fd = os.open(folder / "slab.kv", os.O_RDWR)
    try:
        os.pwrite(fd, data, position)
        os.fsync(fd)
    finally:
        os.close(fd)


def peek(folder: Path, position: int, size: int) -> bytes:
    with (folder / "slab.kv").open("rb") as file:
        file.seek(position)
        return file.read(size)


@pytest.mark.parametrize("within", [0, 8, 30, 60, 100, 170, 4096, 4096 + 59_999])
def test_flipped_bit_loses_one_block(slab: NvmeSlab, folder: Path, counters: Counters, within: int) -> None:
    """Header or payload, first byte or last: that block is corrupt, its neighbours in the same merged read are hits."""
    items = stored(slab)
    position = DATA_START + items[5][0].offset + within
    poke(folder, position, bytes([peek(folder, position, 1)[0] ^ 4]))
    outcomes = slab.read(emptied(items))
    assert outcomes.pop(5) is Outcome.CORRUPT
    assert set(outcomes) == {Outcome.HIT}
    assert counters.snapshot()["nvme_corrupt_blocks_total"] == 1


def test_swapped_and_foreign_slots_are_corrupt(slab: NvmeSlab, folder: Path, tmp_path: Path) -> None:
    items = stored(slab)
    size = items[0][0].size
    first, second = (peek(folder, DATA_START + items[at][0].offset, size) for at in (1, 2))
    poke(folder, DATA_START + items[1][0].offset, second)
    poke(folder, DATA_START + items[2][0].offset, first)
    other = open_slab(tmp_path / "other")
    foreign = stored(other)
    assert foreign[4][0] == items[4][0]  # the same key at the same place in another volume: only the volume's uid differs
    poke(folder, DATA_START + items[4][0].offset, peek(tmp_path / "other", DATA_START + foreign[4][0].offset, size))
    other.close()
    outcomes = slab.read(emptied(items))
    assert [at for at, outcome in enumerate(outcomes) if outcome is not Outcome.HIT] == [1, 2, 4]
    assert slab.read(emptied(items[1:3]), verify=False) == [Outcome.CORRUPT] * 2


def test_torn_slots_are_corrupt(slab: NvmeSlab, folder: Path) -> None:
    items = stored(slab, 3)
    poke(folder, DATA_START + items[1][0].offset + 4096 + 8192, bytes(4096))
    assert slab.read(emptied(items)) == [Outcome.HIT, Outcome.CORRUPT, Outcome.HIT]


@pytest.mark.parametrize("direct", [True, False])
def test_truncated_slab_loses_only_missing_blocks(folder: Path, counters: Counters, direct: bool) -> None:
    slab = open_slab(folder, counters, direct=direct)
    items = stored(slab)
    os.truncate(folder / "slab.kv", DATA_START + items[7][0].offset + 8192)
    outcomes = slab.read(emptied(items))
    assert outcomes == [Outcome.HIT] * 7 + [Outcome.UNAVAILABLE] * 5
    assert counters.snapshot()["nvme_read_errors_total"] == 5
    slab.close()
    with pytest.raises(CorruptBlock, match=r"truncated.*kvstore volumes repair"):
        open_slab(folder)


def test_io_error_loses_one_block(slab: NvmeSlab, counters: Counters, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed merged I/O is retried slot by slot: a bad sector loses one block, for reads and writes."""
    items = stored(slab)
    bad = DATA_START + items[5][0].offset
    real_read, real_write = os.preadv, os.pwritev

    def read(fd: int, buffers: list[memoryview], position: int) -> int:
        if position <= bad < position + sum(len(buffer) for buffer in buffers):
            raise OSError(errno.EIO, "bad sector")
        return real_read(fd, buffers, position)

    def write(fd: int, buffers: list[memoryview], position: int) -> int:
        if position <= bad < position + sum(len(buffer) for buffer in buffers):
            raise OSError(errno.EIO, "bad sector")
        return real_write(fd, buffers, position)

    monkeypatch.setattr(os, "preadv", read)
    monkeypatch.setattr(os, "pwritev", write)
    outcomes = slab.read(emptied(items))
    assert outcomes.pop(5) is Outcome.UNAVAILABLE
    assert set(outcomes) == {Outcome.HIT}
    results = slab.write(items)
    assert isinstance(results.pop(5), OSError)
    assert set(results) == {None}
    assert counters.snapshot()["nvme_read_errors_total"] == counters.snapshot()["nvme_write_errors_total"] == 1


def test_short_write_is_an_error(slab: NvmeSlab, monkeypatch: pytest.MonkeyPatch) -> None:
    items = items_for(slab.allocate(SHAPE, 2) or [], [1, 2], SHAPE)
    real_write = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, position: real_write(fd, buffers[:1], position))
    assert all(isinstance(result, Unavailable) for result in slab.write(items))


def test_failed_sync_stops_further_stores(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports a lost page once; a later sync that succeeds proves nothing."""
    slab = open_slab(folder)
    items = stored(slab, 4)
    fresh = items_for(slab.allocate(SHAPE, 1) or [], [100], SHAPE)
    slab.write(fresh)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda _fd: (_ for _ in ()).throw(OSError(errno.EIO, "lost")))
        with pytest.raises(OSError, match="lost"):
            slab.commit([(fresh[0][0], fresh[0][1])], [])
    with pytest.raises(Unavailable, match="restart the node"):
        slab.commit([(fresh[0][0], fresh[0][1])], [])
    assert slab.read_only is not None
    assert "a sync of its slab failed" in slab.read_only
    assert "read-only" in slab.io_engine
    assert not slab.resume()
    assert all(isinstance(error, Unavailable) for error in slab.write(fresh))
    folder.rename(folder.with_name("elsewhere"))
    with pytest.raises(Unavailable):
        slab.commit([], [items[0][1].key])
    assert not slab.files_present
    folder.with_name("elsewhere").rename(folder)
    assert not slab.resume()
    assert slab.files_present
    slab.commit([], [items[0][1].key])  # removals and reads go on
    assert_reads_back(slab, items)
    slab.close()
    again = NvmeSlab.open(folder, volume_id=VolumeId("v"), capacity_bytes=CAPACITY)
    assert {record.key for _, record in again.recover()} == {record.key for _, record, _ in items[1:]}
    stored(again, 1, first=200)
    again.close()


def test_full_disk_at_catalog_is_reported(slab: NvmeSlab, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object) -> None:
        raise CapacityExceeded("no space for the catalog")

    items = items_for(slab.allocate(SHAPE, 1) or [], [1], SHAPE)
    slab.write(items)
    monkeypatch.setattr(Catalog, "commit", full)
    with pytest.raises(CapacityExceeded):
        slab.commit([(items[0][0], items[0][1])], [])


def test_new_catalog_is_synced_before_the_slab_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, bool]] = []
    monkeypatch.setattr(
        "kvstore.tiers.nvme.volume_open.sync_folder",
        lambda path: synced.append((path.name, (tmp_path / "v" / "slab.kv").exists())),
    )
    open_slab(tmp_path / "v").close()
    assert synced[:3] == [("catalog", False), ("v", False), ("v", True)]


def test_full_disk_at_creation_leaves_no_files(folder: Path) -> None:
    program = (
        "import resource, sys; from pathlib import Path\n"
        "from kvstore.tiers.nvme.slab import NvmeSlab\n"
        "from kvstore.core.errors import CapacityExceeded\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, 8 << 20))\n"
        "try: NvmeSlab.open(Path(sys.argv[1]), volume_id='v', capacity_bytes=16 << 20)\n"
        "except CapacityExceeded as error: print('told')\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "told\n"
    assert not list(folder.glob("slab.kv*"))
    open_slab(folder).close()  # and it can be made once there is space


def test_volume_beyond_address_space_names_size(folder: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"a volume of 900\.0 TiB is too large: .* 450\.0 TiB .* in node\.nvme"):
        NvmeSlab.open(folder, volume_id=VolumeId("v"), capacity_bytes=900 << 40)
    NvmeSlab.open(folder, volume_id=VolumeId("v"), capacity_bytes=1 << 20).close()
    with pytest.raises(InvalidArgument, match=r"a volume of 900\.0 TiB"):
        NvmeSlab.open(folder, volume_id=VolumeId("v"), capacity_bytes=900 << 40)


def test_refused_o_direct_is_counted(folder: Path, counters: Counters, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    slab = open_slab(folder, counters)
    assert slab.io_engine.startswith("posix buffered (O_DIRECT refused")
    assert counters.snapshot()["nvme_direct_io_refused_total"] == 1
    assert_reads_back(slab, stored(slab))
    slab.close()


def test_volume_open_in_another_process_is_rejected(slab: NvmeSlab, folder: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from kvstore.tiers.nvme.slab import NvmeSlab\n"
        "from kvstore.core.errors import Conflict\n"
        "try: NvmeSlab.open(Path(sys.argv[1]), volume_id='v', capacity_bytes=16 << 20)\n"
        "except Conflict as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, timeout=60, check=True)
    assert "another process has this volume open" in done.stdout
    assert slab.usage().blocks == 0


def test_volume_grows_and_never_shrinks(folder: Path) -> None:
    slab = open_slab(folder)
    kept = stored(slab)
    slab.close()
    grown = open_slab(folder, capacity=3 * CAPACITY)
    assert grown.usage().capacity_bytes == 3 * CAPACITY
    assert_reads_back(grown, kept)
    count = 2 * CAPACITY // kept[0][0].size
    kept += stored(grown, count, first=100)
    grown.close()
    with pytest.raises(InvalidArgument, match="cannot shrink"):
        open_slab(folder)
    again = open_slab(folder, capacity=3 * CAPACITY)
    assert_reads_back(again, kept)
    again.close()


def test_foreign_and_damaged_volumes_differ_in_error(folder: Path, tmp_path: Path) -> None:
    open_slab(folder).close()
    with pytest.raises(Conflict, match="another volume"):
        NvmeSlab.open(folder, volume_id=VolumeId("w"), capacity_bytes=CAPACITY)
    poke(folder, 0, bytes(8192))
    with pytest.raises(CorruptBlock, match=r"no good superblock.*kvstore volumes repair"):
        open_slab(folder)
    other = tmp_path / "other"
    open_slab(other).close()
    (folder / "slab.kv").write_bytes((other / "slab.kv").read_bytes())
    with pytest.raises(CorruptBlock, match=r"another volume.*kvstore volumes repair"):
        open_slab(folder)
    (folder / "catalog" / "data.mdb").unlink()
    with pytest.raises(CorruptBlock, match=r"catalog of this volume is lost.*kvstore volumes repair"):
        open_slab(folder)


def test_one_torn_superblock_is_recovered(folder: Path) -> None:
    """Whichever copy is lost, the volume opens, and generations never come back."""
    highest = 0
    for at in range(6):
        slab = open_slab(folder)
        slot = (slab.allocate(SHAPE, 1) or [])[0]
        assert slot.generation > highest
        highest = slot.generation
        slab.close()
        poke(folder, (at % 2) * 4096 + 100, b"torn" * 100)


def test_invalid_catalog_entries_are_dropped(folder: Path, counters: Counters) -> None:
    slab = open_slab(folder)
    kept = stored(slab)
    slab.close()
    catalog = Catalog(folder / "catalog", map_bytes=256 << 20)
    value_of = dict(catalog.entries())
    catalog.commit(
        [
            (block_key(500), value_of[kept[0][1].key]),  # another block's entry
            (block_key(501), b"garbage"),
            (block_key(502), b""),
            (kept[3][1].key, value_of[kept[3][1].key][:-3]),
        ],
        [],
    )
    catalog.close()
    again = NvmeSlab.open(folder, volume_id=VolumeId("v"), capacity_bytes=CAPACITY, counters=counters)
    assert {record.key for _, record in again.recover()} == {record.key for at, (_, record, _) in enumerate(kept) if at != 3}
    assert counters.snapshot()["nvme_recovery_dropped_total"] == 4
    with pytest.raises(Internal):
        list(again.recover())
    again.close()
    assert NvmeSlab.open(folder, volume_id=VolumeId("v"), capacity_bytes=CAPACITY, counters=(fresh := Counters())).close() is None
    assert not fresh.snapshot()


def test_headers_are_verified_on_request(folder: Path, counters: Counters) -> None:
    slab = open_slab(folder)
    kept = stored(slab)
    slab.close()
    poke(folder, DATA_START + kept[2][0].offset + 40, b"other namespace!")
    again = NvmeSlab.open(folder, volume_id=VolumeId("v"), capacity_bytes=CAPACITY, counters=counters, verify_headers=True)
    assert {record.key for _, record in again.recover()} == {record.key for at, (_, record, _) in enumerate(kept) if at != 2}
    assert again.usage().blocks == len(kept) - 1
    again.close()


def test_giant_block_is_read_through_scratch(folder: Path) -> None:
    slab = open_slab(folder, capacity=64 << 20)
    shape = BlockShape(3, (3 << 20) + 5)
    items = items_for(slab.allocate(shape, 2) or [], [1, 2], shape, aligned=False)
    assert slab.write(items) == [None, None]
    assert_reads_back(slab, items, aligned=False)
    assert_reads_back(slab, items, aligned=True)
    slab.close()


def test_giant_block_without_scratch_memory_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slab = open_slab(folder, capacity=64 << 20)
    items = stored(slab, 1, BlockShape(3, (3 << 20) + 5))
    targets = emptied(items)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as full:
        full.setattr("kvstore.tiers.nvme.slab_io.mmap.mmap", refuse)
        assert slab.read(targets) == [Outcome.UNAVAILABLE]
    assert_reads_back(slab, items)
    slab.close()


def test_slab_without_io_threads_is_rejected(folder: Path) -> None:
    open_slab(folder).close()
    with pytest.raises(InvalidArgument):
        SlabFile(folder / "slab.kv", io_threads=0, direct=False, writable=False, counters=Counters())


@pytest.mark.parametrize("refused", ["slab-io_0", "slab-io_1"])
def test_slab_without_io_thread_reads_all(
    slab: NvmeSlab, counters: Counters, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """The process may start no thread, or only one."""
    start = threading.Thread.start
    shape = BlockShape(2, 3 << 20)  # not merged: a request for each block

    def limited_start(thread: threading.Thread) -> None:
        if thread.name == refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited_start)
    items = stored(slab, 2, shape)
    assert_reads_back(slab, items)
    assert counters.snapshot()["nvme_threads_refused_total"] >= 1
