"""Errors of a start with servers that cannot be used name the address, the cause, and the setting that helps."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.config.metadata import MetadataConfig
from kvstore.core.errors import InvalidArgument, KVStoreError, Unauthenticated, Unavailable
from kvstore.embedded.ports import free_port
from kvstore.embedded.valkey import ValkeyServers, find_server
from kvstore.index.counts import count_nothing
from kvstore.index.valkey.address import Credentials, ValkeyAddress
from kvstore.index.valkey.cluster import ValkeyClient

pytestmark = pytest.mark.skipif(find_server() is None, reason="no valkey-server or redis-server here")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServers]:
    with ValkeyServers(tmp_path_factory.mktemp("valkey"), shards=1) as servers:
        yield servers


async def error_of(*seeds: str, password: str = "", tls: ssl.SSLContext | None = None) -> KVStoreError:
    """The error of a start."""
    client = ValkeyClient(ValkeyAddress(seeds, Credentials("", password), tls), budget_s=1.0, count=count_nothing)
    try:
        with pytest.raises(KVStoreError) as raised:
            await client.start()
    finally:
        await client.close()
    return raised.value


async def test_start_without_servers_names_all_of_them() -> None:
    first, second = f"127.0.0.1:{free_port()}", f"no-such-host.invalid:{free_port()}"
    said = str(await error_of(first, second))
    assert f"{first}: " in said
    assert "refused" in said
    assert f"{second}: the host name is not known" in said


async def test_start_with_tls_at_plain_server_names_tls(servers: ValkeyServers) -> None:
    said = str(await error_of(servers.seeds[0], tls=ssl.create_default_context()))
    assert "TLS" in said
    assert servers.seeds[0] in said


@pytest.mark.parametrize("reply", [b"\x00\x00\x12\x04", b""], ids=["other_protocol", "closed"])
async def test_start_at_another_port_names_the_address(reply: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(reply)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
        address = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        said = str(await error_of(address))
    assert f"address={address}" in said
    assert "is it a Valkey server" in said


async def test_start_with_unfit_password_names_the_setting(servers: ValkeyServers) -> None:
    server = servers.primaries[0]
    needless = await error_of(server.address, password="secret")
    server.call("CONFIG", "SET", "requirepass", "secret")
    missing = await error_of(server.address)
    for error, words in ((needless, "has no password"), (missing, "requires a password")):
        assert isinstance(error, Unauthenticated)
        assert words in str(error)
        assert "metadata.valkey_password_file" in str(error)


def test_engine_without_port_names_the_setting() -> None:
    with pytest.raises(InvalidArgument, match=r"metadata\.engine needs a port with each server") as raised:
        _ = MetadataConfig(index_path=Path("index"), engine="valkey://somewhere").valkey_servers
    assert raised.value.fields["address"] == "somewhere"


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Other programs take ports between the search for a free port and the start of a server: as many as the list's number."""
    left = [0]
    with contextlib.ExitStack() as others:

        def port() -> int:
            found = free_port()
            if left[0] > 0:
                left[0] -= 1
                others.enter_context(socket.socket()).bind(("127.0.0.1", found))
            return found

        monkeypatch.setattr("kvstore.embedded.valkey.free_port", port)
        yield left


def test_server_whose_port_was_taken_gets_another(taken: list[int], tmp_path: Path) -> None:
    taken[0] = 1
    with ValkeyServers(tmp_path, shards=1) as started:
        assert started.whole


def test_server_that_ends_at_each_start_names_the_reason(taken: list[int], tmp_path: Path) -> None:
    taken[0] = 100
    with pytest.raises(Unavailable, match=r"ended at its start.*[Ff]ailed"):
        ValkeyServers(tmp_path, shards=1)


def test_server_at_the_port_of_another_is_not_taken_for_it(
    servers: ValkeyServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port was taken by another Valkey, which answers."""
    ports = iter([servers.servers[0].port])
    monkeypatch.setattr("kvstore.embedded.valkey.free_port", lambda: next(ports, None) or free_port())
    with ValkeyServers(tmp_path, shards=1) as started:
        assert started.whole
        assert started.seeds != servers.seeds
