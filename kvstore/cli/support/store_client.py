"""Client of commands that query or change a running store over gRPC, with the calls of the admin REST API.

Exit codes of these commands: 0 done, 1 failed or no answer, 2 usage error, 3 rejected or not found, 4 partly done.
``kvstore status`` exits with 5 if the store answers and a finding is present.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

import click
from click.shell_completion import CompletionItem

from kvstore.cli.support.build_config import token
from kvstore.cli.support.config_options import cluster_option, configuration, setting_option, with_quiet_config
from kvstore.cli.support.output import clean, note
from kvstore.cli.support.result import CommandOutput, prints, watches
from kvstore.config.client import ClientSection
from kvstore.config.model import Config
from kvstore.core.errors import DeadlineExceeded, ErrorKind, KVStoreError, Unavailable
from kvstore.process.node_id import is_plain

if TYPE_CHECKING:
    from kvstore.control_api.commands import Commands
    from kvstore.control_api.queries import Queries
    from kvstore.control_api.schemas.store import NamespaceEvicted, UnreachableNode
    from kvstore.control_api.store_rpc import StoreRpc
    from kvstore.control_api.volume_checks import RunningChecks

T = TypeVar("T")
_log = logging.getLogger(__name__)

EXIT_REFUSED: Final = 3
"""Exit code: not found or rejected."""
EXIT_IN_PART: Final = 4
"""Exit code: nodes did not answer or blocks remain; a later retry may complete the change."""
CODES: Final = "0 done, 1 failed or no answer, 2 usage error, 3 rejected or not found, 4 partly done"
_LISTED: Final = "Exit codes:"
"""Begins the list of a command whose codes mean more than ``CODES``."""
_REFUSALS: Final = frozenset(
    {
        ErrorKind.NOT_FOUND,
        ErrorKind.CONFLICT,
        ErrorKind.PERMISSION_DENIED,
        ErrorKind.UNAUTHENTICATED,
        ErrorKind.UNSUPPORTED,
    }
)
_COMPLETION_S: Final = 0.5
_MOST_COMPLETED: Final = 500


class Refusal(click.ClickException):
    """Error that the store returned, as opposed to a failed call. Printed in one line."""

    exit_code = EXIT_REFUSED


@dataclass(frozen=True, slots=True)
class StoreConnection:
    """Connection to a running store during a query."""

    rpc: StoreRpc
    queries: Queries
    commands: Commands
    checks: RunningChecks


metadata_option = setting_option("--metadata", key="client.metadata", metavar="HOST:PORT[,...]", help="Metadata servers.")
yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")


def store_options(command: Callable[..., T]) -> Callable[..., T]:
    """Add the options that name a store and its configuration, pass the configuration first, and list the exit codes once."""
    made = metadata_option(cluster_option(with_quiet_config(command)))
    text = inspect.cleandoc(command.__doc__ or "")
    made.__doc__ = text if _LISTED in text else f"{text}\n\n{_LISTED} {CODES}."
    return made


def store_query(command: Callable[..., CommandOutput]) -> Callable[..., None]:
    """Make a command of a function that queries the store: ``--output``, ``--watch`` and the options that name a store."""
    return store_options(watches(command))


def store_change(command: Callable[..., CommandOutput]) -> Callable[..., None]:
    """Make a command of a function that changes the store: ``--output`` and the options that name a store."""
    return store_options(prints(command))


def ask(config: Config, question: Callable[[StoreConnection], Awaitable[T]]) -> T:
    """Run a query on a new event loop.

    Args:
        config: address (``client.metadata``), TLS and token (``client.tls``, ``client.token_file``) of the metadata server, and
            timeouts (``admin.timeout``, limited by ``client.deadline``; ``admin.change_timeout``).
        question: the query, given a connection.

    Raises:
        Refusal: the store rejected the call, or did not find the object.
        click.ClickException: the metadata server was not reached; the message has the reason.
        KVStoreError: any other failure.
    """
    try:
        return asyncio.run(_ask(config, question))
    except KVStoreError as error:
        if error.kind in _REFUSALS:
            raise Refusal(clean(str(error))) from error
        raise
    except (ValueError, KeyError) as error:  # an unknown tier, side or id
        _log.debug("invalid answer", exc_info=True)
        raise click.ClickException("the server sent an invalid answer; it may run another version of kvstore") from error


async def _ask(config: Config, question: Callable[[StoreConnection], Awaitable[T]]) -> T:
    from kvstore.control_api.commands import Commands
    from kvstore.control_api.queries import Queries
    from kvstore.control_api.store_rpc import StoreEndpoint, StoreRpc
    from kvstore.control_api.volume_checks import RunningChecks
    from kvstore.observe.counters import Counters
    from kvstore.rpc.auth.tokens import TokenSource

    rpc = StoreRpc(
        StoreEndpoint(
            metadata=config.client.metadata,
            timeout_s=min(config.admin.timeout_ms, config.client.deadline_ms) / 1000,
            change_timeout_s=config.admin.change_timeout_ms / 1000,
            tls=config.client.tls.resolve(),
            token=token(config.client),
            read_token=TokenSource.of(file=config.client.read_token_file),
        ),
        Counters(),
    )
    try:
        try:
            await rpc.server()  # distinguishes an unresponsive node from an unresponsive server
        except (Unavailable, DeadlineExceeded) as error:
            raise click.ClickException(f"{clean(str(error))}. {_advice(config, error)}") from error
        return await question(StoreConnection(rpc, Queries(rpc), Commands(rpc), RunningChecks(rpc)))
    finally:
        await rpc.close()


def _advice(config: Config, error: KVStoreError) -> str:
    """Advice on a metadata server that was not reached."""
    if "TLS" in error.message or "certificate" in error.message:
        return "`kvstore config show` prints the TLS settings (client.tls). Another address: --metadata HOST:PORT."
    here = "`kvstore up` starts a store on this machine. " if config.client.metadata == ClientSection().metadata else ""
    return f"Is it running there? `kvstore health metadata` on that host tells. {here}Another address: --metadata HOST:PORT."


def confirm(what: str, *, yes: bool) -> None:
    """Ask for confirmation before data is lost. Without a terminal, ``--yes`` is required.

    Raises:
        Refusal: the user did not confirm.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise Refusal(f"{clean(what)}: this requires confirmation; without a terminal, confirm with --yes")
    if not click.confirm(clean(what) + "?", err=True):
        raise Refusal("nothing was done")


def tell_unreached(unreached: list[UnreachableNode]) -> None:
    """Report the nodes that are missing from an answer."""
    for one in unreached:
        note(f"without node {one.node_id}: {one.detail} ({one.kind})")


def exit_code_of(done: NamespaceEvicted) -> int:
    """Exit code of a change at several nodes."""
    return 0 if done.complete else EXIT_IN_PART


# ---- completion ----
def complete_nodes(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete ids of nodes if the metadata server answers at once."""

    async def ids(store: StoreConnection) -> list[str]:
        return list(await store.rpc.nodes())

    return _completed(ctx, ids, incomplete)


def complete_volumes(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete ids of volumes."""

    async def ids(store: StoreConnection) -> list[str]:
        return [volume.volume_id for _, volume in await store.queries.known_volumes()]

    return _completed(ctx, ids, incomplete)


def complete_namespaces(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete ids of namespaces."""

    async def ids(store: StoreConnection) -> list[str]:
        return [one.namespace_id.hex() for one in (await store.rpc.namespaces(b"", _MOST_COMPLETED)).namespaces]

    return _completed(ctx, ids, incomplete)


def _completed(
    ctx: click.Context, ids: Callable[[StoreConnection], Awaitable[list[str]]], incomplete: str
) -> list[CompletionItem]:
    """Filter names by prefix. Only plain names are offered, because the shell inserts them into a command line."""
    try:
        config, _ = configuration(ctx)
        quick = config.client.model_copy(update={"deadline_ms": int(_COMPLETION_S * 1000)})
        found = ask(config.model_copy(update={"client": quick}), ids)
    except (KVStoreError, click.ClickException, OSError):
        return []  # a failed completion offers no names
    return [
        CompletionItem(name)
        for name in sorted(found)
        if name.startswith(incomplete) and all(is_plain(part) for part in name.split("/"))
    ][:_MOST_COMPLETED]
