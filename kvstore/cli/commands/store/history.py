"""``kvstore history``: cluster events of the last 24 hours."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

import click

from kvstore.cli.support import output
from kvstore.cli.support.help import Command
from kvstore.cli.support.result import CommandOutput, item
from kvstore.cli.support.store_client import StoreConnection, ask, store_change
from kvstore.config.model import Config
from kvstore.config.values import parse_duration_ms

if TYPE_CHECKING:
    from kvstore.control_api.schemas.health import ClusterEventEntry

_PAGE: Final = 500
_FOLLOW_S: Final = 1.0


@click.command(cls=Command)
@click.option("--since", default="24h", show_default=True, metavar="DURATION", help="Only events of the last 30s, 10min, 1h.")
@click.option("--follow", "-f", is_flag=True, help="Continue with new events until Ctrl-C.")
@store_change
def history(config: Config, *, since: str, follow: bool) -> CommandOutput:
    """Show what happened to the cluster: nodes, findings with their health codes, operators' orders.

    The metadata server keeps the events of the last 24 hours, also over a restart. JSON: items, oldest first, each with id, at_s
    (Unix time), kind, subject, text, code and who; with --follow, one object per line (YAML: one document per event).

    Examples:
      kvstore history --since 1h
      kvstore history --follow
      kvstore history -o json | jq '.items[] | select(.kind == "order")'
    """
    try:
        since_s = parse_duration_ms(since) / 1000
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--since") from error

    found: list[ClusterEventEntry] = []
    output_format = click.get_current_context().params["output_format"]

    async def question(store: StoreConnection) -> None:
        after_id = 0
        while True:
            events, more = await store.queries.cluster_events(after_id, since_s, _PAGE)
            for one in events:
                after_id = int(one.id)
                if follow:
                    item(one.model_dump(mode="json"), _text(one), output_format)
                else:
                    found.append(one)
            if more:
                continue
            if not follow:
                return
            await asyncio.sleep(_FOLLOW_S)

    def show() -> None:
        for one in found:
            output.line(_text(one))
        if not found:
            output.note("no events")

    ask(config, question)
    return CommandOutput(found, show)


def _text(one: ClusterEventEntry) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.at_s))
    words = [one.code or one.kind, one.text, f"(by {one.who})" if one.who else ""]
    prefix = {"finding_raised": "raised  ", "finding_cleared": "cleared "}.get(one.kind, "")
    return f"{at}  {prefix}{' '.join(filter(None, words))}"
