"""kill -9 at random points of a process that writes, commits, removes and reuses slots; the recovered blocks must be exact.

The child reports each commit over a pipe before and after it. After the kill, every block whose commit had returned is served
byte for byte; blocks of the interrupted commit are all present or all absent; no other block is visible.
"""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore.core.types import BlockShape, Outcome, VolumeId
from kvstore.testing.volume_suite import block_payload, emptied
from kvstore.tiers.nvme.fsck import check_volume
from kvstore.tiers.nvme.slab import NvmeSlab

CAPACITY = 6 << 20
SHAPES = (BlockShape(2, 3000), BlockShape(4, 16384))

CHILD = """
import random, sys
from pathlib import Path
from kvstore.core.types import VolumeId
from kvstore.testing.volume_suite import block_key, items_for
from kvstore.tiers.nvme.slab import NvmeSlab
sys.path.insert(0, sys.argv[3])
from test_tiers_crash import CAPACITY, SHAPES, shape_of

draw = random.Random(int(sys.argv[2]))
slab = NvmeSlab.open(Path(sys.argv[1]), volume_id=VolumeId("v"), capacity_bytes=CAPACITY)
held = {int.from_bytes(record.key, "big"): slot for slot, record in slab.recover()}
fresh = int(sys.argv[4])
print("ready", flush=True)
while True:
    shape = SHAPES[draw.randrange(2)]
    count = draw.randint(1, 12)
    slots = slab.allocate(shape, count)
    removed = draw.sample(sorted(held), min(len(held), draw.randint(0, 20) if slots else 25))
    items = []
    if slots:
        numbers = []
        while len(numbers) < count:
            if shape_of(fresh) == shape:
                numbers.append(fresh)
            fresh += 1
        items = items_for(slots, numbers, shape)
        assert slab.write(items) == [None] * count
    names = [int.from_bytes(record.key, "big") for _, record, _ in items]
    print("try", *names, "-", *removed, flush=True)
    slab.commit([(slot, record) for slot, record, _ in items], [block_key(number) for number in removed])
    print("done", flush=True)
    slab.free([held.pop(number) for number in removed])
    held.update(zip(names, slots or []))
"""


def shape_of(number: int) -> BlockShape:
    return SHAPES[number * 2654435761 % 7 % 2]


def run_and_kill(folder: Path, seed: int, first: int) -> list[str]:
    """Lines that the child wrote before it was killed, at a point drawn from the seed."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), str(seed), str(Path(__file__).parent), str(first)], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    out = child.stdout.fileno()
    draw = random.Random(seed)
    lines_wanted = draw.randint(1, 60)
    data = b""
    deadline = time.monotonic() + 30
    while data.count(b"\n") < lines_wanted and time.monotonic() < deadline:
        ready, _, _ = select.select([out], [], [], 1.0)
        if ready:
            piece = os.read(out, 1 << 16)
            assert piece, "the child ended by itself"
            data += piece
    for _ in range(draw.randrange(20_000)):  # somewhere within the next step, by no clock
        pass
    child.send_signal(signal.SIGKILL)
    child.wait(30)
    while piece := os.read(out, 1 << 16):
        data += piece
    child.stdout.close()
    return data[: data.rfind(b"\n") + 1].decode().splitlines()


def settle(lines: list[str], before: set[int]) -> list[set[int]]:
    """States that may be visible after the kill: the last committed one, and that of the interrupted commit."""
    state, pending = set(before), None
    for line in lines:
        word, *rest = line.split(" ")
        if word == "try":
            cut = rest.index("-")
            pending = (state - {int(name) for name in rest[cut + 1 :]}) | {int(name) for name in rest[:cut]}
        elif word == "done":
            assert pending is not None
            state, pending = pending, None
    return [state] if pending is None else [state, pending]


@pytest.mark.parametrize("volume", [0, 1, *(pytest.param(more, marks=pytest.mark.thorough) for more in (2, 3))])
def test_kill_at_random_points_keeps_committed_blocks(tmp_path: Path, volume: int) -> None:
    """Eight kills of one volume after another: damage would add up. Each kill has a seed."""
    folder = tmp_path / "volume"
    visible: set[int] = set()
    generation = 0
    for turn in range(8):
        seed = volume * 8 + turn
        allowed = settle(run_and_kill(folder, seed, first=turn * 1_000_000), visible)
        slab = NvmeSlab.open(folder, volume_id=VolumeId("v"), capacity_bytes=CAPACITY)
        found = list(slab.recover())
        visible = {int.from_bytes(record.key, "big") for _, record in found}
        assert visible in allowed, f"seed {seed}"
        for shape in SHAPES:
            items = emptied([(slot, record, memoryview(b"")) for slot, record in found if record.shape == shape])
            assert slab.read(items) == [Outcome.HIT] * len(items), f"seed {seed}"
            for _, record, view in items:
                assert view == block_payload(int.from_bytes(record.key, "big"), shape)
        newest = max((slot.generation for slot, _ in found), default=0)
        fresh = slab.allocate(SHAPES[0], 1)
        if fresh:
            assert fresh[0].generation > max(newest, generation)
            generation = fresh[0].generation
        slab.close()
    report = check_volume(folder)
    assert report.ok
    assert report.good == len(visible)


def test_unfinished_volume_is_created_again(tmp_path: Path) -> None:
    """Killed during the creation of the volume, before its slab has its final name."""
    folder = tmp_path / "volume"
    slab = NvmeSlab.open(folder, volume_id=VolumeId("v"), capacity_bytes=CAPACITY)
    slab.close()
    (folder / "slab.kv").rename(folder / "slab.kv.new")
    again = NvmeSlab.open(folder, volume_id=VolumeId("v"), capacity_bytes=CAPACITY)
    assert list(again.recover()) == []
    assert again.allocate(SHAPES[0], 1)
    again.close()
