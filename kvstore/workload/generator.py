"""A seeded generator of agent sessions, from published statistics of production agentic reinforcement learning.

DualPath (arXiv 2602.21548), Table 2, reports means over 500 trajectories. Turns times tokens per turn exceeds the total, so
tokens per turn are means of per-trajectory means: a trajectory's total hardly depends on its number of turns. With log-normal
turns E[total / turns] = total / mean turns * exp(sigma^2), which gives sigma. The mean context gives the start of a trajectory:
(first prompt + total) / 2.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.core.errors import InvalidArgument
from kvstore.core.limits import MAX_BLOCK_TOKENS
from kvstore.workload.requests import TraceInfo, TraceRequest

_MIN_TURNS = 2
_TOTAL_SPREAD = 0.07
"""Standard deviation of a trajectory's total over its mean: the longest allowed total is about two deviations above the mean."""
_START_SPREAD = 0.10
_TURN_SHAPE = 1.5
"""Gamma shape of tokens per turn around the trajectory's mean: some turns read a file, most a line."""
_MS_PER_TOKEN = 20.0
"""Decoding time per token; it spaces the turns of a session."""


@dataclass(frozen=True, slots=True)
class AgentProfile:
    """Means over trajectories."""

    name: str
    max_tokens: int
    turns: float
    turns_sigma: float
    """Sigma of the logarithm of the number of turns."""
    append_tokens: float
    """Tokens per turn that tools and users append; including the first prompt."""
    generated_tokens: float
    """Tokens per turn that the model generates."""
    total_tokens: float
    """Tokens at a trajectory's end."""
    context_tokens: float
    """Tokens of context, over all turns."""

    @property
    def first_prompt_tokens(self) -> float:
        """Tokens of the first prompt."""
        return 2 * self.context_tokens - self.total_tokens

    @property
    def generated_share(self) -> float:
        """Share of a trajectory's tokens that the model generates."""
        return self.generated_tokens / (self.generated_tokens + self.append_tokens)


PROFILES = {
    profile.name: profile
    for profile in (
        AgentProfile("agentic-32k", 32_768, 60, 0.68, 608, 148, 28_639, 17_183),
        AgentProfile("agentic-48k", 49_152, 106, 0.69, 474, 172, 42_607, 25_120),
        AgentProfile("agentic-64k", 65_536, 157, 0.73, 429, 176, 55_958, 32_721),
    )
}


@dataclass(frozen=True, slots=True)
class AgentWorkload:
    """A generated workload. Iterating it yields its requests by time; equal settings yield equal requests.

    Attributes:
        profile: statistics of the trajectories.
        sessions: number of trajectories.
        seed: seed of all draws.
        block_tokens: tokens per block.
        shared_prefix_tokens: leading tokens (system prompt, tool descriptions) that all sessions share.
        sessions_per_s: arrivals (Poisson).
        max_turns: maximum turns per trajectory; None: unlimited.
    """

    profile: AgentProfile
    sessions: int
    seed: int = 1
    block_tokens: int = 64
    shared_prefix_tokens: int = 0
    sessions_per_s: float = 1.0
    max_turns: int | None = None

    def __post_init__(self) -> None:
        if self.sessions < 1 or not 1 <= self.block_tokens <= MAX_BLOCK_TOKENS or self.sessions_per_s <= 0 or self.seed < 0:
            raise InvalidArgument("sessions, block_tokens and sessions_per_s must be above 0, and seed at least 0")
        if self.shared_prefix_tokens < 0 or (self.max_turns is not None and self.max_turns < 1):
            raise InvalidArgument("shared_prefix_tokens must be at least 0, and max_turns at least 1")

    @property
    def info(self) -> TraceInfo:
        """Name, block tokens, format."""
        return TraceInfo(self.profile.name, self.block_tokens, "generated")

    def __iter__(self) -> Iterator[TraceRequest]:
        arrivals = np.random.default_rng([self.seed, 0])
        start_ms = 0.0
        waiting: list[tuple[int, int, int]] = []  # (time, session, turn), earliest first
        running: dict[int, Iterator[TraceRequest]] = {}
        upcoming: dict[int, TraceRequest] = {}
        for session in range(self.sessions):
            start_ms += arrivals.exponential(1000.0 / self.sessions_per_s)
            running[session] = self._session(session, start_ms)
            upcoming[session] = next(running[session])
            heapq.heappush(waiting, (upcoming[session].timestamp_ms, session, 0))
        while waiting:
            _, session, _ = heapq.heappop(waiting)
            yield upcoming.pop(session)
            following = next(running[session], None)
            if following is not None:
                upcoming[session] = following
                heapq.heappush(waiting, (following.timestamp_ms, session, following.turn))

    def _session(self, session: int, start_ms: float) -> Iterator[TraceRequest]:
        """The turns of one trajectory."""
        draw = np.random.default_rng([self.seed, 1, session])
        appended, generated = self._turns(draw)
        now_ms = start_ms
        context = 0
        for turn, (append, answer) in enumerate(zip(appended.tolist(), generated.tolist(), strict=True)):
            prompt = context + append
            context = prompt + answer
            if context > self.profile.max_tokens:
                return  # rounding up exceeded the longest context
            first, last = prompt // self.block_tokens, context // self.block_tokens
            yield TraceRequest(
                session=f"agent-{session}",
                turn=turn,
                timestamp_ms=int(now_ms),
                input_tokens=prompt,
                output_tokens=answer,
                block_ids=self._ids(session, 0, first),
                answer_ids=self._ids(session, first, last),
            )
            now_ms += answer * _MS_PER_TOKEN

    def _turns(self, draw: np.random.Generator) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Tokens appended (the first prompt first) and generated, turn by turn."""
        profile = self.profile
        mu = math.log(profile.turns) - profile.turns_sigma**2 / 2
        turns = max(_MIN_TURNS, round(float(draw.lognormal(mu, profile.turns_sigma))))
        total = min(profile.total_tokens * max(0.5, float(draw.normal(1.0, _TOTAL_SPREAD))), float(profile.max_tokens))
        start = profile.first_prompt_tokens * max(0.5, float(draw.normal(1.0, _START_SPREAD)))
        generated_total = total * profile.generated_share
        appended = np.concatenate(([start], _split(draw, total - start - generated_total, turns - 1)))
        generated = _split(draw, generated_total, turns)
        shown = turns if self.max_turns is None else min(turns, self.max_turns)
        return _whole(appended)[:shown], _whole(generated)[:shown]

    def _ids(self, session: int, first: int, last: int) -> npt.NDArray[np.int64]:
        """Ids of a session's blocks ``[first, last)``: shared ids are below all others, which are unique to a session."""
        shared = self.shared_prefix_tokens // self.block_tokens
        ids = np.arange(first, last, dtype=np.int64)
        own = shared + session * (2 * self.profile.max_tokens // self.block_tokens + 2)
        return np.where(ids < shared, ids, ids + own)


def _split(draw: np.random.Generator, total: float, parts: int) -> npt.NDArray[np.float64]:
    """Divide ``total`` into parts with the spread of tokens per turn."""
    weights = draw.gamma(_TURN_SHAPE, size=parts)
    weights *= total / weights.sum()
    return weights


def _whole(tokens: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Round to whole tokens, at least one per turn."""
    return np.maximum(1, np.rint(tokens)).astype(np.int64)
