"""Mounted volumes of a node: waits are bounded if the file system hangs, and failed mounts are opened again."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.config.node import MountSection, NodeConfig
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import InvalidArgument
from kvstore.core.types import BlockKey, BlockRun, BlockShape, NamespaceId, Outcome, StoreOutcome, Tier, VolumeId
from kvstore.node.loads.loader import Loader
from kvstore.node.loads.mounts import Answers, Mount, Mounts
from kvstore.node.state.namespaces import NamespaceRegistry, NodeNamespace
from kvstore.observe.counters import Counters
from kvstore.testing.mount_suite import put
from kvstore.testing.volume_suite import NAMESPACE, SHAPES, block_key, block_payload, block_record, items_for
from kvstore.tiers.contract import Slot
from kvstore.tiers.nvme.mounted import MountedSlab
from kvstore.tiers.nvme.slab import NvmeSlab
from support.node_harness import NODE_ID, NodeHarness

NAME = VolumeId("owner/nvme0")
SHAPE = SHAPES[2]
SHORT_S = 0.05
LONG_S = 60.0


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[NvmeSlab]:
    slab = NvmeSlab.open(tmp_path / "v", volume_id=NAME, capacity_bytes=4 << 20)
    list(slab.recover())
    yield slab
    slab.close()


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def namespace() -> NodeNamespace:
    return NamespaceRegistry().of_shape(NAMESPACE, SHAPE)


@pytest.fixture
def mount(tmp_path: Path, counters: Counters) -> Iterator[Mount]:
    mount = Mount(MountSection(volume=NAME, path=tmp_path / "v"), io_threads=2, counters=counters, clock=MonotonicClock())
    yield mount
    mount.close()


def read(mount: Mount, namespace: NodeNamespace, number: int, left_s: float, released: threading.Event) -> bytes | None:
    """Read one block that the mount knows. Returns its bytes, or None."""
    [slot] = mount.find(namespace, [block_key(number)])
    assert slot is not None
    memory = memoryview(mmap.mmap(-1, SHAPE.block_bytes))
    answers = mount.read(namespace, [(block_key(number), slot, memory)], MonotonicClock().now_s() + left_s, released.set)
    return bytes(memory) if answers is not None and answers[0][0] is Outcome.HIT else None


def test_mount_reads_known_blocks(owner: NvmeSlab, mount: Mount, namespace: NodeNamespace) -> None:
    put(owner, [1, 2], SHAPE)
    assert mount.find(namespace, [block_key(1)]) == [None]
    assert "not read yet" in mount.describe()
    mount.catch_up(MonotonicClock().now_s() + LONG_S)
    released = threading.Event()
    assert read(mount, namespace, 2, LONG_S, released) == block_payload(2, SHAPE)
    assert not released.is_set()  # the read succeeded
    assert "O_DIRECT" in mount.describe()
    assert "2 blocks" in mount.describe()


def test_mount_hung_read_keeps_its_memory(
    owner: NvmeSlab, mount: Mount, namespace: NodeNamespace, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(owner, [1], SHAPE)
    mount.catch_up(MonotonicClock().now_s() + LONG_S)
    proceed, real = threading.Event(), MountedSlab.read

    def hang(
        self: MountedSlab, namespace_id: NamespaceId, shape: BlockShape, items: Sequence[tuple[BlockKey, Slot, memoryview]]
    ) -> Answers:
        assert proceed.wait(LONG_S)
        return real(self, namespace_id, shape, items)

    monkeypatch.setattr(MountedSlab, "read", hang)
    released = threading.Event()
    assert read(mount, namespace, 1, SHORT_S, released) is None
    assert not released.is_set()
    assert mount.find(namespace, [block_key(1)]) == [None]  # other loads do not use the mount
    mount.catch_up(MonotonicClock().now_s() + LONG_S)  # returns at once
    assert counters.snapshot()["mount_stalled_total"] == 1
    proceed.set()
    assert released.wait(LONG_S)
    assert read(mount, namespace, 1, LONG_S, threading.Event()) == block_payload(1, SHAPE)


def test_mount_close_does_not_wait_for_hung_read(
    owner: NvmeSlab, mount: Mount, namespace: NodeNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(owner, [1], SHAPE)
    mount.catch_up(MonotonicClock().now_s() + LONG_S)
    proceed, closed = threading.Event(), threading.Event()
    monkeypatch.setattr(MountedSlab, "read", lambda *_: proceed.wait(LONG_S) and [])
    monkeypatch.setattr(MountedSlab, "close", lambda _: closed.set())
    released = threading.Event()
    assert read(mount, namespace, 1, SHORT_S, released) is None
    mount.close()
    assert not closed.is_set()
    proceed.set()
    assert released.wait(LONG_S)
    assert closed.wait(LONG_S)


def test_mount_close_ends_queued_reads(
    tmp_path: Path, owner: NvmeSlab, namespace: NodeNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(owner, [1], SHAPE)
    monkeypatch.setattr("kvstore.node.loads.mounts.THREADS", 1)
    monkeypatch.setattr("kvstore.node.base.volume_guard.CHANGERS", 0)
    submitted = threading.Semaphore(0)

    class Pool(ThreadPoolExecutor):
        def submit(self, *work: Any, **options: Any) -> Future[Any]:  # type: ignore[override]
            future = super().submit(*work, **options)
            submitted.release()
            return future

    monkeypatch.setattr("kvstore.node.base.volume_guard.ThreadPoolExecutor", Pool)
    mount = Mount(MountSection(volume=NAME, path=tmp_path / "v"), io_threads=2, counters=Counters(), clock=MonotonicClock())
    mount.catch_up(MonotonicClock().now_s() + LONG_S)
    begun, proceed = threading.Event(), threading.Event()

    def hang(*_: object) -> Answers:
        begun.set()
        assert proceed.wait(LONG_S)
        return [(Outcome.MISS, block_record(1, SHAPE))]

    monkeypatch.setattr(MountedSlab, "read", hang)
    events = [threading.Event(), threading.Event()]
    with ThreadPoolExecutor(2) as readers:
        first = readers.submit(read, mount, namespace, 1, LONG_S, events[0])
        assert begun.wait(LONG_S)
        second = readers.submit(read, mount, namespace, 1, LONG_S, events[1])
        for _ in ("catch up", "first read", "second read"):
            assert submitted.acquire(timeout=LONG_S)
        mount.close()
        assert second.result(LONG_S) is None
        assert events[1].is_set(), "the memory of the queued read was not released"
        assert not events[0].is_set()
        proceed.set()
        assert first.result(LONG_S) is None  # a miss


def test_mount_replaced_folder_is_opened_again(tmp_path: Path, namespace: NodeNamespace, counters: Counters) -> None:
    config = MountSection(volume=NAME, path=tmp_path / "v")
    mount = Mount(config, io_threads=2, counters=counters, clock=MonotonicClock(), backoff_s=0.0)
    deadline_s = MonotonicClock().now_s() + LONG_S
    mount.catch_up(deadline_s)
    assert counters.snapshot()["mount_errors_total"] == 1
    assert "No such file" in mount.describe()
    for number in (1, 2):
        slab = NvmeSlab.open(tmp_path / "v", volume_id=NAME, capacity_bytes=4 << 20)
        list(slab.recover())
        put(slab, [number], SHAPE)
        slab.close()
        mount.catch_up(deadline_s)  # the second time: another volume replaced the open one, which is closed
        mount.catch_up(deadline_s)
        assert read(mount, namespace, number, LONG_S, threading.Event()) == block_payload(number, SHAPE)
        (tmp_path / "v").rename(tmp_path / f"old-{number}")
    mount.close()
    assert counters.snapshot()["mount_errors_total"] == 2


class PausedLock:
    """A lock whose first user waits before it takes it."""

    def __init__(self) -> None:
        self.lock, self.first = threading.Lock(), threading.Semaphore(1)
        self.paused, self.proceed = threading.Event(), threading.Event()

    def __enter__(self) -> bool:
        if self.first.acquire(blocking=False):
            self.paused.set()
            assert self.proceed.wait(LONG_S)
        return self.lock.__enter__()

    def __exit__(self, *error: object) -> None:
        self.lock.release()


def test_mount_abandoned_before_use_is_opened_again(
    owner: NvmeSlab, mount: Mount, namespace: NodeNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read fails and closes the volume while another read is about to use it. Its descriptor may be another file's by then."""
    put(owner, [1], SHAPE)
    deadline_s = MonotonicClock().now_s() + LONG_S
    mount.catch_up(deadline_s)
    begun, fail = threading.Event(), threading.Event()

    def failing(_: MountedSlab) -> None:
        begun.set()
        assert fail.wait(LONG_S)
        raise OSError("the file server is away")

    with monkeypatch.context() as patched, ThreadPoolExecutor(2) as readers:
        patched.setattr(MountedSlab, "catch_up", failing)
        failed = readers.submit(mount.catch_up, deadline_s)
        assert begun.wait(LONG_S)
        lock = PausedLock()
        patched.setattr(mount, "_lock", lock)
        found = readers.submit(read, mount, namespace, 1, LONG_S, threading.Event())
        assert lock.paused.wait(LONG_S)
        fail.set()
        failed.result(LONG_S)
        lock.proceed.set()
        assert found.result(LONG_S) == block_payload(1, SHAPE)


@contextmanager
def mounting(mount: Mount) -> Iterator[tuple[NodeHarness, Loader]]:
    """A node that reads the mount."""
    node = NodeHarness(shapes=[SHAPE], clock=MonotonicClock())
    node.namespaces = [node.registry.of_shape(NAMESPACE, SHAPE)]
    loader = Loader(NODE_ID, node.table, node.peers, Mounts([mount]), node.counters, node.clock, window_bytes=1 << 20, threads=1)
    with closing(node), closing(loader):
        yield node, loader


def test_load_from_mount_is_marked_as_mounted(owner: NvmeSlab, mount: Mount) -> None:
    """Its time is not blamed on the node's own volumes."""
    put(owner, [0, 1], SHAPE)
    with mounting(mount) as (node, loader):
        for run in loader.load(node.request([block_key(0), block_key(1)], LONG_S)):
            assert (set(run.outcomes), run.node, run.tier) == ({Outcome.HIT}, NODE_ID, Tier.NVME)
            assert run.mounted
            node.table.unpin(run.pinned())


def test_load_by_keys_from_mount_keeps_place_in_chain(owner: NvmeSlab, mount: Mount) -> None:
    """A read by keys does not know the chain: two of its blocks are not neighbours."""
    slots = owner.allocate(SHAPE, 4)
    assert slots is not None
    items = [
        (slot, replace(record, parent=block_key(at - 1) if at else None, depth=at), memory)
        for at, (slot, record, memory) in enumerate(items_for(slots, range(4), SHAPE))
    ]
    assert owner.write(items) == [None] * 4
    owner.commit([(slot, record) for slot, record, _ in items], [])
    with mounting(mount) as (node, loader):
        for loaded in loader.load(node.request([block_key(1), block_key(3)], LONG_S)):
            assert set(loaded.outcomes) == {Outcome.HIT}
            node.table.unpin(loaded.pinned())
        assert [(one.key, one.parent, one.depth) for one in node.table.snapshot()] == [
            (block_key(at), block_key(at - 1), at) for at in (1, 3)
        ]
        run = BlockRun(NAMESPACE, block_key(0), 1, tuple(block_key(at) for at in (1, 2, 3)))
        grant = node.table.prepare(node.namespace, run, node.clock.now_s())
        assert grant.outcomes == [StoreOutcome.EXISTS, StoreOutcome.STORED, StoreOutcome.EXISTS]
        node.table.abandon(grant)


def test_mounts_get_finds_a_volume(mount: Mount) -> None:
    mounts = Mounts([mount])
    assert mounts.get(NAME) is mount
    assert mounts.get("") is None
    assert mounts.all == (mount,)


@pytest.mark.parametrize("volumes", [["a/nvme0"], ["b/nvme0", "b/nvme0"]])
def test_mounts_of_own_or_equal_volumes_are_refused(tmp_path: Path, volumes: list[str]) -> None:
    with pytest.raises(InvalidArgument):
        NodeConfig(
            node_id="a", run_dir=tmp_path, mounts=tuple(MountSection(volume=volume, path=tmp_path) for volume in volumes)
        ).check()
