# ruff: noqa: N802  # handlers are named by gRPC
"""Errors, retries, TLS and limits over real sockets: a small service whose handlers follow instructions in the request."""

from __future__ import annotations

import asyncio
import datetime as dt
import functools
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from google.rpc import status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1 import metadata_pb2_grpc
from kvproto.v1.common_pb2 import ErrorDetail
from kvstore.core.errors import (
    CapacityExceeded,
    Conflict,
    DeadlineExceeded,
    ErrorKind,
    Internal,
    InvalidArgument,
    KVStoreError,
    Unavailable,
    Unsupported,
)
from kvstore.core.status import STATUS, make_error
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.process.tls import TlsConfig
from kvstore.rpc import server
from kvstore.rpc.auth.tokens import TokenSource
from kvstore.rpc.client import RetryPolicy, call, call_aio, connect, connect_aio
from kvstore.rpc.errors import DETAILS_KEY, from_rpc_error, to_status
from kvstore.rpc.server import BoundServer, build_aio_server

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:grpc")
SERVICE = "kvstore.v1.Metadata"


class Obedient(metadata_pb2_grpc.MetadataServicer):
    """Raise the error kind that the request's namespace names, or return a response."""

    def __init__(self) -> None:
        self.failures_left = 0
        self.calls = 0

    async def Lookup(self, request: pb.LookupRequest, context: object) -> pb.LookupResponse:
        self.calls += 1
        told = request.namespace_id.decode()
        if told == "bug":
            raise RuntimeError("secret insides")
        if told in ("gone", "other"):
            try:
                raise grpc.aio.InternalError('Failed "execute_batch"') if told == "gone" else RuntimeError("something else")
            except (grpc.aio.InternalError, RuntimeError):
                logging.getLogger("grpc._cython.cygrpc").exception("raised in core by servicer method")
        if told == "slow":
            await asyncio.Event().wait()
        if told == "flaky" and self.failures_left:
            self.failures_left -= 1
            raise Unavailable("not now")
        if told in set(ErrorKind):
            raise make_error(ErrorKind(told), "told to", {"name": "value", "long": "x" * 1000})
        return pb.LookupResponse(hit_blocks=len(request.keys))

    async def Publish(self, requests: AsyncIterator[pb.PublishRequest], context: object) -> AsyncIterator[pb.PublishResponse]:
        async for request in requests:
            if request.sequence == 13:
                raise Conflict("unlucky", got=13)
            if request.sequence == 14:
                raise RuntimeError("secret insides")
            yield pb.PublishResponse(sequence=request.sequence)


class Served:
    """A running server and how to talk to it."""

    def __init__(self, bound: BoundServer, service: Obedient, counters: Counters) -> None:
        self.bound, self.service, self.counters = bound, service, counters
        self.address = bound.addresses[0]


@asynccontextmanager
async def serve(address: str = "127.0.0.1:0", tls: TlsConfig | None = None, **options: int) -> AsyncIterator[Served]:
    service, counters = Obedient(), Counters()
    bound = await build_aio_server(
        [functools.partial(metadata_pb2_grpc.add_MetadataServicer_to_server, service)],
        addresses=[address],
        services=[SERVICE],
        counters=counters,
        tls=tls,
        **options,
    )
    await bound.start()
    try:
        yield Served(bound, service, counters)
    finally:
        await bound.stop(0)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serve() as running:
        yield running


@pytest.fixture
async def stub(served: Served) -> AsyncIterator[metadata_pb2_grpc.MetadataStub]:
    async with connect_aio(served.address) as channel:
        yield metadata_pb2_grpc.MetadataStub(channel)


def lookup(told: str, size: int = 0) -> pb.LookupRequest:
    return pb.LookupRequest(namespace_id=told.encode(), keys=bytes(size))


# ---- errors ----
@pytest.mark.parametrize("kind", ErrorKind)
async def test_error_kinds_arrive_as_class_with_fields(stub: metadata_pb2_grpc.MetadataStub, kind: ErrorKind) -> None:
    with pytest.raises(KVStoreError) as caught:
        await call_aio(stub.Lookup, lookup(kind), 5.0)
    assert caught.value.kind is kind
    assert type(caught.value) is type(make_error(kind, "", {}))
    assert caught.value.message == "told to"
    assert caught.value.fields["name"] == "value"
    assert len(caught.value.fields["long"]) < 1000
    failed = caught.value.__cause__
    assert isinstance(failed, grpc.aio.AioRpcError)
    assert failed.code().value[0] == STATUS[kind].grpc


async def test_handler_bug_is_counted_and_logged_without_details(
    served: Served, stub: metadata_pb2_grpc.MetadataStub, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(Internal) as caught:
        await call_aio(stub.Lookup, lookup("bug"), 5.0)
    assert "secret" not in str(caught.value)
    assert "secret insides" in caplog.text
    assert served.counters.snapshot() == {"rpc_unexpected_errors_total": 1, "rpc_errors_internal_total": 1}


@pytest.mark.parametrize(
    "method",
    [
        "/kvstore.v1.Metadata/Lookup",
        "/kvstore.v1.Metadata/WatchBlocks",
        "/kvstore.v1.Metadata/Publish",
        "/grpc.health.v1.Health/Check",
    ],
)
async def test_garbage_requests_are_invalid_counted_and_rarely_logged(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(server, "limited", LimitedLog(server.logger))
    async with grpc.aio.insecure_channel(served.address) as channel:
        for _ in range(20):
            if method.endswith("Publish"):
                answer = channel.stream_stream(method)(iter([b"\xff" * 40])).read()
            elif method.endswith("WatchBlocks"):
                answer = channel.unary_stream(method)(b"\xff" * 40).read()
            else:
                answer = channel.unary_unary(method)(b"\xff" * 40)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await answer
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert type(from_rpc_error(caught.value)) is InvalidArgument
    assert served.counters.snapshot() == {"rpc_unreadable_requests_total": 20, "rpc_errors_invalid_argument_total": 20}
    (said,) = caplog.records
    assert said.levelname == "WARNING"
    assert said.exc_info is None
    assert method.rpartition("/")[2] in said.getMessage()
    assert "request_bytes=40" in said.getMessage()


async def test_disconnected_callers_are_counted_without_tracebacks(
    served: Served, stub: metadata_pb2_grpc.MetadataStub, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC detects a disconnected caller within a window of microseconds, so a handler writes gRPC's log line instead."""
    with caplog.at_level(logging.INFO):
        await call_aio(stub.Lookup, lookup("gone"), 5.0)
        assert caplog.text == ""
        await call_aio(stub.Lookup, lookup("other"), 5.0)
    assert "something else" in caplog.text
    assert served.counters.snapshot() == {"rpc_callers_gone_total": 1}


@pytest.mark.parametrize(("sequence", "kind"), [(13, ErrorKind.CONFLICT), (14, ErrorKind.INTERNAL)])
async def test_stream_errors_arrive_after_responses(stub: metadata_pb2_grpc.MetadataStub, sequence: int, kind: ErrorKind) -> None:
    stream = stub.Publish(iter([pb.PublishRequest(sequence=1), pb.PublishRequest(sequence=sequence)]))
    assert (await stream.read()).sequence == 1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.read()
    assert from_rpc_error(caught.value).kind is kind


async def test_call_unknown_method_is_unsupported(served: Served) -> None:
    async with connect_aio(served.address) as channel:
        missing = channel.unary_unary("/kvstore.v1.Metadata/Nonsense")
        with pytest.raises(Unsupported):
            await call_aio(missing, b"", 5.0)


async def test_call_refused_is_unavailable_late_is_deadline(stub: metadata_pb2_grpc.MetadataStub) -> None:
    with pytest.raises(DeadlineExceeded):
        await call_aio(stub.Lookup, lookup("slow"), 0.05)
    async with connect_aio("127.0.0.1:1") as channel:
        with pytest.raises(Unavailable):
            await call_aio(metadata_pb2_grpc.MetadataStub(channel).Lookup, lookup(""), 5.0)


async def test_call_slow_connection_is_waited_for(served: Served) -> None:
    """Models a long network path, a TLS handshake, or a busy server."""
    host, _, port = served.address.rpartition(":")

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection(host, int(port))
        await asyncio.sleep(0.5)
        await asyncio.gather(pipe(reader, ours), pipe(theirs, writer))

    async def pipe(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65_536):
            sink.write(data)
            await sink.drain()
        sink.close()

    relay = await asyncio.start_server(slow, "127.0.0.1", 0)
    async with relay, connect_aio(f"127.0.0.1:{relay.sockets[0].getsockname()[1]}") as channel:
        answer = await call_aio(metadata_pb2_grpc.MetadataStub(channel).Lookup, lookup("hello"), 30.0)
        assert answer is not None
        await channel.close()


async def test_call_closed_channel_is_unavailable(served: Served) -> None:
    channel = connect_aio(served.address)
    stub = metadata_pb2_grpc.MetadataStub(channel)
    await channel.close()
    with pytest.raises(Unavailable):
        await call_aio(stub.Lookup, lookup(""), 5.0)
    sync_channel = connect(served.address)
    sync_stub = metadata_pb2_grpc.MetadataStub(sync_channel)
    sync_channel.close()
    with pytest.raises(Unavailable):
        call(sync_stub.Lookup, lookup(""), 5.0)


async def test_oversized_message_is_rejected_not_retryable() -> None:
    async with serve(max_message_bytes=1 << 16) as running, connect_aio(running.address) as channel:
        stub = metadata_pb2_grpc.MetadataStub(channel)
        assert (await call_aio(stub.Lookup, lookup("", 1 << 15), 5.0)).hit_blocks == 1 << 15
        with pytest.raises(InvalidArgument, match="larger than max"):
            await call_aio(stub.Lookup, lookup("", 1 << 17), 5.0)


class Failed:
    """A failed call with the given trailing metadata."""

    def __init__(self, code: grpc.StatusCode | None, metadata: object) -> None:
        self._code, self._metadata = code, metadata

    def code(self) -> grpc.StatusCode | None:
        return self._code

    def details(self) -> str | None:
        return None

    def trailing_metadata(self) -> object:
        return self._metadata


def newer_detail() -> bytes:
    status = status_pb2.Status(code=9)
    status.details.add().Pack(ErrorDetail(kind="a_kind_of_tomorrow", retryable=True))
    return status.SerializeToString()


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        (),
        ((DETAILS_KEY, b"\xff\xff garbage"),),
        ((DETAILS_KEY, status_pb2.Status(code=9).SerializeToString()),),
        ((DETAILS_KEY, newer_detail()),),
    ],
    ids=["no metadata", "no detail", "garbage", "empty status", "unknown kind"],
)
def test_error_without_detail_follows_status_code(metadata: object) -> None:
    assert from_rpc_error(Failed(grpc.StatusCode.FAILED_PRECONDITION, metadata)).kind is ErrorKind.LEASE_LOST
    assert from_rpc_error(Failed(None, metadata)).kind is ErrorKind.INTERNAL


def test_status_of_long_error_fits_into_trailing_metadata() -> None:
    fields = {f"name{i}\udc80" * 100: "é\ud800" * 1000 for i in range(1000)}
    assert len(to_status(make_error(ErrorKind.CONFLICT, "é" * 100_000, fields)).SerializeToString()) < 7000


# ---- retries ----
async def test_retryable_failures_are_retried_within_limits(served: Served, stub: metadata_pb2_grpc.MetadataStub) -> None:
    policy = RetryPolicy(attempts=3, first_backoff_s=0.001, max_backoff_s=0.002)
    served.service.failures_left = 2
    await call_aio(stub.Lookup, lookup("flaky"), 5.0, policy)
    assert served.service.calls == 3
    served.service.failures_left = 3
    with pytest.raises(Unavailable):
        await call_aio(stub.Lookup, lookup("flaky"), 5.0, policy)
    assert served.service.calls == 6
    with pytest.raises(CapacityExceeded):
        await call_aio(stub.Lookup, lookup("capacity_exceeded"), 5.0)
    assert served.service.calls == 7  # no retry policy
    with pytest.raises(InvalidArgument):
        await call_aio(stub.Lookup, lookup("invalid_argument"), 5.0, policy)
    assert served.service.calls == 8  # not retryable


async def test_synchronous_calls_retry_and_map_errors(served: Served) -> None:
    policy = RetryPolicy(attempts=2, first_backoff_s=0.001, max_backoff_s=0.001)
    with connect(served.address) as channel:
        stub = metadata_pb2_grpc.MetadataStub(channel)
        served.service.failures_left = 1
        answer = await asyncio.to_thread(call, stub.Lookup, lookup("flaky", 32), 5.0, policy)
        assert answer.hit_blocks == 32
        assert served.service.calls == 2
        with pytest.raises(Conflict):
            await asyncio.to_thread(call, stub.Lookup, lookup("conflict"), 5.0, policy)


async def test_backoff_never_exceeds_deadline(served: Served, stub: metadata_pb2_grpc.MetadataStub) -> None:
    served.service.failures_left = 9
    with pytest.raises(Unavailable):  # the failure itself, at once, rather than a wait that could not help
        await call_aio(stub.Lookup, lookup("flaky"), 5.0, RetryPolicy(attempts=9, first_backoff_s=60, max_backoff_s=60))
    assert served.service.calls == 1


@pytest.mark.parametrize("attempts", [0, -1])
def test_retry_policy_without_attempts_raises(attempts: int) -> None:
    with pytest.raises(InvalidArgument):
        RetryPolicy(attempts=attempts)


# ---- addresses, health, reflection, TLS ----
async def test_unix_sockets_work(tmp_path: Path) -> None:
    async with serve(f"unix:{tmp_path}/rpc.sock") as running, connect_aio(running.address) as channel:
        assert (await call_aio(metadata_pb2_grpc.MetadataStub(channel).Lookup, lookup("", 3), 5.0)).hit_blocks == 3


@pytest.mark.parametrize("address", ["", "nonsense", "127.0.0.1:99999", "unix:relative", "http://x:1", "a b:1", "x:1\n"])
def test_invalid_addresses_are_rejected(address: str) -> None:
    with pytest.raises(InvalidArgument):
        connect(address)


async def test_an_address_in_use_is_unavailable(served: Served) -> None:
    with pytest.raises(Unavailable, match=r"is in use; `kvstore status`|cannot listen on"):
        await serve(served.address).__aenter__()


async def test_health_serves_and_reflection_lists_service(served: Served) -> None:
    async with connect_aio(served.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await call_aio(health.Check, health_pb2.HealthCheckRequest(service=SERVICE), 5.0)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflected = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        async for found in reflected.ServerReflectionInfo(iter([request])):
            assert SERVICE in {service.name for service in found.list_services_response.service}


def make_certificate(folder: Path, name: str, issuer: tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None = None) -> tuple:  # type: ignore[type-arg]
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer[0].subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .sign(issuer[1] if issuer else key, hashes.SHA256())
    )
    (folder / f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / f"{name}.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return certificate, key


async def test_tls_and_client_certificates(tmp_path: Path) -> None:
    authority = make_certificate(tmp_path, "authority")
    make_certificate(tmp_path, "server", authority)
    make_certificate(tmp_path, "client", authority)
    ca = tmp_path / "authority.pem"
    identity = TlsConfig(ca, tmp_path / "server.pem", tmp_path / "server.key", require_client_cert=True)
    known = TlsConfig(ca, tmp_path / "client.pem", tmp_path / "client.key", server_name="server")
    strangers = (TlsConfig(ca, server_name="server"), None, TlsConfig(tmp_path / "client.pem", server_name="server"))
    async with serve(tls=identity) as running:
        async with connect_aio(running.address, tls=known) as channel:
            assert (await call_aio(metadata_pb2_grpc.MetadataStub(channel).Lookup, lookup("", 3), 5.0)).hit_blocks == 3
        for stranger in strangers:
            async with connect_aio(running.address, tls=stranger) as channel:
                with pytest.raises(Unavailable):
                    await call_aio(metadata_pb2_grpc.MetadataStub(channel).Lookup, lookup(""), 5.0)
        assert running.service.calls == 1


def test_unusable_tls_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="requires both"):
        TlsConfig(cert=tmp_path / "a.pem")
    with pytest.raises(InvalidArgument, match="cannot read"):
        connect("127.0.0.1:1", tls=TlsConfig(ca=tmp_path / "missing.pem"))


def test_channel_with_token_closed_meanwhile_raises() -> None:
    """gRPC's own interceptors end the process here."""
    channel = connect("127.0.0.1:1", token=TokenSource("a-token-of-some-length"), node_id="host-1")
    stub = health_pb2_grpc.HealthStub(channel)
    channel.close()
    with pytest.raises(Unavailable, match="the channel is closed"):
        call(stub.Check, health_pb2.HealthCheckRequest(), 1.0)
