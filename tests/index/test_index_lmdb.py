"""The LMDB index: the conformance suite, and what can happen to its files.

Files that cannot be trusted must never be read as an index: they are dropped, which is counted, and the index begins a new
epoch. Files that can be trusted must survive: closing, killing, and other processes.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest

from kvstore.core import limits
from kvstore.core.errors import CapacityExceeded, Conflict, InvalidArgument, Unavailable, Unsupported
from kvstore.core.types import BlockKey, BlockRun, NodeId, Tier, VolumeId
from kvstore.index.contract import PrefixHit, PrefixIndex, ReplicaRun
from kvstore.index.lmdb import LmdbIndex
from kvstore.testing.index.model import Chain
from kvstore.testing.index.process import IndexProcess
from kvstore.testing.index.suite import CHAIN, NAMESPACE, IndexSuite, ask, begin

OPENER = "kvstore.index.lmdb:LmdbIndex.open"


class TestLmdbIndex(IndexSuite):
    process_opener = OPENER

    def open_index(self, place: Path) -> PrefixIndex:
        return LmdbIndex.open(place)


class TestLmdbIndexGrowing(TestLmdbIndex):
    """The same with the smallest map, which has to grow on the way."""

    def open_index(self, place: Path) -> PrefixIndex:
        return LmdbIndex.open(place, map_bytes=1 << 20)


class Events(Counter[str]):
    def add(self, name: str, amount: int) -> None:
        self[name] += amount


def fill(index: PrefixIndex, chains: int = 20) -> int:
    life = begin(index)
    for number in range(chains):
        index.publish(life, [Chain.of(NAMESPACE, [number, *range(99)]).run(0, 100)], [])
    return life


def filled(place: Path) -> bytes:
    """Makes an index and closes it; its epoch."""
    index = LmdbIndex.open(place)
    fill(index)
    index.close()
    return index.epoch


def reopened(place: Path) -> tuple[bytes, int, Events]:
    """Epoch, blocks and events of an index opened anew, after showing that it works."""
    events = Events()
    index = LmdbIndex.open(place, count=events.add)
    blocks = index.stats().blocks
    life = begin(index)
    index.publish(life, [CHAIN.run(0, 100)], [])
    assert ask(index, CHAIN, {life}) == PrefixHit(100, (ReplicaRun(0, 100, life),))
    index.close()
    return index.epoch, blocks, events


# ---- files ----
def test_deleted_files_begin_a_new_epoch(tmp_path: Path) -> None:
    epoch = filled(tmp_path)
    (tmp_path / "data.mdb").unlink()
    assert reopened(tmp_path)[:2] != (epoch, 0)
    shutil.rmtree(tmp_path)
    again, blocks, _ = reopened(tmp_path)
    assert (again != epoch, blocks) == (True, 0)


def test_a_look_at_every_range_reads_each_record_about_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anti-entropy asks for all 4,096, volume by volume: what lies behind a range is not its business."""
    read = 0
    scan = LmdbIndex._scan

    def counted(*arguments: Any) -> Any:
        nonlocal read
        part, following = scan(*arguments)
        read += len(part)
        return part, following

    index = LmdbIndex.open(tmp_path)
    life = fill(index)
    monkeypatch.setattr(LmdbIndex, "_scan", counted)
    found = [key for key_range in range(limits.DIGEST_RANGES) for key in index.keys_in_range(life, key_range)]
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
def test_damaged_files_are_dropped(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    epoch = filled(tmp_path)
    damage(tmp_path / "data.mdb")
    again, blocks, events = reopened(tmp_path)
    assert again != epoch
    assert blocks == 0
    assert events["index_dropped_total"] == 1


@pytest.mark.parametrize("size", [1, 8192, 20_000])
def test_files_cut_while_nobody_closed_them_are_dropped(tmp_path: Path, size: int) -> None:
    killed(tmp_path, "fill(index)")
    os.truncate(tmp_path / "data.mdb", size)
    _, blocks, events = reopened(tmp_path)
    assert blocks == 0
    assert events["index_dropped_total"] == 1


def test_an_empty_data_file_is_as_none(tmp_path: Path) -> None:
    epoch = filled(tmp_path)
    os.truncate(tmp_path / "data.mdb", 0)
    again, blocks, _ = reopened(tmp_path)
    assert (again != epoch, blocks) == (True, 0)


def test_files_of_somebody_else_are_moved_aside(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path)) as env, env.begin(write=True) as txn:
        txn.put(b"precious", b"value")
    _, blocks, events = reopened(tmp_path)
    assert blocks == 0
    assert events["index_dropped_total"] == 1
    aside = tmp_path / "data.mdb.foreign"
    with lmdb.open(str(aside), subdir=False, readonly=True, lock=False) as env, env.begin() as txn:
        assert txn.get(b"precious") == b"value"


def test_an_index_of_another_format_is_dropped(tmp_path: Path) -> None:
    epoch = filled(tmp_path)
    with lmdb.open(str(tmp_path), max_dbs=8) as env, env.begin(write=True, db=env.open_db(b"meta")) as txn:
        txn.put(b"format", b"kvstore-index/0")
    state = json.loads((tmp_path / "state.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps({**state, "clean": False, "machine_boot": machine_boot()}))
    again, blocks, events = reopened(tmp_path)
    assert (again != epoch, blocks, events["index_dropped_total"]) == (True, 0, 1)


def test_a_machine_that_crashed_drops_the_index(tmp_path: Path) -> None:
    killed(tmp_path, "fill(index)")
    state = json.loads((tmp_path / "state.json").read_text())
    assert state["machine_boot"] == machine_boot()
    (tmp_path / "state.json").write_text(json.dumps({**state, "machine_boot": "another"}))
    _, blocks, events = reopened(tmp_path)
    assert (blocks, events["index_dropped_total"]) == (0, 1)


def test_a_machine_that_was_restarted_after_a_clean_close_keeps_it(tmp_path: Path) -> None:
    epoch = filled(tmp_path)
    assert "machine_boot" not in json.loads((tmp_path / "state.json").read_text())
    assert reopened(tmp_path) == (epoch, 2_000, Events())


def test_a_killed_process_loses_nothing_it_committed(tmp_path: Path) -> None:
    killed(tmp_path, "fill(index)")
    _, blocks, events = reopened(tmp_path)
    assert (blocks, events) == (2_000, Events())


def test_damage_that_lmdb_finds_at_work_drops_the_index_at_the_next_opening(tmp_path: Path) -> None:
    events = Events()
    index = LmdbIndex.open(tmp_path, count=events.add)
    epoch = index.epoch

    def damaged(_: object) -> None:
        raise lmdb.CorruptedError("page")

    with pytest.raises(Unavailable):
        index._read(damaged)
    assert events["index_damaged_total"] == 1
    index.close()
    again, _, events = reopened(tmp_path)
    assert again != epoch
    assert events["index_dropped_total"] == 1


def test_a_page_that_names_no_databases_any_more_is_damage(tmp_path: Path) -> None:
    told: list[int] = []
    index = LmdbIndex.open(tmp_path, on_damage=lambda: told.append(1))
    life = begin(index)
    data = tmp_path / "data.mdb"
    with data.open("r+b") as file:
        for page in range(2, data.stat().st_size // 4096):
            file.seek(page * 4096)
            file.write(struct.pack("<QHHHH", page, 0, 0x02, 16, 4096) + bytes(4080))  # a leaf, and sound, with nothing in it
    with pytest.raises(Unavailable):
        ask(index, CHAIN, {life})
    assert told == [1]
    index.close()
    assert reopened(tmp_path)[2]["index_dropped_total"] == 1


def test_damage_is_told_once(tmp_path: Path) -> None:
    told: list[int] = []
    index = LmdbIndex.open(tmp_path, on_damage=lambda: told.append(1))
    fill(index)
    overwrite(0, bytes(8192))(tmp_path / "data.mdb")
    for _ in range(2):
        with pytest.raises(Unavailable):
            index.stats()
    index.close()
    assert told == [1]
    assert reopened(tmp_path)[2]["index_dropped_total"] == 1


def test_files_that_end_before_their_last_page_are_no_damage(tmp_path: Path) -> None:
    """Pages that a transaction takes at the end and gives back are never written."""
    index = LmdbIndex.open(tmp_path)
    fill(index)
    epoch = index.epoch
    with index._env.begin(index._notes, write=True) as txn:
        for number in range(200):
            txn.put(b"%d" % number, bytes(5_000))
        for number in range(200):
            txn.delete(b"%d" % number)
    short = (tmp_path / "data.mdb").stat().st_size < index.stats().bytes
    index.close()
    assert short
    again, _, events = reopened(tmp_path)
    assert (again, events) == (epoch, Events())


def test_a_path_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InvalidArgument):
            LmdbIndex.open(place)
    with pytest.raises(InvalidArgument):
        LmdbIndex.open(tmp_path / "index", map_bytes=4096)


def test_a_full_disk_is_an_error_and_nothing_else(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: both refuse the write."""
    limit = 4 << 20
    child = f"""
        import resource
        index = LmdbIndex.open(place)
        life = begin(index)
        resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
        batches = 0
        try:
            while True:
                index.publish(life, [Chain.of(NAMESPACE, [batches, *range(999)]).run(0, 1000)], [])
                batches += 1
        except (CapacityExceeded, Unavailable) as error:  # LMDB calls a write that was cut short an I/O error
            assert error.retryable
        for number in range(batches):
            chain = Chain.of(NAMESPACE, [number, *range(999)])
            assert ask(index, chain, {{life}}).blocks == 1000, number
        assert ask(index, Chain.of(NAMESPACE, [batches, *range(999)]), {{life}}).blocks == 0
        print(batches, flush=True)
    """
    done = child_process(tmp_path, child)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 3
    assert reopened(tmp_path)[2] == Events()


# ---- processes ----
def test_one_opening_a_process(tmp_path: Path) -> None:
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


def test_readers_refuse_changes_and_follow_the_writer(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        LmdbIndex.open(tmp_path / "absent", read_only=True)
    assert not (tmp_path / "absent").exists()
    writer = IndexProcess(OPENER, tmp_path)
    reader = LmdbIndex.open(tmp_path, map_bytes=1 << 20, read_only=True)
    life = writer.call("open_life", "v", "n", Tier.DRAM, b"b" * 16)
    writer.call("publish", life, [CHAIN.run(0, 100)], [])
    assert ask(reader, CHAIN, {life}).blocks == 100
    with pytest.raises(Unsupported):
        reader.publish(life, [], [])
    with pytest.raises(Unsupported):
        reader.open_life(VolumeId("v"), NodeId("n"), Tier.DRAM, b"c" * 16)  # type: ignore[arg-type]
    # beyond the reader's map: it follows
    for number in range(30):
        writer.call("publish", life, [Chain.of(NAMESPACE, [number, *range(999)]).run(0, 1_000)], [])
    assert reader.stats().bytes > 1 << 20
    assert ask(reader, Chain.of(NAMESPACE, [29, *range(999)]), {life}).blocks == 1_000
    writer.close()
    assert json.loads((tmp_path / "state.json").read_text())["clean"], "readers do not stand in the way of a clean close"
    reader.close()


def test_a_damaged_file_is_no_index_for_a_reader(tmp_path: Path) -> None:
    filled(tmp_path)
    os.truncate(tmp_path / "data.mdb", 8192)
    with pytest.raises(Unavailable):
        LmdbIndex.open(tmp_path, read_only=True)
    assert reopened(tmp_path)[2]["index_dropped_total"] == 1


def test_writers_of_two_processes_grow_the_map_in_turn(tmp_path: Path) -> None:
    ours = LmdbIndex.open(tmp_path, map_bytes=1 << 20)
    life = begin(ours)
    theirs = IndexProcess("test_index_lmdb:open_small", tmp_path)
    for number in range(60):
        run = Chain.of(NAMESPACE, [number, *range(999)]).run(0, 1_000)
        if number // 10 % 2:
            theirs.call("publish", life, [run], [])
        else:
            ours.publish(life, [run], [])
    for number in range(60):
        chain = Chain.of(NAMESPACE, [number, *range(999)])
        assert ask(ours, chain, {life}).blocks == 1_000
        assert theirs.call("lookup", NAMESPACE, chain.packed, {life}).blocks == 1_000
    theirs.close()
    ours.close()


def open_small(place: Path) -> LmdbIndex:
    return LmdbIndex.open(place, map_bytes=1 << 20)


def test_the_last_to_close_closes_cleanly(tmp_path: Path) -> None:
    ours = LmdbIndex.open(tmp_path)
    theirs = IndexProcess(OPENER, tmp_path)
    ours.close()
    assert not json.loads((tmp_path / "state.json").read_text())["clean"]
    theirs.close()
    assert json.loads((tmp_path / "state.json").read_text())["clean"]


def test_damage_is_not_dropped_under_a_process_that_has_it_open(tmp_path: Path) -> None:
    theirs = IndexProcess(OPENER, tmp_path)
    life = theirs.call("open_life", "v", "n", Tier.DRAM, b"b" * 16)
    theirs.call("publish", life, [CHAIN.run(0, 100)], [])
    (tmp_path / "state.json").write_text("{}")
    ours = LmdbIndex.open(tmp_path)
    assert ask(ours, CHAIN, {life}).blocks == 100
    ours.close()
    theirs.kill()


def test_a_forked_child_is_told_to_open_its_own(tmp_path: Path) -> None:
    """In a process of its own, for forking this one would be a risk of its own."""
    child = """
        import os
        index = LmdbIndex.open(place)
        life = fill(index)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                index.stats()
            except Unavailable:
                code = 0
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        index.publish(life, [CHAIN.run(0, 100)], [])
        assert ask(index, CHAIN, {life}).blocks == 100
        index.close()
    """
    done = child_process(tmp_path, child)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "state.json").read_text())["clean"]


def test_files_deleted_under_a_process_do_not_disturb_it(tmp_path: Path) -> None:
    events = Events()
    index = LmdbIndex.open(tmp_path / "index", count=events.add)
    life = begin(index)
    shutil.rmtree(tmp_path / "index")
    index.publish(life, [CHAIN.run(0, 100)], [])
    assert ask(index, CHAIN, {life}).blocks == 100
    index.close()
    assert events["index_unclean_close_total"] == 1
    assert reopened(tmp_path / "index")[1] == 0


# ---- sizes ----
def test_bytes_a_block(tmp_path: Path) -> None:
    """Random keys, one replica each, in batches as nodes send them."""
    index = LmdbIndex.open(tmp_path)
    life = begin(index)
    blocks = 100_000
    for _ in range(blocks // 1_000):
        packed = os.urandom(16_000)
        keys = tuple(BlockKey(packed[at : at + 16]) for at in range(0, 16_000, 16))
        index.publish(life, [BlockRun(NAMESPACE, None, 0, keys)], [])
    stats = index.stats()
    assert stats.blocks == blocks
    assert stats.bytes / blocks <= 160
    index.close()
    assert (tmp_path / "data.mdb").stat().st_size <= stats.bytes


# ---- helpers ----
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
    """Runs code on an open index in a process that then kills itself."""
    done = child_process(place, f"index = LmdbIndex.open(place)\n{code}\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_errors_of_the_disk_are_ours(tmp_path: Path) -> None:
    index = LmdbIndex.open(tmp_path)

    def failing(code: int) -> Callable[[object], None]:
        def work(_: object) -> None:
            error = lmdb.Error("write", code)
            error.code = code  # as those that the library raises have it
            raise error

        return work

    for code in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        with pytest.raises(CapacityExceeded):
            index._read(failing(code))
    with pytest.raises(Unavailable):
        index._read(failing(errno.EIO))
    index.close()
