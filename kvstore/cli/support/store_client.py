"""How commands ask a running store: over gRPC, by what the admin REST asks it with (``kvstore.admin``), with its own options.

Exit codes of these commands: 0 done; 1 failed, also where nothing answers; 2 used wrongly; 3 refused, or not there; 4 done in
part.
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
from kvstore.cli.support.config_options import configuration, setting_option, with_quiet_config
from kvstore.cli.support.output import clean, note
from kvstore.config.client import ClientSection
from kvstore.config.model import Config
from kvstore.core.errors import DeadlineExceeded, ErrorKind, KVStoreError, Unavailable
from kvstore.process.node_id import is_plain

if TYPE_CHECKING:
    from kvstore.control_api.commands import Commands
    from kvstore.control_api.queries import Queries
    from kvstore.control_api.schemas.store import NamespaceEvicted, Unreached
    from kvstore.control_api.store_rpc import StoreRpc
    from kvstore.control_api.volume_checks import VolumeChecks

T = TypeVar("T")
_log = logging.getLogger(__name__)

EXIT_REFUSED: Final = 3
"""What was asked for is not there, or is refused."""
EXIT_IN_PART: Final = 4
"""Nodes did not answer, or blocks stay: done again later it may be done whole."""
CODES: Final = "0 done, 1 failed or no answer, 2 used wrongly, 3 refused or not there, 4 done in part"
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
    """An error in one line that is the store's answer, not a failure to get one."""

    exit_code = EXIT_REFUSED


@dataclass(frozen=True, slots=True)
class Store:
    """A running store, while a question lasts."""

    rpc: StoreRpc
    queries: Queries
    commands: Commands
    checks: VolumeChecks


metadata_option = setting_option("--metadata", key="client.metadata", metavar="HOST:PORT", help="Address of the metadata server.")
json_option = click.option("--json", "as_json", is_flag=True, help="Prints JSON, with the fields of the admin REST.")
yes_option = click.option("--yes", "-y", is_flag=True, help="Does not ask first.")


def store_options(command: Callable[..., T]) -> Callable[..., T]:
    """``--metadata``, ``--config`` and ``--set``; passes the configuration in force first, and says in the help how it exits."""
    made = metadata_option(with_quiet_config(command))
    made.__doc__ = f"{inspect.cleandoc(command.__doc__ or '')}\n\nExits with {CODES}."
    return made


def lists(ctx: click.Context, *given: object) -> bool:
    """Whether a group was called by itself, to list.

    Args:
        ctx: of the group.
        given: its own options, which mean nothing to the commands below it.

    Raises:
        click.UsageError: one was given with such a command: accepted in silence, it would seem to have an effect.
    """
    if ctx.invoked_subcommand is not None and any(given):
        raise click.UsageError(f"put options behind '{ctx.invoked_subcommand}', which they are for", ctx)
    return ctx.invoked_subcommand is None


def ask(config: Config, question: Callable[[Store], Awaitable[T]]) -> T:
    """Asks, on an event loop of its own.

    Args:
        config: where the metadata server is (``client.metadata``), by what TLS and token
            (``client.tls``, ``client.token_file``), and how long answers may take
            (``admin.timeout``, and no longer than ``client.deadline``; ``admin.change_timeout``).
        question: what to ask.

    Raises:
        Refusal: the store says no, or has no such thing.
        click.ClickException: the metadata server was not reached, for the reason that it names.
        KVStoreError: any other failure.
    """
    try:
        return asyncio.run(_ask(config, question))
    except KVStoreError as error:
        if error.kind in _REFUSALS:
            raise Refusal(clean(str(error))) from error
        raise
    except (ValueError, KeyError) as error:  # a tier, a side or an id that there is none of
        _log.debug("an answer has another shape", exc_info=True)
        raise click.ClickException("an answer cannot be understood: is that server of another version?") from error


async def _ask(config: Config, question: Callable[[Store], Awaitable[T]]) -> T:
    from kvstore.control_api.commands import Commands
    from kvstore.control_api.queries import Queries
    from kvstore.control_api.store_rpc import StoreEndpoint, StoreRpc
    from kvstore.control_api.volume_checks import VolumeChecks
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
            await rpc.server()  # else a node that does not answer could not be told from a server that does not
        except (Unavailable, DeadlineExceeded) as error:
            raise click.ClickException(f"{clean(str(error))}. {_advice(config, error)}") from error
        return await question(Store(rpc, Queries(rpc), Commands(rpc), VolumeChecks(rpc)))
    finally:
        await rpc.close()


def _advice(config: Config, error: KVStoreError) -> str:
    """What to do about a metadata server that was not reached."""
    if "TLS" in error.message or "certificate" in error.message:
        return "TLS settings: docs/how-to/security.md. Another address: --metadata HOST:PORT."
    here = "`kvstore up` starts a store on this machine. " if config.client.metadata == ClientSection().metadata else ""
    return f"Is it running there? `kvstore health metadata` on that host tells. {here}Another address: --metadata HOST:PORT."


def confirm(what: str, *, yes: bool) -> None:
    """Asks before something is lost; without a terminal nobody can be asked, and ``--yes`` has to say it.

    Raises:
        Refusal: nobody said yes.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise Refusal(f"{clean(what)}: nobody can be asked here, so say it with --yes")
    if not click.confirm(clean(what) + "?", err=True):
        raise Refusal("nothing was done")


def tell_unreached(unreached: list[Unreached]) -> None:
    """Says which nodes an answer is without."""
    for one in unreached:
        note(f"without node {one.node_id}: {one.detail} ({one.kind})")


def end_of(done: NamespaceEvicted) -> None:
    """Exits with ``EXIT_IN_PART`` where a change at many nodes is not complete."""
    tell_unreached(done.unreached)
    if not done.complete:
        sys.exit(EXIT_IN_PART)


# ---- completion ----
def complete_nodes(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of nodes, where a metadata server answers at once."""

    async def ids(store: Store) -> list[str]:
        return list(await store.rpc.nodes())

    return _completed(ctx, ids, incomplete)


def complete_volumes(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Ids of volumes."""

    async def ids(store: Store) -> list[str]:
        return [volume.volume_id for _, volume in await store.queries.known_volumes()]

    return _completed(ctx, ids, incomplete)


def complete_namespaces(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Ids of namespaces."""

    async def ids(store: Store) -> list[str]:
        return [one.namespace_id.hex() for one in (await store.rpc.namespaces(b"", _MOST_COMPLETED)).namespaces]

    return _completed(ctx, ids, incomplete)


def _completed(ctx: click.Context, ids: Callable[[Store], Awaitable[list[str]]], incomplete: str) -> list[CompletionItem]:
    """Those that begin so. A shell puts them into a command line: nothing is offered that is more than a plain name."""
    try:
        config, _ = configuration(ctx)
        quick = config.client.model_copy(update={"deadline_ms": int(_COMPLETION_S * 1000)})
        found = ask(config.model_copy(update={"client": quick}), ids)
    except (KVStoreError, click.ClickException, OSError):
        return []  # a completion that fails offers nothing
    return [
        CompletionItem(name)
        for name in sorted(found)
        if name.startswith(incomplete) and all(is_plain(part) for part in name.split("/"))
    ][:_MOST_COMPLETED]
