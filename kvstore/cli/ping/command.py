"""``kvstore ping``: does each server of a store answer, and how fast."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import click

from kvstore.cli.commands.host.health import address_from_here
from kvstore.cli.support import output, param_types
from kvstore.cli.support.build_config import token
from kvstore.cli.support.config_options import cluster_option, configuration, with_quiet_config
from kvstore.cli.support.help import Command
from kvstore.cli.support.result import CommandOutput, watches
from kvstore.cli.support.store_client import EXIT_REFUSED, metadata_option
from kvstore.config.model import Config
from kvstore.config.sources import Provenance
from kvstore.core.errors import KVStoreError
from kvstore.rpc.auth.tokens import TokenSource

if TYPE_CHECKING:
    from kvstore.cli.ping.round_trips import PingResult, PingTarget

_AT_ONCE: Final = 16


@click.command(cls=Command)
@click.argument("addresses", nargs=-1, metavar="[ADDRESS]...")
@click.option("--count", "-n", type=click.IntRange(1, 10_000), default=10, show_default=True, help="Round trips per server.")
@click.option(
    "--timeout", callback=param_types.some_seconds, default="2s", show_default=True, metavar="TIME", help="Limit per call."
)
@metadata_option
@cluster_option
@with_quiet_config
@watches
def ping(config: Config, *, addresses: tuple[str, ...], count: int, timeout: float) -> CommandOutput:
    """Measure round trips to the servers of a store, and say why a server does not answer.

    Without ADDRESS: the metadata server, all nodes that it knows, and the admin server and router of this host. ADDRESS is
    HOST:PORT, unix:PATH, or a URL such as https://HOST:PORT. Each server gets a health check, then a small call that is repeated.
    Its kind is found out, so an address of another kind of server is noticed. Times include this command's own work.

    The output names the cause: connection refused, no answer, TLS on one side only, certificates, token, role, not serving, and
    a server of another kind.

    Examples:
      kvstore ping
      kvstore ping 10.0.0.2:7410 --count 100
      kvstore ping https://admin.example:7470 -o json

    Exit codes: 0 every server answered, 1 one did not, 2 usage error, 3 one refused the token or the role.
    """
    from kvstore.cli.ping.round_trips import PingOutcome
    from kvstore.rpc.failover.addresses import MetadataAddresses

    _, provenance = configuration(click.get_current_context())
    own = token(config.client)
    reading = TokenSource.of(file=config.client.read_token_file) or own
    if addresses:
        results = ping_all(list(_named(config, addresses, own)), count, timeout)
    else:
        results = ping_all(list(_usual(config, provenance, own)), count, timeout)
        servers = results[: len(MetadataAddresses.parse(config.client.metadata).entries)]
        results[len(servers) : len(servers)] = ping_all(list(_nodes(config, servers, own, reading, timeout)), count, timeout)
        results = [one for one in results if one.detail != _LEFT_OUT]
    outcomes = {result.outcome for result in results}
    exit_code = 1 if PingOutcome.FAILED in outcomes else EXIT_REFUSED if PingOutcome.REFUSED in outcomes else 0
    answers = [result.to_json() for result in results]
    data = {"ok": all(one["outcome"] == "answered" for one in answers), "servers": answers}
    return CommandOutput(data, lambda: _show(results), exit_code)


_LEFT_OUT: Final = "left out"


def _named(config: Config, addresses: tuple[str, ...], own: TokenSource | None) -> Iterator[PingTarget]:
    from kvstore.cli.ping.round_trips import PingTarget
    from kvstore.rpc.address import check_address

    for address in addresses:
        if "://" not in address:
            check_address(address)
        yield PingTarget(address=address, tls=config.client.tls.resolve(), token=own)


def _usual(config: Config, provenance: Provenance, own: TokenSource | None) -> Iterator[PingTarget]:
    """The metadata server, and admin server and router of this host."""
    from kvstore.cli.ping.round_trips import PingTarget, ServerKind
    from kvstore.rpc.failover.addresses import MetadataAddresses

    tls = config.client.tls.resolve()
    for address in MetadataAddresses.parse(config.client.metadata).entries:
        yield PingTarget(address=address, kind=ServerKind.METADATA, tls=tls, token=own)
    for kind, setting, section in ((ServerKind.ADMIN, "admin", config.admin), (ServerKind.ROUTER, "router", config.router)):
        if section.listen == "none" or section.listen.endswith(":0"):
            continue
        tls = (config.client.tls.resolve() or section.tls.resolve()) if section.tls.cert is not None else None
        optional = provenance[f"{setting}.listen"].source == "default"
        yield PingTarget(address=address_from_here(section.listen), kind=kind, tls=tls, optional=optional)


def _nodes(
    config: Config, servers: Sequence[PingResult], own: TokenSource | None, reading: TokenSource | None, timeout_s: float
) -> Iterator[PingTarget]:
    """Nodes that the metadata server knows. Their addresses are not verified, so they get the token for reading."""
    from kvproto.v1 import metadata_pb2, metadata_pb2_grpc
    from kvstore.cli.ping.round_trips import PingOutcome, PingTarget, ServerKind
    from kvstore.rpc.client import call
    from kvstore.rpc.failover.connect import connect_metadata

    if not any(one.outcome is PingOutcome.ANSWERED for one in servers):
        return
    tls = config.client.tls.resolve()
    try:
        with connect_metadata(config.client.metadata, tls=tls, token=own) as channel:
            known = call(metadata_pb2_grpc.MetadataStub(channel).ListNodes, metadata_pb2.ListNodesRequest(), timeout_s).nodes
    except KVStoreError as error:
        servers[0].failed(str(error))
        return
    for status in known:
        address = status.node.control_address
        if not address:  # the cache of an engine serves no calls
            continue
        yield PingTarget(address=address, kind=ServerKind.NODE, name=status.node.node_id, tls=tls, token=reading)


def ping_all(targets: list[PingTarget], count: int, timeout_s: float) -> list[PingResult]:
    """Ping servers at the same time.

    Args:
        targets: the servers.
        count: repeated calls of each.
        timeout_s: limit of each call.
    """

    def ping_one(target: PingTarget) -> PingResult:
        return _ping(target, count, timeout_s)

    if not targets:
        return []
    with ThreadPoolExecutor(min(_AT_ONCE, len(targets)), thread_name_prefix="ping") as threads:
        return list(threads.map(ping_one, targets))


def _ping(target: PingTarget, count: int, timeout_s: float) -> PingResult:
    from kvstore.cli.ping.http_pings import ping_http
    from kvstore.cli.ping.round_trips import PingOutcome, ServerKind, ping_grpc

    how: Callable[[PingTarget, int, float], PingResult] = ping_grpc
    given = target.kind is not ServerKind.NODE  # a node could register a URL, and the command would send its certificate there
    if (given and "://" in target.address) or target.kind in (ServerKind.ADMIN, ServerKind.ROUTER):
        how = ping_http
    result = how(target, count, timeout_s)
    if target.optional and result.detail == "connection refused":
        result.detail = _LEFT_OUT
    if how is ping_grpc and target.kind is ServerKind.UNKNOWN and _may_be_http(target, result):
        other = ping_http(target, count, timeout_s)
        if other.outcome is PingOutcome.ANSWERED or other.kind is not ServerKind.UNKNOWN:
            return other
    return result


def _may_be_http(target: PingTarget, result: PingResult) -> bool:
    """Whether no gRPC server answered, although the connection was accepted."""
    return result.connect_s is None and not target.address.startswith("unix:") and result.detail != "connection refused"


def _show(results: list[PingResult]) -> None:
    from kvstore.cli.ping.round_trips import PingOutcome, ServerKind

    answers = [result.to_json() for result in results]
    rows = [[one["server"], one["name"], one["address"], *map(str, _times(one)), one["outcome"]] for one in answers]
    output.table(("server", "name", "address", "count", "min", "median", "max", "result"), rows)
    for result in results:
        if result.outcome is not PingOutcome.ANSWERED:
            called = f"{result.kind} {result.name}".rstrip()
            output.note(f"{called} at {result.address}: {result.detail}")
    if any(result.kind is ServerKind.NODE and result.outcome is PingOutcome.FAILED for result in results):
        output.note("kvstore status --detail says since when a node is silent, and what to do")


def _times(answer: dict[str, Any]) -> list[str]:
    times = (answer["min_ms"], answer["median_ms"], answer["max_ms"])
    return [str(answer["count"]), *("" if time is None else f"{time:.2f}ms" for time in times)]
