"""Checks of arguments that several public methods take."""

from __future__ import annotations

import os
from numbers import Real
from typing import cast

from kvstore.core.errors import InvalidArgument
from kvstore.core.limits import MAX_NAME_BYTES

MAX_SECONDS = 86_400.0
"""Longer times, infinity included, are cut to a day: timers, and milliseconds in messages, cannot represent infinity."""


def check_seconds(name: str, seconds: object, *, zero: bool = False) -> float:
    """Check a time span and cut it to a day.

    Args:
        name: of the argument, for the error.
        seconds: the span.
        zero: whether 0 is allowed.

    Raises:
        InvalidArgument: not a number, NaN, or negative.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, Real):
        raise InvalidArgument("seconds must be a number", argument=name, got=type(seconds).__name__)
    value = cast("float", seconds)  # integers and numpy's numbers compare alike
    if not (value > 0 or (zero and value == 0)):
        raise InvalidArgument("seconds must be positive", argument=name, seconds=seconds)
    return MAX_SECONDS if value > MAX_SECONDS else float(value)


def check_name(name: str, value: object) -> str:
    """Check the name of a node or a policy.

    Args:
        name: of the argument, for the error.
        value: the name.

    Raises:
        InvalidArgument: not a string, too long, or not printable.
    """
    if not isinstance(value, str) or not value.isprintable() or len(value.encode()) > MAX_NAME_BYTES:
        raise InvalidArgument("a name must be printable text", argument=name, got=ascii(value)[:64])
    return value


def check_sendable(name: str, value: str) -> str:
    """Check that a text can be encoded.

    Args:
        name: of the argument, for the error.
        value: the text.

    Raises:
        InvalidArgument: not valid Unicode, such as a lone surrogate.
    """
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument("text must be valid Unicode", argument=name, got=ascii(value)[:64]) from error
    return value


def check_process(made_in: int) -> None:
    """Check that a client is used in the process that made it.

    Args:
        made_in: id of that process.

    Raises:
        InvalidArgument: this is a child of it, where gRPC and connections of the client do not work.
    """
    if os.getpid() != made_in:
        raise InvalidArgument("this client was made before a fork; make another one in the child")
