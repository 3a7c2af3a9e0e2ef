"""The command line reference, from the parsers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click

from docs_site.markdown import code, fenced, plain, table
from kvstore.cli.app import root


def pages() -> str:
    """Write a section per command and subcommand."""
    context = click.Context(root, info_name="kvstore")
    return "\n".join(_section(context))


def _section(context: click.Context) -> Iterator[str]:
    command = context.command
    depth = context.command_path.count(" ")
    if depth:
        yield f"{'#' * (depth + 1)} {context.command_path}\n"
    pieces = command.collect_usage_pieces(context)
    yield fenced(" ".join([context.command_path, *pieces]))
    yield from _help(command.help or "")
    options = [_option(context, option) for option in command.params if isinstance(option, click.Option) and not option.hidden]
    if options:
        yield table(("option", "what it does"), options)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from _section(click.Context(below, info_name=name, parent=context))


def _help(text: str) -> Iterator[str]:
    """Convert help text: an indented paragraph is an example with a heading."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        lines = paragraph.split("\n")
        first = next((number for number, line in enumerate(lines) if line.startswith("  ")), len(lines))
        if lines[:first]:
            yield plain(" ".join(lines[:first])) + "\n"
        if lines[first:]:
            yield fenced(inspect.cleandoc("\n".join(lines[first:])), "sh" if "kvstore" in lines[first] else "text")


def _option(context: click.Context, option: click.Option) -> tuple[str, str]:
    names, text = option.get_help_record(context) or ("", "")
    return code(names), plain(text)
