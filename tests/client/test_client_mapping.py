"""One mapping of an arena per process: views of each session, forks, and pages that the node has not allocated yet."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from kvclient.memory.arena import ArenaMapping, ClientArena
from kvclient.memory.shared_mapping import is_charged_to_first_user, is_resident, map_file
from kvstore.core.errors import Conflict, Unavailable
from kvstore.native import address_of
from support.wait import wait_until

PAGE = os.sysconf("SC_PAGE_SIZE")
MIB = 1 << 20


@pytest.fixture
def memory() -> Iterator[int]:
    fd = os.memfd_create("test-mapping")
    os.ftruncate(fd, 40 * MIB)
    yield fd
    os.close(fd)


def allocated(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_mapping_in_use_keeps_each_session_apart(memory: int) -> None:
    first, second = map_file(memory, 40 * MIB), map_file(memory, 40 * MIB)
    assert (first.first, second.first) == (True, False)
    assert address_of(first.view) == address_of(second.view)
    for holds in (lambda view: view[PAGE : 2 * PAGE], lambda view: np.frombuffer(view, np.uint8), lambda view: view[:9][:3]):
        held = holds(first.view)
        with pytest.raises(Conflict, match="in use"):
            first.close()
        assert first.view[:1] is not None, "nothing has changed"
        del held
    first.close()
    second.view[:3] = b"abc"
    assert os.pread(memory, 3, 0) == b"abc"
    with pytest.raises(Unavailable, match="another size"):
        map_file(memory, 20 * MIB)
    second.close()
    third = map_file(memory, 40 * MIB)
    assert third.first
    third.close()


def test_mapping_in_forked_child_is_its_own(memory: int) -> None:
    use = map_file(memory, 40 * MIB)
    child = os.fork()
    if child == 0:
        own = map_file(memory, 40 * MIB)
        fine = own.first and address_of(own.view) != address_of(use.view)
        use.close()
        own.close()
        os._exit(not fine)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    use.view[:3] = b"xyz"
    use.close()


def test_is_resident_tells_pages_that_exist(memory: int) -> None:
    use = map_file(memory, 40 * MIB)
    base = address_of(use.view)
    os.pwrite(memory, b"x" * (4 * PAGE), 8 * PAGE)
    assert is_resident(base + 8 * PAGE, 4 * PAGE)
    assert not is_resident(base + 8 * PAGE, 5 * PAGE)
    assert not is_resident(base + 7 * PAGE, PAGE)
    assert allocated(memory) == 4 * PAGE, "to look allocates nothing"
    assert is_charged_to_first_user(memory)
    use.close()


def test_mapping_ahead_allocates_no_page_of_the_node(memory: int) -> None:
    os.pwrite(memory, bytes(16 * MIB), 0)
    use = map_file(memory, 40 * MIB)
    ours, theirs = socket.socketpair()
    arena = ClientArena(ArenaMapping(ours, use, 40 * MIB), map_ahead=True)

    def entered(mib: int) -> bool:
        """Whether the first pages of the mapping are in the page table of this process."""
        with open("/proc/self/pagemap", "rb") as file:
            file.seek(address_of(use.view) // PAGE * 8)
            entries = np.frombuffer(file.read(mib * MIB // PAGE * 8), np.uint64)
        return bool((entries >> np.uint64(63)).all())

    wait_until(lambda: entered(16), "the pages that exist are mapped ahead")
    assert allocated(memory) == 16 * MIB
    os.pwrite(memory, bytes(24 * MIB), 16 * MIB)
    wait_until(lambda: entered(40), "and the others once the node has allocated them")
    arena.close()
    theirs.close()


def test_mapping_ahead_given_up_is_logged(memory: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("kvclient.memory.arena.MAP_AHEAD_S", 0.0)
    ours, theirs = socket.socketpair()
    with caplog.at_level(logging.INFO, "kvclient"):
        arena = ClientArena(ArenaMapping(ours, map_file(memory, 40 * MIB), 40 * MIB), map_ahead=True)
        wait_until(lambda: "did not allocate it in time (mapped_mib=0)" in caplog.text)
    arena.close()
    theirs.close()
