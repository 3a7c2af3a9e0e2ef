"""Test peers: a node as the metadata server sees it, and the server as a real process."""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio

from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1 import metadata_pb2_grpc
from kvproto.v1.common_pb2 import BlockRun, NodeInfo, Tier, VolumeInfo
from kvstore.config.metadata import MetadataConfig
from kvstore.core.clock import ManualClock
from kvstore.metadata.server import MetadataServer
from kvstore.rpc.client import call_aio, connect_aio
from kvstore.rpc.errors import from_rpc_error

NAMESPACE = b"namespace-of-16b"
TIMEOUT_S = 10.0


def run_of(keys: Sequence[bytes], start: int = 0, stop: int | None = None, namespace: bytes = NAMESPACE) -> BlockRun:
    """Blocks [start, stop) of a chain."""
    return BlockRun(
        namespace_id=namespace, parent=keys[start - 1] if start else b"", depth=start, keys=b"".join(keys[start:stop])
    )


class Peer:
    """A node: registers, beats, publishes. Default volumes: ``<node>/dram`` and ``<node>/nvme0``."""

    def __init__(self, channel: grpc.aio.Channel, node_id: str = "host-1", volumes: dict[str, Tier] | None = None) -> None:
        self.stub = metadata_pb2_grpc.MetadataStub(channel)
        self.node_id = node_id
        self.boot_id = secrets.token_bytes(16)
        self.volumes = volumes or {f"{node_id}/dram": Tier.TIER_DRAM, f"{node_id}/nvme0": Tier.TIER_NVME}
        self.sequence = 0
        self.zone = ""
        self.uid = b""

    @property
    def dram(self) -> str:
        return f"{self.node_id}/dram"

    @property
    def nvme(self) -> str:
        return f"{self.node_id}/nvme0"

    def info(self) -> NodeInfo:
        return NodeInfo(
            node_id=self.node_id,
            boot_id=self.boot_id,
            roles=["prefill"],
            control_address="127.0.0.1:1",
            data_address="127.0.0.1:2",
            volumes=[
                VolumeInfo(volume_id=name, tier=tier, capacity_bytes=1 << 30, uid=self.uid) for name, tier in self.volumes.items()
            ],
            zone=self.zone,
        )

    def reboot(self) -> None:
        """Draw a new boot id, without registering it."""
        self.boot_id = secrets.token_bytes(16)
        self.sequence = 0

    async def register(self) -> dict[str, bool]:
        """The volumes whose inventories the server requests."""
        request = pb.RegisterNodeRequest(operation_id=secrets.token_bytes(16), node=self.info())
        answer = await call_aio(self.stub.RegisterNode, request, TIMEOUT_S)
        return {need.volume_id: need.inventory_needed for need in answer.volume_needs}

    async def beat(self, used: int = 0) -> pb.HeartbeatResponse:
        usages = [pb.VolumeUsage(volume_id=name, used_bytes=used) for name in self.volumes]
        request = pb.HeartbeatRequest(node_id=self.node_id, boot_id=self.boot_id, usages=usages)
        return await call_aio(self.stub.Heartbeat, request, TIMEOUT_S)

    def batch(
        self, volume: str, stored: Sequence[BlockRun] = (), removed: Sequence[bytes] = (), *, sync_end: bool = False
    ) -> pb.PublishRequest:
        """The next message of the stream."""
        self.sequence += 1
        return pb.PublishRequest(
            node_id=self.node_id,
            boot_id=self.boot_id,
            sequence=self.sequence,
            volume_id=volume,
            stored=stored,
            removed=b"".join(removed),
            sync_end=sync_end,
        )

    async def send(self, *messages: pb.PublishRequest) -> list[int]:
        """Send messages on one stream and return the acknowledgements. Raises kvstore errors."""
        try:
            return [answer.sequence async for answer in self.stub.Publish(iter(messages), timeout=TIMEOUT_S)]
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def publish(self, volume: str, *stored: BlockRun, sync_end: bool = False) -> None:
        """Send one batch and return its acknowledgement."""
        message = self.batch(volume, stored, sync_end=sync_end)
        assert (await self.send(message))[-1] == message.sequence

    async def lookup(self, keys: Sequence[bytes], namespace: bytes = NAMESPACE, ends: Sequence[int] = ()) -> pb.LookupResponse:
        request = pb.LookupRequest(namespace_id=namespace, keys=b"".join(keys), ends=ends)
        return await call_aio(self.stub.Lookup, request, TIMEOUT_S)

    async def hit(self, keys: Sequence[bytes], namespace: bytes = NAMESPACE) -> int:
        """Return the length of the longest prefix."""
        return (await self.lookup(keys, namespace)).hit_blocks

    async def counters(self) -> dict[str, int]:
        return dict((await call_aio(self.stub.GetStats, pb.GetStatsRequest(), TIMEOUT_S)).counters)

    async def compare(self, volume: str, first: int, digests: Sequence[int], counts: Sequence[int]) -> list[int]:
        request = pb.CompareDigestsRequest(
            node_id=self.node_id, boot_id=self.boot_id, volume_id=volume, first_range=first, digests=digests, counts=counts
        )
        return list((await call_aio(self.stub.CompareDigests, request, TIMEOUT_S)).differing_ranges)

    async def repair(self, volume: str, number: int, blocks: Sequence[BlockRun]) -> tuple[int, int]:
        request = pb.RepairRangesRequest(
            operation_id=secrets.token_bytes(16),
            node_id=self.node_id,
            boot_id=self.boot_id,
            volume_id=volume,
            ranges=[number],
            blocks=blocks,
        )
        answer = await call_aio(self.stub.RepairRanges, request, TIMEOUT_S)
        return answer.added, answer.removed


class EngineCache(Peer):
    """The published cache of an engine: a node without an address."""

    def __init__(self, channel: grpc.aio.Channel, node_id: str) -> None:
        super().__init__(channel, node_id, {f"{node_id}/cache": Tier.TIER_HBM})

    def info(self) -> NodeInfo:
        volumes = [VolumeInfo(volume_id=name, tier=tier, capacity_bytes=1 << 30) for name, tier in self.volumes.items()]
        return NodeInfo(node_id=self.node_id, boot_id=self.boot_id, volumes=volumes)

    async def unregister(self) -> None:
        request = pb.UnregisterNodeRequest(operation_id=bytes(16), node_id=self.node_id, boot_id=self.boot_id)
        assert (await call_aio(self.stub.UnregisterNode, request, TIMEOUT_S)).known


@dataclass
class Running:
    """A server in this process, its clock and a channel to it."""

    server: MetadataServer
    clock: ManualClock
    channel: grpc.aio.Channel
    address: str

    def peer(self, node_id: str = "host-1") -> Peer:
        return Peer(self.channel, node_id)


@asynccontextmanager
async def serve(index_path: Path, **more: Any) -> AsyncIterator[Running]:
    """Serve an index with a new clock, and with further settings."""
    clock = ManualClock()
    config = MetadataConfig(
        index_path=index_path, listen="127.0.0.1:0", index_size_bytes=64 << 20, heartbeat_interval_ms=20, node_ttl_ms=100, **more
    )
    server = MetadataServer(config, clock=clock)
    address = await server.start()
    async with connect_aio(address) as channel:
        yield Running(server, clock, channel, address)
    await server.stop(0.0)


SCRIPT = """
import json, logging, sys
from pathlib import Path
from kvstore.config.metadata import MetadataConfig
from kvstore.metadata.main import run
if __name__ == "__main__":
    logging.basicConfig(level="INFO")
    folder, index, listen, ttl_ms = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    run(MetadataConfig(index_path=index, listen=listen, ready_file=folder / "ready",
                       index_size_bytes=64 << 20, heartbeat_interval_ms=ttl_ms // 5, node_ttl_ms=ttl_ms,
                       **json.loads(sys.argv[5])))
"""


class ServerProcess:
    """The real server process, with an index in its folder or one that it shares with another server of this host."""

    def __init__(self, folder: Path, ttl_ms: int = 2_500, index: Path | None = None, **settings: Any) -> None:
        self.folder, self.ttl_ms = folder, ttl_ms
        self.index = folder / "index" if index is None else index
        self.settings = json.dumps(settings)
        self.address = "127.0.0.1:0"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, or restart on the same port, and wait until calls are answered."""
        ready = self.folder / "ready"
        ready.unlink(missing_ok=True)
        arguments = [str(self.folder), str(self.index), self.address, str(self.ttl_ms), self.settings]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen([sys.executable, "-c", SCRIPT, *arguments], stdout=log, stderr=log)
        deadline = time.monotonic() + 30
        while not ready.exists():
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.005)
        said = json.loads(ready.read_text())
        assert said["pid"] == self.process.pid
        self.address = said["address"]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End the server by a signal and return its exit code."""
        self.send_signal(number)
        assert self.process is not None
        return self.process.wait(20)

    def send_signal(self, number: int) -> None:
        """Send the server a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def log(self) -> str:
        return (self.folder / "log").read_text()


@contextmanager
def server_process(folder: Path, ttl_ms: int = 2_500, index: Path | None = None, **settings: Any) -> Iterator[ServerProcess]:
    """A running server process with further ``MetadataConfig`` settings, killed at the end if it still runs."""
    server = ServerProcess(folder, ttl_ms, index, **settings)
    server.start()
    try:
        yield server
    except BaseException:
        print(server.log())
        raise
    finally:
        if server.process is not None and server.process.poll() is None:
            server.process.kill()
            server.process.wait(10)


@contextmanager
def two_servers(folder: Path, **settings: Any) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """Two running server processes of one host that share an index."""
    with ExitStack() as stack:
        servers = []
        for name in ("one", "two"):
            (folder / name).mkdir()
            servers.append(stack.enter_context(server_process(folder / name, index=folder / "index", **settings)))
        yield servers[0], servers[1]
