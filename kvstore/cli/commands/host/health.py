"""``kvstore health``: health checks of the daemons on this host, for containers, probes and scripts."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from kvstore.cli.support.build_config import node_config
from kvstore.cli.support.config_options import with_quiet_config
from kvstore.cli.support.folders import socket_folders
from kvstore.cli.support.help import Command
from kvstore.cli.support.result import CommandOutput, line, watches
from kvstore.config.model import Config
from kvstore.config.node import NodeConfig
from kvstore.core.errors import DeadlineExceeded, KVStoreError, NotFound, Unavailable
from kvstore.doctor.servers.local_nodes import sockets_in
from kvstore.process.tls import TlsConfig
from kvstore.rpc.auth.tokens import TokenSource
from kvstore.rpc.diagnosis import Target

_ANSWER_S: Final = 2.0
_REASON_S: Final = 1.0
"""Timeout of the call that finds why the metadata server rejects a node; two fit into the timeout of a container probe."""
_EVERYWHERE: Final = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104  # asked by way of loopback


@click.command(cls=Command)
@click.argument("daemon", type=click.Choice(("metadata", "node", "router", "admin")))
@with_quiet_config
@watches
def health(config: Config, *, daemon: str) -> CommandOutput:
    """Check whether a daemon of this host serves.

    The address is part of the daemon's configuration: the unix socket of a node, the listen address of the others, with TLS if
    configured. A daemon does not serve while it starts (a node reads its catalogs first) or stops. A router without engines and
    an admin server without metadata server do not serve either.

    Examples:
      kvstore health node
      kvstore health metadata --config /etc/kvstore/kvstore.toml
      kvstore health node --watch 5
      kvstore health admin -o json

    A node whose reports the metadata server rejects "serves this host only"; the output has the reason.

    JSON: daemon, serves, local_only (a node that the metadata server rejects), detail (the reason; null: none).

    Exit code 1: the daemon does not serve, or does not answer within two seconds.
    """
    unheard: str | None = None
    failure: str | None
    serves = False
    try:
        if daemon == "node":
            settings = _found(config, node_config(config))
            address = f"unix:{settings.run_dir / settings.node_id}.sock"
            serves = _grpc_serves(address, None)
            if serves and settings.metadata is not None:
                unheard = _why_unheard(settings, address)
        elif daemon == "metadata":
            serves = _grpc_serves(address_from_here(config.metadata.listen), config.metadata.tls.resolve())
        elif daemon == "router":
            serves = _http_serves(address_from_here(config.router.listen), "/health", config.router.tls.resolve())
        else:
            serves = _http_serves(address_from_here(config.admin.listen), "/readyz", config.admin.tls.resolve())
    except (KVStoreError, OSError, http.client.HTTPException) as error:
        failure = str(error)
    else:
        failure = None if serves else "running, but not serving"
    data = {"daemon": daemon, "serves": serves, "local_only": unheard is not None, "detail": failure or unheard}
    if failure is not None:
        return CommandOutput(data, lambda: None, 1, f"{daemon}: {failure}")
    return line(data, f"{daemon}: serves" if unheard is None else f"{daemon}: serves this host only: {unheard}")


def _found(config: Config, settings: NodeConfig) -> NodeConfig:
    """Find the node to query: the configured one; if none is named, the only one of ``node.run_dir``, or else of this host.

    Daemons under systemd get their names from the unit's environment, which commands do not see.
    """
    if config.node.node_id or (settings.run_dir / f"{settings.node_id}.sock").exists():
        return settings
    running = _running_in([settings.run_dir]) or _running_in(socket_folders(config))
    if len(running) > 1:
        names = ", ".join(path.stem for path in running)
        raise click.ClickException(f"node: several nodes run on this host ({names}); name one: --set node.node_id=NAME")
    return settings.model_copy(update={"run_dir": running[0].parent, "node_id": running[0].stem}) if running else settings


def _running_in(folders: Sequence[Path]) -> list[Path]:
    return [one.path for one in sockets_in(folders)[0] if one.error is None]


def address_from_here(listen: str) -> str:
    """Address of a listener as seen from this host."""
    host, _, port = listen.rpartition(":")
    if port == "0":
        raise click.ClickException(f"it listens on any free port ({listen}); configure a fixed port")
    return f"{_EVERYWHERE.get(host, host)}:{port}"


def _why_unheard(settings: NodeConfig, address: str) -> str | None:
    """Why the metadata server rejects the reports of a node; None: it accepts them.

    The health service of the node has the state. A call with the node's credentials finds the reason.

    Args:
        settings: settings of the node.
        address: address of its unix socket.
    """
    from kvproto.v1 import metadata_pb2, metadata_pb2_grpc
    from kvstore.rpc.client import call
    from kvstore.rpc.failover.connect import connect_metadata
    from kvstore.rpc.server import METADATA_SERVICE

    assert settings.metadata is not None
    try:
        if _grpc_serves(address, None, METADATA_SERVICE):
            return None
    except NotFound:
        return None  # the node is starting or has just ended
    token = TokenSource.of(file=settings.token_file)
    target = Target(
        server="the metadata server",
        address=settings.metadata,
        tls=settings.tls.resolve(),
        token=token,
        tls_settings="[node.tls]",
        token_setting="node.token_file",  # noqa: S106  # its name
    )
    # a call that only nodes may make, with an unknown boot
    request = metadata_pb2.CompareDigestsRequest(node_id=settings.node_id, boot_id=bytes(16), volume_id=settings.node_id)
    try:
        with connect_metadata(settings.metadata, tls=settings.tls.resolve(), token=token) as channel:
            call(metadata_pb2_grpc.MetadataStub(channel).CompareDigests, request, _REASON_S)
    except NotFound:
        pass
    except KVStoreError as error:
        return str(target.explain(error, _REASON_S))
    return f"the metadata server at {settings.metadata} has not taken its last report; the log of the node says why"


def _grpc_serves(address: str, identity: TlsConfig | None, service: str = "") -> bool:
    """Query the standard gRPC health service. A server with mutual TLS gets its own certificate.

    Raises:
        NotFound: the server does not have the service.
        KVStoreError: no answer; its message says why the server was not reached.
    """
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from kvstore.rpc.client import call, connect

    try:
        with connect(address, tls=identity) as channel:
            answer = call(health_pb2_grpc.HealthStub(channel).Check, health_pb2.HealthCheckRequest(service=service), _ANSWER_S)
    except (Unavailable, DeadlineExceeded) as error:
        raise Target("it", address, identity, None, "[metadata.tls]", "").explain(error, _REASON_S) from error
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _http_serves(address: str, path: str, identity: TlsConfig | None) -> bool:
    """Query the health of a server over HTTP. A server with mutual TLS gets its own certificate.

    The server certificate is not verified, because the query stays on this host and contains no secrets.

    Raises:
        OSError, HTTPException: no answer.
    """
    connection = http.client.HTTPConnection(address, timeout=_ANSWER_S)
    if identity is not None and identity.cert is not None:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        if identity.require_client_cert:
            context.load_cert_chain(identity.cert, identity.key)
        connection = http.client.HTTPSConnection(address, timeout=_ANSWER_S, context=context)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.HTTPStatus.OK
    finally:
        connection.close()
