"""Kinds of command-line values that click does not know, as callbacks of their options."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kvstore.config.values import parse_duration_ms, parse_size
from kvstore.core.errors import InvalidArgument

if TYPE_CHECKING:
    from kvstore.replay.capacity import StoreCapacity

LEAST_VOLUME: Final = 16 << 20
"""A smaller volume holds a few blocks at most: nearly always a number without its unit."""


def size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """``64KiB``, ``4MiB``, or a number of bytes."""
    if value is None:
        return None
    try:
        return parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error


def some_size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """As ``size``, but not 0."""
    found = size(ctx, param, value)
    if found == 0:
        raise click.BadParameter("takes more than 0 bytes", ctx, param)
    return found


def some_seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """``500ms``, ``90s``, ``10m``: seconds, not 0."""
    if value is None:
        return None
    try:
        found = parse_duration_ms(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error
    if found == 0:
        raise click.BadParameter("takes more than 0", ctx, param)
    return found / 1000


def volume_size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """As ``size``: 0 for no volume, else room for some blocks at least."""
    found = size(ctx, param, value)
    if found is not None and 0 < found < LEAST_VOLUME:
        raise click.BadParameter(
            f"{found} bytes hold no blocks: give a size with its unit of at least 16MiB (say 4GiB), or 0 for no volume",
            ctx,
            param,
        )
    return found


def result_file(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """A file to be written at the end, ``-`` for standard output: refused at once where it could not be."""
    if value is None or value == Path("-"):
        return value
    if not value.parent.is_dir():
        raise click.BadParameter(f"there is no folder {value.parent}", ctx, param)
    if not os.access(value if value.exists() else value.parent, os.W_OK):
        raise click.BadParameter(f"{value} cannot be written", ctx, param)
    return value


def capacity(ctx: click.Context, param: click.Parameter, value: str | None) -> StoreCapacity | None:
    """``dram=1GiB,nvme=20GiB``."""
    from kvstore.replay.capacity import parse_capacity  # only replays need it

    if value is None:
        return None
    try:
        return parse_capacity(value)
    except InvalidArgument as error:
        raise click.BadParameter(str(error), ctx, param) from error
