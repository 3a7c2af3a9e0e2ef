"""The highest rate of agents that a cluster sustains within latency limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.core.errors import InvalidArgument
from kvstore.simulate.cluster import SimConfig
from kvstore.simulate.result import SimResult
from kvstore.simulate.run import simulate
from kvstore.simulate.sessions import AgentSession, arriving

TTFT_S = 4.0
TPOT_S = 0.050
"""The paper's service levels."""

_PRECISION = 0.06
MOST_RATES = 12


@dataclass(frozen=True, slots=True)
class Point:
    """One arrival rate that was tried; latencies are means over the requests of the measured time.

    Attributes:
        agents_s: sessions that begin a second.
        ttft_s, ttst_s, tpot_s: means.
        kept: both limits were, and the load was kept up with.
    """

    agents_s: float
    ttft_s: float
    ttst_s: float
    tpot_s: float
    kept: bool


@dataclass(frozen=True, slots=True)
class Capacity:
    """The highest rate that kept the limits, and all that were tried, in the order of rates; 0: none did."""

    variant: str
    agents_s: float
    points: tuple[Point, ...]


def capacity(
    config: SimConfig,
    pool: Sequence[AgentSession],
    *,
    every: int = 1,
    ttft_s: float = TTFT_S,
    tpot_s: float = TPOT_S,
    lives: float = 3.0,
    first_guess: float = 0.3,
    seed: int = 1,
    tried: Callable[[Point], None] | None = None,
) -> Capacity:
    """Search the highest rate of Poisson arrivals at which mean TTFT and mean TPOT are within their limits.

    Sessions are drawn from the pool in turns. A run lasts ``lives`` session times; the first fills the cluster and is not
    measured. The rate is doubled or halved until the limit is between two rates, then bisected geometrically to 6 %.

    Args:
        config: the cluster and the variant; its sessions are not used.
        pool: sessions to draw from, thinned to one turn in ``every``.
        every: factor of the thinning; the returned rates are for whole sessions.
        ttft_s: limit of the mean time to the first token.
        tpot_s: limit of the mean time per token.
        lives: length of a run.
        first_guess: the first rate.
        seed: seed of the arrivals.
        tried: called after each rate.

    Raises:
        InvalidArgument: the run is too short, or the pool is empty.
    """
    if not pool or lives <= 1 or not first_guess > 0:
        raise InvalidArgument(
            "sessions must not be empty, lives must be above 1, and first_guess above 0",
            sessions=len(pool),
            lives=lives,
            first_guess=first_guess,
        )
    points: list[Point] = []

    def keeps(rate: float) -> bool:
        point = _try(config, pool, rate, every, ttft_s, tpot_s, lives, seed)
        points.append(point)
        if tried is not None:
            tried(point)
        return point.kept

    low, high = 0.0, math.inf
    rate = first_guess
    while len(points) < MOST_RATES:
        if keeps(rate):
            low = rate
        else:
            high = rate
        if low and high <= low * (1 + _PRECISION):
            break
        rate = low * 2 if high == math.inf else high / 2 if not low else math.sqrt(low * high)
    return Capacity(config.variant.name, low, tuple(sorted(points, key=lambda point: point.agents_s)))


def _try(
    config: SimConfig,
    pool: Sequence[AgentSession],
    rate: float,
    every: int,
    ttft_s: float,
    tpot_s: float,
    lives: float,
    seed: int,
) -> Point:
    life = _life(config, pool, ttft_s)
    until = life * lives
    count = math.ceil(until * rate * every * 1.3) + 4
    chosen = [pool[index % len(pool)] for index in range(count)]
    sessions = arriving(chosen, rate * every, seed)
    # by Little's law an overloaded cluster has more requests under way than arrive in a few limits
    requests_s = rate * every * sum(len(session.turns) for session in pool) / len(pool)
    most = math.ceil(requests_s * (4 * ttft_s + 8 * life / _turns(pool))) + 32
    result = simulate(config.but(sessions=sessions), until_s=until, most_waiting=most)
    return _point(result, rate, ttft_s, tpot_s, until, life)


def _point(result: SimResult, rate: float, ttft_s: float, tpot_s: float, until: float, life: float) -> Point:
    measured = result.arrivals >= life
    if result.seconds < until or not measured.any():  # stopped: it was not kept up with
        return Point(rate, math.inf, math.inf, math.inf, kept=False)
    ttft = float(result.ttfts[measured].mean())
    tpot = float(np.nanmean(result.tpots[measured]))
    return Point(rate, ttft, result.ttst.mean, tpot, kept=ttft <= ttft_s and tpot <= tpot_s)


def _turns(pool: Sequence[AgentSession]) -> float:
    return max(1.0, sum(len(session.turns) for session in pool) / len(pool))


def _life(config: SimConfig, pool: Sequence[AgentSession], ttft_s: float) -> float:
    """Estimate the seconds of a session: decoding at a small batch, and half the TTFT limit per turn."""
    step = config.decode.decode_seconds(16, 16 * 32_000, 16 * 8) if config.compute else 0.0
    tokens = sum(turn.out for session in pool for turn in session.turns) / len(pool)
    think = sum(turn.think_s for session in pool for turn in session.turns) / len(pool)
    return tokens * step + _turns(pool) * ttft_s / 2 + think
