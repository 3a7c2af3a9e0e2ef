"""Faults during one-sided transfers: reads end in bounded time with misses, without late bytes, leaked pins or crashes.

``test_nixl.py`` runs this file in a separate process.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.core.errors import InvalidArgument, Unsupported
from kvstore.core.types import BlockShape, Outcome
from kvstore.observe.counters import Counters
from kvstore.testing.memory_provider import MemoryProvider, block_key, block_payload
from kvstore.testing.transport_suite import NAMESPACE, SENTINEL, content, dense, read_of
from kvstore.transport.addresses import parse_address
from kvstore.transport.contract import LateBytes
from kvstore.transport.nixl import agent as nixl_agent
from kvstore.transport.nixl.address_table import AddressTable
from kvstore.transport.nixl.agent import NixlAgent, NixlOptions, Region, has_rdma, host_id
from kvstore.transport.nixl.frames import AttachFrame, FetchFrame, TransferMode, encode_attach, encode_fetch
from kvstore.transport.nixl.peer import NixlPeer
from kvstore.transport.nixl.responder import NixlResponder, choose_mode
from kvstore.transport.tcp import frames
from kvstore.transport.tcp.server import TcpServer
from kvstore.transport.wire import PlainWire

SHAPE = BlockShape(1, 16 << 10)
COUNT = 4096
OVER = [
    pytest.param({"transports": "tcp"}, id="ucx-tcp-push"),
    pytest.param({"mode": "pull"}, id="ucx-cma-pull"),
    pytest.param({"mode": "push"}, id="ucx-cma-push"),
]


@contextmanager
def child(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    script = Path(__file__).with_name("nixl_child.py")
    command = [sys.executable, str(script), *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=30)


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


@contextmanager
def reader(
    address: str, options: dict[str, str], regions: Sequence[Region] = ()
) -> Iterator[tuple[NixlPeer, NixlAgent, Counters]]:
    counters = Counters()
    port = NixlAgent(NixlOptions(**options), name="reader", regions=regions, counters=counters)  # type: ignore[arg-type]
    peer = NixlPeer(address, port, counters=counters)
    try:
        yield peer, port, counters
    finally:
        peer.close()
        port.close()


def assert_hits_are_right(outcomes: list[Outcome], buffer: object) -> None:
    for number, outcome in enumerate(outcomes):
        if outcome is Outcome.HIT:
            assert content(buffer, number) == block_payload(number, SHAPE)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", OVER)
def test_read_server_killed_during_transfer_is_miss(options: dict[str, str]) -> None:
    with (
        child("serve", json.dumps(options), str(int(signal.SIGKILL))) as server,
        reader(heard(server), options) as (peer, _, counters),
    ):
        buffer = dense(COUNT, SHAPE)
        began_s = time.monotonic()
        result = peer.read(read_of(range(COUNT), 1, within_s=120), buffer)
        assert time.monotonic() - began_s < 60, "the death of the server is detected before the deadline"
        assert server.wait(10) == -signal.SIGKILL, counters.snapshot()
        assert Outcome.HIT not in result.outcomes[-4:]
        assert_hits_are_right(result.outcomes, buffer)


@pytest.mark.parametrize("options", OVER)
def test_read_after_deadline_writes_no_late_bytes(options: dict[str, str]) -> None:
    with (
        child("serve", json.dumps(options), str(int(signal.SIGSTOP))) as server,
        reader(heard(server), options) as (peer, _, counters),
    ):
        buffer = dense(COUNT, SHAPE)
        result = peer.read(read_of(range(COUNT), 1, within_s=4), buffer)
        assert set(result.outcomes) <= {Outcome.TIMEOUT, Outcome.UNAVAILABLE, Outcome.HIT}
        assert result.outcomes[-1] is not Outcome.HIT
        assert counters.get("transport_nixl_fences_total") == 1
        assert counters.get("transport_nixl_fences_broken_total") == 0
        buffer.array[:] = SENTINEL  # the caller reuses the memory
        os.kill(server.pid, signal.SIGCONT)
        tell(server, "end")
        assert heard(server).startswith("settled"), "the server has released all pins"
        assert (buffer.array == SENTINEL).all(), "late bytes arrived"
        assert server.wait(20) == 0


class BreakableAgent:
    """An agent of NIXL whose transfers start and then fail, as over RDMA, if ``fails_at`` names a step.

    Transfers over CMA are otherwise complete at once.
    """

    def __init__(self, whole: Any) -> None:
        self.agent = whole.agent
        self.fails_at = ""
        self._whole = whole

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def transfer(self, handle: Any) -> str:
        state: str = self._whole.transfer(handle)
        if self.fails_at == "transfer":
            raise RuntimeError("test error after the start")
        return "PROC" if self.fails_at else state

    def check_xfer_state(self, handle: Any) -> str:
        if self.fails_at:
            raise RuntimeError(f"test error: {handle!r}")
        state: str = self._whole.check_xfer_state(handle)
        return state


class BreakableNixl:
    """NIXL's Python interface with agents that a test can break. It keeps none of them alive."""

    def __init__(self) -> None:
        self._whole = nixl_agent.load()
        self._latest: Callable[[], BreakableAgent | None] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def nixl_agent(self, *arguments: Any) -> BreakableAgent:
        made = BreakableAgent(self._whole.nixl_agent(*arguments))
        self._latest = weakref.ref(made)
        return made

    def break_agent(self, where: str) -> weakref.ref[Any]:
        """Break the latest agent. Returns a reference to the object that owns its connections."""
        agent = self._latest()
        assert agent is not None
        agent.fails_at = where
        return weakref.ref(agent.agent)


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> BreakableNixl:
    breakable = BreakableNixl()
    monkeypatch.setattr(nixl_agent, "load", lambda: breakable)
    return breakable


@pytest.mark.parametrize("where", ["transfer", "check"])
def test_fence_while_error_is_handled_ends_agent(where: str, nixl: BreakableNixl, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception keeps its frames, which would keep the agent alive, and its connections could receive late bytes."""
    lives: list[bool] = []
    with child("serve", "{}", "0") as server, reader(heard(server), {}) as (peer, port, counters):
        assert peer.read(read_of(range(64), 1, within_s=60), dense(64, SHAPE)).outcomes.count(Outcome.HIT) == 64
        owner = nixl.break_agent(where)
        fence, send = port.fence, PlainWire.send

        def fenced(epoch: int) -> bool:
            done = fence(epoch)
            lives.append(owner() is not None)
            return done

        def sent(self: PlainWire, *more: Any) -> None:
            if lives:  # the first request after the fence, and all later ones
                lives.append(owner() is not None)
            send(self, *more)

        monkeypatch.setattr(port, "fence", fenced)
        monkeypatch.setattr(PlainWire, "send", sent)
        buffer = dense(64, SHAPE)
        result = peer.read(read_of(range(64), 1, within_s=60), buffer)
        assert result.outcomes.count(Outcome.HIT) == 64, "read over the connection"
        assert_hits_are_right(result.outcomes, buffer)
        assert len(lives) > 1
        assert not any(lives)
        assert counters.get("transport_nixl_fences_total") == 1
        assert counters.get("transport_nixl_fences_broken_total") == 0


def test_read_failed_pull_next_read_is_pushed(
    nixl: BreakableNixl, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Containers of one host may be unable to read each other's memory, which the first read detects."""
    caplog.set_level(logging.INFO, "kvstore.transport.nixl.peer")
    monkeypatch.setattr("kvstore.transport.nixl.peer.OFF_S", 0.0)
    with child("serve", "{}", "0") as server, reader(heard(server), {}) as (peer, port, counters):
        port.open()
        nixl.break_agent("check")
        for _ in range(2):
            buffer = dense(64, SHAPE)
            assert peer.read(read_of(range(64), 1, within_s=60), buffer).outcomes.count(Outcome.HIT) == 64
        assert [line for line in caplog.messages if line.startswith("NIXL attached: ")][-1].endswith("(mode=push)")
        assert counters.get("transport_nixl_fallbacks_total") >= 1
        assert counters.get("transport_nixl_bytes_received_total") > 0


def test_agent_emulation_in_environment_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX suggests this variable if CMA is missing, but with it a dying reader ends the process that it reads from."""
    monkeypatch.setenv("UCX_PROTO_EMULATION_ENABLE", "y")
    port = NixlAgent(NixlOptions(), name="here")
    port.open()
    port.close()
    assert "UCX_PROTO_EMULATION_ENABLE" not in os.environ
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    assert NixlOptions().only_tcp
    monkeypatch.setenv("UCX_TLS", "rc,tcp")
    assert not NixlOptions().only_tcp


@pytest.mark.parametrize("options", OVER)
def test_server_reader_killed_releases_pins(options: dict[str, str]) -> None:
    provider, counters = MemoryProvider(), Counters()
    provider.declare(NAMESPACE, SHAPE)
    provider.put(NAMESPACE, range(COUNT))
    port = NixlAgent(NixlOptions(**options), name="server", counters=counters)  # type: ignore[arg-type]
    server = TcpServer(provider, one_sided=partial(NixlResponder, port), counters=counters)
    server.start()
    try:
        with child("read", server.address, json.dumps(options), str(int(signal.SIGKILL))) as victim:
            assert victim.wait(30) == -signal.SIGKILL
        provider.settle()
        with reader(server.address, options) as (peer, _, others):
            buffer = dense(COUNT, SHAPE)
            assert peer.read(read_of(range(COUNT), 1), buffer).outcomes == [Outcome.HIT] * COUNT
            assert_hits_are_right([Outcome.HIT] * COUNT, buffer)
            assert others.get("transport_nixl_bytes_received_total") == COUNT * SHAPE.block_bytes
    finally:
        server.stop()
        port.close()


def test_server_reader_killed_before_answer_survives() -> None:
    """The reader requests pull mode over TCP. If the server allowed it, unanswered requests of a dead reader would end it."""
    halt = str(int(signal.SIGSTOP))
    with (
        child("serve", json.dumps({"transports": "tcp"}), halt, "later") as server,
        child("read", address := heard(server), json.dumps({"mode": "pull"}), halt, "later") as victim,
    ):
        assert heard(victim) == f"read {COUNT * SHAPE.block_bytes}", "all bytes of the first read came by NIXL"
        os.kill(server.pid, signal.SIGUSR1)
        assert heard(server) == "armed"
        tell(victim, "again")
        for process in (victim, server):  # each stops itself during the transfer
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        victim.kill()
        assert victim.wait(10) == -signal.SIGKILL
        os.kill(server.pid, signal.SIGCONT)
        with reader(address, {}) as (peer, _, _):
            buffer = dense(COUNT, SHAPE)
            assert peer.read(read_of(range(COUNT), 1), buffer).outcomes == [Outcome.HIT] * COUNT
            assert_hits_are_right([Outcome.HIT] * COUNT, buffer)
        tell(server, "end")
        assert heard(server).startswith("settled"), "the server has released all pins"
        assert server.wait(20) == 0


def test_mode_pull_over_tcp_becomes_push() -> None:
    with pytest.raises(InvalidArgument, match="pulling over UCX's TCP is not supported"):
        NixlOptions(transports="tcp,cuda_copy", mode="pull")
    asked = AttachFrame(host_id(), "pull", rdma=True, agent=b"agent")
    assert choose_mode(asked, only_tcp=False) is TransferMode.PULL
    assert choose_mode(asked, only_tcp=True) is TransferMode.PUSH
    for host in (b"another machine.", bytes(16)):
        assert choose_mode(AttachFrame(host, "pull", rdma=has_rdma(), agent=b"agent"), only_tcp=True) is TransferMode.PUSH
        assert choose_mode(AttachFrame(host, "pull", rdma=False, agent=b"agent"), only_tcp=False) is TransferMode.PUSH


def test_read_pull_without_cma_uses_connection() -> None:
    """Both processes are on one host, but cannot read each other's memory: here the server lacks CMA."""
    with (
        child("serve", json.dumps({"transports": "tcp,self,sysv"}), "0") as server,
        reader(heard(server), {"mode": "pull"}) as (peer, _, counters),
    ):
        buffer = dense(COUNT, SHAPE)
        assert peer.read(read_of(range(COUNT), 1), buffer).outcomes == [Outcome.HIT] * COUNT
        assert_hits_are_right([Outcome.HIT] * COUNT, buffer)
        assert counters.get("transport_nixl_fallbacks_total") >= 1
        assert counters.get("transport_nixl_bytes_received_total") == 0


def test_fence_that_fails_raises_late_bytes(nixl: BreakableNixl) -> None:
    """Another reference keeps the agent and its connections alive, so the memory of the read must not be used again."""
    arena = dense(64, SHAPE)
    region = Region(arena.array.ctypes.data, arena.array.nbytes)
    with child("serve", "{}", "0") as server, reader(heard(server), {}, [region]) as (peer, port, counters):
        assert peer.read(read_of(range(64), 1, within_s=60), arena).outcomes.count(Outcome.HIT) == 64
        held = nixl.break_agent("check")()
        with pytest.raises(LateBytes):
            peer.read(read_of(range(64), 1, within_s=60), arena)
        assert counters.get("transport_nixl_fences_broken_total") == 1
        assert counters.get("transport_nixl_fences_total") == 0
        buffer = dense(64, SHAPE)
        result = peer.read(read_of(range(64), 1, within_s=60), buffer)
        assert result.outcomes.count(Outcome.HIT) == 64, "read over the connection"
        assert_hits_are_right(result.outcomes, buffer)
        with pytest.raises(Unsupported):
            port.open()
        del held


def test_fence_that_fails_leaves_callers_memory_alone(nixl: BreakableNixl) -> None:
    """Bytes may arrive in bounce memory only. So the read goes on over the connection, into the same memory."""
    with child("serve", "{}", "0") as server, reader(heard(server), {"mode": "pull"}) as (peer, _, counters):
        buffer = dense(64, SHAPE)
        assert peer.read(read_of(range(64), 1, within_s=60), buffer).outcomes.count(Outcome.HIT) == 64
        start, held = NixlAgent.start, nixl.break_agent("check")()
        begin, end = buffer.array.ctypes.data, buffer.array.ctypes.data + buffer.array.nbytes
        targets: list[int] = []

        def start_noted(self: NixlAgent, epoch: int, operation: Any, ours: Any, *more: Any) -> Any:
            targets.extend(ours[:, 0].tolist())
            return start(self, epoch, operation, ours, *more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(NixlAgent, "start", start_noted)
            result = peer.read(read_of(range(64), 1, within_s=60), buffer)
        assert counters.get("transport_nixl_fences_broken_total") == 1
        assert result.outcomes.count(Outcome.HIT) == 64
        assert_hits_are_right(result.outcomes, buffer)
        assert targets
        assert not [target for target in targets if begin <= target < end]
        del held


def test_fence_ends_agent_and_next_read_makes_new_one() -> None:
    provider, counters = MemoryProvider(), Counters()
    provider.declare(NAMESPACE, SHAPE)
    provider.put(NAMESPACE, range(2))
    serving = NixlAgent(NixlOptions(), name="server")
    reading = NixlAgent(NixlOptions(mode="pull"), name="reader", counters=counters)
    server = TcpServer(provider, one_sided=partial(NixlResponder, serving))
    server.start()
    peer = NixlPeer(server.address, reading, counters=counters)
    try:
        assert peer.read(read_of(range(2), 1), dense(2, SHAPE)).outcomes == [Outcome.HIT] * 2
        descriptors = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            reading.fence(reading.epoch)
            assert len(os.listdir("/proc/self/fd")) < descriptors, "the end of the agent closes its descriptors"
            assert peer.read(read_of(range(2), 1), dense(2, SHAPE)).outcomes == [Outcome.HIT] * 2
        assert len(os.listdir("/proc/self/fd")) <= descriptors
        assert counters.get("transport_nixl_agents_total") == 4
        assert counters.get("transport_nixl_fallbacks_total") == 0
    finally:
        peer.close()
        server.stop()
        reading.close()
        serving.close()
        provider.settle()


def test_read_nixl_not_installed_uses_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "_MODULES", ("no_such_nixl",))
    port = NixlAgent(NixlOptions())
    with pytest.raises(Unsupported):
        port.open()
    provider, counters = MemoryProvider(), Counters()
    provider.declare(NAMESPACE, SHAPE)
    provider.put(NAMESPACE, [1])
    server = TcpServer(provider, one_sided=partial(NixlResponder, port))
    server.start()
    peer = NixlPeer(server.address, port, counters=counters)
    try:
        assert peer.read(read_of([1], 1), dense(1, SHAPE)).outcomes == [Outcome.HIT]
        assert counters.get("transport_nixl_fallbacks_total") == 1
        assert counters.get("transport_nixl_bytes_received_total") == 0
    finally:
        peer.close()
        server.stop()


def test_environment_service_level_and_devices_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "has_rdma", lambda: True)
    found = nixl_agent.environment(NixlOptions(service_level=3, devices="mlx5_0:1", transports="rc,cuda_copy"))
    assert found["UCX_IB_SL"] == "3"
    assert found["UCX_NET_DEVICES"] == "mlx5_0:1"
    assert found["UCX_TLS"] == "rc,cuda_copy"
    assert "UCX_MODULES" not in found


def answered(wire: socket.socket, frame: bytes) -> tuple[frames.FrameKind, bytes]:
    """Send a frame; return kind and header of the answer."""
    wire.sendall(frame)
    with wire.makefile("rb") as said:
        head = frames.decode_head(said.read(frames.HEAD_BYTES))
        return head.kind, said.read(head.header_bytes)


def test_fetch_into_unregistered_memory_is_refused() -> None:
    """A reader names addresses outside its registered memory, over its edge, and at the end of the address space."""
    options = {"transports": "tcp", "mode": "push"}
    with child("serve", json.dumps(options), "0") as server:
        address = heard(server)
        space = np.zeros(2 * SHAPE.block_bytes, np.uint8)
        region = Region(space.ctypes.data, space.nbytes)
        port = NixlAgent(NixlOptions(transports="tcp"), name="intruder-reads", regions=[region])
        _, mine = port.metadata()
        read = frames.ReadFrame(NAMESPACE, [block_key(0)], SHAPE, 0, 1, 0, 20_000)
        size = SHAPE.layer_block_bytes
        for number, place in enumerate((0, region.address + SHAPE.block_bytes + 1, (1 << 64) - 4096, (1 << 64) - 2048)):
            with socket.create_connection(parse_address(address), 20.0) as wire:
                assert answered(wire, frames.encode_hello(b""))[0] is frames.FrameKind.WELCOME
                attach = encode_attach(1, AttachFrame(host_id(), "push", False, mine))
                assert answered(wire, attach)[0] is frames.FrameKind.ATTACHED
                landing = AddressTable(np.array([place], np.uint64), size, size)
                kind, said = answered(wire, encode_fetch(2, FetchFrame(read, landing)))
                assert kind is frames.FrameKind.ERROR, number
                assert b"NIXL" in said or b"address" in said
        port.close()
        with reader(address, options) as (peer, _, _):
            buffer = dense(COUNT, SHAPE)
            assert_hits_are_right(peer.read(read_of(range(COUNT), 1, within_s=20), buffer).outcomes, buffer)
        assert server.poll() is None
