"""Parts of LMCache's adapter without LMCache: keys, layouts, options, tasks, known keys."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvclient import CacheSpec, InvalidArgument, KVClient
from kvclient.engines.lmcache import namespaces
from kvclient.engines.lmcache.counters import AdapterCounters
from kvclient.engines.lmcache.layouts import ObjectLayout, SeenLayouts, parts_of
from kvclient.engines.lmcache.ledger import KeyLedger
from kvclient.engines.lmcache.object_keys import is_strong, store_key
from kvclient.engines.lmcache.options import AdapterOptions
from kvclient.engines.lmcache.tasks import TaskQueue
from kvclient.engines.lmcache.versions import TESTED, check_version
from kvclient.engines.options import HookOptions
from kvstore.core.errors import CapacityExceeded, Unsupported
from kvstore.core.limits import MAX_LAYER_BLOCK_BYTES
from kvstore.core.types import NamespaceId
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from support.wait import wait_until

SOON_S = 0.05
LATER_S = 30.0
NAMESPACE = NamespaceId(bytes(16))


class Dtype:
    """A dtype of torch, as far as the adapter looks at it."""

    def __init__(self, name: str, itemsize: int) -> None:
        self.name, self.itemsize = name, itemsize

    def __str__(self) -> str:
        return f"torch.{self.name}"


@dataclass(frozen=True)
class Key:
    """LMCache's ``ObjectKey``."""

    chunk_hash: bytes = bytes(32)
    model_name: str = "m"
    kv_rank: int = 1
    object_group_id: int = 0
    cache_salt: str = ""


# ---- keys ----
KEYS = st.builds(
    Key,
    chunk_hash=st.binary(min_size=16, max_size=33),
    kv_rank=st.integers(0, 1 << 32),
    object_group_id=st.integers(0, 8),
    cache_salt=st.text(max_size=4),
)


@given(KEYS, KEYS)
def test_lmcache_keys_differ_with_each_part(one: Key, other: Key) -> None:
    assert (store_key(NAMESPACE, one) == store_key(NAMESPACE, other)) == (one == other)
    assert store_key(NAMESPACE, one) != store_key(NamespaceId(bytes(15) + b"1"), one)


def test_lmcache_key_never_changes() -> None:
    """Otherwise objects of earlier processes are not found."""
    key = Key(bytes(range(32)), "m", 0x01000100, 2, "anna")
    assert store_key(NamespaceId(b"n" * 16), key).hex() == "30d516a8f2be041aaa286a22f85f8bdb"


def test_lmcache_short_hashes_are_weak() -> None:
    assert is_strong(Key(bytes(16)))
    assert not is_strong(Key(bytes(8)))


# ---- layouts ----
def test_lmcache_layouts_of_equal_size_differ() -> None:
    bf16, fp16 = Dtype("bfloat16", 2), Dtype("float16", 2)
    every = [
        ObjectLayout.of_tensors([(2, 4, 256, 64)], [bf16]),
        ObjectLayout.of_tensors([(2, 4, 256, 64)], [fp16]),
        ObjectLayout.of_tensors([(2, 256, 4, 64)], [bf16]),
        ObjectLayout.of_tensors([(1, 4, 256, 64)] * 2, [bf16, bf16]),
        ObjectLayout.of_bytes(2 * 4 * 256 * 64 * 2),
    ]
    assert {one.size for one in every if one} == {262_144}
    hook = HookOptions()
    assert len({one.spec(hook, "m", 256).namespace for one in every if one}) == len(every)


def test_lmcache_namespace_depends_on_options() -> None:
    layout = ObjectLayout.of_bytes(4096)
    specs = [
        layout.spec(HookOptions(), "m", 256),
        layout.spec(HookOptions(), "other", 256),
        layout.spec(HookOptions(), "m", 128),
        layout.spec(HookOptions(weights_epoch="2"), "m", 256),
        layout.spec(HookOptions(tenant="t"), "m", 256),
        layout.spec(HookOptions(salt="s"), "m", 256),
    ]
    assert len({spec.namespace for spec in specs}) == len(specs)


def test_lmcache_layout_without_tensors_is_none() -> None:
    assert ObjectLayout.of_tensors([], []) is None
    assert ObjectLayout.of_tensors([(0, 4)], [Dtype("uint8", 1)]) is None


def test_lmcache_long_layouts_are_digested() -> None:
    dtype = Dtype("uint8", 1)
    specs = [ObjectLayout.of_tensors([(1 + at,)] * 200, [dtype] * 200).spec(HookOptions(), "m", 1) for at in range(2)]  # type: ignore[union-attr]
    assert specs[0].namespace != specs[1].namespace


@given(st.integers(1, 4 * MAX_LAYER_BLOCK_BYTES))
def test_lmcache_large_objects_have_equal_parts(size: int) -> None:
    try:
        parts = parts_of(size)
    except InvalidArgument:
        assert size > MAX_LAYER_BLOCK_BYTES
        return
    assert size % parts == 0
    assert size // parts <= MAX_LAYER_BLOCK_BYTES


def test_lmcache_candidates_begin_with_the_stated_layout() -> None:
    seen = SeenLayouts([7])
    one, two, assumed = (ObjectLayout.of_bytes(size) for size in (1, 2, 7))
    assert seen.candidates("m", 0, None) == [assumed]
    seen.record("m", 0, one)
    assert seen.candidates("m", 0, one) == [one, assumed]
    assert seen.candidates("m", 0, two) == [two, assumed], "a load would use the stated one"
    assert seen.candidates("m", 1, two) == [two, assumed]
    for size in range(10, 20):
        seen.record("m", 0, ObjectLayout.of_bytes(size))
    assert [layout.size for layout in seen.candidates("m", 0, None)] == [19, 18, 17, 16, 7]


# ---- options and versions ----
@pytest.mark.parametrize(
    ("params", "names"),
    [
        ({"worker": 3}, "worker"),
        ({"model": "m"}, "model"),
        ({"require_store": True}, "require_store"),
        ({"workers": 0}, "workers"),
        ({"workers": True}, "workers"),
        ({"max_pending": "many"}, "max_pending"),
        ({"object_bytes": [0]}, "object_bytes"),
        ({"object_bytes": 4096}, "object_bytes"),
        ({"usage_check_s": 0}, "usage_check_s"),
        ({"metadata": "", "node": "unix:/x"}, "metadata"),
        ({"metadata": "h:1"}, "weights_epoch"),
        ([], "adapter_params"),
    ],
)
def test_lmcache_option_error_names_it(params: object, names: str) -> None:
    with pytest.raises(InvalidArgument, match=names):
        AdapterOptions.from_params(params)


def test_lmcache_options_are_typed() -> None:
    given = {"metadata": "h:1", "weights_epoch": "1", "workers": 2, "object_bytes": [1, 2], "load_deadline_s": 3}
    options = AdapterOptions.from_params(given)
    assert (options.workers, options.object_bytes, options.hook.load_deadline_s) == (2, (1, 2), 3.0)


def test_lmcache_versions_outside_the_tested_are_refused() -> None:
    for version in TESTED:
        check_version(version)
        check_version(f"{version}+cpu")
    with pytest.raises(Unsupported, match=TESTED[0]):
        check_version("0.4.7")
    with pytest.raises(Unsupported):
        check_version("0.6.0")


# ---- tasks ----
@contextmanager
def queue(workers: int = 1, max_pending: int = 8) -> Iterator[tuple[TaskQueue[str], AdapterCounters, threading.Semaphore]]:
    woken = threading.Semaphore(0)
    counters = AdapterCounters()
    tasks: TaskQueue[str] = TaskQueue("test", count(), workers, max_pending, counters, woken.release)
    yield tasks, counters, woken
    tasks.close()


def test_lmcache_task_result_is_returned_once() -> None:
    with queue() as (tasks, _, woken):
        number = tasks.submit(lambda _: "good", "failed", LATER_S)
        assert woken.acquire(timeout=LATER_S)
        assert tasks.take(number) == "good"
        assert tasks.take(number) is None
        assert tasks.take_all() == {}


def test_lmcache_task_that_raises_has_failed() -> None:
    def work(_: float) -> str:
        raise ValueError("bug")

    with queue() as (tasks, counters, woken):
        number = tasks.submit(work, "failed", LATER_S)
        assert woken.acquire(timeout=LATER_S)
        assert tasks.take_all() == {number: "failed"}
        assert counters.totals()["bugs"] == 1


def test_lmcache_tasks_beyond_the_bound_fail_at_once() -> None:
    gate = threading.Event()
    with queue(max_pending=2) as (tasks, counters, _):
        numbers = [tasks.submit(lambda _: str(gate.wait(LATER_S)), "failed", LATER_S) for _ in range(4)]
        assert [tasks.take(number) for number in numbers] == [None, None, "failed", "failed"]
        assert counters.totals()["tasks_refused"] == 2
        gate.set()
        wait_until(lambda: tasks.pending == 0, "the tasks have ended")
        assert tasks.take_all() == {numbers[0]: "True", numbers[1]: "True"}


def test_lmcache_task_that_waited_too_long_has_failed() -> None:
    gate = threading.Event()
    with queue() as (tasks, _, woken):
        tasks.submit(lambda _: str(gate.wait(LATER_S)), "failed", LATER_S)
        late = tasks.submit(lambda _: "good", "failed", SOON_S)
        time.sleep(2 * SOON_S)
        gate.set()
        assert woken.acquire(timeout=LATER_S)
        assert woken.acquire(timeout=LATER_S)
        assert tasks.take(late) == "failed"


def test_lmcache_close_waits_for_tasks_and_wakes_no_more() -> None:
    ended = threading.Event()

    def work(_: float) -> str:
        time.sleep(SOON_S)
        ended.set()
        return "good"

    with queue() as (tasks, _, woken):
        running = tasks.submit(work, "failed", LATER_S)
        waiting = tasks.submit(lambda _: "good", "failed", LATER_S)
        tasks.close()
        assert ended.is_set()
        results = tasks.take_all()
        assert set(results) == {running, waiting}
        while woken.acquire(blocking=False):
            pass
        assert tasks.take(tasks.submit(lambda _: "good", "failed", LATER_S)) == "failed"
        assert not woken.acquire(blocking=False)


# ---- known keys ----
class Clock:
    """A clock that tests set."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def keyed(*numbers: int) -> list[tuple[Key, int]]:
    return [(Key(bytes([number]) * 32), 10 + number) for number in numbers]


def test_lmcache_known_keys_are_counted_once() -> None:
    ledger = KeyLedger(4)
    assert ledger.add(keyed(1, 2)) == (keyed(1, 2), [])
    assert ledger.add(keyed(2, 3)) == (keyed(3), [])
    assert ledger.add(keyed(4, 5)) == (keyed(4, 5), keyed(1))
    assert len(ledger) == 4


def test_lmcache_deleted_keys_are_hidden_until_stored() -> None:
    ledger = KeyLedger(4)
    ledger.add(keyed(1))
    keys = [key for key, _ in keyed(1, 2, 3)]
    assert ledger.delete(keys[:2]) == keyed(1)
    assert ledger.hidden(keys) == [True, True, False]
    ledger.add(keyed(1))
    assert ledger.hidden(keys) == [False, True, False]


def test_lmcache_pages_list_each_key_once() -> None:
    ledger = KeyLedger(10)
    ledger.add(keyed(*range(5)))
    ledger.add([(replace(key, model_name="other"), size) for key, size in keyed(9)])
    listed, after = [], -1
    while True:
        page, following = ledger.page("m", 2, after)
        listed += page
        ledger.delete(key for key, _ in page)
        if following is None:
            break
        after = following
    assert listed == keyed(*range(5))


def test_lmcache_missing_keys_are_forgotten_later() -> None:
    clock = Clock()
    ledger = KeyLedger(10, clock)
    ledger.add(keyed(1))
    assert ledger.forget_missing([keyed(1)[0][0]]) == []
    clock.now_s += 60
    ledger.add(keyed(2))
    assert ledger.forget_missing(key for key, _ in keyed(1, 2, 3)) == keyed(1)


def test_lmcache_checks_reach_every_key() -> None:
    ledger = KeyLedger(10)
    ledger.add(keyed(*range(5)))
    assert sorted(size for _ in range(3) for _, size in ledger.to_check(2)) == [10, 10, 11, 12, 13, 14]


# ---- namespaces ----
def test_lmcache_namespaces_beyond_the_bound_close_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "MOST", 2)
    specs = [ObjectLayout.of_bytes(4096 * (1 + at)).spec(HookOptions(), "m", 256) for at in range(3)]
    with LocalCluster([NodeSpec("n", dram_bytes=16 << 20)]) as cluster:
        counters = AdapterCounters()
        hook = HookOptions(metadata=cluster.metadata_address, node=cluster.node("n").local_socket)
        clients = namespaces.NamespaceClients(hook, counters)
        end_s = time.monotonic() + LATER_S
        key = [store_key(NAMESPACE, Key())]
        with clients.client(specs[0], end_s) as first:
            with clients.client(specs[1], end_s) as second, pytest.raises(CapacityExceeded), clients.client(specs[2], end_s):
                pass
            with clients.client(specs[2], end_s) as third:
                assert {one.spec for one in clients.opened()} == {specs[0], specs[2]}, "the older one is in use"
                assert [one.lookup_heads(key).error for one in (first, third)] == [None, None]
            wait_until(lambda: second.lookup_heads(key).error is not None, "the unused one is closed")
        with clients.client(specs[1], end_s) as again:
            assert again.lookup_heads(key).error is None
        assert counters.totals()["namespaces_closed"] == 2
        clients.close()
        assert third.lookup_heads(key).error is not None
        with pytest.raises(InvalidArgument, match="closed"), clients.client(specs[0], end_s):
            pass


def test_lmcache_namespaces_close_all_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[CacheSpec] = []

    def close(client: KVClient) -> None:
        closed.append(client.spec)
        raise RuntimeError("a bug")

    specs = [ObjectLayout.of_bytes(4096 * (1 + at)).spec(HookOptions(), "m", 256) for at in range(3)]
    with LocalCluster([NodeSpec("n", dram_bytes=16 << 20)]) as cluster:
        clients = namespaces.NamespaceClients(HookOptions(metadata=cluster.metadata_address), AdapterCounters())
        for spec in specs:
            with clients.client(spec, time.monotonic() + LATER_S):
                pass
        opened = clients.opened()
        with monkeypatch.context() as patch:
            patch.setattr(KVClient, "close", close)
            with pytest.raises(RuntimeError):
                clients.close()
        assert set(closed) == set(specs)
        for client in opened:
            client.close()
