"""Calls to several metadata servers over real sockets: repetition, execution at most once, streams, DNS, all away."""

from __future__ import annotations

import asyncio
import logging
import queue
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from scripted_server import ScriptedServer, answer, forward, hang, lose_connection, reject, say_unavailable, send_elsewhere

from kvproto.v1 import admin_pb2, metadata_pb2
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import common as common_metrics
from kvstore.process.tls import TlsConfig
from kvstore.rpc.client import connect
from kvstore.rpc.failover import selection
from kvstore.rpc.failover.addresses import MetadataAddresses
from kvstore.rpc.failover.aio_channel import AioFailoverChannel
from kvstore.rpc.failover.channel import FailoverChannel
from kvstore.rpc.failover.connect import connect_metadata, connect_metadata_aio
from kvstore.rpc.failover.rpc_rules import RULES, Repetition, rule_of
from kvstore.rpc.failover.selection import CallPlacement, Condition, Failure, ranked
from kvstore.rpc.failover.servers import MetadataServers
from kvstore.rpc.health_probe import HealthProbe
from support.wait import wait_until

LOOKUP = "/kvstore.v1.Metadata/Lookup"
REGISTER = "/kvstore.v1.Metadata/RegisterNode"
PLAN = "/kvstore.v1.Metadata/PlanLoad"
ASSIGN = "/kvstore.v1.Metadata/AssignRequest"
PUBLISH = "/kvstore.v1.Metadata/Publish"
UNARY = sorted(name for name, rule in RULES.items() if rule.repetition is not Repetition.STREAM and "health" not in name)
REPAIR = "/kvstore.v1.Metadata/RepairRanges"
TIMEOUT_S = 10.0


class Pair:
    """Two servers and a channel to both."""

    def __init__(self, *, shares_state: bool | None = None) -> None:
        self.servers = [ScriptedServer(shares_state=shares_state) for _ in range(2)]
        self.counters = Counters()
        self.channel = connect_metadata(
            ",".join(server.address for server in self.servers), caller="engine-0", counters=self.counters
        )
        assert isinstance(self.channel, FailoverChannel)

    def preferred(self, method: str) -> tuple[ScriptedServer, ScriptedServer]:
        """The server in use for a method, and the other one."""
        servers = self.channel.servers  # type: ignore[attr-defined]
        servers.wait_ready(rule_of(method).placement, TIMEOUT_S)  # else the question would be under way when a server is stopped
        route = servers.pick(rule_of(method).placement)
        assert route is not None
        first = next(server for server in self.servers if server.address == route.address)
        return first, next(server for server in self.servers if server is not first)

    def call(self, method: str, timeout_s: float = TIMEOUT_S, **more: object) -> str:
        """Call a method and return the address of the server that answered."""
        made: Any = self.channel.unary_unary(method)
        return bytes(made(b"", timeout=timeout_s, **more)).decode()

    def condition(self, server: ScriptedServer) -> str:
        states = self.channel.servers.states()  # type: ignore[attr-defined]
        return next(state.condition for state in states if state.address == server.address)

    def close(self) -> None:
        self.channel.close()
        for server in self.servers:
            server.stop()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def has_connections(address: str) -> bool:
    """Whether a socket of this host is connected to a port, or has not yet closed a connection that ended there."""
    port = f":{int(address.rpartition(':')[2]):04X}"
    connections = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(remote.endswith(port) and state in {"01", "08"} for _, _, remote, state, *_ in connections)


def code_of(call: Callable[[], object]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as failed:
        call()
    code: grpc.StatusCode = failed.value.code()
    return code


# ---- the table
def test_rules_name_every_rpc_of_the_metadata_server() -> None:
    services = [metadata_pb2.DESCRIPTOR.services_by_name["Metadata"], admin_pb2.DESCRIPTOR.services_by_name["MetadataAdmin"]]
    methods = {f"/{service.full_name}/{method.name}": method for service in services for method in service.methods}
    assert set(RULES) - {"/grpc.health.v1.Health/Check"} == set(methods)
    assert {name for name, rule in RULES.items() if rule.repetition is Repetition.STREAM} == {
        name for name, method in methods.items() if method.server_streaming
    }
    assert rule_of("/kvstore.v1.Metadata/Unknown").repetition is Repetition.ONCE


@pytest.mark.parametrize("method", UNARY)
def test_call_connection_lost_is_repeated_if_its_rule_allows(pair: Pair, method: str) -> None:
    first, second = pair.preferred(method)
    first.behaviour = lose_connection
    name = method.rpartition("/")[2]
    if RULES[method].repetition is Repetition.REPEAT:
        assert pair.call(method) == second.address
        assert (first.calls[name], second.calls[name]) == (1, 1)
    else:
        assert code_of(lambda: pair.call(method)) is grpc.StatusCode.UNAVAILABLE
        assert (first.calls[name], second.calls[name]) == (1, 0)
        assert pair.call(method) == second.address


@pytest.mark.parametrize("method", UNARY)
def test_call_refused_is_executed_once_on_next_server(pair: Pair, method: str) -> None:
    first, second = pair.preferred(method)
    first.stop()
    # else a call may be written to the connection while it breaks, and only its rule says whether it is repeated
    wait_until(lambda: not has_connections(first.address), "the client has closed its connections")
    assert pair.call(method) == second.address
    assert second.calls[method.rpartition("/")[2]] == 1
    assert pair.counters.get(common_metrics.FAILOVER_SERVERS_LOST) == 1
    assert pair.counters.get(common_metrics.FAILOVER_CHANGES) == 1


# ---- servers that share their whole state
def sharing_pair(*, told: bool = True) -> Pair:
    """Two servers that share their state; the caller's own server is not the common one. ``told``: they say so at once."""
    while True:
        pair = Pair(shares_state=told)
        addresses = [server.address for server in pair.servers]
        if ranked(addresses, "engine-0") != ranked(addresses, ""):
            return pair
        pair.close()


def own_server(pair: Pair) -> str:
    return ranked([server.address for server in pair.servers], "engine-0")[0]


def test_changes_with_shared_state_go_to_server_of_caller() -> None:
    with closing(sharing_pair()) as pair:
        assert [pair.call(REGISTER), pair.call(LOOKUP), pair.call(PLAN)] == [own_server(pair)] * 3
        assert pair.counters.get(common_metrics.FAILOVER_CHANGES) == 0


@pytest.mark.parametrize("timeout_s", [0.9, TIMEOUT_S])
def test_plan_forwarded_next_one_goes_straight_to_planner(timeout_s: float) -> None:
    with closing(sharing_pair()) as pair:
        first, second = pair.preferred(PLAN)
        first.behaviour = forward
        assert [pair.call(PLAN, timeout_s) for _ in range(3)] == [first.address, second.address, second.address]
        assert pair.call(REGISTER) == first.address
        first.behaviour, second.behaviour = answer, forward  # the role has moved
        assert [pair.call(PLAN, timeout_s) for _ in range(3)] == [second.address, first.address, first.address]
        first.stop()
        assert pair.call(PLAN, timeout_s) == second.address


def test_stream_moves_once_servers_say_that_they_share_state() -> None:
    with closing(sharing_pair(told=False)) as pair:
        common = pair.preferred(PUBLISH)[0]
        requests = Requests()
        stream = stream_of(pair, requests)
        requests.send()
        assert next(stream) == common.address.encode() != own_server(pair).encode()
        for server in pair.servers:
            server.say_shared(True)
        assert code_of(lambda: next(stream)) is grpc.StatusCode.UNAVAILABLE
        assert pair.call(REGISTER) == own_server(pair)
        assert pair.counters.get(common_metrics.FAILOVER_CHANGES) == 0


def test_aio_plan_forwarded_next_one_goes_straight_to_planner() -> None:
    async def use(channel: AioFailoverChannel, servers: list[ScriptedServer]) -> None:
        first, second = servers
        first.behaviour = forward
        assert [await call_over(channel, PLAN) for _ in range(3)] == [first.address, second.address, second.address]

    aio(use, shares_state=True)


# ---- unary calls
def test_call_answered_unavailable_is_repeated_server_stays(pair: Pair) -> None:
    first, second = pair.preferred(LOOKUP)
    first.behaviour = say_unavailable
    assert pair.call(LOOKUP) == second.address
    assert pair.condition(first) == "usable"


def test_call_once_not_executed_is_repeated_server_stays(pair: Pair) -> None:
    first, second = pair.preferred(REPAIR)
    first.behaviour = reject
    assert pair.call(REPAIR) == second.address
    assert pair.condition(first) == "usable"


def test_call_sent_elsewhere_leaves_the_server_for_a_while(pair: Pair) -> None:
    first, second = pair.preferred(LOOKUP)
    first.behaviour = send_elsewhere
    assert [pair.call(LOOKUP) for _ in range(3)] == [second.address] * 3
    assert first.calls["Lookup"] == 1, "later calls go to the other server at once"


def test_servers_that_all_refuse_calls_log_one_change(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """They answer probes, so each call goes to all of them."""
    monkeypatch.setattr("kvstore.rpc.failover.servers.LimitedLog", partial(LimitedLog, interval_s=3_600.0))
    with closing(Pair()) as pair:
        pair.preferred(LOOKUP)
        for server in pair.servers:
            server.behaviour = send_elsewhere

        def call() -> None:
            assert code_of(lambda: pair.call(LOOKUP)) is grpc.StatusCode.UNAVAILABLE

        with caplog.at_level(logging.WARNING, "kvstore.rpc.failover.servers"):
            wait_until(lambda: pair.counters.get(common_metrics.FAILOVER_CHANGES) >= 6, step=call)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["metadata server changed"]


def test_call_timed_out_is_repeated_within_its_deadline(pair: Pair) -> None:
    first, second = pair.preferred(LOOKUP)
    first.behaviour = hang
    assert [pair.call(LOOKUP, 0.4) for _ in range(4)] == [second.address] * 4
    assert first.calls["Lookup"] == 3  # then its breaker is open


def test_call_once_timed_out_is_not_repeated(pair: Pair) -> None:
    first, second = pair.preferred(PLAN)
    first.behaviour = hang
    assert code_of(lambda: pair.call(PLAN, 0.2)) is grpc.StatusCode.DEADLINE_EXCEEDED
    assert second.calls["PlanLoad"] == 0


def test_call_that_waits_times_out_without_a_verdict(pair: Pair) -> None:
    first, _ = pair.preferred(ASSIGN)
    first.behaviour = hang
    for _ in range(4):
        assert code_of(lambda: pair.call(ASSIGN, 0.05)) is grpc.StatusCode.DEADLINE_EXCEEDED
    assert pair.condition(first) == "usable"


def test_calls_both_away_fail_at_once_and_go_on_later(pair: Pair) -> None:
    for server in pair.servers:
        server.stop()
    with pytest.raises(grpc.RpcError, match=r"failed to connect|no metadata server answers"):
        pair.call(LOOKUP)
    began_s = time.monotonic()
    for _ in range(50):
        assert code_of(lambda: pair.call(LOOKUP)) is grpc.StatusCode.UNAVAILABLE
    assert time.monotonic() - began_s < TIMEOUT_S / 2
    assert pair.counters.get(common_metrics.FAILOVER_CALLS_REFUSED) >= 50
    threading.Timer(0.2, pair.servers[1].start).start()
    assert pair.call(LOOKUP, wait_for_ready=True) == pair.servers[1].address


def test_last_server_lost_first_one_is_probed_at_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "PROBE_FIRST_S", 60.0)
    monkeypatch.setattr(selection, "PROBE_MAX_S", 60.0)
    first, second = pair.preferred(LOOKUP)
    first.stop()
    assert pair.call(LOOKUP) == second.address
    wait_until(lambda: pair.channel.servers.probes_waiting == 1, "the first probe failed")  # type: ignore[attr-defined]
    first.start()
    second.stop()
    with pytest.raises(grpc.RpcError):
        pair.call(LOOKUP)
    assert pair.call(LOOKUP, wait_for_ready=True) == first.address


def test_servers_lost_without_threads_are_found_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    channel, start = cast("FailoverChannel", pair.channel), threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if isinstance(thread, threading.Timer) or thread.name == "kvstore-probe":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as exhausted:
        exhausted.setattr(threading.Thread, "start", refuse)
        for server in pair.servers:
            server.stop()
        with pytest.raises(grpc.RpcError):
            pair.call(LOOKUP)
        wait_until(lambda: channel.servers.probes_waiting == 2, "both servers wait for the next call")
    for server in pair.servers:
        server.start()
    wait_until(lambda: channel.servers.pick(CallPlacement.SPREAD) is not None, "calls probe the servers")
    assert pair.call(LOOKUP) in [server.address for server in pair.servers]


def test_call_wait_for_ready_ends_at_its_deadline(pair: Pair) -> None:
    for server in pair.servers:
        server.stop()
    code_of(lambda: pair.call(LOOKUP))
    assert code_of(lambda: pair.call(LOOKUP, 0.3, wait_for_ready=True)) is grpc.StatusCode.UNAVAILABLE


def test_future_goes_to_the_server_in_use(pair: Pair) -> None:
    first, second = pair.preferred(LOOKUP)
    made: Any = pair.channel.unary_unary(LOOKUP)
    assert made.future(b"", timeout=TIMEOUT_S).result() == first.address.encode()
    first.stop()
    with pytest.raises(grpc.RpcError):
        made.future(b"", timeout=TIMEOUT_S).result()
    wait_until(lambda: pair.condition(first) == "away")
    assert made.future(b"", timeout=TIMEOUT_S).result() == second.address.encode()


def test_closed_channel_refuses_calls(pair: Pair) -> None:
    pair.channel.close()
    with pytest.raises(ValueError, match="closed"):
        pair.call(LOOKUP)


def test_single_address_is_an_ordinary_channel() -> None:
    with connect_metadata("127.0.0.1:7400") as channel:
        assert not isinstance(channel, FailoverChannel)


# ---- streams
class Requests:
    """An endless iterator of requests that a test feeds."""

    def __init__(self) -> None:
        self._queue: queue.Queue[bytes | None] = queue.Queue()

    def send(self) -> None:
        self._queue.put(b"")

    def end(self) -> None:
        self._queue.put(None)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._queue.get, None)


def stream_of(pair: Pair, requests: Requests) -> Any:  # gRPC's are untyped
    made: Any = pair.channel.stream_stream(PUBLISH)
    return made(iter(requests))


def test_stream_server_killed_reopens_on_the_next(pair: Pair) -> None:
    first, second = pair.preferred(PUBLISH)
    requests = Requests()
    stream = stream_of(pair, requests)
    requests.send()
    assert next(stream) == first.address.encode()
    first.stop()
    assert code_of(lambda: next(stream)) is grpc.StatusCode.UNAVAILABLE
    requests.end()
    requests = Requests()
    stream = stream_of(pair, requests)
    requests.send()
    assert next(stream) == second.address.encode()
    requests.end()
    assert list(stream) == []


def test_stream_ends_when_calls_change_server(pair: Pair) -> None:
    first, second = pair.preferred(PUBLISH)
    requests = Requests()
    stream = stream_of(pair, requests)
    requests.send()
    next(stream)
    first.behaviour = lose_connection
    with pytest.raises(grpc.RpcError):
        pair.call(PLAN)  # placed as the stream is
    with pytest.raises(grpc.RpcError, match="another metadata server") as ended:
        next(stream)
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
    assert pair.preferred(PUBLISH)[0] is second
    requests.end()


def test_stream_both_away_is_unavailable(pair: Pair) -> None:
    for server in pair.servers:
        server.stop()
    code_of(lambda: pair.call(PLAN))
    assert code_of(lambda: next(stream_of(pair, Requests()))) is grpc.StatusCode.UNAVAILABLE


# ---- names
class Names:
    """A resolver whose answers a test changes."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: Sequence[str] = addresses
        self.asked = threading.Event()
        self.blocked: threading.Event | None = None

    def __call__(self, _host: str, _port: int) -> Sequence[str]:
        self.asked.set()
        if self.blocked is not None:
            self.blocked.wait(30.0)
        if not self.addresses:
            raise OSError("name unknown")
        return self.addresses


def lookup_by_name(channel: grpc.Channel, timeout_s: float = TIMEOUT_S) -> str:
    made: Any = channel.unary_unary(LOOKUP)
    return bytes(made(b"", timeout=timeout_s)).decode()


def test_name_changed_after_failure_is_followed() -> None:
    old = ScriptedServer("127.0.0.2:0")
    port = old.address.rpartition(":")[2]
    new = ScriptedServer(f"127.0.0.3:{port}")
    names = Names("127.0.0.2")
    with connect_metadata(f"metadata.test:{port}", resolver=names) as channel:
        assert lookup_by_name(channel) == old.address
        names.addresses = ["127.0.0.3"]
        old.stop()

        def follows() -> bool:
            try:
                return lookup_by_name(channel) == new.address
            except grpc.RpcError:
                return False

        wait_until(follows)
        assert [state.address for state in channel.servers.states()] == [new.address]  # type: ignore[attr-defined]
    new.stop()


def test_name_of_several_servers_fails_over() -> None:
    one = ScriptedServer("127.0.0.2:0")
    port = one.address.rpartition(":")[2]
    two = ScriptedServer(f"127.0.0.3:{port}")
    with connect_metadata(f"dns:metadata.test:{port}", resolver=Names("127.0.0.2", "127.0.0.3")) as channel:
        used = lookup_by_name(channel)
        first, second = (one, two) if used == one.address else (two, one)
        first.stop()
        assert lookup_by_name(channel) == second.address
    second.stop()


def test_name_unknown_is_unavailable_until_it_is_known() -> None:
    server = ScriptedServer("127.0.0.2:0")
    names = Names()
    with connect_metadata(f"metadata.test:{server.address.rpartition(':')[2]}", resolver=names) as channel:
        with pytest.raises(grpc.RpcError, match="not known"):
            lookup_by_name(channel)
        names.addresses = ["127.0.0.2"]

        def known() -> bool:
            try:
                return lookup_by_name(channel) == server.address
            except grpc.RpcError:
                return False

        wait_until(known)
    server.stop()


def test_name_resolver_hangs_calls_end_at_their_deadline() -> None:
    names = Names("127.0.0.2")
    names.blocked = threading.Event()
    with connect_metadata("metadata.test:7400", resolver=names) as channel:
        assert code_of(lambda: lookup_by_name(channel, 0.2)) is grpc.StatusCode.UNAVAILABLE
    names.blocked.set()


def test_aio_name_resolver_hangs_loop_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names("127.0.0.2")
    names.blocked = threading.Event()
    waiting: list[threading.Thread] = []
    wait_ready = MetadataServers.wait_ready

    def record(servers: MetadataServers, placement: CallPlacement, timeout_s: float | None) -> None:
        waiting.append(threading.current_thread())
        wait_ready(servers, placement, timeout_s)

    async def use() -> grpc.StatusCode:
        channel = connect_metadata_aio("dns:metadata.test:7400", resolver=names)
        assert isinstance(channel, AioFailoverChannel)
        try:
            await call_over(channel, LOOKUP, 0.2)
        except grpc.RpcError as error:
            return error.code()  # type: ignore[no-any-return, attr-defined]
        finally:
            await channel.close()
        return grpc.StatusCode.OK

    monkeypatch.setattr(MetadataServers, "wait_ready", record)
    assert asyncio.run(use()) is grpc.StatusCode.UNAVAILABLE
    names.blocked.set()
    assert len(waiting) == 1
    assert threading.current_thread() not in waiting


def test_probe_that_cannot_start_is_sent_again() -> None:
    server = ScriptedServer()
    opened: list[str] = []

    def open_channel(address: str, _tls: TlsConfig | None) -> grpc.Channel:
        opened.append(address)
        if len(opened) == 1:
            raise OSError("the TLS files are being replaced")
        return grpc.insecure_channel(address)

    addresses = MetadataAddresses.parse(f"{server.address},127.0.0.1:1")
    servers = MetadataServers(addresses, "engine-0", None, open_channel, Counters())
    servers.pick(CallPlacement.SPREAD)
    servers.failed(server.address, Failure.REFUSED)
    condition = lambda: next(one.condition for one in servers.states() if one.address == server.address)  # noqa: E731
    wait_until(lambda: condition() is Condition.USABLE, "the server was probed")
    servers.close()
    server.stop()


def test_probe_makes_no_method_of_a_closed_channel() -> None:
    """gRPC crashes the process if it does. Here the probe is closed at the moment in which the method is made."""
    made: list[bool] = []

    def refuse_closed(*_: object, **__: object) -> None:
        raise ValueError("Cannot invoke RPC on closed channel!")

    class Channel:
        closed = False

        def unary_unary(self, *_: object, **__: object) -> Callable[..., object]:
            closing = threading.Thread(target=probe.close, daemon=True)
            closing.start()
            closing.join(0.2)
            made.append(self.closed)
            return refuse_closed

        unary_stream = unary_unary

        def close(self) -> None:
            self.closed = True

    probe = HealthProbe(lambda _: Channel())  # type: ignore[arg-type, return-value]
    ended: queue.Queue[bool] = queue.Queue()
    probe("server", 0.1, ended.put)
    assert not ended.get(timeout=TIMEOUT_S)
    assert made[0] is False


def test_tls_of_named_server_expects_the_name(tmp_path: Path) -> None:
    tls = TlsConfig(ca=tmp_path / "ca.pem")
    servers = MetadataServers(
        MetadataAddresses.parse("metadata.test:7400"),
        "n",
        tls,
        lambda address, _: connect(address),
        Counters(),
        Names("10.0.0.1"),
    )
    servers.wait_ready(CallPlacement.SPREAD, TIMEOUT_S)
    named = servers.tls_of("10.0.0.1:7400")
    assert named is not None
    assert (named.ca, named.server_name) == (tls.ca, "metadata.test")
    servers.close()


# ---- a server that answers nothing
@pytest.fixture
def silent_address() -> Iterator[str]:
    """Address of a listener that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def caller_of(first: str, second: str) -> str:
    """Name of a caller that prefers the first of two servers."""
    return next(name for name in map(str, range(1_000)) if ranked([first, second], name)[0] == first)


def test_call_long_hung_server_is_cut_and_repeated(silent_address: str) -> None:
    server = ScriptedServer()
    caller = caller_of(silent_address, server.address)
    with connect_metadata(f"{silent_address},{server.address}", caller=caller) as channel:
        began_s = time.monotonic()
        assert lookup_by_name(channel, 60.0) == server.address
        assert time.monotonic() - began_s < 60.0 / 4  # half of the time would pass without the verdict
    server.stop()


def test_aio_call_long_hung_server_is_cut_and_repeated(silent_address: str) -> None:
    async def run() -> None:
        server = ScriptedServer()
        caller = caller_of(silent_address, server.address)
        async with connect_metadata_aio(f"{silent_address},{server.address}", caller=caller) as channel:
            assert isinstance(channel, AioFailoverChannel)
            began_s = time.monotonic()
            assert await call_over(channel, LOOKUP, 60.0) == server.address
            assert time.monotonic() - began_s < 60.0 / 4
        await asyncio.to_thread(server.stop)

    asyncio.run(run())


# ---- asyncio
def aio(use: Callable[[AioFailoverChannel, list[ScriptedServer]], Awaitable[None]], *, shares_state: bool | None = None) -> None:
    """Run a test with two servers and an asyncio channel to both: the preferred server of lookups comes first."""

    async def run() -> None:
        servers = [ScriptedServer(shares_state=shares_state) for _ in range(2)]
        async with connect_metadata_aio(",".join(server.address for server in servers), caller="engine-0") as channel:
            assert isinstance(channel, AioFailoverChannel)
            route = channel.servers.pick(CallPlacement.SPREAD)
            assert route is not None
            servers.sort(key=lambda server: server.address != route.address)
            await use(channel, servers)
        for server in servers:
            await asyncio.to_thread(server.stop)

    asyncio.run(run())


async def call_over(channel: AioFailoverChannel, method: str, timeout_s: float = TIMEOUT_S) -> str:
    made: Any = channel.unary_unary(method)
    return bytes(await made(b"", timeout=timeout_s)).decode()


def test_aio_call_connection_lost_is_repeated() -> None:
    async def use(channel: AioFailoverChannel, servers: list[ScriptedServer]) -> None:
        first, second = servers
        first.behaviour = lose_connection
        assert await call_over(channel, LOOKUP) == second.address
        second.behaviour = lose_connection
        with pytest.raises(grpc.RpcError):
            await call_over(channel, LOOKUP)

    aio(use)


def test_aio_call_timed_out_is_repeated() -> None:
    async def use(channel: AioFailoverChannel, servers: list[ScriptedServer]) -> None:
        servers[0].behaviour = hang
        assert await call_over(channel, LOOKUP, 0.4) == servers[1].address
        servers[0].released.set()

    aio(use)


def test_aio_calls_both_away_are_unavailable() -> None:
    async def use(channel: AioFailoverChannel, servers: list[ScriptedServer]) -> None:
        for server in servers:
            await asyncio.to_thread(server.stop)
        for _ in range(3):
            with pytest.raises(grpc.RpcError) as failed:
                await call_over(channel, LOOKUP)
            assert failed.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]

    aio(use)


def test_aio_call_cancelled_by_its_caller_is_cancelled() -> None:
    async def use(channel: AioFailoverChannel, servers: list[ScriptedServer]) -> None:
        servers[0].behaviour = hang
        task = asyncio.create_task(call_over(channel, LOOKUP, 30.0))
        await asyncio.to_thread(wait_until, lambda: servers[0].calls["Lookup"])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        servers[0].released.set()

    aio(use)


def test_channel_of_removed_server_is_closed_in_another_thread() -> None:
    """A change may be told in the thread of gRPC in which that channel's calls end: closing there would wait for itself."""
    closed: queue.SimpleQueue[int] = queue.SimpleQueue()
    removed = SimpleNamespace(close=lambda: closed.put(threading.get_ident()))
    servers = SimpleNamespace(addresses=("a", "b"), tls_of=lambda _: None, close=lambda: None)
    channel = FailoverChannel(cast("MetadataServers", servers), lambda *_: cast("grpc.Channel", removed))
    channel.channel_to("a")
    servers.addresses = ("b",)
    servers.on_change()
    assert closed.empty(), "its calls may be under way until the next change"
    servers.on_change()
    assert closed.get(timeout=10) != threading.get_ident()
    channel.close()
    assert closed.empty(), "once"
