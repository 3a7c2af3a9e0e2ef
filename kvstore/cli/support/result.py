"""Answers of commands: one option for the output format, one to repeat the command, and the printing of both.

A command returns a ``CommandOutput``. A decorator adds ``--output`` and ``--watch`` and prints the answer.
"""

from __future__ import annotations

import functools
import io
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any, Final

import click
from pydantic import BaseModel

from kvstore.cli.support import output
from kvstore.config.values import parse_duration_ms
from kvstore.core.errors import KVStoreError

FORMATS: Final = ("table", "json", "yaml")
_USUAL_S: Final = "2"
_LEAST_S: Final = 0.1
_REDRAW: Final = "\x1b[H\x1b[J"
_ESCAPED: Final = "\\u007f"
"""Form of the only control character that JSON does not escape."""


@dataclass(frozen=True, slots=True)
class CommandOutput:
    """Result of a command.

    Attributes:
        data: what JSON and YAML show: a model of the REST API, plain data, or a list of models (shown as ``items``).
        show: prints the answer for people.
        exit_code: exit code of the command; ignored while it is repeated.
        error: why the command fails although it has an answer; printed last, to standard error.
    """

    data: BaseModel | Mapping[str, Any] | Sequence[BaseModel]
    show: Callable[[], None]
    exit_code: int = 0
    error: str | None = None

    def plain(self) -> Any:  # noqa: ANN401  # JSON
        """The data without types."""
        if isinstance(self.data, BaseModel):
            return self.data.model_dump(mode="json")
        if isinstance(self.data, Mapping):
            return dict(self.data)
        return {"items": [one.model_dump(mode="json") for one in self.data]}


def table(
    data: BaseModel | Mapping[str, Any] | Sequence[BaseModel], columns: Sequence[str], rows: Iterable[Sequence[str]]
) -> CommandOutput:
    """Return a result that is shown as a table."""
    return CommandOutput(data, lambda: output.table(columns, rows))


def facts(data: BaseModel | Mapping[str, Any], pairs: Iterable[tuple[str, str]]) -> CommandOutput:
    """Return a result that is shown as properties, one per line."""
    return CommandOutput(data, lambda: output.facts(pairs))


def line(data: BaseModel | Mapping[str, Any], text: str) -> CommandOutput:
    """Return a result that is shown as one line."""
    return CommandOutput(data, lambda: output.line(text))


def prints(command: Callable[..., CommandOutput]) -> Callable[..., None]:
    """Add ``--output`` to a command that returns a ``CommandOutput``, and print the answer."""

    @output_option
    @functools.wraps(command)
    def printing(*args: Any, output_format: str, **kwargs: Any) -> None:  # noqa: ANN401  # arguments of the command
        _end(command(*args, **kwargs), output_format)

    return printing


def watches(command: Callable[..., CommandOutput]) -> Callable[..., None]:
    """Like ``prints``, with ``--watch``, which repeats the command until Ctrl-C."""

    @_watch_option
    @output_option
    @functools.wraps(command)
    def printing(*args: Any, output_format: str, watch_s: float | None, **kwargs: Any) -> None:  # noqa: ANN401
        if watch_s is None:
            _end(command(*args, **kwargs), output_format)
        else:
            _repeat(functools.partial(command, *args, **kwargs), output_format, watch_s)

    return printing


def item(data: Mapping[str, Any], text: str, output_format: str) -> None:
    """Print one item of a stream: a line for people, one line of JSON, or one YAML document.

    Args:
        data: what JSON and YAML show.
        text: line for people.
        output_format: value of ``--output``.
    """
    if output_format == "table":
        output.line(text)
    elif output_format == "json":
        click.echo(json.dumps(data).replace("\x7f", _ESCAPED))
    else:
        click.echo("---")
        _print(CommandOutput(data, lambda: None), output_format)


def _end(found: CommandOutput, output_format: str) -> None:
    _print(found, output_format)
    if found.error is not None:
        click.echo(f"Error: {found.error}", err=True)
    if found.exit_code:
        sys.exit(found.exit_code)


def _repeat(command: Callable[[], CommandOutput], output_format: str, watch_s: float) -> None:
    """Print the answer again and again. A failure of the first query ends the command, a later one is shown and retried."""
    terminal = sys.stdout.isatty()
    first = True
    try:
        while True:
            try:
                shown = _rendered(command(), output_format)
            except (KVStoreError, click.ClickException) as error:
                if first:
                    raise
                reason = error.format_message() if isinstance(error, click.ClickException) else str(error)
                output.note(f"no answer, trying again: {reason}")
            else:
                if terminal:
                    heading = f"{time.strftime('%H:%M:%S')}  every {watch_s:g} s, Ctrl-C quits"
                    click.echo(f"{_REDRAW}{heading}\n\n{shown}", nl=False)
                else:
                    separator = {"table": "\n", "yaml": "---\n", "json": ""}[output_format]
                    click.echo(shown if first else separator + shown, nl=False)
                    sys.stdout.flush()
                first = False
            time.sleep(watch_s)
    except KeyboardInterrupt:
        return


def _rendered(found: CommandOutput, output_format: str) -> str:
    """Text of an answer, so that a frame is drawn at once."""

    class Buffer(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    terminal = sys.stdout.isatty()
    with redirect_stdout(Buffer()) as text:
        _print(found, output_format)
        if found.error is not None and output_format == "table":
            click.echo(f"Error: {found.error}")
    return text.getvalue()


def _print(found: CommandOutput, output_format: str) -> None:
    if output_format == "table":
        found.show()
    elif output_format == "json":
        click.echo(json.dumps(found.plain(), indent=2, default=str).replace("\x7f", _ESCAPED))
    else:
        import yaml  # one format of three

        # the round trip makes every value one that YAML can show
        plain = json.loads(json.dumps(found.plain(), default=str))
        click.echo(yaml.safe_dump(plain, sort_keys=False, width=1000), nl=False)


def _seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Parse ``5``, ``5s`` or ``500ms``."""
    if value is None:
        return None
    try:
        found = parse_duration_ms(value if not re.fullmatch(r"[\d.]+", value) else f"{value}s") / 1000
    except ValueError as error:
        raise click.BadParameter(
            f"{value!r} is not a time such as 5 or 500ms; write --watch last or give it a time", ctx, param
        ) from error
    if found < _LEAST_S:
        raise click.BadParameter(f"must be at least {_LEAST_S:g} seconds", ctx, param)
    return found


output_option = click.option(
    "--output",
    "-o",
    "output_format",
    type=click.Choice(FORMATS),
    default="table",
    show_default=True,
    help="Output format: a table for people, JSON or YAML for programs.",
)
"""``--output``, for commands that print a stream of ``item`` instead of one answer."""

_watch_option = click.option(
    "--watch",
    "watch_s",
    is_flag=False,
    flag_value=_USUAL_S,
    default=None,
    callback=_seconds,
    metavar="[SECONDS]",
    help=f"Repeat until Ctrl-C, every {_USUAL_S} seconds if no time is given.",
)
