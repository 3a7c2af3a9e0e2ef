"""Faults with real processes: kill -9, damaged files, hostile input. A miss is correct; a wrong byte, a hang or a loss is not."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest

from conftest import HANG_S, Engine, Store
from kvproto.v1 import common_pb2, metadata_pb2, metadata_pb2_grpc, node_pb2, node_pb2_grpc
from kvstore.core.types import Outcome, StoreOutcome
from kvstore.embedded.cluster import NodeSpec
from samples import sample
from support.wait import wait_until

MIB = 1 << 20
MakeStore = Callable[..., Store]

WRITER = """
import sys, numpy as np
sys.path[:0] = sys.argv[4:]
from conftest import Engine
class At:
    def __init__(self, metadata, socket): self.metadata_address, self.local_socket = metadata, socket
    def node(self, name): return self
engine = Engine(At(sys.argv[1], sys.argv[2]), "a", layers=4, layer_bytes=16384)
print("ready", flush=True)
for number in range(100000):
    engine.store(f"{sys.argv[3]}-{number}", 8)
    print(number, flush=True)
"""


def start_writer(store: Store, name: str) -> subprocess.Popen[bytes]:
    daemon = store.cluster.node("a")
    arguments = [
        sys.executable,
        "-c",
        WRITER,
        store.cluster.metadata_address,
        daemon.local_socket,
        name,
        str(Path(__file__).parent),
        str(Path(__file__).parents[1]),
    ]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_killed_writers_leave_nothing_half_written(make_store: MakeStore) -> None:
    store = make_store(NodeSpec("a", dram_bytes=32 * MIB, nvme_bytes=64 * MIB))
    reader = store.engine("a", layers=4, layer_bytes=16384)
    dice = random.Random(7)
    for seed in range(sample(4, of=12)):
        writer = start_writer(store, f"w{seed}")
        assert writer.stdout is not None
        for _ in range(dice.randrange(1, 6)):
            last = int(writer.stdout.readline())
        time.sleep(dice.random() * 0.004)  # at some point of the next store
        writer.kill()
        writer.wait(10)
        writer.stdout.close()
        for number in range(last + 1):
            assert reader.load(f"w{seed}-{number}", 8).hit_blocks == 8, "completed stores stay"
        reader.load(f"w{seed}-{last + 1}", 8)  # its visible blocks are correct
    wait_until(lambda: store.node_stats("a").counters["sessions"] == 1, "the writers' sessions ended")

    def only_blocks() -> bool:
        dram = store.node_stats("a").tiers[0]
        return dram.used_bytes == dram.blocks * 65536

    wait_until(only_blocks, "no slots are left for unfinished blocks")
    assert store.flush("a")
    store.empty_dram("a")  # nothing stays prepared or pinned


KILLED_IN_COPY = """
import mmap, os, sys, tempfile
sys.path[:0] = sys.argv[4:]
import numpy as np
from conftest import Engine
from kvclient.memory import arena
class At:
    def __init__(self, metadata, socket): self.metadata_address, self.local_socket = metadata, socket
    def node(self, name): return self
engine = Engine(At(sys.argv[1], sys.argv[2]), "a", layers=4, layer_bytes=1 << 20)
keys = engine.keys(sys.argv[3], 16)
with tempfile.TemporaryFile() as file:
    size = len(keys) * engine.spec.block_bytes
    file.truncate(size)
    data = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8).reshape(len(keys), -1)
    engine.payloads.fill(keys, data)
    file.truncate(size - (16 << 20))  # a read of the pages at the end kills the process
    run = arena.run
    def noted(batch, sums=None):
        print("copying", len(batch.sources), flush=True)
        run(batch, sums)
        print("copied", flush=True)
    arena.run = noted
    engine.client.store(keys, data)
"""


def test_writer_killed_inside_a_copy_leaves_no_block(make_store: MakeStore) -> None:
    """The kernel dies in the middle of one call that copies 64 MiB: a chunk of a store, and an eighth of the arena."""
    store = make_store(NodeSpec("a", dram_bytes=640 * MIB, settings=(("prefault", "false"),)))
    daemon = store.cluster.node("a")
    arguments = [store.cluster.metadata_address, daemon.local_socket, "killed", *map(str, Path(__file__).parents[:2])]
    done = subprocess.run([sys.executable, "-c", KILLED_IN_COPY, *arguments], capture_output=True, check=False, timeout=HANG_S)
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, b"copying 16\n"), done.stderr
    reader = store.engine("a", layers=4, layer_bytes=MIB)
    assert reader.load("killed", 16).hit_blocks == 0
    wait_until(lambda: store.node_stats("a").tiers[0].used_bytes == 0, "the slots are free")
    assert store.node_stats("a").tiers[0].blocks == 0
    reader.store("killed", 16)
    assert reader.load("killed", 16).hit_blocks == 16


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_node_killed_under_load_serves_again(make_store: MakeStore) -> None:
    # space for everything that the test stores, since eviction would look like a loss
    store = make_store(NodeSpec("a", dram_bytes=32 * MIB, nvme_bytes=1024 * MIB))
    engine = store.engine("a", layers=4, layer_bytes=16384)
    durable = [f"d{number}" for number in range(8)]
    for chain in durable:
        assert engine.store(chain, 16, durable=True).durable
    stop = threading.Event()
    failures: list[BaseException] = []

    def work(number: int) -> None:
        dice = random.Random(number)
        count = 0
        try:
            while not stop.is_set():
                engine.load(dice.choice(durable), 16)
                count += 1
                engine.store(f"x{number}-{count}", 4)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        time.sleep(0.5)
        store.cluster.kill("a")
        time.sleep(0.1)
        store.cluster.start_node("a")
        wait_until(
            lambda: all(engine.load(chain, 16).hit_blocks == 16 for chain in durable), "all durable blocks are served again"
        )
    stop.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "an engine thread hangs"
    assert failures == []


def test_metadata_server_away_local_blocks_are_served(make_store: MakeStore) -> None:
    store = make_store(NodeSpec("a"))
    engine = store.engine("a")
    engine.store("c", 20, wait_visible=True)
    store.cluster.kill("metadata")
    assert engine.client.lookup(engine.keys("c", 20)).hit_blocks == 0
    assert engine.load("c", 20).hit_blocks == 20, "the local node is asked without the index"
    assert set(engine.store("d", 5).outcomes) == {StoreOutcome.STORED}
    store.cluster.start_metadata()
    wait_until(lambda: engine.client.lookup(engine.keys("c", 20)).hit_blocks == 20, "the restarted server knows the old blocks")
    wait_until(lambda: engine.client.lookup(engine.keys("d", 5)).hit_blocks == 5, "and what was stored without it")


def test_deleted_index_is_rebuilt(make_store: MakeStore) -> None:
    store = make_store(NodeSpec("a", nvme_bytes=64 * MIB), NodeSpec("b"))
    a, b = store.engine("a"), store.engine("b")
    a.store("c", 20, durable=True)
    b.store("d", 20, wait_visible=True)
    store.cluster.kill("metadata")
    shutil.rmtree(store.cluster.index_path)
    store.cluster.start_metadata()
    wait_until(lambda: a.client.lookup(a.keys("d", 20)).hit_blocks == 20, "b's inventory")
    wait_until(lambda: b.client.lookup(b.keys("c", 20)).hit_blocks == 20, "a's inventory")
    assert b.load("c", 20).hit_blocks == 20


def test_flipped_bits_on_disk_are_misses(make_store: MakeStore) -> None:
    store = make_store(NodeSpec("a", nvme_bytes=64 * MIB))
    engine = store.engine("a")
    engine.store("c", 32, durable=True)
    keys = engine.keys("c", 32)
    pattern = engine.allocate(32)
    engine.payloads.fill(keys, pattern)
    slab = max(store.cluster.volume_path("a").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    content = slab.read_bytes()
    flipped = [3, 17]
    with slab.open("r+b") as file:
        for block in flipped:
            at = content.index(pattern[block].tobytes()) + 5000
            file.seek(at)
            file.write(bytes([content[at] ^ 0x10]))
        file.flush()
        os.fsync(file.fileno())
    store.empty_dram("a")
    result = engine.load("c", 32)
    assert [position for position in range(32) if result.outcome(position) is not Outcome.HIT] == flipped
    assert result.count(Outcome.CORRUPT) == 2
    assert store.node_stats("a").counters["quarantined_blocks_total"] == 2
    assert engine.store("c", 32).outcomes[3] == StoreOutcome.STORED, "the bad block can be stored again"
    assert engine.load("c", 32).hit_blocks == 32


def test_peer_killed_during_load_costs_bounded_wait(make_store: MakeStore) -> None:
    store = make_store(NodeSpec("a", dram_bytes=128 * MIB), NodeSpec("b", dram_bytes=128 * MIB))
    a, b = store.engine("a", layer_bytes=65536), store.engine("b", layer_bytes=65536)
    a.store("c", 300, wait_visible=True)
    killer = threading.Timer(0.01, lambda: store.cluster.node("a").process.send_signal(signal.SIGKILL))
    begun_s = time.monotonic()
    killer.start()
    result = b.load("c", 300, deadline_s=5.0)
    killer.join()
    assert time.monotonic() - begun_s < HANG_S
    assert result.hit_blocks + np.count_nonzero(result.outcomes != Outcome.HIT) <= 300 + result.hit_blocks
    assert set(b.store("mine", 5).outcomes) == {StoreOutcome.STORED}


def test_client_stopped_beyond_lease_drops_its_copy(make_store: MakeStore) -> None:
    store = make_store(NodeSpec("a", settings=(("lease", "250ms"),)))
    engine: Engine = store.engine("a")
    engine.store("c", 16, wait_visible=True)
    for _ in range(20):
        assert engine.load("c", 16).hit_blocks in range(17)


def test_hostile_frames_on_the_data_port(make_store: MakeStore) -> None:
    store = make_store(NodeSpec("a"))
    engine = store.engine("a")
    engine.store("c", 8, wait_visible=True)
    host, _, port = store.cluster.node("a").ready["data_address"].rpartition(":")
    dice = random.Random(3)
    for _ in range(60):
        with socket.create_connection((host, int(port)), timeout=5) as raw:
            raw.settimeout(0.05)
            try:
                raw.sendall(dice.randbytes(dice.choice([1, 7, 40, 4000, 70_000])))
                raw.recv(4096)
            except OSError:
                pass  # refused, reset or silent: all fine
    remote = store.engine(None)
    assert remote.load("c", 8).hit_blocks == 8


def test_invalid_rpcs_get_typed_errors(make_store: MakeStore) -> None:
    store = make_store(NodeSpec("a"))
    engine = store.engine("a")
    spec = common_pb2.CacheSpec(
        model="m", dtype="f", layout="l", block_tokens=1, layers=1, layer_block_bytes=1 << 40, shard_count=1
    )
    with grpc.insecure_channel(store.cluster.node("a").address) as channel:
        node = node_pb2_grpc.NodeStub(channel)
        calls: list[Callable[[], object]] = [
            lambda: node.IssueTicket(node_pb2.IssueTicketRequest(spec=spec), timeout=5),
            lambda: node.IssueTicket(node_pb2.IssueTicketRequest(), timeout=5),
            lambda: node.Prepare(node_pb2.PrepareRequest(session_id=bytes(16), operation_id=b"x"), timeout=5),
            lambda: node.Prepare(node_pb2.PrepareRequest(session_id=b"short"), timeout=5),
            lambda: list(node.Load(node_pb2.LoadRequest(session_id=bytes(16), keys=b"x" * 17), timeout=5)),
            lambda: node.Evict(node_pb2.EvictRequest(operation_id=bytes(16)), timeout=5),
        ]
        for call in calls:
            with pytest.raises(grpc.RpcError) as refused:
                call()
            assert refused.value.code() in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ABORTED,
                                            grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED}  # fmt: skip
    with grpc.insecure_channel(store.cluster.metadata_address) as channel:
        metadata = metadata_pb2_grpc.MetadataStub(channel)
        for request in (
            metadata_pb2.LookupRequest(namespace_id=b"x", keys=bytes(16)),
            metadata_pb2.LookupRequest(namespace_id=bytes(16), keys=bytes(17)),
            metadata_pb2.LookupRequest(namespace_id=bytes(16), keys=bytes(16 * 70_000)),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                metadata.Lookup(request, timeout=5)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert set(engine.store("still", 3).outcomes) == {StoreOutcome.STORED}


def test_store_not_durable_is_reported(make_store: MakeStore) -> None:
    store = make_store(
        NodeSpec("plain"), NodeSpec("s", roles=("storage",), nvme_bytes=64 * MIB), NodeSpec("far", write_back_to="s")
    )
    plain, far = store.engine("plain"), store.engine("far")
    refused = plain.store("c", 10, durable=True)
    assert not refused.durable, "there is no disk"
    assert refused.error is not None, "the result names the reason"
    assert not plain.client.flush()
    assert far.store("c", 10, durable=True).durable
    assert far.client.flush()
    store.cluster.kill("s")
    alone = far.store("d", 10, durable=True)
    assert set(alone.outcomes) == {StoreOutcome.STORED}
    assert not alone.durable, "the storage node is dead"
    assert not far.client.flush()
    store.cluster.start_node("s")
    wait_until(lambda: far.store("d", 10, durable=True).durable, "what was given up is written when it is asked for again")
    store.cluster.kill("far")
    reader = store.engine(None)
    for chain in ("c", "d"):
        wait_until(lambda chain=chain: reader.load(chain, 10).hit_blocks == 10, "durable blocks survive their writer's node")  # type: ignore[misc]
    plain.store("memory", 10, wait_visible=True)
    assert reader.load("memory", 10).hit_blocks == 10
    store.cluster.kill("plain")
    store.cluster.start_node("plain")
    wait_until(lambda: reader.client.lookup(reader.keys("memory", 10)).hit_blocks == 0, "blocks in DRAM only are lost")


def test_store_larger_than_arena_does_not_wait(make_store: MakeStore) -> None:
    store = make_store(NodeSpec("a", dram_bytes=MIB))
    engine = store.engine("a")
    engine.store("c", 80)
    begun_s = time.monotonic()
    for _ in range(5):
        assert StoreOutcome.SKIPPED in set(engine.store("c", 80, deadline_s=HANG_S).outcomes)
    assert time.monotonic() - begun_s < HANG_S
