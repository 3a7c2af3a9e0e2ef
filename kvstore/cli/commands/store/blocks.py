"""``kvstore blocks``: hits and misses of a prompt, block by block."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kvstore.cli.commands.store.namespace_names import find
from kvstore.cli.support import output, result
from kvstore.cli.support.help import Group
from kvstore.cli.support.result import CommandOutput
from kvstore.cli.support.store_client import StoreConnection, ask, complete_namespaces, store_query
from kvstore.config.model import Config
from kvstore.core.keys import MAX_TOKEN
from kvstore.core.limits import MAX_KEYS_PER_CALL

if TYPE_CHECKING:
    from kvstore.control_api.schemas.store import LookupAnswer, Replica

MAX_TOKENS: Final = 4_194_304
MAX_INPUT_BYTES: Final = 64 << 20
_KEY: Final = re.compile(r"[0-9a-f]{32}")
_TOKEN: Final = re.compile(r"[0-9]{1,10}")
_APART: Final = re.compile(r"[\s,;\[\]\"']+")


def chain_of(text: str) -> tuple[list[str] | None, list[int] | None]:
    """Parse keys or token ids, separated by blanks, commas or lines, or as a JSON list. One of the two results is None.

    Raises:
        click.UsageError: the input is empty, too long, mixed or invalid.
    """
    words = [word for word in _APART.split(text.lower()) if word]
    if not words:
        raise click.UsageError("give token ids or keys: as arguments, with --file, or on standard input")
    if all(_KEY.fullmatch(word) for word in words):
        if len(words) > MAX_KEYS_PER_CALL:
            raise click.UsageError(f"{len(words):,} keys: {MAX_KEYS_PER_CALL:,} at most")
        return words, None
    wrong = next((word for word in words if not _TOKEN.fullmatch(word) or int(word) > MAX_TOKEN), None)
    if wrong is not None:
        raise click.UsageError(f"{output.clean(wrong[:40])} is neither a token id nor a key of 32 hexadecimal digits")
    if len(words) > MAX_TOKENS:
        raise click.UsageError(f"{len(words):,} tokens: {MAX_TOKENS:,} at most")
    return None, [int(word) for word in words]


@click.group(cls=Group)
def blocks() -> None:
    """Look blocks up, and explain hits and misses.

    Examples:
      kvstore blocks lookup 8c2f0d 1 2 3 4
      kvstore blocks show 03b1f2c4d5968778695a4b3c2d1e0f10
    """


@blocks.command()
@click.argument("namespace", shell_complete=complete_namespaces)
@click.argument("ids", nargs=-1)
@click.option("--file", "-f", type=click.Path(allow_dash=True, path_type=Path), help="File with the ids; -: standard input.")
@store_query
def lookup(config: Config, *, namespace: str, ids: tuple[str, ...], file: Path | None) -> CommandOutput:
    """Show the hit length of a chain in NAMESPACE and the reason of the first miss. IDS are its token ids or block keys.

    It is not counted as a lookup. Without IDS and --file, standard input is read.

    Examples:
      kvstore blocks lookup 8c2f0d 1 2 3 4
      kvstore blocks lookup 8c2f0d --file tokens.json
      jq -c .token_ids request.json | kvstore blocks lookup 8c2f0d -o json | jq .first_miss
    """
    from kvstore.control_api.schemas.store import LookupQuery

    if ids and file is not None:
        raise click.UsageError("give ids, or a file of them, not both")
    keys, tokens = chain_of(" ".join(ids) if ids else _read(file))

    async def question(store: StoreConnection) -> LookupAnswer:
        wanted = (await find(store, namespace)).namespace_id
        return await store.queries.look_up(LookupQuery(namespace_id=wanted, keys=keys, tokens=tokens))

    found = ask(config, question)
    why = f": {found.first_miss}" if found.first_miss else ""
    output.note(f"{found.hit_blocks:,} of {found.blocks:,} blocks hit{why}")
    return result.table(
        found,
        ("blocks", "hit", "state", "where", "why"),
        [
            (
                f"{run.start}-{run.start + run.count - 1}" if run.count > 1 else str(run.start),
                "hit" if run.hit else "miss",
                run.state,
                _where(run.replicas),
                run.why,
            )
            for run in found.runs
        ],
    )


@blocks.command("show")
@click.argument("key")
@store_query
def show_block(config: Config, *, key: str) -> CommandOutput:
    """Show the index record of a block, by its KEY of 32 hexadecimal digits.

    Examples:
      kvstore blocks show 03b1f2c4d5968778695a4b3c2d1e0f10
    """
    wanted = key.lower()
    if not _KEY.fullmatch(wanted):
        raise click.BadParameter("a key must have 32 hexadecimal digits", param_hint="KEY")
    found = ask(config, lambda store: store.queries.block(wanted))
    return result.facts(
        found,
        [
            ("key", found.key),
            ("state", found.state),
            ("why", found.why),
            ("namespace", found.namespace_id or ""),
            ("depth", "" if found.depth is None else str(found.depth)),
            ("where", _where(found.replicas)),
        ],
    )


def _where(replicas: list[Replica]) -> str:
    return ", ".join(one.volume_id for one in replicas if one.volume_id and one.visible)


def _read(file: Path | None) -> str:
    """Read a file or standard input, up to a limit in bytes."""
    if file is None or file == Path("-"):
        if file is None and sys.stdin.isatty():
            return ""
        raw = sys.stdin.buffer.read(MAX_INPUT_BYTES + 1)
    else:
        with file.open("rb") as opened:
            raw = opened.read(MAX_INPUT_BYTES + 1)
    if len(raw) > MAX_INPUT_BYTES:
        raise click.UsageError(f"more than {MAX_INPUT_BYTES >> 20} MiB of ids")
    return raw.decode(errors="replace")
