"""Help texts with examples, groups of commands on one kind of object, and suggestions for mistyped names."""

from __future__ import annotations

import difflib
import inspect

import click

_KEEP_LINES = "\b\n"


class Command(click.Command):
    """Command whose help does not re-wrap paragraphs with indented lines."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        plain = self.help
        self.help = keep_examples(plain or "")
        try:
            super().format_help_text(ctx, formatter)
        finally:
            self.help = plain


class Group(Command, click.Group):
    """Commands on one kind of object."""

    command_class = Command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if not args[0].startswith("-") and not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            near = self.elsewhere(ctx, args[0]) or difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            hint = f"Did you mean '{ctx.command_path} {near[0]}'?" if near else f"'{ctx.command_path} --help' lists them."
            raise click.UsageError(f"No such command '{args[0]}'. {hint}", ctx)
        return super().resolve_command(ctx, args)

    def elsewhere(self, ctx: click.Context, name: str) -> list[str]:  # noqa: ARG002
        """Commands of that name below other groups."""
        return []


class Resource(Group):
    """Commands on one kind of object, of which one is run if none is named: ``kvstore nodes`` lists the nodes.

    Attributes:
        usual: name of this command.
    """

    usual = "list"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing and (not args or _is_option(args[0], ctx)):
            args = [self.usual, *args]
        return super().parse_args(ctx, args)


class ShownResource(Resource):
    """Commands on one object, which is shown if no command is named."""

    usual = "show"


def _is_option(word: str, ctx: click.Context) -> bool:
    return word.startswith("-") and word not in ctx.help_option_names


def keep_examples(text: str) -> str:
    """Mark paragraphs with an indented line, such as examples, so that click does not re-wrap them."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(
        _KEEP_LINES + paragraph if any(line.startswith("  ") for line in paragraph.split("\n")) else paragraph
        for paragraph in paragraphs
    )
