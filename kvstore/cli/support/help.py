"""Help texts that keep their examples: click would re-wrap them."""

from __future__ import annotations

import inspect

import click

_KEEP_LINES = "\b\n"


class Command(click.Command):
    """A command whose help keeps paragraphs with indented lines as they are written."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        plain = self.help
        self.help = keep_examples(plain or "")
        try:
            super().format_help_text(ctx, formatter)
        finally:
            self.help = plain


class Group(Command, click.Group):
    """Commands below a name, that does something by itself too: lists what the others show and change."""


def keep_examples(text: str) -> str:
    """Marks paragraphs that have an indented line, such as examples, so that click leaves their lines alone."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(
        _KEEP_LINES + paragraph if any(line.startswith("  ") for line in paragraph.split("\n")) else paragraph
        for paragraph in paragraphs
    )
