"""One request in the simulated cluster, and bounded space that requests wait for in order."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from kvstore.simulate.sessions import SessionTurn


class Job:
    """One request and when what happened to it; times are NaN until then."""

    __slots__ = (
        "arrived",
        "decode",
        "decode_bytes",
        "finished",
        "first_token",
        "loaded",
        "name",
        "paired",
        "parts_left",
        "prefill",
        "prefill_bytes",
        "prefill_start",
        "pushed",
        "read_bytes",
        "remaining",
        "second_token",
        "session",
        "turn",
        "turn_index",
    )

    def __init__(self, name: str, session: int, turn_index: int, turn: SessionTurn, arrived: float) -> None:
        self.name = name
        self.session = session
        self.turn_index = turn_index
        self.turn = turn
        self.arrived = arrived
        self.paired = self.loaded = self.prefill_start = math.nan
        self.first_token = self.second_token = self.finished = math.nan
        self.prefill = self.decode = -1
        """Index of the engine among those of its role."""
        self.parts_left = 0
        self.remaining = turn.new
        """Tokens not yet computed."""
        self.pushed = False
        self.read_bytes = self.prefill_bytes = self.decode_bytes = 0.0
        """KV read from storage; of it over the prefill and over the decode node."""

    @property
    def prompt_tokens(self) -> int:
        """Hit and new."""
        return self.turn.hit + self.turn.new

    @property
    def tokens(self) -> int:
        """Prompt and answer: its length to the scheduler."""
        return self.prompt_tokens + self.turn.out


class SpaceQueue:
    """Queue for bounded space. Requests get all their space at once and in order, so none holds a part while it waits."""

    def __init__(self, size: float) -> None:
        self.size = size
        self.used = 0.0
        self.most_waiting = 0
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()

    def take(self, amount: float, granted: Callable[[], None]) -> None:
        """Call ``granted`` once ``amount`` is available. An amount above ``size`` counts as ``size``."""
        self._waiting.append((min(amount, self.size), granted))
        self._serve()
        self.most_waiting = max(self.most_waiting, len(self._waiting))

    def give(self, amount: float) -> None:
        """Return space that was taken."""
        self.used -= min(amount, self.size)
        self._serve()

    def _serve(self) -> None:
        while self._waiting and self.used + self._waiting[0][0] <= self.size * (1 + 1e-9):
            amount, granted = self._waiting.popleft()
            self.used += amount
            granted()
