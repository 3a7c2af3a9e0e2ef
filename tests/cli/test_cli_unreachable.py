"""Errors of commands and the client library for an unreachable metadata server: reason and advice."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from certificates import SERVER_NAME, CertificateFiles, make_certificates
from kvclient import CacheSpec, ClientOptions, KVClient
from kvstore.cli.app import root
from kvstore.core.errors import Unauthenticated, Unavailable
from kvstore.embedded.cluster import LocalCluster
from kvstore.process.tls import TlsConfig

SPEC = CacheSpec(model="m", block_tokens=16, layers=2, layer_block_bytes=4096)
TOKEN = "operators-token-1"


@dataclass(frozen=True)
class Secured:
    """Start a metadata server with mutual TLS and tokens, without nodes."""

    address: str
    ours: CertificateFiles
    theirs: CertificateFiles
    folder: Path

    def tls(self) -> dict[str, str]:
        files = {"tls.ca": str(self.ours.ca), "tls.cert": str(self.ours.cert), "tls.key": str(self.ours.key)}
        return {**files, "tls.server_name": SERVER_NAME}


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    ours, theirs = make_certificates(folder / "ours"), make_certificates(folder / "theirs")
    tokens = folder / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text(f"operator alice {TOKEN}\n")
    settings = [
        ("tls.ca", str(ours.ca)),
        ("tls.cert", str(ours.cert)),
        ("tls.key", str(ours.key)),
        ("tls.require_client_cert", "true"),
        ("tokens_file", str(tokens)),
    ]
    with LocalCluster([], folder / "data", metadata_settings=settings) as cluster:
        yield Secured(cluster.metadata_address, ours, theirs, folder)


def status(address: str, **settings: str) -> tuple[int, str]:
    given = [part for name, value in settings.items() for part in ("--set", f"client.{name}={value}")]
    done = CliRunner().invoke(root, ["status", "--metadata", address, *given])
    return done.exit_code, done.stderr


def test_status_plain_text_to_tls_names_the_setting(secured: Secured) -> None:
    code, said = status(secured.address)
    assert code == 1
    first = f"Error: cannot reach the metadata server at {secured.address}: it speaks TLS and [client.tls] is not set. "
    assert said.startswith(first)
    assert "kvstore up" not in said


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tls.ca": "theirs/ca.crt"}, "its certificate is not signed by [client.tls] ca {folder}/theirs/ca.crt"),
        ({"tls.cert": "", "tls.key": ""}, "it requires a client certificate ([client.tls] cert, key)"),
        (
            {"tls.server_name": "another"},
            "its certificate is for 'kvstore', expected 'another': set [client.tls] server_name",
        ),
    ],
    ids=["another authority", "no certificate", "another name"],
)
def test_status_wrong_tls_says_what_is_wrong(secured: Secured, change: dict[str, str], reason: str) -> None:
    settings = secured.tls()
    for name, value in change.items():
        settings[name] = str(secured.folder / value) if "/" in value else value
    code, said = status(secured.address, **{name: value for name, value in settings.items() if value})
    assert code == 1
    expected = f"cannot reach the metadata server at {secured.address}: {reason.format(folder=secured.folder)}. "
    assert said.startswith(f"Error: {expected}")


def test_status_closed_port_advises_to_look_there() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        code, said = status(address)
    assert code == 1
    assert said == (
        f"Error: cannot reach the metadata server at {address}: connection refused. "
        "Is it running there? `kvstore health metadata` on that host tells. Another address: --metadata HOST:PORT.\n"
    )


def test_status_token_refused_names_its_file(secured: Secured) -> None:
    def said(**settings: str) -> str:
        code, told = status(secured.address, **secured.tls(), **settings)
        assert code == 3, told
        return told.strip()

    at = f"the metadata server at {secured.address}"
    assert said() == f"Error: a token is required by {at} (client.token_file is not set)"
    file = secured.folder / "shown"
    file.touch(mode=0o600)
    file.write_text("a-token-of-nobodys")
    assert said(token_file=str(file)) == f"Error: the token in {file} is not known to {at}"


def test_status_malformed_token_file_says_what_was_found(secured: Secured) -> None:
    file = secured.folder / "short"
    file.touch(mode=0o600)
    file.write_text("abcd")
    code, said = status(secured.address, **secured.tls(), token_file=str(file))
    expected = f"Error: {file} holds no valid token: 16 to 512 ASCII characters without spaces, found 4\n"
    assert (code, said) == (1, expected)


def test_connect_unreachable_server_says_why(secured: Secured) -> None:
    options = ClientOptions(token=TOKEN, connect_deadline_s=5.0)
    with pytest.raises(Unavailable, match="it speaks TLS and TlsConfig is not set"):
        KVClient.connect(secured.address, SPEC, options=options)
    with pytest.raises(Unavailable, match=r"it requires a client certificate \(TlsConfig cert, key\)"):
        KVClient.connect(secured.address, SPEC, options=options, tls=TlsConfig(ca=secured.ours.ca, server_name=SERVER_NAME))
    ours = secured.ours.client()
    with pytest.raises(Unauthenticated, match="the token given is not known to the metadata server at"):
        KVClient.connect(secured.address, SPEC, options=ClientOptions(token="a-token-of-nobodys"), tls=ours)
    with pytest.raises(Unauthenticated, match=r"a token is required by the metadata server at .* is not set"):
        KVClient.connect(secured.address, SPEC, tls=ours)
    KVClient.connect(secured.address, SPEC, options=options, tls=ours).close()
