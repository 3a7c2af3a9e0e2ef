"""Channels to one or several metadata servers. A single server gets an ordinary channel."""

from __future__ import annotations

import secrets

import grpc
import grpc.aio

from kvstore.observe.counters import Counters
from kvstore.process.tls import TlsConfig
from kvstore.rpc.auth.tokens import TokenSource
from kvstore.rpc.client import connect, connect_aio
from kvstore.rpc.failover.addresses import MetadataAddresses
from kvstore.rpc.failover.aio_channel import AioFailoverChannel
from kvstore.rpc.failover.channel import FailoverChannel
from kvstore.rpc.failover.resolver import Resolver, system_resolver
from kvstore.rpc.failover.selection import Condition
from kvstore.rpc.failover.servers import MetadataServers, MetadataServerState


def connect_metadata(
    addresses: MetadataAddresses | str,
    *,
    caller: str = "",
    tls: TlsConfig | None = None,
    token: TokenSource | None = None,
    node_id: str | None = None,
    own_connection: bool = False,
    counters: Counters | None = None,
    resolver: Resolver = system_resolver,
) -> grpc.Channel:
    """A synchronous channel to the metadata servers. It connects at the first call. Thread-safe: share it.

        with connect_metadata("10.0.0.1:7400,10.0.0.2:7400", caller="engine-0") as channel:
            stub = MetadataStub(channel)

    Args:
        addresses: the servers, or the setting that names them.
        caller: name by which this process ranks the servers, so that callers spread over them; empty: a random one.
        tls: see ``kvstore.rpc.client.connect``.
        token: see there.
        node_id: see there.
        own_connection: see there.
        counters: counts failovers.
        resolver: resolves names.

    Raises:
        InvalidArgument: an address is invalid, or a TLS file cannot be read.
    """
    addresses = MetadataAddresses.of(addresses)
    only = addresses.only
    if only is not None:
        return connect(only, tls=tls, token=token, node_id=node_id, own_connection=own_connection)

    def open_channel(address: str, server_tls: TlsConfig | None) -> grpc.Channel:
        return connect(address, tls=server_tls, token=token, node_id=node_id, own_connection=own_connection)

    return FailoverChannel(_servers(addresses, caller, tls, counters, resolver), open_channel)


def connect_metadata_aio(
    addresses: MetadataAddresses | str,
    *,
    caller: str = "",
    tls: TlsConfig | None = None,
    token: TokenSource | None = None,
    counters: Counters | None = None,
    resolver: Resolver = system_resolver,
) -> grpc.aio.Channel:
    """As ``connect_metadata``, for the running event loop."""
    addresses = MetadataAddresses.of(addresses)
    only = addresses.only
    if only is not None:
        return connect_aio(only, tls=tls, token=token)

    def open_channel(address: str, server_tls: TlsConfig | None) -> grpc.aio.Channel:
        return connect_aio(address, tls=server_tls, token=token)

    return AioFailoverChannel(_servers(addresses, caller, tls, counters, resolver), open_channel)


def states_of(channel: grpc.Channel | grpc.aio.Channel, addresses: MetadataAddresses | str) -> list[MetadataServerState]:
    """Return the servers of a channel with their state. A single server counts as usable.

    Args:
        channel: made by ``connect_metadata`` or ``connect_metadata_aio``.
        addresses: its addresses.
    """
    if isinstance(channel, FailoverChannel | AioFailoverChannel):
        return channel.servers.states()
    return [MetadataServerState(str(addresses), Condition.USABLE, used=True)]


def _servers(
    addresses: MetadataAddresses, caller: str, tls: TlsConfig | None, counters: Counters | None, resolver: Resolver
) -> MetadataServers:
    def open_probe(address: str, server_tls: TlsConfig | None) -> grpc.Channel:
        return connect(address, tls=server_tls)

    return MetadataServers(addresses, caller or secrets.token_hex(8), tls, open_probe, counters or Counters(), resolver)
