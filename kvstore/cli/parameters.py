"""Kinds of command-line values that click does not know, as callbacks of their options."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvstore.core.config_values import parse_size
from kvstore.core.errors import InvalidArgument

if TYPE_CHECKING:
    from kvstore.replay.capacity import Capacity


def size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """``64KiB``, ``4MiB``, or a number of bytes."""
    if value is None:
        return None
    try:
        return parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error


def capacity(ctx: click.Context, param: click.Parameter, value: str | None) -> Capacity | None:
    """``dram=1GiB,nvme=20GiB``."""
    from kvstore.replay.capacity import parse_capacity  # only replays need it

    if value is None:
        return None
    try:
        return parse_capacity(value)
    except InvalidArgument as error:
        raise click.BadParameter(str(error), ctx, param) from error
