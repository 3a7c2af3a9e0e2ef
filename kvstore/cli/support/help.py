"""Help texts with examples, which click would re-wrap."""

from __future__ import annotations

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
    """Group of commands that lists its objects if called without a command."""


def keep_examples(text: str) -> str:
    """Mark paragraphs with an indented line, such as examples, so that click does not re-wrap them."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(
        _KEEP_LINES + paragraph if any(line.startswith("  ") for line in paragraph.split("\n")) else paragraph
        for paragraph in paragraphs
    )
