"""Waiting for a state that another thread or process reaches, if that offers no event to wait for."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable

import pytest

Description = str | Callable[[], str]

WAIT_S = 30.0
"""The default bound: generous, as a loaded machine is slow. A test that passes waits much less."""
POLL_S, MOST_POLL_S = 0.01, 0.05
"""Time between two polls of a default wait. It grows to a tenth of the wait: each poll costs a daemon processor time."""


def wait_until(
    condition: Callable[[], object],
    what: Description = "",
    timeout_s: float = WAIT_S,
    *,
    poll_s: float | None = None,
    step: Callable[[], object] | None = None,
) -> float:
    """Wait until a condition is true. Returns the seconds that it took.

    Args:
        condition: is polled.
        what: the failure's message; a function is called when the test fails. Default: the source of the condition.
        timeout_s: the test fails after this.
        poll_s: time between two polls; None: as long as ``POLL_S`` and ``MOST_POLL_S`` say.
        step: is called between two polls, in place of a sleep.
    """
    began_s = time.monotonic()
    while not condition():
        if time.monotonic() - began_s >= timeout_s:
            pytest.fail(_timeout_message(condition, what, timeout_s))
        if step is None:
            time.sleep(_poll_s(began_s) if poll_s is None else poll_s)
        else:
            step()
    return time.monotonic() - began_s


async def wait_until_async(
    condition: Callable[[], object], what: Description = "", timeout_s: float = WAIT_S, *, poll_s: float | None = None
) -> None:
    """Wait until a condition is true, as ``wait_until`` does. It may be asynchronous; one that hangs fails, too."""

    async def holds() -> object:
        answer = condition()
        return await answer if inspect.isawaitable(answer) else answer

    began_s = time.monotonic()
    try:
        async with asyncio.timeout(timeout_s):
            while not await holds():  # noqa: ASYNC110  # the state is another process's: there is no event
                await asyncio.sleep(_poll_s(began_s) if poll_s is None else poll_s)
    except TimeoutError:
        pytest.fail(_timeout_message(condition, what, timeout_s))


def _poll_s(began_s: float) -> float:
    return min(MOST_POLL_S, max(POLL_S, (time.monotonic() - began_s) / 10))


def _timeout_message(condition: Callable[[], object], what: Description, timeout_s: float) -> str:
    text = what() if callable(what) else what
    if not text:
        try:
            text = inspect.getsource(condition).strip()
        except (OSError, TypeError):
            text = repr(condition)
    return f"timeout after {timeout_s:.0f} s: {text}"
