"""Tests of the real server process: kills, restarts, damaged indexes, signals."""

from __future__ import annotations

import random
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from metadata_harness import Peer, ServerProcess, run_of, server_process
from pydantic import ValidationError

from kvstore.config.base import TlsSection
from kvstore.config.metadata import MetadataConfig
from kvstore.core.errors import InvalidArgument, NotFound, Unavailable
from kvstore.metadata.main import run
from kvstore.rpc.client import connect_aio
from support.chains import chain
from support.wait import wait_until_async

KEYS = chain("a", 50)


async def test_server_killed_and_restarted_continues(tmp_path: Path) -> None:
    with server_process(tmp_path) as server:
        async with connect_aio(server.address) as channel:
            peer = Peer(channel)
            await peer.register()
            await peer.publish(peer.nvme, run_of(KEYS, 0, 40), sync_end=True)
            epoch = (await peer.beat()).index_epoch
        server.stop(signal.SIGKILL)
        server.start()
        async with connect_aio(server.address) as channel:
            again = Peer(channel)
            again.boot_id, again.sequence = peer.boot_id, peer.sequence
            assert await again.hit(KEYS) == 40  # the node had no chance to call: grace
            beat = await again.beat()
            assert not beat.register_again
            assert beat.index_epoch == epoch
            await again.publish(again.nvme, run_of(KEYS, 40))
            assert await again.hit(KEYS) == 50
            assert not (await again.register())[again.nvme]
        assert server.stop() == 0


async def test_server_index_deleted_is_rebuilt_by_nodes(tmp_path: Path) -> None:
    with server_process(tmp_path) as server:
        async with connect_aio(server.address) as channel:
            peer = Peer(channel)
            await peer.register()
            await peer.publish(peer.nvme, run_of(KEYS), sync_end=True)
            epoch = (await peer.beat()).index_epoch
        server.stop(signal.SIGKILL)
        shutil.rmtree(tmp_path / "index")
        server.start()
        async with connect_aio(server.address) as channel:
            again = Peer(channel)
            again.boot_id, again.sequence = peer.boot_id, peer.sequence
            assert await again.hit(KEYS) == 0
            beat = await again.beat()
            assert beat.register_again
            assert beat.index_epoch != epoch
            with pytest.raises(NotFound):
                await again.send(again.batch(again.nvme))
            again.sequence = 0  # a new epoch restarts the numbering
            assert (await again.register())[again.nvme]
            await again.publish(again.nvme, run_of(KEYS), sync_end=True)
            assert await again.hit(KEYS) == 50


@pytest.mark.parametrize("damage", ["metas", "pages", "noise"])
async def test_server_index_damaged_while_running_is_recreated(tmp_path: Path, damage: str) -> None:
    with server_process(tmp_path) as server:
        assert server.process is not None
        async with connect_aio(server.address) as channel:
            peer = Peer(channel)
            await peer.register()
            for start in range(0, 2_000, 500):
                await peer.publish(peer.nvme, run_of(chain("long", 2_000), start, start + 500), sync_end=True)
            epoch = (await peer.beat()).index_epoch
            data = tmp_path / "index" / "data.mdb"
            pages = range(2, data.stat().st_size // 4096) if damage == "pages" else range(2)
            with data.open("r+b") as file:
                for page in pages:
                    file.seek(page * 4096)
                    file.write(bytes(4096) if damage == "metas" else random.Random(page).randbytes(4096))

            async def made_anew() -> bool:
                assert server.process is not None
                assert server.process.poll() is None, "it lives on"
                with suppress(Unavailable):
                    await peer.hit(KEYS)
                    return (await peer.beat()).index_epoch != epoch
                return False

            await wait_until_async(made_anew)
            peer.sequence = 0
            assert (await peer.beat()).register_again
            assert (await peer.register())[peer.nvme]
            await peer.publish(peer.nvme, run_of(KEYS), sync_end=True)
            assert await peer.hit(KEYS) == 50
            assert (await peer.counters())["metadata_index_restarts_total"] == 1
        assert server.stop() == 0
        assert "damaged" in server.log()


async def test_server_start_damaged_index_is_recreated(tmp_path: Path) -> None:
    with server_process(tmp_path) as server:
        async with connect_aio(server.address) as channel:
            peer = Peer(channel)
            await peer.register()
            await peer.publish(peer.nvme, run_of(KEYS), sync_end=True)
        server.stop(signal.SIGKILL)
        data = tmp_path / "index" / "data.mdb"
        content = data.read_bytes()
        with data.open("r+b") as file:
            for page in range(2, len(content) // 4096):
                # opening looks at the list of databases and at ``meta`` alone; the node table reads the volume epochs
                if not any(name in content[page * 4096 : (page + 1) * 4096] for name in (b"namespaces", b"kvstore-index/")):
                    file.seek(page * 4096)
                    file.write(random.Random(page).randbytes(4096))
        server.start()
        async with connect_aio(server.address) as channel:
            again = Peer(channel)
            assert (await again.register())[again.nvme]
            await again.publish(again.nvme, run_of(KEYS), sync_end=True)
            assert await again.hit(KEYS) == 50
        assert server.stop() == 0
        assert "CRITICAL" in server.log()


async def test_server_restart_silent_node_is_hidden_after_grace(tmp_path: Path) -> None:
    with server_process(tmp_path, ttl_ms=300) as server:
        async with connect_aio(server.address) as channel:
            peer = Peer(channel)
            await peer.register()
            await peer.publish(peer.nvme, run_of(KEYS), sync_end=True)
        server.stop(signal.SIGKILL)
        server.start()
        async with connect_aio(server.address) as channel:
            again = Peer(channel)

            async def hidden() -> bool:
                return await again.hit(KEYS) == 0

            await wait_until_async(hidden)
            again.boot_id = peer.boot_id
            assert not (await again.beat()).register_again
            assert await again.hit(KEYS) == 50


def test_server_port_in_use_fails_cleanly(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    with server_process(tmp_path / "first") as server:
        config = MetadataConfig(index_path=tmp_path / "index", listen=server.address)
        with pytest.raises(Unavailable, match=r"is in use; `kvstore status`|cannot listen on"):
            run(config)


def test_server_index_path_is_file_fails(tmp_path: Path) -> None:
    (tmp_path / "index").write_text("not an index")
    server = ServerProcess(tmp_path)
    with pytest.raises(AssertionError, match="InvalidArgument"):
        server.start()


@pytest.mark.parametrize(
    "change",
    [
        {"listen": "0.0.0.0:7400"},
        {"listen": "[::]:7400"},
        {"listen": "store.example:7400"},
        {"listen": "nonsense"},
        {"node_ttl_ms": 100, "heartbeat_interval_ms": 100},
        {"engine_ttl_ms": 5_000, "request_ttl_ms": 5_000},
    ],
    ids=str,
)
def test_config_invalid_or_insecure_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        MetadataConfig(index_path=tmp_path, **change).check()  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"max_requests": 0}, {"index_size_bytes": 0}], ids=str)
def test_metadata_config_value_out_of_range_rejected(tmp_path: Path, change: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        MetadataConfig(index_path=tmp_path, **change)  # type: ignore[arg-type]


def test_config_remote_listen_requires_tls_or_permission(tmp_path: Path) -> None:
    MetadataConfig(index_path=tmp_path, listen="0.0.0.0:1", allow_insecure_remote=True).check()
    MetadataConfig(index_path=tmp_path, listen="0.0.0.0:1", tls=TlsSection(cert=tmp_path, key=tmp_path)).check()
    MetadataConfig(index_path=tmp_path, listen="[::1]:1").check()
    MetadataConfig(index_path=tmp_path, metrics_listen="0.0.0.0:1", allow_insecure_metrics=True).check()
    with pytest.raises(InvalidArgument, match=r"requires TLS; set metadata\.tls, or metadata\.allow_insecure_remote"):
        MetadataConfig(index_path=tmp_path, listen="0.0.0.0:1", allow_insecure_metrics=True).check()
    with pytest.raises(InvalidArgument, match="allow_insecure_metrics"):
        MetadataConfig(index_path=tmp_path, metrics_listen="0.0.0.0:1").check()
    MetadataConfig(index_path=tmp_path, listen="localhost:1").check()
