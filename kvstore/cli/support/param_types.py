"""Parsers of option values that click does not support, as option callbacks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kvstore.config.values import parse_duration_ms, parse_size
from kvstore.core.errors import InvalidArgument

if TYPE_CHECKING:
    from kvstore.replay.capacity import StoreCapacity
    from kvstore.stress.plan import OperationMix

LEAST_VOLUME: Final = 16 << 20
"""Minimum capacity of a volume. A smaller number usually lacks its unit."""


def size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Parse ``64KiB``, ``4MiB`` or a number of bytes."""
    if value is None:
        return None
    try:
        return parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error


def some_size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Parse a size other than 0."""
    found = size(ctx, param, value)
    if found == 0:
        raise click.BadParameter("must be more than 0 bytes", ctx, param)
    return found


def some_seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Parse ``500ms``, ``90s`` or ``10m`` to seconds, but not 0."""
    if value is None:
        return None
    try:
        found = parse_duration_ms(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error
    if found == 0:
        raise click.BadParameter("must be more than 0", ctx, param)
    return found / 1000


def operation_mix(ctx: click.Context, param: click.Parameter, value: str) -> OperationMix:
    """Parse ``1:8:1``."""
    from kvstore.stress.plan import OperationMix  # only stress needs it

    try:
        return OperationMix.parse(value)
    except InvalidArgument as error:
        raise click.BadParameter(str(error), ctx, param) from error


def volume_size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Parse the capacity of a volume: 0 for no volume, else at least the minimum."""
    found = size(ctx, param, value)
    if found is not None and 0 < found < LEAST_VOLUME:
        raise click.BadParameter(
            f"{found} bytes hold no blocks: give a size with its unit of at least 16MiB (say 4GiB), or 0 for no volume",
            ctx,
            param,
        )
    return found


def result_file(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Parse the path of an output file, ``-`` for standard output. Reject a path that cannot be written."""
    if value is None or value == Path("-"):
        return value
    if not value.parent.is_dir():
        raise click.BadParameter(f"the folder {value.parent} does not exist", ctx, param)
    if not os.access(value if value.exists() else value.parent, os.W_OK):
        raise click.BadParameter(f"{value} cannot be written", ctx, param)
    return value


def capacity(ctx: click.Context, param: click.Parameter, value: str | None) -> StoreCapacity | None:
    """Parse ``dram=1GiB,nvme=20GiB``."""
    from kvstore.replay.capacity import parse_capacity  # only replay needs it

    if value is None:
        return None
    try:
        return parse_capacity(value)
    except InvalidArgument as error:
        raise click.BadParameter(str(error), ctx, param) from error
