"""Options of commands that start a store: number of metadata servers, and the place of the index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

import click

_P = ParamSpec("_P")
_R = TypeVar("_R")

_MAX_SERVERS: Final = 16
_MAX_SHARDS: Final = 16
_MIN_SHARDS: Final = 3
"""With fewer, no replica replaces its primary: most of the primaries must agree, and one of them is the lost one."""


def _shards(_context: click.Context, _parameter: click.Parameter, value: int) -> int:
    if 0 < value < _MIN_SHARDS:
        raise click.BadParameter(f"{value} shards cannot lose a server: use {_MIN_SHARDS} or more, or 0")
    return value


def scale_options(command: Callable[_P, _R]) -> Callable[_P, _R]:
    """Add ``--servers`` and ``--shards``."""
    command = click.option(
        "--shards",
        type=click.IntRange(0, _MAX_SHARDS),
        callback=_shards,
        default=0,
        show_default=True,
        help="Shards of a Valkey Cluster that holds the index, each a primary and a replica: 3 or more; 0: the index is a file.",
    )(command)
    return click.option(
        "--servers",
        type=click.IntRange(1, _MAX_SERVERS),
        default=1,
        show_default=True,
        help="Metadata servers; they share the index.",
    )(command)


def describe_metadata(servers: int, shards: int) -> str:
    """Describe what is started, for messages: "2 metadata servers, 3 Valkey shards of 2 servers each"."""
    described = "a metadata server" if servers == 1 else f"{servers} metadata servers"
    if shards:
        described += f", {shards} Valkey shards of 2 servers each"
    return described
