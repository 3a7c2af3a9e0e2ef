"""Errors that a new user of the SDK meets first say what to do."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvclient import CacheSpec, ClientOptions, KVClient
from kvstore.core.errors import InvalidArgument, KVStoreError, Unavailable, Unsupported
from kvstore.process.tls import TlsConfig

SPEC = CacheSpec(model="m", block_tokens=16, layers=2, layer_block_bytes=4096)
QUICK = ClientOptions(connect_deadline_s=2.0)


@pytest.fixture
def other() -> Iterator[str]:
    """A gRPC server without the services of a store."""
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def error_of(metadata: Any, spec: Any = SPEC, **arguments: Any) -> KVStoreError:
    with pytest.raises(KVStoreError) as failed:
        KVClient.connect(metadata, spec, **{"options": QUICK, **arguments})
    return failed.value


def test_connect_refused_names_default_port_and_command() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        error = error_of(address)
    assert isinstance(error, Unavailable)
    advice = "check its address (port 7400 by default) and that it runs; `kvstore up` starts a store on this machine"
    assert str(error) == f"cannot reach the metadata server at {address}: connection refused; {advice}"


def test_connect_tls_mismatch_names_argument(other: str) -> None:
    said = str(error_of(other, tls=TlsConfig()))
    assert "it does not speak TLS and TlsConfig is set; " in said
    assert said.endswith("if the server uses TLS, pass tls=TlsConfig(ca=...) to connect; if not, pass tls=None")


def test_connect_to_other_server_says_so(other: str) -> None:
    for error in (error_of(other), error_of(None, node=other)):
        assert isinstance(error, Unsupported)
        assert "it is a server of another kind or version; check its address" in str(error)


def test_connect_missing_node_says_why(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/node.sock"
    said = str(error_of(None, node=address))
    why = f"cannot reach the local node at {address}: nothing listens on {tmp_path}/node.sock; check that it runs"
    assert said == f'{why} (`kvstore status` lists nodes), or pass node="auto" to connect'


def test_connect_wrong_arguments_name_expected_ones() -> None:
    swapped = error_of(SPEC, "127.0.0.1:7400")
    assert isinstance(swapped, InvalidArgument)
    assert swapped.fields == {"argument": "metadata", "got": "CacheSpec", "expected": "str | None"}
    assert error_of("127.0.0.1:7400", {"model": "m"}).fields["expected"] == "CacheSpec"
    assert '"127.0.0.1:7400"' in str(error_of(None))


def test_store_without_node_and_closed_client_say_what_to_do(other: str) -> None:
    client = KVClient.connect(other, SPEC, node=None, options=ClientOptions(require_store=False, connect_deadline_s=2.0))
    keys = client.keys(np.arange(SPEC.block_tokens, dtype=np.uint32))
    blocks = np.zeros((1, SPEC.block_bytes), np.uint8)
    client.close()
    for result in (client.store(keys, blocks), client.load(keys, blocks)):
        assert str(result.error) == "the client is closed; make another one with KVClient.connect"
