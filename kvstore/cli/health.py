"""``kvstore health``: whether a daemon of this host serves, for what looks after processes: containers, probes, scripts."""

from __future__ import annotations

import http.client
import ssl
from typing import Final

import click

from kvstore.cli.help import Command
from kvstore.cli.options import with_quiet_config
from kvstore.cli.settings import node_config, tls
from kvstore.core.config import Config
from kvstore.core.errors import KVStoreError
from kvstore.core.tls import TlsConfig

_ANSWER_S: Final = 2.0
_EVERYWHERE: Final = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104  # asked by way of loopback


@click.command(cls=Command)
@click.argument("daemon", type=click.Choice(("metadata", "node", "router", "admin")))
@with_quiet_config
def health(config: Config, *, daemon: str) -> None:
    """Asks a daemon of this host whether it serves.

    It is given the daemon's own configuration, and finds it by that: a node by its unix socket, the others by the address that
    they listen on, over TLS where they serve it. A daemon that is starting (a node reads the catalogs of its volumes first) or
    stopping does not serve, nor does a router without engines or an admin server without the metadata server.

    Examples:
      kvstore health node
      kvstore health metadata --config /etc/kvstore/kvstore.toml

    Exits with 1 where it does not serve, or does not answer within two seconds.
    """
    try:
        if daemon == "node":
            settings = node_config(config)
            serves = _grpc_serves(f"unix:{settings.run_dir / settings.node_id}.sock", None)
        elif daemon == "metadata":
            serves = _grpc_serves(_from_here(config.metadata.listen), tls(config.metadata.tls))
        elif daemon == "router":
            serves = _http_serves(_from_here(config.router.listen), "/health", tls(config.router.tls))
        else:
            serves = _http_serves(_from_here(config.admin.listen), "/readyz", tls(config.admin.tls))
    except (KVStoreError, OSError, http.client.HTTPException) as error:
        raise click.ClickException(f"{daemon}: {error}") from error
    if not serves:
        raise click.ClickException(f"{daemon}: it is up and does not serve")
    click.echo(f"{daemon}: serves")


def _from_here(listen: str) -> str:
    """An address listened on, as it is reached from this host."""
    host, _, port = listen.rpartition(":")
    if port == "0":
        raise click.ClickException(f"it listens on any free port ({listen}): give it one, or it cannot be found")
    return f"{_EVERYWHERE.get(host, host)}:{port}"


def _grpc_serves(address: str, identity: TlsConfig | None) -> bool:
    """Asks by the standard health service; a server that wants certificates is shown its own.

    Raises:
        KVStoreError: no answer.
    """
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from kvstore.rpc.client import call, connect

    with connect(address, tls=identity) as channel:
        answer = call(health_pb2_grpc.HealthStub(channel).Check, health_pb2.HealthCheckRequest(), _ANSWER_S)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _http_serves(address: str, path: str, identity: TlsConfig | None) -> bool:
    """Asks by HTTP; a server that wants certificates is shown its own.

    Whose certificate it shows does not matter: it is asked on this host, and told nothing.

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
