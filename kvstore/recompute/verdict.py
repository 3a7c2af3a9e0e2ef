"""The verdict on one request: load all found blocks, load only the first of them, or compute everything.

Let ``k`` be the number of blocks that are loaded. The load takes longer with each block, and the rest of the prompt is computed
faster: later blocks save more, since attention compares them with everything before them. Within the blocks of one source, the
sum of both is therefore concave in ``k``, and smallest at an end: only the ends of sources are candidates. Where load and
computation overlap, it is smallest where both take equally long, which a bisection finds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import accumulate

MARGIN = 0.02
"""A load that takes longer by this share is still preferred: it leaves the engine to other requests."""
LEAST_GAIN_S = 0.005
"""A load that takes longer by less than this is still preferred: predictions are not exact to milliseconds."""
DEADLINE_SHARE = 0.8
"""Share of its deadline that a load may be predicted to take."""


class Choice(StrEnum):
    """Decision about the found blocks of a request."""

    LOAD = "load"
    """All are loaded."""
    CUT = "cut"
    """The first ones are loaded, the rest is computed."""
    COMPUTE = "compute"
    """None is loaded."""
    PROBE = "probe"
    """Computing is faster; a few blocks are loaded, with a short deadline, to measure their source again."""


class Overlap(StrEnum):
    """Computation for a request while its blocks are read."""

    NONE = "none"
    """Nothing: the rest of the prompt is computed after the load."""
    LAYERS = "layers"
    """The rest of the prompt: each layer is computed once it is loaded."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive blocks from one source.

    Attributes:
        blocks: number of blocks.
        fixed_s: fixed cost of a load from this source.
        block_s: time per block.
    """

    blocks: int
    fixed_s: float
    block_s: float


@dataclass(frozen=True, slots=True)
class FoundPrefix:
    """A request whose leading blocks were found.

    Attributes:
        pieces: the found blocks beyond the cached ones, in order.
        block_tokens: tokens of a block.
        cached: tokens that the engine has.
        tokens: all tokens.
    """

    pieces: Sequence[Piece]
    block_tokens: int
    cached: int
    tokens: int
    _ends: Sequence[int] = field(init=False, repr=False, compare=False)
    """By piece: the position after its last block."""
    _costs: Sequence[tuple[float, float]] = field(init=False, repr=False, compare=False)
    """By number of leading pieces: their largest fixed cost, and the time of their blocks. A prefix may have thousands."""

    def __post_init__(self) -> None:
        fixed_s = total_s = 0.0
        costs = [(fixed_s, total_s)]
        for piece in self.pieces:
            if piece.blocks > 0:
                fixed_s, total_s = max(fixed_s, piece.fixed_s), total_s + piece.blocks * piece.block_s
            costs.append((fixed_s, total_s))
        object.__setattr__(self, "_ends", list(accumulate(piece.blocks for piece in self.pieces)))
        object.__setattr__(self, "_costs", costs)

    @property
    def blocks(self) -> int:
        """Number of found blocks."""
        return self._ends[-1] if self._ends else 0

    def load_seconds(self, blocks: int) -> float:
        """Return the time of a load of the first blocks: sources add up, the largest fixed cost counts once."""
        whole = bisect_right(self._ends, blocks)
        fixed_s, total_s = self._costs[whole]
        more = blocks - (self._ends[whole - 1] if whole else 0)
        if more > 0 and whole < len(self.pieces):
            piece = self.pieces[whole]
            fixed_s, total_s = max(fixed_s, piece.fixed_s), total_s + more * piece.block_s
        return fixed_s + total_s


@dataclass(frozen=True, slots=True)
class LoadVerdict:
    """Decision about a request, and its price.

    Attributes:
        choice: the decision.
        blocks: blocks to load.
        seconds: predicted time until the prompt is complete.
        load_s: predicted time of the load within it.
        load_all_s: predicted time if everything is loaded.
        compute_s: predicted time if nothing is loaded.
        limit_s: deadline of the load of a probe, in seconds; None: not a probe.
    """

    choice: Choice
    blocks: int
    seconds: float
    load_s: float
    load_all_s: float
    compute_s: float
    limit_s: float | None = None


Compute = Callable[[int, int], float]
"""Predicts the time of computing new tokens after cached ones: ``compute(cached, tokens)``."""


def judge(
    prompt: FoundPrefix,
    compute: Compute,
    *,
    overlap: Overlap = Overlap.NONE,
    least_blocks: int = 1,
    deadline_s: float = float("inf"),
) -> LoadVerdict:
    """Return the fastest way to complete a prompt.

    Args:
        prompt: the request.
        compute: predicts computing.
        overlap: computation while blocks are read.
        least_blocks: fewer blocks are not loaded.
        deadline_s: bound of the load: at most ``DEADLINE_SHARE`` of it is planned.
    """
    blocks = prompt.blocks
    longest = bisect_left(range(1, blocks + 1), True, key=lambda k: prompt.load_seconds(k) > deadline_s * DEADLINE_SHARE)
    price = partial(_price, prompt, compute, overlap)
    candidates = _ends(prompt, longest)
    if overlap is Overlap.LAYERS:
        meet = bisect_left(range(longest + 1), True, key=lambda k: prompt.load_seconds(k) >= _rest(prompt, compute, k))
        candidates += [k for k in (meet - 1, meet) if 0 < k <= longest]
    allowed = [k for k in candidates if k >= max(1, least_blocks)]
    compute_s = compute(prompt.cached, prompt.tokens - prompt.cached)
    seconds, negative = min([(price(k), -k) for k in allowed] + [(compute_s, 0)])
    whole_s = price(blocks) if blocks else compute_s
    if blocks in allowed and whole_s <= seconds + max(seconds * MARGIN, LEAST_GAIN_S):
        seconds, negative = whole_s, -blocks
    k = -negative
    choice = Choice.COMPUTE if not k else Choice.LOAD if k == blocks else Choice.CUT
    return LoadVerdict(choice, k, seconds, prompt.load_seconds(k), whole_s, compute_s)


def _ends(prompt: FoundPrefix, longest: int) -> list[int]:
    """Return the ends of sources, as far as a load may reach."""
    ends, at = [], 0
    for piece in prompt.pieces:
        at += piece.blocks
        ends.append(min(at, longest))
    return sorted({end for end in ends if end})


def _rest(prompt: FoundPrefix, compute: Compute, k: int) -> float:
    """Return the time of computing what ``k`` loaded blocks leave."""
    cached = prompt.cached + k * prompt.block_tokens
    return compute(cached, prompt.tokens - cached)


def _price(prompt: FoundPrefix, compute: Compute, overlap: Overlap, k: int) -> float:
    """Return the time until the prompt is complete if its first ``k`` blocks are loaded."""
    load_s, rest_s = prompt.load_seconds(k), _rest(prompt, compute, k)
    return max(load_s, rest_s) if overlap is Overlap.LAYERS else load_s + rest_s
