"""``kvstore nodes drain``, ``undrain`` and ``remove``: nodes leave and rejoin a running store."""

from __future__ import annotations

import asyncio
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

import click

from kvstore.cli.support import param_types, result
from kvstore.cli.support.help import Command
from kvstore.cli.support.output import clean
from kvstore.cli.support.result import CommandOutput
from kvstore.cli.support.store_client import Refusal, StoreConnection, ask, complete_nodes, store_change
from kvstore.config.model import Config

if TYPE_CHECKING:
    from kvproto.v1 import metadata_pb2

EXIT_BLOCKED = 3
"""Exit code: the drain is blocked, and stopping the node would lose blocks. The same code as for a rejected call."""
EXIT_TIMEOUT = 4
"""Exit code: timeout. The drain continues."""
_POLL_S = 0.3
_SAY_EVERY_S = 5.0
_argument = click.argument("node", shell_complete=complete_nodes)


@click.command(cls=Command)
@_argument
@click.option("--move", is_flag=True, help="Move blocks that no other active node has on a volume to other nodes.")
@click.option("--wait", is_flag=True, help="Wait until the node is drained or blocked.")
@click.option("--timeout", callback=param_types.some_seconds, metavar="TIME", help="Longest wait, e.g. 90s.")
@store_change
def drain(config: Config, *, node: str, move: bool, wait: bool, timeout: float | None) -> CommandOutput:
    """Drain a node: it stores no new blocks, serves loads and makes all blocks durable.

    Engines on its host keep loading and stop storing. A drained node may be stopped. Without --move, its blocks stay on its
    volumes and are misses until it is back. With --move, other nodes serve them. A drain survives restarts; kvstore nodes
    undrain cancels it.

    Examples:
      kvstore nodes drain host-3 --wait            before a restart of the host
      kvstore nodes drain host-3 --move --wait     before it leaves for good; then stop it and remove it

    Exit codes: 0 ordered, or with --wait drained; 1 failed or no answer; 2 usage error; 3 rejected or not found, or with --wait
    blocked: stopping the node would lose blocks; 4 --timeout passed, and the drain continues.
    """

    async def order(store: StoreConnection) -> CommandOutput:
        status = await store.rpc.drain_node(node, move=move)
        return await _await_drained(store, node, timeout) if wait else _drain_report(status)

    return ask(config, order)


@click.command(cls=Command)
@_argument
@store_change
def undrain(config: Config, *, node: str) -> CommandOutput:
    """Cancel the drain of a node. Blocks that were moved to other nodes stay there.

    Examples:
      kvstore nodes undrain host-3
    """
    return _drain_report(ask(config, lambda store: store.rpc.undrain_node(node)))


@click.command(cls=Command)
@_argument
@click.option("--force", is_flag=True, help="Also if it is alive and not drained.")
@store_change
def remove(config: Config, *, node: str, force: bool) -> CommandOutput:
    """Forget a dead or drained node and its replicas at once.

    Its volumes are not touched: if the node is started again, its blocks are back.

    Examples:
      kvstore nodes remove host-3
    """
    if not ask(config, lambda store: store.rpc.remove_node(node, force=force)):
        raise Refusal(f"no such node: {node}; kvstore nodes lists them")
    return result.line({"node_id": node, "removed": True}, f"{node}: removed")


def _drain_report(status: metadata_pb2.NodeStatus, exit_code: int = 0) -> CommandOutput:
    from kvstore.control_api import serializers

    return CommandOutput(serializers.participation(status), lambda: click.echo(describe(status)), exit_code)


def describe(status: metadata_pb2.NodeStatus) -> str:
    """State of a node in one line."""
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
        said.append(f"no report for {status.heartbeat_age_ms / 1000:.0f} s")
    return clean(", ".join(said))


async def _await_drained(store: StoreConnection, node: str, timeout_s: float | None) -> CommandOutput:
    """Show the progress of a drain until it ends."""
    from kvproto.v1 import common_pb2

    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    with _Line() as show:
        while True:
            status = (await store.rpc.nodes()).get(node)
            if status is None or not status.HasField("order"):
                raise click.ClickException(f"{node}: the node was removed, or its drain was cancelled, during the wait")
            final = status.state in (common_pb2.NODE_STATE_DRAINED, common_pb2.NODE_STATE_DRAIN_BLOCKED)
            if not final and not status.alive:
                raise click.ClickException(f"{describe(status)}: it drains once it is back")
            late = deadline_s is not None and time.monotonic() > deadline_s
            if status.state == common_pb2.NODE_STATE_DRAINED:
                return _drain_report(status)
            if final or late:
                return _drain_report(status, EXIT_BLOCKED if final else EXIT_TIMEOUT)
            show(describe(status))
            await asyncio.sleep(_POLL_S)


class _Line:
    """Context manager for a status line on standard error: rewritten in place on a terminal, printed on change elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._shown = ""
        self._said_s = float("-inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._terminal and self._shown:
            click.echo("\r\x1b[2K", nl=False, err=True)

    def __call__(self, text: str) -> None:
        now_s = time.monotonic()
        if self._terminal:
            click.echo("\r\x1b[2K" + text, nl=False, err=True)
        elif text != self._shown and now_s - self._said_s >= _SAY_EVERY_S:
            click.echo(text, err=True)
            self._said_s = now_s
        self._shown = text
