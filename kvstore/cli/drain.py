"""``kvstore drain``, ``undrain`` and ``remove``: takes a node out of a running store, and lets it back in."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli import parameters
from kvstore.cli.help import Command
from kvstore.cli.options import setting_option, with_quiet_config
from kvstore.cli.settings import tls
from kvstore.core.config import Config
from kvstore.core.errors import DeadlineExceeded, KVStoreError, Unavailable

if TYPE_CHECKING:
    from kvproto.v1 import metadata_pb2, metadata_pb2_grpc

EXIT_BLOCKED = 3
"""The node can do no more, and stopping it would lose blocks."""
EXIT_TIMEOUT = 4
"""It was not drained in time; it goes on."""
_POLL_S = 0.3
_SAY_EVERY_S = 5.0
_address = setting_option("--metadata", key="client.metadata", metavar="HOST:PORT", help="Address of the metadata server.")


@click.command(cls=Command)
@click.argument("node")
@click.option("--move", is_flag=True, help="Copies blocks that lie on no other active node's volume to some.")
@click.option("--wait", is_flag=True, help="Returns once the node is drained, or can do no more.")
@click.option("--timeout", callback=parameters.some_seconds, metavar="TIME", help="The most to wait, e.g. 90s.")
@_address
@with_quiet_config
def drain(config: Config, *, node: str, move: bool, wait: bool, timeout: float | None) -> None:
    """Drains a node: it takes nothing new, serves what it holds, and makes everything durable.

    Engines of its host find what they ask for as before, and store nothing. Once it is drained it may be stopped. Without --move
    its blocks stay on its volumes and are found again when it is back; with --move they are found meanwhile. The order holds over
    restarts, until kvstore undrain.

    Examples:
      kvstore drain host-3 --wait              before a restart of the host
      kvstore drain host-3 --move --wait       before it leaves for good; then stop it, and kvstore remove host-3

    Exits with 0 once that is done (without --wait: ordered), 1 where it failed, 3 where the node can do no more and stopping it
    would lose blocks, 4 where --timeout came first.
    """
    from kvproto.v1 import metadata_pb2

    with _metadata(config) as (stub, ask):
        request = metadata_pb2.DrainNodeRequest(operation_id=secrets.token_bytes(16), node_id=node, move=move)
        status = ask(stub.DrainNode, request).status
        if wait:
            _await_drained(stub, ask, node, timeout)
        else:
            click.echo(describe(status))


@click.command(cls=Command)
@click.argument("node")
@_address
@with_quiet_config
def undrain(config: Config, *, node: str) -> None:
    """Lets a node take part again. What was copied to others stays there.

    Examples:
      kvstore undrain host-3
    """
    from kvproto.v1 import metadata_pb2

    with _metadata(config) as (stub, ask):
        request = metadata_pb2.UndrainNodeRequest(operation_id=secrets.token_bytes(16), node_id=node)
        click.echo(describe(ask(stub.UndrainNode, request).status))


@click.command(cls=Command)
@click.argument("node")
@click.option("--force", is_flag=True, help="Also where it lives and is not drained.")
@_address
@with_quiet_config
def remove(config: Config, *, node: str, force: bool) -> None:
    """Forgets a node that is dead or drained, and what it held, at once.

    Its volumes stay as they are: started anew, the node is back with them.

    Examples:
      kvstore remove host-3
    """
    from kvproto.v1 import metadata_pb2

    with _metadata(config) as (stub, ask):
        request = metadata_pb2.RemoveNodeRequest(operation_id=secrets.token_bytes(16), node_id=node, force=force)
        if not ask(stub.RemoveNode, request).known:
            raise click.ClickException(f"no such node: {node}")
        click.echo(f"{node}: removed")


def describe(status: metadata_pb2.NodeStatus) -> str:
    """A node's part in the store, in one line."""
    from kvproto.v1 import common_pb2

    name = common_pb2.NodeState.Name(status.state).removeprefix("NODE_STATE_").lower().replace("_", " ")
    said = [f"{status.node.node_id}: {name}"]
    drain = status.drain
    if drain.waiting_blocks:
        said.append(f"{drain.waiting_blocks:,} blocks to write")
    if status.order.move:
        said.append(f"{drain.moved_blocks:,} moved, {drain.left_blocks:,} to move")
    if drain.not_durable_blocks:
        said.append(f"{drain.not_durable_blocks:,} not durable")
    if drain.why:
        said.append(drain.why)
    if status.stopped:
        said.append("stopped")
    elif not status.alive:
        said.append(f"silent for {status.heartbeat_age_ms / 1000:.0f} s")
    return ", ".join(said)


@contextmanager
def _metadata(config: Config) -> Iterator[tuple[metadata_pb2_grpc.MetadataStub, Callable[[Any, Any], Any]]]:
    """A stub, and what asks it; a server that does not answer is said so that one knows what to do."""
    from kvproto.v1 import metadata_pb2_grpc
    from kvstore.rpc.client import RetryPolicy, call, connect

    with connect(config.client.metadata, tls=tls(config.client.tls)) as channel:
        try:
            yield (
                metadata_pb2_grpc.MetadataStub(channel),
                lambda method, request: call(method, request, config.client.deadline / 1000, RetryPolicy()),
            )
        except (Unavailable, DeadlineExceeded) as error:
            raise click.ClickException(
                f"no metadata server answers at {config.client.metadata} ({error.kind}): --metadata HOST:PORT names another"
            ) from error


def _await_drained(
    stub: metadata_pb2_grpc.MetadataStub, ask: Callable[[Any, Any], Any], node: str, timeout_s: float | None
) -> None:
    """Shows how far a node is until there is nothing more to wait for, and exits accordingly."""
    from kvproto.v1 import common_pb2, metadata_pb2

    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    show = _Line()
    while True:
        try:
            nodes = {one.node.node_id: one for one in ask(stub.ListNodes, metadata_pb2.ListNodesRequest()).nodes}
        except KVStoreError:
            show.end()
            raise
        status = nodes.get(node)
        if status is None or not status.HasField("order"):
            show.end()
            raise click.ClickException(f"{node}: somebody removed it or lifted the order meanwhile")
        final = status.state in (common_pb2.NODE_STATE_DRAINED, common_pb2.NODE_STATE_DRAIN_BLOCKED)
        if not final and not status.alive:
            show.end()
            raise click.ClickException(f"{describe(status)}: the order holds, and it drains once it is back")
        late = deadline_s is not None and time.monotonic() > deadline_s
        show(describe(status), last=final or late)
        if status.state == common_pb2.NODE_STATE_DRAINED:
            return
        if final or late:
            sys.exit(EXIT_BLOCKED if final else EXIT_TIMEOUT)
        time.sleep(_POLL_S)


class _Line:
    """One line that is rewritten on a terminal; elsewhere a line where something changed, and not too often."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._shown = ""
        self._said_s = float("-inf")

    def __call__(self, text: str, *, last: bool) -> None:
        now_s = time.monotonic()
        if self._terminal:
            click.echo("\r\x1b[2K" + text, nl=last)
        elif last or (text != self._shown and now_s - self._said_s >= _SAY_EVERY_S):
            click.echo(text)
            self._said_s = now_s
        self._shown = text

    def end(self) -> None:
        """Leaves the line as it is."""
        if self._terminal and self._shown:
            click.echo()
