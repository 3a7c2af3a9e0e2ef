"""Mounted volumes as a node uses them: bounded where the file system hangs, opened again after trouble."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore.config.node import MountSection, NodeConfig
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import InvalidArgument
from kvstore.core.types import BlockKey, BlockShape, NamespaceId, Outcome, VolumeId
from kvstore.node.loads.mounts import Answers, Mount, Mounts
from kvstore.node.state.namespaces import NamespaceRegistry, NodeNamespace
from kvstore.observe.counters import Counters
from kvstore.testing.mount_suite import put
from kvstore.testing.volume_suite import NAMESPACE, SHAPES, block_key, block_payload
from kvstore.tiers.contract import Slot
from kvstore.tiers.nvme.mounted import MountedSlab
from kvstore.tiers.nvme.slab import NvmeSlab

NAME = VolumeId("owner/nvme0")
SHAPE = SHAPES[2]
SOON_S = 0.05
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


def read(mount: Mount, namespace: NodeNamespace, number: int, left_s: float, back: threading.Event) -> bytes | None:
    """Reads one block that the mount knows of; its bytes where it came."""
    [slot] = mount.find(namespace, [block_key(number)])
    assert slot is not None
    memory = memoryview(mmap.mmap(-1, SHAPE.block_bytes))
    answers = mount.read(namespace, [(block_key(number), slot, memory)], MonotonicClock().now_s() + left_s, back.set)
    return bytes(memory) if answers is not None and answers[0][0] is Outcome.HIT else None


def test_what_is_known_is_read(owner: NvmeSlab, mount: Mount, namespace: NodeNamespace) -> None:
    put(owner, [1, 2], SHAPE)
    assert mount.find(namespace, [block_key(1)]) == [None]
    assert "not read yet" in mount.describe()
    mount.catch_up(MonotonicClock().now_s() + LONG_S)
    back = threading.Event()
    assert read(mount, namespace, 2, LONG_S, back) == block_payload(2, SHAPE)
    assert not back.is_set()  # the memory is the caller's, who was answered
    assert "O_DIRECT" in mount.describe()
    assert "2 blocks" in mount.describe()


def test_a_read_that_hangs_is_left_behind_and_its_memory_rests(
    owner: NvmeSlab, mount: Mount, namespace: NodeNamespace, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(owner, [1], SHAPE)
    mount.catch_up(MonotonicClock().now_s() + LONG_S)
    go_on, real = threading.Event(), MountedSlab.read

    def hang(
        self: MountedSlab, namespace_id: NamespaceId, shape: BlockShape, items: Sequence[tuple[BlockKey, Slot, memoryview]]
    ) -> list[tuple[Outcome, bytes]]:
        assert go_on.wait(LONG_S)
        return real(self, namespace_id, shape, items)

    monkeypatch.setattr(MountedSlab, "read", hang)
    back = threading.Event()
    assert read(mount, namespace, 1, SOON_S, back) is None
    assert not back.is_set()
    assert mount.find(namespace, [block_key(1)]) == [None]  # nobody else is sent there
    mount.catch_up(MonotonicClock().now_s() + LONG_S)  # answers at once
    assert counters.snapshot()["mount_stalled_total"] == 1
    go_on.set()
    assert back.wait(LONG_S)
    assert read(mount, namespace, 1, LONG_S, threading.Event()) == block_payload(1, SHAPE)


def test_closing_does_not_wait_for_what_hangs(
    owner: NvmeSlab, mount: Mount, namespace: NodeNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(owner, [1], SHAPE)
    mount.catch_up(MonotonicClock().now_s() + LONG_S)
    go_on, closed = threading.Event(), threading.Event()
    monkeypatch.setattr(MountedSlab, "read", lambda *_: go_on.wait(LONG_S) and [])
    monkeypatch.setattr(MountedSlab, "close", lambda _: closed.set())
    back = threading.Event()
    assert read(mount, namespace, 1, SOON_S, back) is None
    mount.close()
    assert not closed.is_set()
    go_on.set()
    assert back.wait(LONG_S)
    assert closed.wait(LONG_S)


def test_what_waits_for_its_turn_when_the_mount_is_closed_is_answered(
    tmp_path: Path, owner: NvmeSlab, namespace: NodeNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(owner, [1], SHAPE)
    monkeypatch.setattr("kvstore.node.loads.mounts.THREADS", 1)
    monkeypatch.setattr("kvstore.node.base.volume_guard.CHANGERS", 0)
    mount = Mount(MountSection(volume=NAME, path=tmp_path / "v"), io_threads=2, counters=Counters(), clock=MonotonicClock())
    mount.catch_up(MonotonicClock().now_s() + LONG_S)
    begun, go_on = threading.Event(), threading.Event()

    def hang(*_: object) -> Answers:
        begun.set()
        assert go_on.wait(LONG_S)
        return [(Outcome.MISS, b"")]

    monkeypatch.setattr(MountedSlab, "read", hang)
    backs = [threading.Event(), threading.Event()]
    with ThreadPoolExecutor(2) as readers:
        first = readers.submit(read, mount, namespace, 1, LONG_S, backs[0])
        assert begun.wait(LONG_S)
        second = readers.submit(read, mount, namespace, 1, LONG_S, backs[1])
        while not mount._guard._others._work_queue.qsize():
            assert not second.done()
            time.sleep(0.001)
        mount.close()
        assert second.result(LONG_S) is None
        assert backs[1].is_set(), "who owns the memory was not told that it is free"
        assert not backs[0].is_set()
        go_on.set()
        assert first.result(LONG_S) is None  # a miss, as it was said


def test_a_folder_that_comes_later_or_is_replaced_is_opened_again(
    tmp_path: Path, namespace: NodeNamespace, counters: Counters
) -> None:
    config = MountSection(volume=NAME, path=tmp_path / "v")
    mount = Mount(config, io_threads=2, counters=counters, clock=MonotonicClock(), rest_s=0.0)
    deadline_s = MonotonicClock().now_s() + LONG_S
    mount.catch_up(deadline_s)
    assert counters.snapshot()["mount_errors_total"] == 1
    assert "No such file" in mount.describe()
    for number in (1, 2):
        slab = NvmeSlab.open(tmp_path / "v", volume_id=NAME, capacity_bytes=4 << 20)
        list(slab.recover())
        put(slab, [number], SHAPE)
        slab.close()
        mount.catch_up(deadline_s)  # the second time: another volume lies there, so that this one is closed
        mount.catch_up(deadline_s)
        assert read(mount, namespace, number, LONG_S, threading.Event()) == block_payload(number, SHAPE)
        (tmp_path / "v").rename(tmp_path / f"old-{number}")
    mount.close()
    assert counters.snapshot()["mount_errors_total"] == 2


def test_mounts_are_found_by_volume(mount: Mount) -> None:
    mounts = Mounts([mount])
    assert mounts.get(NAME) is mount
    assert mounts.get("") is None
    assert list(mounts) == [mount]


@pytest.mark.parametrize("volumes", [["a/nvme0"], ["b/nvme0", "b/nvme0"]])
def test_mounts_of_ones_own_volumes_are_refused(tmp_path: Path, volumes: list[str]) -> None:
    with pytest.raises(InvalidArgument):
        NodeConfig(
            node_id="a", run_dir=tmp_path, mounts=tuple(MountSection(volume=volume, path=tmp_path) for volume in volumes)
        ).check()
