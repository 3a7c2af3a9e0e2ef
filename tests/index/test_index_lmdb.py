"""Tests of the LMDB index: the conformance suite, and damage to its files.

Untrusted files must never be read as an index: they are dropped and counted, and a new index epoch begins. Trusted files must
survive a close, a kill, and other processes.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Container
from pathlib import Path

import lmdb
import pytest

from kvstore.core import limits
from kvstore.core.errors import CapacityExceeded, Conflict, InvalidArgument, Unavailable, Unsupported
from kvstore.core.types import BlockKey, BlockRun, NodeId, Tier, VolumeId
from kvstore.index.contract import PrefixHit, PrefixIndex, ReplicaRun, VolumeEpoch
from kvstore.index.lmdb import LmdbIndex
from kvstore.index.record import decode
from kvstore.testing.index.model import Chain
from kvstore.testing.index.process import IndexProcess
from kvstore.testing.index.suite import CHAIN, NAMESPACE, IndexSuite, ask, begin

OPENER = "kvstore.index.lmdb:LmdbIndex.open"


class TestLmdbIndex(IndexSuite):
    process_opener = OPENER

    def open_index(self, place: Path) -> PrefixIndex:
        return LmdbIndex.open(place)


class TestLmdbIndexGrowing(TestLmdbIndex):
    """The suite with the smallest map, which has to grow during the tests."""

    def open_index(self, place: Path) -> PrefixIndex:
        return LmdbIndex.open(place, map_bytes=1 << 20)


class Events(Counter[str]):
    def add(self, name: str, amount: int) -> None:
        self[name] += amount


def fill(index: PrefixIndex, chains: int = 20) -> int:
    volume_epoch = begin(index)
    for number in range(chains):
        index.publish(volume_epoch, [Chain.of(NAMESPACE, [number, *range(99)]).run(0, 100)], [])
    return volume_epoch


def filled(place: Path) -> bytes:
    """Create, fill and close an index; return its epoch."""
    index = LmdbIndex.open(place)
    fill(index)
    index.close()
    return index.epoch


def reopened(place: Path) -> tuple[bytes, int, Events]:
    """Open an index again, check that it works, and return its epoch, number of blocks and counters."""
    events = Events()
    index = LmdbIndex.open(place, count=events.add)
    blocks = index.stats().blocks
    volume_epoch = begin(index)
    index.publish(volume_epoch, [CHAIN.run(0, 100)], [])
    assert ask(index, CHAIN, {volume_epoch}) == PrefixHit(100, (ReplicaRun(0, 100, volume_epoch),))
    index.close()
    return index.epoch, blocks, events


# ---- files ----
def test_index_files_deleted_begins_new_epoch(tmp_path: Path) -> None:
    epoch = filled(tmp_path)
    (tmp_path / "data.mdb").unlink()
    assert reopened(tmp_path)[:2] != (epoch, 0)
    shutil.rmtree(tmp_path)
    again, blocks, _ = reopened(tmp_path)
    assert (again != epoch, blocks) == (True, 0)


def test_keys_in_range_all_ranges_read_each_record_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0

    def counted(value: bytes) -> tuple[int, ...]:
        nonlocal read
        read += 1
        return decode(value)

    index = LmdbIndex.open(tmp_path)
    volume_epoch = fill(index)
    monkeypatch.setattr("kvstore.index.lmdb.decode", counted)
    found = [key for key_range in range(limits.DIGEST_RANGES) for key in index.keys_in_range(volume_epoch, key_range)]
    assert len(set(found)) == len(found) == index.stats().blocks > 1_000
    assert read == len(found)
    index.close()


def overwrite(at: int, content: bytes) -> Callable[[Path], None]:
    def damage(data: Path) -> None:
        with data.open("r+b") as file:
            file.seek(at)
            file.write(content)

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        overwrite(0, b"\xff" * 8192),
        overwrite(0, bytes(8192)),
        overwrite(16384, os.urandom(8192)),
        overwrite(40_000, b"\x01"),
        lambda data: os.truncate(data, 1),
        lambda data: os.truncate(data, 4096),
        lambda data: os.truncate(data, 8192),
        lambda data: os.truncate(data, 20_000),
        lambda data: data.write_bytes(b"not a database " * 5_000),
        lambda data: os.truncate(data, data.stat().st_size + 4096),
    ],
    ids=["metas-ff", "metas-zero", "pages", "one-byte", "cut-1", "cut-4096", "cut-8192", "cut-20000", "text", "longer"],
)
def test_index_files_damaged_are_dropped(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    epoch = filled(tmp_path)
    damage(tmp_path / "data.mdb")
    again, blocks, events = reopened(tmp_path)
    assert again != epoch
    assert blocks == 0
    assert events["index_dropped_total"] == 1


@pytest.mark.parametrize("size", [1, 8192, 20_000])
def test_index_files_truncated_after_kill_are_dropped(tmp_path: Path, size: int) -> None:
    killed(tmp_path, "fill(index)")
    os.truncate(tmp_path / "data.mdb", size)
    _, blocks, events = reopened(tmp_path)
    assert blocks == 0
    assert events["index_dropped_total"] == 1


def test_index_data_file_empty_begins_new_epoch(tmp_path: Path) -> None:
    epoch = filled(tmp_path)
    os.truncate(tmp_path / "data.mdb", 0)
    again, blocks, _ = reopened(tmp_path)
    assert (again != epoch, blocks) == (True, 0)


def test_index_files_of_another_program_are_moved_aside(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path)) as env, env.begin(write=True) as txn:
        txn.put(b"precious", b"value")
    _, blocks, events = reopened(tmp_path)
    assert blocks == 0
    assert events["index_dropped_total"] == 1
    aside = tmp_path / "data.mdb.foreign"
    with lmdb.open(str(aside), subdir=False, readonly=True, lock=False) as env, env.begin() as txn:
        assert txn.get(b"precious") == b"value"


def test_index_of_another_format_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    epoch = filled(tmp_path)
    with lmdb.open(str(tmp_path), max_dbs=8) as env, env.begin(write=True, db=env.open_db(b"meta")) as txn:
        txn.put(b"format", b"kvstore-index/0")
    mark_killed(tmp_path)
    with pytest.raises(Unavailable, match=r"its format is kvstore-index/0, this version reads kvstore-index/2"):
        LmdbIndex.open(tmp_path, read_only=True)
    again, blocks, events = reopened(tmp_path)
    assert (again != epoch, blocks, events["index_dropped_total"]) == (True, 0, 1)
    assert "its format is kvstore-index/0, this version reads kvstore-index/2" in caplog.text


def test_index_after_machine_crash_is_dropped(tmp_path: Path) -> None:
    killed(tmp_path, "fill(index)")
    state = json.loads((tmp_path / "state.json").read_text())
    assert state["machine_boot"] == machine_boot()
    (tmp_path / "state.json").write_text(json.dumps({**state, "machine_boot": "another"}))
    _, blocks, events = reopened(tmp_path)
    assert (blocks, events["index_dropped_total"]) == (0, 1)


def test_index_clean_close_survives_machine_restart(tmp_path: Path) -> None:
    epoch = filled(tmp_path)
    assert "machine_boot" not in json.loads((tmp_path / "state.json").read_text())
    assert reopened(tmp_path) == (epoch, 2_000, Events())


def test_index_process_killed_keeps_commits(tmp_path: Path) -> None:
    killed(tmp_path, "fill(index)")
    _, blocks, events = reopened(tmp_path)
    assert (blocks, events) == (2_000, Events())


def test_index_damage_found_at_work_is_dropped_at_next_open(tmp_path: Path) -> None:
    events = Events()
    index = LmdbIndex.open(tmp_path, count=events.add)
    epoch = index.epoch
    fill(index)
    with pytest.raises(Unavailable):
        index.lookup(NAMESPACE, CHAIN.packed, RaisingContainer(lmdb.CorruptedError("page")))
    assert events["index_damaged_total"] == 1
    index.close()
    again, _, events = reopened(tmp_path)
    assert again != epoch
    assert events["index_dropped_total"] == 1


def test_index_database_page_empty_is_damage(tmp_path: Path) -> None:
    reported: list[int] = []
    index = LmdbIndex.open(tmp_path, on_damage=lambda: reported.append(1))
    volume_epoch = begin(index)
    data = tmp_path / "data.mdb"
    with data.open("r+b") as file:
        for page in range(2, data.stat().st_size // 4096):
            file.seek(page * 4096)
            file.write(struct.pack("<QHHHH", page, 0, 0x02, 16, 4096) + bytes(4080))  # a valid empty leaf page
    with pytest.raises(Unavailable):
        ask(index, CHAIN, {volume_epoch})
    assert reported == [1]
    index.close()
    assert reopened(tmp_path)[2]["index_dropped_total"] == 1


def test_index_damage_is_reported_once(tmp_path: Path) -> None:
    reported: list[int] = []
    index = LmdbIndex.open(tmp_path, on_damage=lambda: reported.append(1))
    fill(index)
    overwrite(0, bytes(8192))(tmp_path / "data.mdb")
    for _ in range(2):
        with pytest.raises(Unavailable):
            index.stats()
    index.close()
    assert reported == [1]
    assert reopened(tmp_path)[2]["index_dropped_total"] == 1


def test_index_file_ending_before_last_page_is_kept(tmp_path: Path) -> None:
    """LMDB never writes pages that a transaction allocates at the end of the file and frees before it commits."""
    epoch = filled(tmp_path)
    with lmdb.open(str(tmp_path), max_dbs=8) as env:
        with env.begin(env.open_db(b"notes"), write=True) as txn:
            for number in range(200):
                txn.put(b"%d" % number, bytes(5_000))
            for number in range(200):
                txn.delete(b"%d" % number)
        pages = env.info()["last_pgno"] + 1
        assert (tmp_path / "data.mdb").stat().st_size < pages * env.stat()["psize"]
    mark_killed(tmp_path)
    again, _, events = reopened(tmp_path)
    assert (again, events) == (epoch, Events())


def test_index_open_path_not_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InvalidArgument):
            LmdbIndex.open(place)
    with pytest.raises(InvalidArgument):
        LmdbIndex.open(tmp_path / "index", map_bytes=4096)


def test_index_disk_full_keeps_committed_blocks(tmp_path: Path) -> None:
    """A limit on file sizes simulates the full disk: both make the write fail."""
    limit = 4 << 20
    child = f"""
        import resource
        index = LmdbIndex.open(place)
        volume_epoch = begin(index)
        resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
        batches = 0
        try:
            while True:
                index.publish(volume_epoch, [Chain.of(NAMESPACE, [batches, *range(999)]).run(0, 1000)], [])
                batches += 1
        except (CapacityExceeded, Unavailable) as error:  # LMDB reports a short write as an I/O error
            assert error.retryable
        for number in range(batches):
            chain = Chain.of(NAMESPACE, [number, *range(999)])
            assert ask(index, chain, {{volume_epoch}}).blocks == 1000, number
        assert ask(index, Chain.of(NAMESPACE, [batches, *range(999)]), {{volume_epoch}}).blocks == 0
        print(batches, flush=True)
    """
    done = child_process(tmp_path, child)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 3
    assert reopened(tmp_path)[2] == Events()


# ---- processes ----
def test_index_second_open_in_process_is_conflict(tmp_path: Path) -> None:
    index = LmdbIndex.open(tmp_path)
    for read_only in (False, True):
        with pytest.raises(Conflict):
            LmdbIndex.open(tmp_path, read_only=read_only)
    (tmp_path / "alias").symlink_to(tmp_path)
    with pytest.raises(Conflict):
        LmdbIndex.open(tmp_path / "alias")
    fill(index, 1)
    index.close()
    LmdbIndex.open(tmp_path).close()


def test_index_reader_refuses_changes_and_follows_writer(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        LmdbIndex.open(tmp_path / "absent", read_only=True)
    assert not (tmp_path / "absent").exists()
    writer = IndexProcess(OPENER, tmp_path)
    reader = LmdbIndex.open(tmp_path, map_bytes=1 << 20, read_only=True)
    volume_epoch = writer.call("open_volume_epoch", "v", "n", Tier.DRAM, b"b" * 16)
    writer.call("publish", volume_epoch, [CHAIN.run(0, 100)], [])
    assert ask(reader, CHAIN, {volume_epoch}).blocks == 100
    with pytest.raises(Unsupported):
        reader.publish(volume_epoch, [], [])
    with pytest.raises(Unsupported):
        reader.open_volume_epoch(VolumeId("v"), NodeId("n"), Tier.DRAM, b"c" * 16)  # type: ignore[arg-type]
    # the reader follows beyond its own map size
    for number in range(30):
        writer.call("publish", volume_epoch, [Chain.of(NAMESPACE, [number, *range(999)]).run(0, 1_000)], [])
    assert reader.stats().bytes > 1 << 20
    assert ask(reader, Chain.of(NAMESPACE, [29, *range(999)]), {volume_epoch}).blocks == 1_000
    writer.close()
    assert json.loads((tmp_path / "state.json").read_text())["clean"], "an open reader does not prevent a clean close"
    reader.close()


def test_index_reader_refuses_damaged_file(tmp_path: Path) -> None:
    filled(tmp_path)
    os.truncate(tmp_path / "data.mdb", 8192)
    with pytest.raises(Unavailable):
        LmdbIndex.open(tmp_path, read_only=True)
    assert reopened(tmp_path)[2]["index_dropped_total"] == 1


def test_index_writers_of_two_processes_grow_the_map(tmp_path: Path) -> None:
    ours = LmdbIndex.open(tmp_path, map_bytes=1 << 20)
    volume_epoch = begin(ours)
    theirs = IndexProcess("test_index_lmdb:open_small", tmp_path)
    for number in range(60):
        run = Chain.of(NAMESPACE, [number, *range(999)]).run(0, 1_000)
        if number // 10 % 2:
            theirs.call("publish", volume_epoch, [run], [])
        else:
            ours.publish(volume_epoch, [run], [])
    for number in range(60):
        chain = Chain.of(NAMESPACE, [number, *range(999)])
        assert ask(ours, chain, {volume_epoch}).blocks == 1_000
        assert theirs.call("lookup", NAMESPACE, chain.packed, {volume_epoch}).blocks == 1_000
    theirs.close()
    ours.close()


def open_small(place: Path) -> LmdbIndex:
    return LmdbIndex.open(place, map_bytes=1 << 20)


def test_index_last_process_to_close_closes_cleanly(tmp_path: Path) -> None:
    ours = LmdbIndex.open(tmp_path)
    theirs = IndexProcess(OPENER, tmp_path)
    ours.close()
    assert not json.loads((tmp_path / "state.json").read_text())["clean"]
    theirs.close()
    assert json.loads((tmp_path / "state.json").read_text())["clean"]


def test_index_open_elsewhere_is_not_dropped(tmp_path: Path) -> None:
    theirs = IndexProcess(OPENER, tmp_path)
    volume_epoch = theirs.call("open_volume_epoch", "v", "n", Tier.DRAM, b"b" * 16)
    theirs.call("publish", volume_epoch, [CHAIN.run(0, 100)], [])
    (tmp_path / "state.json").write_text("{}")
    ours = LmdbIndex.open(tmp_path)
    assert ask(ours, CHAIN, {volume_epoch}).blocks == 100
    ours.close()
    theirs.kill()


def test_index_use_after_fork_is_unavailable(tmp_path: Path) -> None:
    """Runs in a child process: forking the test process is unsafe."""
    child = """
        import os
        index = LmdbIndex.open(place)
        volume_epoch = fill(index)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                index.stats()
            except Unavailable:
                code = 0
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        index.publish(volume_epoch, [CHAIN.run(0, 100)], [])
        assert ask(index, CHAIN, {volume_epoch}).blocks == 100
        index.close()
    """
    done = child_process(tmp_path, child)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "state.json").read_text())["clean"]


def test_index_files_deleted_while_open_keep_working(tmp_path: Path) -> None:
    events = Events()
    index = LmdbIndex.open(tmp_path / "index", count=events.add)
    volume_epoch = begin(index)
    shutil.rmtree(tmp_path / "index")
    index.publish(volume_epoch, [CHAIN.run(0, 100)], [])
    assert ask(index, CHAIN, {volume_epoch}).blocks == 100
    index.close()
    assert events["index_unclean_close_total"] == 1
    assert reopened(tmp_path / "index")[1] == 0


# ---- sizes ----
def test_index_bytes_per_block_are_bounded(tmp_path: Path) -> None:
    """Random keys, one replica per key, in batches of the size that nodes send."""
    index = LmdbIndex.open(tmp_path)
    volume_epoch = begin(index)
    blocks = 100_000
    for _ in range(blocks // 1_000):
        packed = os.urandom(16_000)
        keys = tuple(BlockKey(packed[at : at + 16]) for at in range(0, 16_000, 16))
        index.publish(volume_epoch, [BlockRun(NAMESPACE, None, 0, keys)], [])
    stats = index.stats()
    assert stats.blocks == blocks
    assert stats.bytes / blocks <= 160
    index.close()
    assert (tmp_path / "data.mdb").stat().st_size <= stats.bytes


# ---- helpers ----
class RaisingContainer(Container[VolumeEpoch]):
    """A set of visible volume epochs that raises an error within the index's read transaction."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __contains__(self, _: object) -> bool:
        raise self._error


def mark_killed(place: Path) -> None:
    """Make the state of a closed index that of a process which was killed."""
    state = json.loads((place / "state.json").read_text())
    (place / "state.json").write_text(json.dumps({**state, "clean": False, "machine_boot": machine_boot()}))


def machine_boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


PREAMBLE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_index_lmdb import *
place = Path(sys.argv[1])
"""


def child_process(place: Path, code: str) -> subprocess.CompletedProcess[str]:
    script = PREAMBLE + textwrap.dedent(code)
    command = [sys.executable, "-c", script, str(place), str(Path(__file__).parent)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def killed(place: Path, code: str) -> None:
    """Run code on an open index in a child process that then kills itself."""
    done = child_process(place, f"index = LmdbIndex.open(place)\n{code}\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_index_disk_errors_are_store_errors(tmp_path: Path) -> None:
    index = LmdbIndex.open(tmp_path)
    fill(index)
    no_space = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
    for code in (*no_space, errno.EIO):
        error = lmdb.Error("write", code)
        error.code = code  # the library sets this attribute on the errors that it raises
        with pytest.raises(CapacityExceeded if code in no_space else Unavailable):
            index.lookup(NAMESPACE, CHAIN.packed, RaisingContainer(error))
    index.close()
