"""The adapter behind real LMCache, over real stores: shared objects, faults, bounds, the end."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache")

from lmcache_bed import CHUNK_TOKENS, SHAPE, WAIT_S, Controller, content, controller, layout, memory_objects, object_keys

from kvclient.engines.lmcache.tasks import TaskQueue
from kvstore.testing.connector.driver import StoreAddress
from kvstore.testing.connector.faulty_store import NODE, FaultyStore, StoreFault
from support.wait import wait_until

SOON = {"lookup_deadline_s": 1.0, "load_deadline_s": 3.0, "store_deadline_s": 3.0, "connect_deadline_s": 1.0, "verify": "always"}
BYTES = 2 * math.prod(SHAPE)


def shown(one: Controller, keys: list[Any], **stated: Any) -> None:
    wait_until(lambda: one.find(keys, **stated) == list(range(len(keys))), "lookups show the objects")


@pytest.mark.thorough
def test_lmcache_bench_verifies_all_bytes(store: StoreAddress) -> None:
    """LMCache's own test of adapters, in two processes: one stores, the other loads."""
    params = {"metadata": store.metadata, "node": store.node, "salt": "bench", "weights_epoch": "1", "object_bytes": [262_144]}
    adapter = {"type": "plugin", "module_path": "kvclient.engines.lmcache", "class_name": "KVStoreL2Adapter"}
    flags = ["--num-keys", "8", "--in-flight", "2", "--data-size-kb", "256", "--lookup-max-hit-rate", "1.0"]
    command = [str(Path(sys.executable).parent / "lmcache"), "bench", "l2", *flags]
    command += ["--l2-adapter", json.dumps({**adapter, "adapter_params": params})]
    for more in (["--no-skip-verify"], ["--only", "load"], ["--only", "lookup"]):
        done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=WAIT_S * 2, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        successes = [int(line.split(":")[1]) for line in done.stdout.splitlines() if line.startswith("Total success:")]
        if "--no-skip-verify" in more:
            del successes[1]  # its lookup comes before the index shows all objects; the last process looks them up again
        assert set(successes) == {16}, done.stdout
        if "--no-skip-verify" in more:
            assert "data verified OK" in done.stdout
            assert "MISMATCH" not in done.stdout


def test_lmcache_stored_objects_are_found_by_another(store: StoreAddress) -> None:
    keys, written = object_keys(6), memory_objects(6, seed=3)
    with controller(store) as first:
        result = first.store(keys[:5], written[:5])
        assert (result.is_successful(), result.bytes_transferred()) == (True, 5 * BYTES)
        assert first.store(keys[:5], written[:5]).bytes_transferred() == 0, "they exist"
        assert first.adapter.get_usage().total_bytes_used == 5 * BYTES
        shown(first, keys[:5])
    with controller(store) as second:
        assert second.find(keys) == [0, 1, 2, 3, 4]
        read = memory_objects(6)
        assert second.load(keys, read) == [0, 1, 2, 3, 4]
        assert content(read)[:5] == content(written)[:5]
        assert not any(content(read)[5])
        assert second.counts()["load_missing_objects"] == 1
        assert not second.counts()["bugs"]


@pytest.mark.parametrize(
    "other",
    [{"cache_salt": "bob"}, {"model_name": "tiny/other"}, {"kv_rank": 0x02000200}, {"object_group_id": 1}],
    ids=lambda other: next(iter(other)),
)
def test_lmcache_other_key_parts_find_nothing(store: StoreAddress, other: dict[str, Any]) -> None:
    keys = object_keys(2, seed=5, cache_salt="anna")
    others = object_keys(2, seed=5, **{"cache_salt": "anna", **other})
    stated = {0: layout(), 1: layout()}
    with controller(store) as one:
        assert one.store(keys, memory_objects(2, seed=1)).is_successful()
        shown(one, keys)
        assert one.find(others, stated) == []
        read = memory_objects(2)
        assert one.load(others, read) == []
        assert not any(map(any, content(read)))


@pytest.mark.parametrize("options", [{"weights_epoch": "2"}, {"tenant": "t"}, {"salt": "s"}], ids=lambda one: next(iter(one)))
def test_lmcache_other_options_find_nothing(store: StoreAddress, options: dict[str, Any]) -> None:
    keys = object_keys(2, seed=6)
    with controller(store) as one, controller(store, options) as other:
        assert one.store(keys, memory_objects(2, seed=1)).is_successful()
        shown(one, keys)
        assert other.find(keys) == []
        assert other.load(keys, memory_objects(2)) == []


def test_lmcache_layouts_of_equal_size_share_nothing(store: StoreAddress) -> None:
    keys, turned = object_keys(2, seed=7), (SHAPE[1], SHAPE[0], *SHAPE[2:])
    with controller(store) as one:
        assert one.store(keys, memory_objects(2, seed=1)).is_successful()
        shown(one, keys)
    with controller(store) as other:
        assert other.find(keys, {0: layout("float16")}) == []
        assert other.load(keys, memory_objects(2, dtype="float16")) == []
        assert other.load(keys, memory_objects(2, shape=turned)) == []


def test_lmcache_groups_of_different_sizes_are_found(store: StoreAddress) -> None:
    small = (1, 1, CHUNK_TOKENS, 8)
    keys = [*object_keys(2, seed=8), *object_keys(2, seed=8, object_group_id=1)]
    written = [*memory_objects(2, seed=1), *memory_objects(2, seed=2, dtype="float32", shape=small)]
    stated = {0: layout(), 1: layout("float32", small)}
    with controller(store) as one:
        assert one.store(keys, written).is_successful()
        shown(one, keys, stated=stated)
    with controller(store) as other:
        assert other.find(keys, stated) == [0, 1, 2, 3]
        read = [*memory_objects(2), *memory_objects(2, dtype="float32", shape=small)]
        assert other.load(keys, read) == [0, 1, 2, 3]
        assert content(read) == content(written)


def test_lmcache_lookup_without_layout_uses_seen_sizes(store: StoreAddress) -> None:
    keys = object_keys(2, seed=9)
    with controller(store) as one:
        assert one.find(keys, {}) == []
        assert one.store(keys, memory_objects(2, seed=1)).is_successful()
        shown(one, keys, stated={})
        assert one.find(keys, {0: layout("float16")}) == [], "a load would use the stated layout"


def test_lmcache_objects_without_structure_are_skipped(store: StoreAddress) -> None:
    """LMCache's serde makes them: two servers with different encodings must not exchange them."""
    keys, size = object_keys(1, seed=12), 8192
    with controller(store) as one, controller(store, {"object_bytes": [size], "salt": "raw"}) as other:
        assert not one.store(keys, memory_objects(1, seed=1, dtype="uint8", shape=(size,))).is_successful()
        assert one.load(keys, memory_objects(1, dtype="uint8", shape=(size,))) == []
        assert one.counts()["unknown_objects"] == 2
        assert other.store(keys, memory_objects(1, seed=1, dtype="uint8", shape=(size,))).is_successful()


def test_lmcache_short_hashes_are_skipped(store: StoreAddress) -> None:
    from lmcache.v1.distributed.api import ObjectKey

    keys = [ObjectKey(bytes(8), "tiny/model", 1)]
    with controller(store) as one:
        assert not one.store(keys, memory_objects(1, seed=1)).is_successful()
        assert one.find(keys) == []
        assert one.load(keys, memory_objects(1)) == []
        assert one.counts()["weak_hashes"] == 2


def test_lmcache_usage_listing_and_delete(store: StoreAddress) -> None:
    keys = [*object_keys(3, seed=10, cache_salt="anna"), *object_keys(2, seed=11, model_name="tiny/other")]
    with controller(store) as one:
        told = Listener()
        one.adapter.register_listener(told)
        assert one.store(keys, memory_objects(5, seed=4)).is_successful()
        assert told.stored == dict.fromkeys(keys, BYTES)
        shown(one, keys)
        usage = one.adapter.get_usage()
        assert (usage.total_bytes_used, dict(usage.bytes_by_cache_salt)) == (5 * BYTES, {"anna": 3 * BYTES, "": 2 * BYTES})
        first = one.adapter.list_l2_keys("tiny/model", page_size=2)
        rest = one.adapter.list_l2_keys("tiny/model", page_size=2, cursor=first.next_page_token)
        assert [entry.key.to_object_key() for entry in (*first.entries, *rest.entries)] == keys[:3]
        assert rest.next_page_token is None
        for wrong in ({"page_size": 0}, {"cursor": "x"}):
            with pytest.raises(ValueError, match=next(iter(wrong))):
                one.adapter.list_l2_keys(**wrong)
        one.adapter.delete(keys[:1])
        assert told.deleted == keys[:1]
        assert one.find(keys) == [1, 2, 3, 4]
        assert one.load(keys, read := memory_objects(5)) == [1, 2, 3, 4]
        assert not any(content(read)[0])
        assert one.adapter.get_usage().total_bytes_used == 4 * BYTES
        assert one.store(keys[:1], memory_objects(1, seed=4)).is_successful()
        assert one.find(keys[:1]) == [0]


class Listener:
    """Collects LMCache's notifications."""

    def __init__(self) -> None:
        self.stored: dict[Any, int] = {}
        self.deleted: list[Any] = []

    def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        self.stored |= dict(zip(keys, sizes, strict=True))

    def on_l2_keys_accessed(self, keys: list[Any]) -> None:
        raise RuntimeError("a listener's bug")

    def on_l2_keys_deleted(self, keys: list[Any]) -> None:
        self.deleted += keys


@pytest.mark.parametrize("fault", list(StoreFault), ids=lambda fault: fault.name.lower())
def test_lmcache_fault_never_gives_wrong_bytes(tmp_path: Path, fault: StoreFault) -> None:
    """During a fault each task ends in time with right bytes or misses; afterwards the store is used again."""
    keys, written = object_keys(8, seed=12), memory_objects(8, seed=5)
    new, added = object_keys(4, seed=13), memory_objects(4, seed=6)
    with FaultyStore(tmp_path / "store") as broken, controller(broken.address, SOON) as one:
        assert one.store(keys, written).is_successful()
        shown(one, keys)
        broken.flush()
        broken.strike(fault, random.Random(1))
        for _ in range(2):
            read = memory_objects(8)
            found = one.find(keys)
            arrived = one.load(keys, read)
            assert set(arrived) <= set(range(8))
            assert all(content(read)[at] == content(written)[at] for at in arrived), fault
            one.store(new, added)
        broken.heal()

        def used_again() -> bool:
            after, more = memory_objects(4), object_keys(4, seed=14 + int(time.monotonic() * 1000))
            return bool(
                one.store(more, added).is_successful()
                and one.load(more, after) == [0, 1, 2, 3]
                and content(after) == content(added)
            )

        wait_until(used_again, "the store is used again")
        counts = one.counts()
        assert not counts["bugs"]
        if fault in {StoreFault.NODE_KILLED, StoreFault.ALL_KILLED, StoreFault.MEMORY_CORRUPTED, StoreFault.DISK_CORRUPTED}:
            assert counts["load_missing_objects"], (found, arrived)


def test_lmcache_starts_without_store_and_uses_it_later(tmp_path: Path) -> None:
    keys, written = object_keys(2, seed=20), memory_objects(2, seed=7)
    with FaultyStore(tmp_path / "store") as broken:
        address = broken.address
        broken.strike(StoreFault.ALL_KILLED, random.Random(1))
        with controller(address, SOON) as one:
            began_s = time.monotonic()
            assert one.find(keys) == []
            assert one.load(keys, memory_objects(2)) == []
            assert not one.store(keys, written).is_successful()
            assert time.monotonic() - began_s < WAIT_S
            assert one.counts()["lookup_failures"]
            assert not one.adapter.report_status()["is_healthy"]
            broken.heal()
            wait_until(lambda: one.store(keys, written).is_successful(), "the store is used")
            shown(one, keys)
            assert one.load(keys, read := memory_objects(2)) == [0, 1]
            assert content(read) == content(written)
            assert one.adapter.report_status()["is_healthy"]


def test_lmcache_store_away_is_logged_without_tasks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with FaultyStore(tmp_path / "store") as broken:
        address = broken.address
        broken.strike(StoreFault.ALL_KILLED, random.Random(1))
        with controller(address, SOON) as one:
            wait_until(lambda: "store away" in caplog.text, "the log says so")
            assert f"metadata={address.metadata}" in caplog.text
            assert not one.adapter.report_status()["is_healthy"]
            broken.heal()
            wait_until(lambda: "store answers again" in caplog.text, "the log says so")
            assert one.adapter.report_status()["is_healthy"]
    assert caplog.text.count("store away") == 1


def test_lmcache_refused_objects_are_no_lookup_failures(store: StoreAddress) -> None:
    """A size that cannot be divided: the store is not asked, and it is well."""
    keys = object_keys(2, seed=23)
    with controller(store) as one:
        assert one.find(keys, {0: layout(shape=((1 << 30) + 3,))}) == []
        counts = one.counts()
        assert (counts["objects_refused"], counts["lookup_failures"]) == (2, 0)
        assert one.adapter.report_status()["is_healthy"]


def test_lmcache_listeners_see_the_order_of_changes(store: StoreAddress) -> None:
    """A deletion during a notification waits for it: usage and listing agree with the notifications."""
    keys, order, entered, gate = object_keys(2, seed=24), [], threading.Event(), threading.Event()

    class Slow(Listener):
        def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
            entered.set()
            assert gate.wait(WAIT_S)
            order.append("stored")

        def on_l2_keys_deleted(self, keys: list[Any]) -> None:
            order.append("deleted")

    with controller(store) as one:
        one.adapter.register_listener(Slow())
        number = one.adapter.submit_store_task(keys, memory_objects(2, seed=1))
        assert entered.wait(WAIT_S)
        with ThreadPoolExecutor(2) as pool:
            deleted = pool.submit(one.adapter.delete, keys)
            listed = pool.submit(one.adapter.list_l2_keys)
            assert not wait([deleted, listed], timeout=0.2).done
            gate.set()
            deleted.result(WAIT_S)
        assert one.stored(number).is_successful()
        assert order == ["stored", "deleted"]
        assert one.adapter.get_usage().total_bytes_used == 0
        assert not one.adapter.list_l2_keys().entries


def test_lmcache_client_killed_leaves_the_store_intact(store: StoreAddress) -> None:
    """A process is killed while it stores; another one then stores the same objects."""
    script = (
        "import sys, time; from lmcache_bed import *; from kvstore.testing.connector.driver import StoreAddress\n"
        "one = Controller(StoreAddress(*sys.argv[1:3]), {'salt': 'killed'})\n"
        "for seed in range(30, 60): one.adapter.submit_store_task(object_keys(16, seed=seed), memory_objects(16, seed=seed))\n"
        "print('storing', flush=True); time.sleep(60)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, store.metadata, store.node],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )
    assert child.stdout is not None
    for line in child.stdout:
        if b"storing" in line:
            break
    child.kill()
    child.wait()
    child.stdout.close()
    with controller(store, {"salt": "killed", "verify": "always"}) as one:
        for seed in range(30, 60):
            keys, right, read = object_keys(16, seed=seed), memory_objects(16, seed=seed), memory_objects(16)
            arrived = one.load(keys, read)
            assert all(content(read)[at] == content(right)[at] for at in arrived)
        wait_until(lambda: one.store(keys, right).is_successful(), "the objects are stored")
        assert one.load(keys, read) == list(range(16))
        assert content(read) == content(right)


def test_lmcache_tasks_beyond_the_bound_fail_at_once(tmp_path: Path) -> None:
    keys, objects = object_keys(2, seed=21), memory_objects(2, seed=8)
    with FaultyStore(tmp_path / "store") as broken, controller(broken.address, {**SOON, "max_pending": 3, "workers": 1}) as one:
        assert one.store(keys, objects).is_successful()
        os.kill(broken.cluster.node(NODE).process.pid, 19)
        try:
            numbers = [one.adapter.submit_load_task(keys, memory_objects(2)) for _ in range(10)]
            refused = [number for number in numbers if one.adapter.query_load_result(number) is not None]
            assert refused == numbers[3:]
            assert one.counts()["tasks_refused"] == 7
            wait_until(lambda: not one.adapter.report_status()["pending"]["load"], "the tasks have ended by their deadline")
        finally:
            os.kill(broken.cluster.node(NODE).process.pid, 18)
        assert [one.adapter.query_load_result(number) is not None for number in numbers] == [True] * 3 + [False] * 7


def threads_of_adapters() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kvstore-lmcache")]


def test_lmcache_close_ends_all_work_before_it_returns(tmp_path: Path) -> None:
    """Loads hang in a stopped node. After the end nothing writes to LMCache's memory, also if the node continues."""
    keys = object_keys(64, seed=22)
    with FaultyStore(tmp_path / "store") as broken:
        node = broken.cluster.node(NODE).process.pid
        one = Controller(broken.address, SOON)
        assert one.store(keys, memory_objects(64, seed=9)).is_successful()
        os.kill(node, signal.SIGSTOP)
        reads = [memory_objects(64) for _ in range(20)]
        numbers = [one.adapter.submit_load_task(keys, read) for read in reads]
        wait_until(lambda: one.adapter.report_status()["pending"]["load"] == len(reads), "no load has ended")
        one.adapter.close()
        assert not threads_of_adapters()
        assert [one.adapter.query_load_result(number).popcount() for number in numbers] == [0] * len(reads)
        for read in reads:
            for memory in read:
                memory.raw_data.fill_(0xA5)
        os.kill(node, signal.SIGCONT)
        with controller(broken.address, {**SOON, "salt": "other"}) as other:  # the node works again
            wait_until(lambda: other.store(keys, memory_objects(64, seed=9)).is_successful(), "the node answers")
        assert all(set(bytes(memory.byte_array)) == {0xA5} for read in reads for memory in read)
        one.adapter.close()
        late = one.adapter.submit_store_task(keys, reads[0])
        assert not one.adapter.pop_completed_store_tasks()[late].is_successful()
        assert one.adapter.query_lookup_and_lock_result(one.adapter.submit_lookup_and_lock_task(keys, {})).popcount() == 0
        assert not one.adapter.report_status()["is_healthy"]


def test_lmcache_close_ends_everything_after_an_error(store: StoreAddress, monkeypatch: pytest.MonkeyPatch) -> None:
    def close(tasks: TaskQueue[Any]) -> None:
        end(tasks)
        raise RuntimeError("a bug")

    end = TaskQueue.close
    one, keys = Controller(store), object_keys(1, seed=25)
    assert one.store(keys, memory_objects(1, seed=1)).is_successful()
    shown(one, keys)
    assert one.load(keys, memory_objects(1)) == [0]
    assert len(threads_of_adapters()) > 3, "of stores, lookups, loads and the watcher"
    events = [one.adapter.get_store_event_fd(), one.adapter.get_lookup_and_lock_event_fd(), one.adapter.get_load_event_fd()]
    with monkeypatch.context() as patch:
        patch.setattr(TaskQueue, "close", close)
        with pytest.raises(RuntimeError):
            one.adapter.close()
    assert not threads_of_adapters()
    for event in events:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(event)
    one.adapter.close()


def test_lmcache_evicted_objects_leave_the_usage(tmp_path: Path) -> None:
    with (
        FaultyStore(tmp_path / "store", dram_bytes=8 << 20, nvme_bytes=0) as small,
        controller(small.address, {"usage_check_s": 0.2}) as one,
    ):
        for seed in range(40):
            one.store(object_keys(16, seed=100 + seed), memory_objects(16, seed=seed))
        assert 640 * BYTES > 8 << 20
        wait_until(lambda: one.counts()["keys_gone"], "the check finds that objects were evicted", timeout_s=60)
        assert one.adapter.get_usage().total_bytes_used < 640 * BYTES
