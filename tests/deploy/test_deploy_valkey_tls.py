"""The files of deploy/systemd/valkey with TLS, as real servers: three shards, entered as the user that the files provide."""

from __future__ import annotations

import json
import re
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import hiredis
import numpy as np
import pytest
from deployed import SYSTEMD

from kvclient import CacheSpec, KVClient
from kvclient.events import BlockWatcher
from kvproto.v1 import admin_pb2, admin_pb2_grpc
from kvstore.core.errors import Internal, Unauthenticated, Unavailable
from kvstore.embedded.children import start
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.embedded.valkey import SLOTS, find_server
from kvstore.index.contract import PrefixIndex
from kvstore.index.valkey.address import Credentials, ValkeyAddress
from kvstore.index.valkey.index import ValkeyIndex
from kvstore.rpc.client import connect
from kvstore.testing.index.suite import IndexSuite
from nursery import cli
from support.ports import free_valkey_ports
from support.wait import wait_until

CONFIGURATION = SYSTEMD / "valkey"
HOST = "127.0.0.1"
SHARDS = 3
BLOCKS = 64
SIGNED = ("-days", "2", "-out", "tls.crt")
_NO_REPLY = object()


def make_certificates(folder: Path) -> Path:
    """Make an authority, and a certificate with the address of this host. Returns the file of the authority."""
    folder.mkdir()
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    commands = [
        ["req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=authority"],
        ["req", "-new", *key[:-2], "-keyout", "tls.key", "-out", "tls.csr", "-subj", "/CN=valkey"],
        ["x509", "-req", "-in", "tls.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "san", *SIGNED],
    ]
    (folder / "san").write_text(f"subjectAltName=IP:{HOST}\n")
    for command in commands:
        done = subprocess.run(["openssl", *command], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
    return folder / "ca.crt"


class TlsCluster:
    """Servers with the files of deploy/systemd/valkey, each at a port of this machine."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.ca = make_certificates(folder / "tls")
        self.ports = free_valkey_ports(SHARDS)
        users = (CONFIGURATION / "users.acl").read_text()
        self.passwords = dict(re.findall(r"user (\w+) on >(\S+)", users))
        (folder / "users.acl").write_text(users)
        self._context = ssl.create_default_context(cafile=self.ca)
        self._processes: list[subprocess.Popen[bytes]] = []
        for port in self.ports:
            text = (CONFIGURATION / "valkey.conf").read_text()
            for before, after in (
                ("/etc/valkey", str(folder)),
                ("bind 10.0.0.1", f"bind {HOST}"),
                ("tls-port 6379", f"tls-port {port}"),
            ):
                assert before in text
                text = text.replace(before, after)
            home = folder / str(port)
            home.mkdir()
            (home / "valkey.conf").write_text(text)
            with (home / "log").open("wb") as log:
                process = start([str(program), str(home / "valkey.conf")], stdout=log, stderr=log, cwd=home)
            self._processes.append(process)
            wait_until(lambda process=process, port=port: process.poll() is not None or self._answers(port))  # type: ignore[misc]
        if any(process.poll() is not None for process in self._processes):
            self.close()
            pytest.skip(f"{program} is built without TLS")
        for number, port in enumerate(self.ports):
            first, last = SLOTS * number // SHARDS, SLOTS * (number + 1) // SHARDS - 1
            assert self.call(port, "CLUSTER", "ADDSLOTSRANGE", first, last) == b"OK"
            assert self.call(port, "CLUSTER", "MEET", HOST, self.ports[0]) == b"OK"
        wait_until(lambda: all(b"cluster_state:ok" in self.call(port, "CLUSTER", "INFO") for port in self.ports))
        wait_until(lambda: all(len(self.call(port, "CLUSTER", "SLOTS")) == SHARDS for port in self.ports))

    def call(self, port: int, *words: str | int) -> Any:
        """Run a command as the administrator."""
        reader = hiredis.Reader(notEnoughData=_NO_REPLY)
        with (
            socket.create_connection((HOST, port), 5.0) as plain,
            self._context.wrap_socket(plain, server_hostname=HOST) as connection,
        ):
            login = hiredis.pack_command(("AUTH", "admin", self.passwords["admin"]))
            connection.sendall(login + hiredis.pack_command(words))  # type: ignore[arg-type]  # its stub has a tuple of one type
            replies: list[object] = []
            while len(replies) < 2:
                if (reply := reader.gets()) is not _NO_REPLY:
                    replies.append(reply)
                    continue
                part = connection.recv(1 << 16)
                assert part, "the server closed the connection"
                reader.feed(part)
        return replies[1]

    def _answers(self, port: int) -> bool:
        try:
            return bool(self.call(port, "PING") == b"PONG")
        except OSError:
            return False

    @property
    def seeds(self) -> tuple[str, ...]:
        return tuple(f"{HOST}:{port}" for port in self.ports)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsCluster]:
    program = find_server("redis-server")  # the wheel of Valkey is built without TLS
    if program is None:
        pytest.skip("NO redis-server HERE: TLS TO VALKEY IS NOT TESTED")
    made = TlsCluster(program, tmp_path_factory.mktemp("tls"))
    yield made
    made.close()


def settings_of(cluster: TlsCluster, folder: Path, password: str | None = None, ca: Path | None = None) -> list[tuple[str, str]]:
    file = folder / "password"
    file.write_text(cluster.passwords["kvstore"] if password is None else password)
    return [
        ("engine", f"valkeys://{','.join(cluster.seeds)}"),
        ("valkey_user", "kvstore"),
        ("valkey_password_file", str(file)),
        ("valkey_ca", str(cluster.ca if ca is None else ca)),
    ]


def open_at(place: Path) -> ValkeyIndex:
    """Open the index that a file describes: its seeds, its authority and the password."""
    seeds, ca, password = json.loads(place.read_text())
    address = ValkeyAddress(tuple(seeds), Credentials("kvstore", password), ssl.create_default_context(cafile=ca))
    return ValkeyIndex.open(address, lookup_budget_s=5.0)


@pytest.mark.thorough
class TestIndexOverTls(IndexSuite):
    """The user of users.acl may do all that the index does."""

    process_opener: ClassVar[str | None] = None
    whole_batches: ClassVar[bool] = False

    @pytest.fixture
    def place(self, tmp_path: Path, cluster: TlsCluster) -> Path:
        for port in cluster.ports:
            cluster.call(port, "FLUSHALL")
        place = tmp_path / "place"
        place.write_text(json.dumps([cluster.seeds, str(cluster.ca), cluster.passwords["kvstore"]]))
        return place

    def open_index(self, place: Path) -> PrefixIndex:
        return open_at(place)


def test_store_over_tls_with_the_user_of_the_files(cluster: TlsCluster, tmp_path: Path) -> None:
    """Blocks, block events, orders, and another metadata server after one was killed."""
    spec = CacheSpec(model="deployed", block_tokens=16, layers=1, layer_block_bytes=512)
    with ExitStack() as stack:
        settings = [*settings_of(cluster, tmp_path), ("lookup_shard", "500ms"), ("node_ttl", "2500ms")]
        store = stack.enter_context(LocalCluster([NodeSpec("n", dram_bytes=64 << 20)], tmp_path / "store", settings, servers=2))
        watcher = stack.enter_context(BlockWatcher(store.metadata_address))
        watcher.wait_complete(30.0)
        engine = stack.enter_context(KVClient.connect(store.metadata_address, spec, node=store.node("n").local_socket))
        keys = engine.keys(np.arange(BLOCKS * 16, dtype=np.uint32))
        engine.store(keys, np.ones((BLOCKS, spec.block_bytes), np.uint8), wait_visible=True)
        assert engine.load(keys, np.zeros((BLOCKS, spec.block_bytes), np.uint8)).hit_blocks == BLOCKS
        seen: list[int] = []
        wait_until(lambda: (seen.clear(), watcher.read(lambda mirror: seen.append(len(set(mirror)))), seen[0] == BLOCKS)[-1])
        with connect(store.node("metadata").address) as channel:
            stub = admin_pb2_grpc.MetadataAdminStub(channel)
            order = admin_pb2.SetTenantQuotaRequest(operation_id=bytes(16), tenant="t", quota=admin_pb2.TenantQuota(dram_bytes=1))
            stub.SetTenantQuota(order, timeout=10)
            shards = stub.DescribeShards(admin_pb2.DescribeShardsRequest(), timeout=10)
            assert str(cluster.ports[0]) in str(shards)
        store.kill("metadata")
        wait_until(lambda: engine.lookup(keys).hit_blocks == BLOCKS)
        store.kill("n")  # the other server finds it silent, closes its volumes and sweeps
        wait_until(lambda: engine.lookup(keys).hit_blocks == 0)
        log = store.base_dir / "metadata-2.log"
        wait_until(lambda: "role taken: sweep" in log.read_text())
        store.start_node("n")
        assert "NOPERM" not in log.read_text() + (store.base_dir / "metadata.log").read_text()
    for port in cluster.ports:
        denied = [dict(zip(entry[::2], entry[1::2], strict=True)) for entry in cluster.call(port, "ACL", "LOG")]
        commands = {entry[b"object"] for entry in denied if entry[b"username"] == b"kvstore"}
        assert commands <= {b"config|get"}, "all others that the store runs are permitted"


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [("password", Unauthenticated, "rejects the user or the password"), ("ca", Unavailable, "certificate")],
)
def test_index_over_tls_wrong_setting_says_so(cluster: TlsCluster, tmp_path: Path, wrong: str, error: type, words: str) -> None:
    ca, password = cluster.ca, cluster.passwords["kvstore"]
    if wrong == "password":
        password = "wrong"
    else:
        ca = make_certificates(tmp_path / "other")
    address = ValkeyAddress(cluster.seeds, Credentials("kvstore", password), ssl.create_default_context(cafile=ca))
    with pytest.raises(error, match=words):
        ValkeyIndex.open(address)
    settings = settings_of(cluster, tmp_path, password, ca)
    with pytest.raises(Internal, match=words), LocalCluster([], tmp_path / "store", settings):
        pass


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        pytest.param("nothing", "answers", marks=pytest.mark.thorough),
        pytest.param("password", "rejects the user or the password", marks=pytest.mark.thorough),
        ("ca", "certificate that is not trusted"),
        ("scheme", "may require TLS"),
    ],
)
def test_doctor_over_tls_names_the_problem(cluster: TlsCluster, tmp_path: Path, wrong: str, words: str) -> None:
    ca = make_certificates(tmp_path / "other") if wrong == "ca" else None
    settings = dict(settings_of(cluster, tmp_path, "wrong" if wrong == "password" else None, ca))
    if wrong == "scheme":
        settings["engine"] = settings["engine"].replace("valkeys://", "valkey://")
        del settings["valkey_ca"]
    arguments = [word for name, value in settings.items() for word in ("--set", f"metadata.{name}={value}")]
    command = [*cli(), "doctor", "--dram", "16MiB", "-o", "json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, cwd=tmp_path)
    found = [one for one in json.loads(done.stdout)["findings"] if one["area"] == "index"]
    of_seed = [one for one in found if cluster.seeds[0] in one["message"]]
    assert any(words in one["message"] for one in of_seed), found
    if wrong != "nothing":
        assert {one["level"] for one in of_seed} == {"missing"}
