"""The workload of a cluster: sessions of turns, each with its hit tokens, new tokens and generated tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvstore.core.errors import InvalidArgument
from kvstore.workload.chains import ChainTable
from kvstore.workload.requests import TraceRequest

_GOLDEN = 0.6180339887498949
"""Multiples of this number, modulo 1, are spread evenly for any number of draws."""


class SessionTurn(NamedTuple):
    """One request of a session."""

    hit: int
    """Leading tokens whose KV is in storage; whole blocks."""
    new: int
    """Tokens to compute, at least one."""
    out: int
    """Tokens to generate, at least one."""
    think_s: float = 0.0
    """Seconds after the end of the previous turn; for the first turn, after the start of the session."""


class AgentSession(NamedTuple):
    """A conversation: its turns run one after another."""

    start_s: float
    turns: tuple[SessionTurn, ...]


def sessions_of(
    requests: Iterable[TraceRequest],
    block_tokens: int,
    *,
    append_factor: float = 1.0,
    most_tokens: int | None = None,
) -> list[AgentSession]:
    """Sessions of a workload; hits are those of an unbounded store.

    Sessions begin at the times of the workload; within a session each turn follows the previous one at once, as if tools took
    no time.

    Args:
        requests: in order of time.
        block_tokens: tokens per block of the workload.
        append_factor: multiplies every turn's new tokens (the context grows accordingly); everything before the appended tokens
            then counts as a hit.
        most_tokens: a session ends before the first turn with a longer prompt.
    """
    table = ChainTable()
    turns: dict[str, list[SessionTurn]] = {}
    starts: dict[str, float] = {}
    grown: dict[str, int] = {}
    ended: set[str] = set()
    for request in requests:
        known = len(table)
        ids = np.concatenate((request.block_ids, request.answer_ids)) if len(request.answer_ids) else request.block_ids
        chain = table.intern(request.session, ids)[: len(request.block_ids)]
        hit = int(np.searchsorted(chain >= known, 1)) * block_tokens
        hit = min(hit, (max(0, request.input_tokens - 1) // block_tokens) * block_tokens)  # the last token is always computed
        new = max(1, request.input_tokens - hit)
        if append_factor != 1.0:
            before = grown.get(request.session, 0)
            hit = (hit + before) // block_tokens * block_tokens if hit else 0
            grown[request.session] = before + round(new * (append_factor - 1))
            new = max(1, round(new * append_factor))
        if most_tokens is not None and (hit + new > most_tokens or request.session in ended):
            ended.add(request.session)
            continue
        starts.setdefault(request.session, request.timestamp_ms / 1000)
        turns.setdefault(request.session, []).append(SessionTurn(hit, new, max(1, request.output_tokens)))
    return [AgentSession(starts[name], tuple(found)) for name, found in turns.items()]


def thinned(sessions: Iterable[AgentSession], every: int) -> list[AgentSession]:
    """Keep one turn in ``every`` of each session, as if the others had run before. The load stays the same, the run is shorter.

    Which turns are kept differs evenly from session to session, so that early and late ones are kept alike; a short session
    may keep none. A run takes about 1/``every`` of the time; arrivals come ``every`` times as fast to keep as many sessions
    alive.
    """
    if every < 1:
        raise InvalidArgument("the thinning factor must be at least 1", every=every)
    return [
        AgentSession(session.start_s / every, session.turns[int(index * _GOLDEN % 1 * every) :: every])
        for index, session in enumerate(sessions)
    ]


def at_once(sessions: Iterable[AgentSession]) -> tuple[AgentSession, ...]:
    """Start all sessions at time 0: an offline batch."""
    return tuple(AgentSession(0.0, session.turns) for session in sessions)


def arriving(sessions: Sequence[AgentSession], per_s: float, seed: int) -> tuple[AgentSession, ...]:
    """Start sessions as a Poisson process of this rate."""
    if not per_s > 0:
        raise InvalidArgument("per_s must be above zero", per_s=per_s)
    starts = np.random.default_rng([seed, 7]).exponential(1 / per_s, len(sessions)).cumsum()
    return tuple(AgentSession(float(start), session.turns) for start, session in zip(starts, sessions, strict=True))
