"""A store with token files, as real processes: every method, every role, two tenants, every interface."""

from __future__ import annotations

import json
import secrets
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from click.testing import CliRunner
from google.protobuf import message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvclient import CacheSpec, ClientOptions, KVClient, list_namespaces
from kvclient.events import BlockWatcher
from kvproto.v1 import admin_pb2, admin_pb2_grpc, common_pb2, metadata_pb2, metadata_pb2_grpc, node_pb2, node_pb2_grpc
from kvstore.cli.app import root
from kvstore.core.errors import Internal, KVStoreError, LeaseLost, NotFound, PermissionDenied, Unauthenticated
from kvstore.core.types import Outcome, StoreOutcome
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.rpc.auth.interceptor import GRANTED, REQUIRED, Permission
from kvstore.rpc.auth.tokens import AccessRole, TokenSource
from kvstore.rpc.client import call, connect
from kvstore.rpc.codec import spec_to_proto
from support.client_parts import session_of
from support.wait import wait_until

WAIT_S = 30.0
CALL_S = 10.0
BLOCKS = 8
TOKENS = {role: f"the-token-of-{role.value}" for role in AccessRole}
ACME, OTHER = "the-token-of-tenant", "the-token-of-other-tenant"


def spec(tenant: str) -> CacheSpec:
    return CacheSpec(model="m", block_tokens=16, layers=2, layer_block_bytes=4096, tenant=tenant)


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


@dataclass
class Store:
    """Metadata server and two nodes; the second one's engines read from the first."""

    cluster: LocalCluster
    folder: Path

    def client(self, tenant: str, token: str, node: str | None = "a", **more: Any) -> KVClient:
        options = ClientOptions(token=token, **more)
        where = None if node is None else self.cluster.node(node).local_socket
        return KVClient.connect(self.cluster.metadata_address, spec(tenant), node=where, options=options)

    def channel(self, daemon: str, token: str = "") -> grpc.Channel:
        address = self.cluster.metadata_address if daemon == "metadata" else self.cluster.node(daemon).address
        return connect(address, token=TokenSource(token) if token else None)

    def command(self, *arguments: str, token: str = "", code: int = 0) -> str:
        given = [*arguments, "--metadata", self.cluster.metadata_address]
        if token:
            given += ["--set", f"client.token_file={written(self.folder / 'shown', token)}"]
        done = CliRunner().invoke(root, given)
        assert done.exit_code == code, (arguments, done.output, done.exception)
        return done.output


@contextmanager
def started(folder: Path) -> Iterator[Store]:
    """A store with a token for each role, and for a second tenant. At the end, its logs are searched for tokens."""
    lines = [f"{role.value} {'acme' if role is AccessRole.TENANT else 'some'} {token}" for role, token in TOKENS.items()]
    tokens = written(folder / "tokens", "\n".join([*lines, f"tenant other {OTHER}"]))
    shown = written(folder / "node-token", TOKENS[AccessRole.NODE])
    settings = (("tokens_file", str(tokens)), ("token_file", str(shown)))
    nodes = [NodeSpec(name, dram_bytes=16 << 20, nvme_bytes=32 << 20, settings=settings) for name in ("a", "b")]
    with LocalCluster(
        nodes, folder / "data", metadata_settings=[("tokens_file", str(tokens)), ("max_subscribers", "8")]
    ) as cluster:
        made = Store(cluster, folder)
        stub = metadata_pb2_grpc.MetadataStub(made.channel("metadata", TOKENS[AccessRole.OPERATOR]))
        wait_until(
            lambda: len(call(stub.ListNodes, metadata_pb2.ListNodesRequest(), CALL_S).nodes) == 2, "nodes show their token"
        )
        yield made
        for daemon in ("metadata", "a", "b"):
            assert "the-token-of" not in cluster.node(daemon).log_path.read_text(), "no log shows a token"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with started(tmp_path_factory.mktemp("store")) as made:
        yield made


@pytest.fixture
def own_store(tmp_path: Path) -> Iterator[Store]:
    """A store for one test, which may break it."""
    with started(tmp_path) as made:
        yield made


def refused(method: Any, request: Any) -> bool:
    try:
        call(method, request, CALL_S)
    except Unauthenticated:
        return True
    return False


def filled(client: KVClient, seed: int = 1) -> tuple[list[bytes], np.ndarray[Any, np.dtype[np.uint8]]]:
    draw = np.random.default_rng(seed)
    keys = list(client.keys(draw.integers(0, 1 << 32, BLOCKS * 16, np.uint32)))
    data = draw.integers(0, 256, (BLOCKS, client.spec.block_bytes), np.uint8)
    assert client.store(keys, data, wait_visible=True).held_blocks == BLOCKS
    return keys, data


DAEMONS = {"Metadata": "metadata", "MetadataAdmin": "metadata", "Node": "a", "NodeAdmin": "a"}
FILES = {"Metadata": metadata_pb2, "Node": node_pb2, "MetadataAdmin": admin_pb2, "NodeAdmin": admin_pb2}


def error_of(channel: grpc.Channel, method: str) -> KVStoreError | None:
    """Error of an empty request to a method; None: success."""
    service, name = method.rpartition(".")[2].split("/")
    found = FILES[service].DESCRIPTOR.services_by_name[service].methods_by_name[name]
    asked, answer = (message_factory.GetMessageClass(one) for one in (found.input_type, found.output_type))
    codec = {"request_serializer": asked.SerializeToString, "response_deserializer": answer.FromString}
    kinds = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, True): channel.stream_stream,
    }
    made = kinds[found.client_streaming, found.server_streaming](method, **codec)
    given: Any = iter([asked()]) if found.client_streaming else asked()

    def run(_request: object, timeout: float | None = None, **more: Any) -> Any:
        answered = made(given, timeout=timeout, **more)
        return next(iter(answered), None) if found.server_streaming else answered

    try:
        call(run, given, CALL_S)
    except KVStoreError as error:
        return error
    return None


OURS = sorted(method for method in REQUIRED if method.startswith("/kvstore."))


def test_calls_without_token_are_rejected(store: Store) -> None:
    for token in ("", "a-token-that-nobody-has"):
        channels = {daemon: store.channel(daemon, token) for daemon in ("metadata", "a")}
        for method in OURS:
            service = method.rpartition(".")[2].split("/")[0]
            assert isinstance(error_of(channels[DAEMONS[service]], method), Unauthenticated), (method, token)
        for channel in channels.values():
            health = health_pb2_grpc.HealthStub(channel)
            assert call(health.Check, health_pb2.HealthCheckRequest(), CALL_S).status, "health checks need no token"
            with pytest.raises(grpc.RpcError) as watching:
                next(iter(health.Watch(health_pb2.HealthCheckRequest(), timeout=CALL_S)))
            assert watching.value.code() is grpc.StatusCode.UNAUTHENTICATED, "Watch needs a token"


def test_rejected_requests_are_not_parsed(store: Store) -> None:
    """An unparsable request is rejected for its token; a server that parses first returns another error."""
    for method in ("/kvstore.v1.Metadata/Lookup", "/kvstore.v1.Metadata/WatchBlocks"):
        streams = method.endswith("WatchBlocks")
        channel = store.channel("metadata")
        made = channel.unary_stream(method) if streams else channel.unary_unary(method)
        with pytest.raises(grpc.RpcError) as refusal:
            list(made(b"\xff" * 64, timeout=CALL_S))
        assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("role", list(AccessRole))
def test_roles_reach_methods_of_the_mapping(store: Store, role: AccessRole) -> None:
    """Requests are empty, so most admitted ones are rejected as malformed. Disruptive requests are not sent."""
    channels = {daemon: store.channel(daemon, TOKENS[role]) for daemon in ("metadata", "a")}
    for method in OURS:
        service, name = method.rpartition(".")[2].split("/")
        reaches = REQUIRED[method] in GRANTED[role] or (
            role is AccessRole.READ and name in {"ListNamespaces", "ListNodes", "GetNode"}
        )
        if reaches and (REQUIRED[method] is Permission.CHANGE or name in {"WatchBlocks", "Publish", "AwaitPrompt", "Flush"}):
            continue
        error = error_of(channels[DAEMONS[service]], method)
        if reaches:
            assert not isinstance(error, Unauthenticated), method
            assert not isinstance(error, Internal), (method, error)
            assert error is None or "requires the role" not in str(error), method
        else:
            assert isinstance(error, PermissionDenied), (method, error)


def test_tenant_engine_stores_and_loads(store: Store) -> None:
    with store.client("acme", ACME) as engine, store.client("acme", ACME, node="b") as far:
        keys, data = filled(engine)
        out = np.zeros_like(data)
        wait_until(lambda: far.lookup(keys).hit_blocks == BLOCKS, "it is published")
        assert engine.load(engine.lookup(keys), out).hit_blocks == BLOCKS
        assert np.array_equal(out, data)
        out[:] = 0
        loaded = far.load(far.lookup(keys), out)  # node b fetches from node a, with a ticket that its own token brings
        assert loaded.hit_blocks == BLOCKS, loaded.error
        assert np.array_equal(out, data)
    with store.client("acme", ACME, node=None) as remote:  # over the data plane, tickets by its own token
        out[:] = 0
        assert remote.load(remote.lookup(keys), out).hit_blocks == BLOCKS
        assert np.array_equal(out, data)
    with store.client("", TOKENS[AccessRole.ENGINE]) as engine:
        filled(engine, 2)


def test_other_tenant_is_denied_on_every_interface(store: Store) -> None:
    mine = spec("acme")
    with store.client("acme", ACME) as engine:
        keys, _ = filled(engine, 3)
        packed = b"".join(keys)
        session = session_of(engine)
        metadata = metadata_pb2_grpc.MetadataStub(store.channel("metadata", OTHER))
        node = node_pb2_grpc.NodeStub(store.channel("a", OTHER))
        operation = secrets.token_bytes(16)
        asked: list[tuple[Any, Any]] = [
            (metadata.RegisterNamespace, metadata_pb2.RegisterNamespaceRequest(operation_id=operation, spec=spec_to_proto(mine))),
            (metadata.Lookup, metadata_pb2.LookupRequest(namespace_id=mine.namespace, keys=packed)),
            (metadata.LookupHeads, metadata_pb2.LookupHeadsRequest(namespace_id=mine.namespace, keys=packed)),
            (metadata.LocateBlocks, metadata_pb2.LocateBlocksRequest(namespace_id=mine.namespace, keys=packed)),
            (node.IssueTicket, node_pb2.IssueTicketRequest(spec=spec_to_proto(mine))),
            (node.OpenSession, node_pb2.OpenSessionRequest(client_name="x", spec=spec_to_proto(mine), remote=True)),
        ]
        sid = session.session_id
        asked += [
            (node.Complete, node_pb2.CompleteRequest(session_id=sid, operation_id=operation, keys=packed)),
            (node.Abort, node_pb2.AbortRequest(session_id=sid, operation_id=operation)),
            (node.Locate, node_pb2.LocateRequest(session_id=sid, keys=packed)),
            (node.Release, node_pb2.ReleaseRequest(session_id=sid, lease_ids=[1])),
            (node.Prepare, node_pb2.PrepareRequest(session_id=sid, operation_id=operation)),
            (node.Flush, node_pb2.FlushRequest(session_id=sid, keys=packed)),
        ]
        for method, request in asked:
            with pytest.raises(PermissionDenied):
                call(method, request, CALL_S)
        for stream, request in (
            (node.Load, node_pb2.LoadRequest(session_id=sid, keys=packed)),
            (node.AwaitPrompt, node_pb2.AwaitPromptRequest(session_id=sid, operation_id=operation, keys=packed)),
            (metadata.WatchBlocks, metadata_pb2.WatchBlocksRequest(namespace_ids=[mine.namespace])),
            (metadata.WatchBlocks, metadata_pb2.WatchBlocksRequest()),
        ):
            with pytest.raises(PermissionDenied):
                call(
                    lambda request, timeout=None, stream=stream, **_: next(iter(stream(request, timeout=timeout))),
                    request,
                    CALL_S,
                )
        with pytest.raises(NotFound):
            call(metadata.Lookup, metadata_pb2.LookupRequest(namespace_id=b"x" * 16, keys=packed), CALL_S)
        assert engine.lookup(keys).hit_blocks == BLOCKS
    address = store.cluster.metadata_address
    assert {one.tenant for one in list_namespaces(address, token=TokenSource(OTHER))} <= {"other"}
    assert "acme" in {one.tenant for one in list_namespaces(address, token=TokenSource(TOKENS[AccessRole.READ]))}
    with store.client("other", OTHER) as engine:
        filled(engine, 3)
    with BlockWatcher(address, namespaces=[spec("other").namespace], token=TokenSource(OTHER)) as watcher:
        watcher.wait_complete(WAIT_S)


def test_tenant_cannot_publish_old_bytes_of_others(store: Store) -> None:
    """Slots are not cleared: a tenant that gets slots without writing them could read other tenants' bytes."""
    with store.client("acme", ACME) as engine:
        keys, _ = filled(engine, 4)
        ours, operation = spec("other"), secrets.token_bytes(16)
        node = node_pb2_grpc.NodeStub(store.channel("a", OTHER))
        for remote in (False, True):
            asked = node_pb2.OpenSessionRequest(client_name="thief", spec=spec_to_proto(ours), remote=remote)
            session = call(node.OpenSession, asked, CALL_S).session_id
            run = common_pb2.BlockRun(namespace_id=ours.namespace, keys=secrets.token_bytes(16))
            with pytest.raises(PermissionDenied, match="arena"):
                call(node.Prepare, node_pb2.PrepareRequest(session_id=session, operation_id=operation, blocks=run), CALL_S)
            sums = bytes(8 * ours.layers)
            done = node_pb2.CompleteRequest(session_id=session, operation_id=operation, keys=run.keys, checksums=sums)
            assert list(call(node.Complete, done, CALL_S).outcomes) == [StoreOutcome.LOST]
        assert engine.lookup(keys).hit_blocks == BLOCKS


def test_tenant_subscriptions_are_limited_to_its_share(store: Store) -> None:
    request = metadata_pb2.WatchBlocksRequest(namespace_ids=[spec("other").namespace])

    def watch(token: str) -> Any:
        stream = metadata_pb2_grpc.MetadataStub(store.channel("metadata", token)).WatchBlocks(request, timeout=WAIT_S)
        next(stream)
        return stream

    def again() -> bool:
        with suppress(grpc.RpcError):
            held.append(watch(OTHER))
            return True
        return False

    with store.client("other", OTHER):
        held = [watch(OTHER), watch(OTHER)]
        with pytest.raises(grpc.RpcError, match="tenant limit"):
            watch(OTHER)
        held += [watch(TOKENS[AccessRole.ENGINE]) for _ in range(3)]
        held.pop(0).cancel()
        wait_until(again, "its place is free again")
        for stream in held:
            stream.cancel()


def test_tenant_flushes_only_its_blocks(store: Store) -> None:
    with store.client("acme", ACME) as engine, store.client("other", OTHER) as other:
        filled(engine, 6)
        assert engine.flush(CALL_S)
        answers = {
            token: call(node_pb2_grpc.NodeStub(store.channel("a", token)).Flush, node_pb2.FlushRequest(timeout_ms=1_000), CALL_S)
            for token in (OTHER, TOKENS[AccessRole.ENGINE])
        }
        assert answers[OTHER].complete
        assert answers[OTHER].durable_blocks == 0, "other tenants' blocks are not counted"
        assert answers[TOKENS[AccessRole.ENGINE]].durable_blocks >= BLOCKS
        assert other.flush(CALL_S)


def test_rejected_client_misses_and_reports(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """The client raises no error: every block is a miss, counted and logged; the token is not logged."""
    for tenant, token in (("acme", OTHER), ("acme", "a-token-that-nobody-has"), ("acme", "")):
        with store.client(tenant, token, require_store=False, log_interval_s=0.0) as client:
            keys = list(client.keys(np.arange(BLOCKS * 16, dtype=np.uint32)))
            buffer = np.zeros((BLOCKS, client.spec.block_bytes), np.uint8)
            assert client.lookup(keys).hit_blocks == 0
            loaded = client.load(keys, buffer)
            assert loaded.hit_blocks == 0
            assert Outcome.HIT not in loaded.outcomes
            assert client.store(keys, buffer).held_blocks == 0
            assert client.stats()["client_connect_failed_total"] >= 1
        with pytest.raises((PermissionDenied, Unauthenticated)):
            store.client(tenant, token)
    assert "belongs to another tenant" in caplog.text
    assert "that-nobody-has" not in caplog.text
    assert OTHER not in caplog.text


def test_node_token_is_sent_to_nodes_only(store: Store) -> None:
    """If a tenant names its server as a source, the node does not send its token there."""
    seen: list[Any] = []

    class Thief(node_pb2_grpc.NodeServicer):
        def IssueTicket(self, request: Any, context: Any) -> Any:  # noqa: N802
            seen.append(context.invocation_metadata())
            context.abort(grpc.StatusCode.NOT_FOUND, "no")

    server = grpc.server(ThreadPoolExecutor(2))
    node_pb2_grpc.add_NodeServicer_to_server(Thief(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with store.client("acme", ACME) as engine:
            session = session_of(engine)
            stub = node_pb2_grpc.NodeStub(connect(store.cluster.node("a").local_socket, token=TokenSource(ACME)))
            source = node_pb2.LoadSource(
                start=0, count=1, node_id="b", control_address=f"127.0.0.1:{port}", data_address=f"127.0.0.1:{port}"
            )
            request = node_pb2.LoadRequest(session_id=session.session_id, keys=secrets.token_bytes(16), sources=[source])
            answers = list(stub.Load(request, timeout=CALL_S))
            assert [run.outcome for answer in answers for run in answer.runs] == [Outcome.UNAVAILABLE]
    finally:
        server.stop(None)
    assert seen == []
    assert "no node of this store has this address" in store.cluster.node("a").log_path.read_text()


def test_operator_token_is_not_sent_to_false_nodes(store: Store) -> None:
    """The store has a token with role read, because requests about nodes are sent to the addresses that nodes registered."""
    seen: list[str] = []

    class Thief(grpc.GenericRpcHandler):
        def service(self, handler_call_details: Any) -> None:
            seen.extend(value for name, value in handler_call_details.invocation_metadata if name == "authorization")

    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers([Thief()])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    metadata = metadata_pb2_grpc.MetadataStub(store.channel("metadata", TOKENS[AccessRole.NODE]))
    rogue = common_pb2.NodeInfo(node_id="rogue", boot_id=b"r" * 16, control_address=address, data_address=address)
    reads = written(store.folder / "reads", TOKENS[AccessRole.READ])
    shown = written(store.folder / "operates", TOKENS[AccessRole.OPERATOR])
    given = ("--set", f"client.token_file={shown}", "--set", f"client.read_token_file={reads}")
    try:
        call(metadata.RegisterNode, metadata_pb2.RegisterNodeRequest(operation_id=b"o" * 16, node=rogue), CALL_S)
        admin = store.cluster.start_admin(arguments=given).address

        def asked() -> bool:
            call(metadata.Heartbeat, metadata_pb2.HeartbeatRequest(node_id="rogue", boot_id=rogue.boot_id), CALL_S)
            with urllib.request.urlopen(f"http://{admin}/v1/overview", timeout=WAIT_S) as answer:
                assert {one["node_id"] for one in json.loads(answer.read())["activity"]} >= {"a", "b"}
            return bool(seen)

        wait_until(asked, "the rogue was asked, too")
        assert set(seen) == {f"Bearer {TOKENS[AccessRole.READ]}"}
        check = urllib.request.Request(f"http://{admin}/v1/volumes/a/nvme0/check", b"{}", {"content-type": "application/json"})
        with urllib.request.urlopen(check, timeout=WAIT_S) as answer:
            assert answer.status in (200, 202), "what changes something takes the operator's"
    finally:
        store.cluster.stop("admin")
        operator = metadata_pb2_grpc.MetadataStub(store.channel("metadata", TOKENS[AccessRole.OPERATOR]))
        gone = metadata_pb2.RemoveNodeRequest(operation_id=b"o" * 16, node_id="rogue", force=True)
        call(operator.RemoveNode, gone, CALL_S)
        server.stop(None)


def test_session_of_earlier_server_is_lost_not_denied(store: Store) -> None:
    stub = node_pb2_grpc.NodeStub(store.channel("a", ACME))
    with pytest.raises(LeaseLost):
        call(stub.Release, node_pb2.ReleaseRequest(session_id=b"s" * 16), CALL_S)


def test_restarted_node_learns_tenants_of_its_blocks(store: Store) -> None:
    """No client opens the namespace there again, so only the metadata server knows the tenant."""
    with store.client("acme", ACME) as engine:
        filled(engine, 5)
        assert engine.flush(WAIT_S)
    store.cluster.kill("a")
    store.cluster.start_node("a")
    stub = admin_pb2_grpc.NodeAdminStub(store.channel("a", TOKENS[AccessRole.OPERATOR]))

    def known() -> bool:
        volumes = call(stub.DescribeNode, admin_pb2.DescribeNodeRequest(), CALL_S).volumes
        whose = {(one.tenant, one.unknown) for volume in volumes for one in volume.tenants if one.nvme_bytes}
        return ("acme", False) in whose and not any(nobodys for _, nobodys in whose)

    wait_until(known, "node a knows the tenant of each block")


def test_commands_and_admin_server_send_token(store: Store) -> None:
    assert "token" in store.command("nodes", code=3)
    assert "a" in store.command("nodes", token=TOKENS[AccessRole.READ])
    store.command("nodes", "drain", "b", token=TOKENS[AccessRole.READ], code=3)
    assert "b" in store.command("volumes", "check", "b/nvme0", "--wait", token=TOKENS[AccessRole.OPERATOR])
    shown = written(store.folder / "admin-token", TOKENS[AccessRole.OPERATOR])
    address = store.cluster.start_admin(arguments=("--set", f"client.token_file={shown}")).address
    with urllib.request.urlopen(f"http://{address}/v1/overview", timeout=WAIT_S) as answer:
        told = json.loads(answer.read())
    assert [one["node_id"] for one in told["activity"]] == ["a", "b"], "nodes are asked with it, too"
    store.cluster.stop("admin")


def test_tokens_change_without_restart(own_store: Store) -> None:
    file = own_store.folder / "tokens"
    lines = file.read_text().splitlines()
    fresh = "the-token-of-acme-tomorrow"
    with own_store.client("acme", ACME) as engine:
        keys, _ = filled(engine, 9)
        assert engine.lookup(keys).hit_blocks == BLOCKS
        written(
            own_store.folder / "tokens.new", "\n".join([one for one in lines if ACME not in one] + [f"tenant acme {fresh}"])
        ).replace(file)
        wait_until(lambda: engine.lookup(keys).hit_blocks == 0, "the old token is rejected")
    node = node_pb2_grpc.NodeStub(own_store.channel("a", fresh))
    wait_until(lambda: not refused(node.GetNode, node_pb2.GetNodeRequest()), "the node has read the new one")
    with own_store.client("acme", fresh) as engine:
        assert engine.lookup(keys).hit_blocks == BLOCKS
