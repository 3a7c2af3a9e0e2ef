"""Peers and limits use memory of the same pages as the store's arena, so that ratios compare programs, not pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.core.types import VolumeId
from kvstore.observe.counters import Counters
from kvstore.tiers.arena import DramArena
from peers.fio import HUGE_PAGES
from peers.memory import ArenaMemory
from peers.summed_file import SummedFile
from support.wait import wait_until

MIB = 1 << 20
KERNEL = Path("/sys/kernel/mm/transparent_hugepage/enabled")

pytestmark = pytest.mark.skipif(
    not KERNEL.exists() or "[never]" in KERNEL.read_text(encoding="utf-8"), reason="this host has no transparent huge pages"
)


def eligible_bytes(pid: int | str = "self") -> int:
    """Return the bytes of a process's mappings to which the kernel gives huge pages, if it has some."""
    mappings = Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8")
    sizes = re.findall(r"^Size: +(\d+) kB$|^THPeligible: +(\d)", mappings, re.MULTILINE)
    pairs = zip(sizes[::2], sizes[1::2], strict=True)
    return sum(int(kib) << 10 for (kib, _), (_, eligible) in pairs if eligible == "1")


def is_eligible(address: int) -> bool:
    """Whether the kernel gives huge pages, if it has some, to the mapping of this process that contains an address."""
    found = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif found and line.startswith("THPeligible:"):
            return line.split()[1] == "1"
    raise AssertionError("nothing is mapped there")


def test_limit_of_nvme_has_huge_pages(tmp_path: Path) -> None:
    with SummedFile(tmp_path / "bare", 16 * MIB, MIB, threads=1) as bare:
        assert is_eligible(bare.space.ctypes.data + 8 * MIB)


def test_memory_of_peers_has_the_pages_of_an_arena() -> None:
    counters = Counters()
    arena = DramArena(VolumeId("a"), 16 * MIB, prefault=True, counters=counters)
    wait_until(lambda: "100 %" in arena.backing or counters.get("arena_huge_pages_refused_total") > 0)
    memory = ArenaMemory(16 * MIB - 1)
    assert memory.bytes.nbytes == 16 * MIB - 1
    assert memory.pages == ("huge pages" if "100 %" in arena.backing else "pages of 4 KiB")
    arena.close()


def test_fio_buffers_have_huge_pages() -> None:
    """In place of fio, whose run is too short to be inspected, a process that allocates in the same way."""
    allocate = "import ctypes, sys; ctypes.CDLL(None).malloc(64 << 20); print(flush=True); sys.stdin.read()"
    eligible = []
    for environment in ({}, HUGE_PAGES):
        with subprocess.Popen(
            [sys.executable, "-c", allocate], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | environment
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            eligible.append(eligible_bytes(process.pid))
            process.communicate()
    without, with_them = eligible
    assert with_them - without >= 64 * MIB
