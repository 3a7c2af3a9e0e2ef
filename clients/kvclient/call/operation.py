"""One call of an engine's: how long it may take, and whether it is still wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import cast

from kvstore.core.clock import Clock
from kvstore.core.errors import DeadlineExceeded, InvalidArgument
from kvstore.core.limits import MAX_NAME_BYTES

MOST_SECONDS = 86_400.0
"""What is longer, infinity included, is taken as a day: timers below us and milliseconds on the wire know no infinity."""


def check_seconds(name: str, seconds: object, *, zero: bool = False) -> float:
    """A span of time that a caller chose, at most a day.

    Args:
        name: what it is, for the error.
        seconds: the span.
        zero: whether it may be 0.

    Raises:
        InvalidArgument: no number, NaN, or below 0.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, Real):
        raise InvalidArgument("seconds take a number", argument=name, got=type(seconds).__name__)
    value = cast("float", seconds)  # integers and numpy's numbers compare alike
    if not (value > 0 or (zero and value == 0)):
        raise InvalidArgument("seconds from now are above 0", argument=name, seconds=seconds)
    return MOST_SECONDS if value > MOST_SECONDS else float(value)


def check_name(name: str, value: object) -> str:
    """The name of a node or a policy that a caller gave.

    Args:
        name: what it is, for the error.
        value: the name.

    Raises:
        InvalidArgument: no string, too long, or nothing that a server would take: lone surrogates, control characters.
    """
    if not isinstance(value, str) or not value.isprintable() or len(value.encode()) > MAX_NAME_BYTES:
        raise InvalidArgument("this takes a name of printable text", argument=name, got=ascii(value)[:64])
    return value


def check_sendable(name: str, value: str) -> str:
    """A text that a caller gave, of whatever characters.

    Args:
        name: what it is, for the error.
        value: the text.

    Raises:
        InvalidArgument: it is not Unicode, as with a lone surrogate, and cannot be sent.
    """
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument("this is not valid Unicode", argument=name, got=ascii(value)[:64]) from error
    return value


class Operation:
    """A deadline and a cancellation, carried through everything that a call does.

    Whoever moves bytes asks ``over`` between two pieces of work; whoever waits for something outside registers how to wake
    it with ``on_cancel``. Thread-safe.
    """

    def __init__(self, clock: Clock, timeout_s: float) -> None:
        self._clock = clock
        self.started_s = clock.now_s()
        self.deadline_s = self.started_s + timeout_s
        self._lock = threading.Lock()
        self._cancelled = False
        self.cancellable = False
        """Whether somebody may cancel it while it waits for a server: such waits cost a little more."""
        self._wake: set[Callable[[], object]] = set()
        self.named_blocks: int | None = None
        """Of a load: how many leading blocks its lookup found; None: all, or nobody was asked."""
        self.index_down = False
        """Of a load: its lookup failed."""
        self.spent_s: dict[str, float] = {}
        """Seconds by phase of the work, for whoever asks why it was slow."""

    def left_s(self) -> float:
        """Seconds until the deadline, 0 when it has passed or nobody wants the result any more."""
        return 0.0 if self._cancelled else max(0.0, self.deadline_s - self._clock.now_s())

    def elapsed_s(self) -> float:
        """Seconds since the call began."""
        return self._clock.now_s() - self.started_s

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time inside to a phase's. Phases that run at once each count in full."""
        began_s = self._clock.now_s()
        try:
            yield
        finally:
            self.spent_s[name] = self.spent_s.get(name, 0.0) + self._clock.now_s() - began_s

    @property
    def cancelled(self) -> bool:
        """Whether the caller gave it up."""
        return self._cancelled

    @property
    def over(self) -> bool:
        """Whether to stop: cancelled, or past the deadline."""
        return self._cancelled or self._clock.now_s() >= self.deadline_s

    def error(self) -> DeadlineExceeded:
        """Why it stopped."""
        if self._cancelled:
            return DeadlineExceeded("cancelled by the caller")
        return DeadlineExceeded("not finished within its deadline", seconds=round(self.deadline_s - self.started_s, 3))

    def cancel(self) -> None:
        """Nobody wants the result any more. Returns at once; the work stops soon after."""
        with self._lock:
            self._cancelled = True
            wake = list(self._wake)
        for callback in wake:
            callback()

    @contextmanager
    def on_cancel(self, callback: Callable[[], object]) -> Iterator[None]:
        """While inside, ``callback`` is called on cancellation (at once, where that came before). It must not block."""
        with self._lock:
            self._wake.add(callback)
            cancelled = self._cancelled
        try:
            if cancelled:
                callback()
            yield
        finally:
            with self._lock:
                self._wake.discard(callback)
