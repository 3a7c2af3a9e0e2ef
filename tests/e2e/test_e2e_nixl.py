"""Nodes with NIXL, real processes: statistics name the transport that moved the bytes, and every byte is checked."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from conftest import Store
from kvstore.core.types import Outcome
from kvstore.embedded.cluster import NodeSpec

if importlib.util.find_spec("nixl_cu12") is None:
    pytest.skip("THE TRANSPORT NIXL WAS NOT TESTED: its wheel is not installed (make install)", allow_module_level=True)

MakeStore = Callable[..., Store]

CMA = (("nixl", "required"), ("nixl_trusted_network", "true"))
TCP = (*CMA, ("nixl_transports", "tcp"))


def counted(store: Store, node: str, name: str) -> int:
    return dict(store.node_stats(node).counters).get(name, 0)


@pytest.mark.parametrize("settings", [TCP, CMA], ids=["ucx-tcp", "ucx-cma"])
def test_nixl_node_reads_from_peer(make_store: MakeStore, settings: tuple[tuple[str, str], ...]) -> None:
    store = make_store(NodeSpec("a", settings=settings), NodeSpec("b", settings=settings))
    a, b = (store.engine(node, layer_bytes=64 << 10) for node in "ab")
    assert a.store("c", 100, wait_visible=True).held_blocks == 100
    result = b.load("c", 100)
    assert result.hit_blocks == 100
    assert counted(store, "b", "transport_nixl_bytes_received_total") == 100 * b.spec.block_bytes
    assert counted(store, "a", "transport_nixl_bytes_sent_total") == 100 * b.spec.block_bytes
    assert counted(store, "a", "transport_nixl_bounced_bytes_total") == 0, "the arena is registered"
    assert counted(store, "b", "transport_nixl_fallbacks_total") == 0
    assert any(line.startswith("NIXL: in use") for line in store.node_stats("b").io_engines)


CLIENT = """
import sys
import numpy as np
from kvclient import CacheSpec, ClientOptions, KVClient
from kvstore.transport.nixl.agent import NixlOptions

spec = CacheSpec(model="test", block_tokens=16, layers=4, layer_block_bytes=65536)
options = ClientOptions(client_name="far", nixl=NixlOptions(), nixl_trusted_network=True)
with KVClient.connect(sys.argv[1], spec, node=None, options=options) as client:
    keys = [bytes.fromhex(key) for key in sys.stdin.read().split()]
    space = np.zeros((len(keys), spec.block_bytes), np.uint8)
    assert client.load(keys, space).hit_blocks == len(keys)
    assert client.stats()["transport_nixl_bytes_received_total"] == space.nbytes
    space.tofile(sys.argv[2])
"""
"""A separate process, like an engine; ``tests/transport/test_nixl.py`` explains why."""


def test_nixl_client_without_node_reads(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store(NodeSpec("a", settings=CMA))
    writer = store.engine("a", layer_bytes=64 << 10)
    writer.store("c", 60, wait_visible=True)
    keys = writer.keys("c", 60)
    command = [sys.executable, "-c", CLIENT, store.cluster.metadata_address, str(tmp_path / "loaded")]
    done = subprocess.run(
        command, input=" ".join(key.hex() for key in keys), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    loaded = np.fromfile(tmp_path / "loaded", np.uint8).reshape(60, -1)
    assert list(writer.payloads.wrong_blocks(keys, loaded)) == []


def test_nixl_on_one_side_only_uses_tcp(make_store: MakeStore) -> None:
    store = make_store(NodeSpec("a"), NodeSpec("b", settings=CMA))
    a, b = store.engine("a"), store.engine("b")
    a.store("c", 40, wait_visible=True)
    assert b.load("c", 40).hit_blocks == 40
    assert counted(store, "b", "transport_nixl_bytes_received_total") == 0
    assert counted(store, "b", "transport_nixl_fallbacks_total") >= 1
    assert counted(store, "a", "transport_nixl_refused_total") >= 1


def test_nixl_killed_node_is_a_miss(make_store: MakeStore) -> None:
    store = make_store(*(NodeSpec(node, settings=TCP) for node in "abd"))
    a, b, d = (store.engine(node, layer_bytes=64 << 10) for node in "abd")
    a.store("c", 200, wait_visible=True)
    d.store("e", 50, wait_visible=True)
    with b.client.start_load(b.keys("c", 200), space := b.allocate(200), deadline_s=20.0) as load:
        store.cluster.kill("a")
        result = load.result(30.0)
    keys = b.keys("c", 200)
    hits = [at for at, outcome in enumerate(result.outcomes) if outcome == Outcome.HIT]
    assert list(b.payloads.wrong_blocks([keys[at] for at in hits], space[hits])) == []
    assert store.cluster.node("b").process.poll() is None, store.cluster.node("b").log_tail()
    assert b.load("e", 50).hit_blocks == 50, "it reads from others as before"


def listens_beyond_loopback(pid: int) -> list[str]:
    """Addresses, in the kernel's notation, of a process's TCP sockets that listen beyond loopback."""
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    mine = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in mine:
                found.append(words[1].partition(":")[0])
    assert found, "a node listens"
    return [one for one in found if not one.endswith("7F")]


@pytest.mark.parametrize("settings", [TCP, CMA], ids=["ucx-tcp", "ucx-cma"])
def test_nixl_loopback_node_listens_on_loopback(make_store: MakeStore, settings: tuple[tuple[str, str], ...]) -> None:
    store = make_store(NodeSpec("a", settings=settings))
    assert listens_beyond_loopback(store.cluster.node("a").process.pid) == []


WIRE = """
import socket, sys, time
import numpy as np
from kvclient import CacheSpec
from kvproto.v1 import node_pb2, node_pb2_grpc
from kvstore.rpc.client import call, connect
from kvstore.rpc.codec import spec_to_proto
from kvstore.transport.tcp import frames
from kvstore.transport.nixl.frames import AttachFrame, FetchFrame, decode_attached, decode_placed, encode_attach, encode_fetch
from kvstore.transport.nixl.address_table import consecutive_blocks
from kvstore.transport.nixl.agent import NixlOptions, NixlAgent, host_id

spec = CacheSpec(model="test", block_tokens=16, layers=4, layer_block_bytes=65536)

class Wire:
    def __init__(self, control, data):
        with connect(control) as channel:
            request = node_pb2.IssueTicketRequest(spec=spec_to_proto(spec))
            ticket = call(node_pb2_grpc.NodeStub(channel).IssueTicket, request, 5.0).ticket
        host, _, number = data.rpartition(":")
        self.socket = socket.create_connection((host, int(number)), 20.0)
        assert self.ask(frames.encode_hello(ticket))[0] == "WELCOME"

    def received(self, count):
        data = b""
        while len(data) < count:
            more = self.socket.recv(count - len(data))
            assert more, "closed"
            data += more
        return data

    def ask(self, frame):
        self.socket.sendall(frame)
        head = frames.decode_head(self.received(frames.HEAD_BYTES))
        return head.kind.name, self.received(head.header_bytes)

port = NixlAgent(NixlOptions(transports="tcp"), name="intruder-reads")
epoch, mine = port.metadata()
"""
"""A connection of a ticket holder, and its agent."""
INTRUDER = (
    WIRE
    + """
wire = Wire(*sys.argv[1:3])
kind, header = wire.ask(encode_attach(1, AttachFrame(host_id(), "pull", False, mine)))
assert kind == "ATTACHED", header
name = port.add_remote(epoch, decode_attached(header)[1])
read = frames.ReadFrame(spec.namespace, [bytes.fromhex(sys.argv[3])], spec.shape, 0, spec.layers, 0, 20_000)
address = int(decode_placed(wire.ask(encode_fetch(2, FetchFrame(read, None)))[1], 65536).addresses[0])
slab = port.acquire_slab(5.0)
slab.memory[:64] = b"x" * 64
rows = [consecutive_blocks(at, 1, 1, 64).rows(1, contiguous=True) for at in (slab.address, address)]
transfer, end_s = port.start(epoch, "WRITE", *rows, name), time.monotonic() + 20.0
while transfer is not None and not port.is_done(transfer):
    assert time.monotonic() < end_s
print("written")
port.close()
"""
)
DEPUTY = (
    WIRE
    + """
_, header = Wire(*sys.argv[3:5]).ask(encode_attach(1, AttachFrame(host_id(), "pull", False, mine)))
victim = decode_attached(header)[1]
print(Wire(*sys.argv[1:3]).ask(encode_attach(1, AttachFrame(host_id(), "push", False, victim)))[0])
"""
)


def test_nixl_foreign_write_into_arena_is_a_miss(make_store: MakeStore) -> None:
    store = make_store(NodeSpec("a", settings=CMA))
    engine = store.engine("a", layer_bytes=64 << 10)
    assert engine.store("c", 3, wait_visible=True).held_blocks == 3
    ready, keys = store.cluster.node("a").ready, engine.keys("c", 3)
    command = [sys.executable, "-c", INTRUDER, ready["address"], ready["data_address"], keys[1].hex()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "written\n", done.stdout + done.stderr
    asked_for = engine.client.load(keys, engine.allocate(3), verify="never")
    assert asked_for.hit_blocks == 3, "a client that verifies nothing receives it"
    result = engine.load("c", 3)
    assert list(result.outcomes) == [Outcome.HIT, Outcome.CORRUPT, Outcome.HIT]


def test_nixl_serving_agent_is_not_pushed_to(make_store: MakeStore) -> None:
    """Otherwise a client that may read from both could make one node write into the other's arena."""
    store = make_store(*(NodeSpec(node, settings=CMA) for node in "ab"))
    addresses = [store.cluster.node(node).ready[name] for node in "ab" for name in ("address", "data_address")]
    command = [sys.executable, "-c", DEPUTY, *addresses]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "ERROR\n", done.stdout + done.stderr
    assert counted(store, "a", "transport_nixl_refused_total") == 1
