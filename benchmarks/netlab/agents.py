"""Agents of a timed engine run: trajectories, and the tokens and keys that all processes derive from the same few numbers.

An agent has a context that is in storage when a run starts, and turns that follow each other immediately, as if its tools took no
time. Appended and generated tokens differ between runs, so that no run hits blocks of another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvstore.core.errors import InvalidArgument
from kvstore.core.keys import KeyChain
from kvstore.core.spec import CacheSpec
from kvstore.core.types import BlockKey
from kvstore.workload.generator import PROFILES, AgentWorkload

MOST_TOKENS = 1 << 18
"""Largest number of tokens of an agent at its end."""
_GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, spread evenly however many are drawn."""
_BEFORE_ALL_RUNS = 0


class Turn(NamedTuple):
    """One request of an agent."""

    append: int
    """Tokens that tools and users append."""
    out: int
    """Tokens that are generated."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One agent: ``context`` tokens whose whole blocks are in storage, and the turns after it."""

    context: int
    turns: tuple[Turn, ...]

    def prompt(self, turn: int) -> int:
        """Tokens of a turn's prompt."""
        return self.context + sum(one.append + one.out for one in self.turns[:turn]) + self.turns[turn].append

    @property
    def end(self) -> int:
        """Tokens after the last turn."""
        return self.context + sum(one.append + one.out for one in self.turns)

    def known(self, turn: int) -> int:
        """Leading tokens of it whose KV was computed before: the last generated token's never is."""
        return self.prompt(turn) - self.turns[turn].append - (1 if turn else 0)


def trajectories(
    profile: str, agents: int, turns: int, seed: int, append_factor: float = 1.0, out_factor: float = 1.0
) -> list[Trajectory]:
    """Consecutive turns out of generated trajectories, begun anywhere in each: contexts are those of a running system.

    Args:
        profile: name of a published profile (``kvstore.workload.generator``).
        agents: how many.
        turns: of each.
        seed: of everything drawn.
        append_factor: factor of the appended tokens.
        out_factor: factor of the generated tokens.
    """
    found: dict[str, list[tuple[int, int]]] = {}
    for request in AgentWorkload(PROFILES[profile], agents, seed):
        found.setdefault(request.session, []).append((request.input_tokens, request.output_tokens))
    made = []
    for number, requests in enumerate(found.values()):
        first = 1 + int((number + 1) * _GOLDEN % 1 * max(0, len(requests) - turns - 1))
        context = sum(requests[first - 1])
        before = context
        chosen = []
        for prompt, out in requests[first : first + turns]:
            chosen.append(Turn(max(1, round((prompt - before) * append_factor)), max(2, round(out * out_factor))))
            before = prompt + out
        made.append(Trajectory(context, tuple(chosen)))
    if max(one.end for one in made) > MOST_TOKENS:
        raise InvalidArgument("an agent ends with too many tokens", most=MOST_TOKENS)
    return made


class Chains:
    """Tokens and keys of agents, made when first asked for.

    Args:
        spec: the namespace.
        seed: shared by all processes.
        contexts: tokens of each agent's first context.
    """

    def __init__(self, spec: CacheSpec, seed: int, contexts: Sequence[int]) -> None:
        self._chain = KeyChain(spec)
        self._block_tokens = spec.block_tokens
        self._seed = seed
        self._contexts = list(contexts)
        self._made: dict[int, tuple[int, np.ndarray[tuple[int], np.dtype[np.uint32]], list[BlockKey]]] = {}

    def keys(self, agent: int, run: int, tokens: int) -> list[BlockKey]:
        """Keys of a prompt of so many tokens; the last one is the tail's where the last block is not full."""
        text, keys = self._of(agent, run)
        full = tokens // self._block_tokens
        if full * self._block_tokens == tokens:
            return keys[:full]
        return [*keys[:full], self._chain.tail(text[full * self._block_tokens : tokens], keys[full - 1] if full else None)]

    def stored(self, agent: int) -> list[BlockKey]:
        """Keys of the blocks that are in storage before all runs."""
        return self._of(agent, _BEFORE_ALL_RUNS)[1][: self._contexts[agent] // self._block_tokens]

    def _of(self, agent: int, run: int) -> tuple[np.ndarray[tuple[int], np.dtype[np.uint32]], list[BlockKey]]:
        held = self._made.get(agent)
        if held is None or held[0] != run:
            context = self._contexts[agent]
            text = np.empty(MOST_TOKENS, np.uint32)
            text[:context] = self._draw(agent, _BEFORE_ALL_RUNS)[:context]
            text[context:] = self._draw(agent, run + 1)[context:]
            held = self._made[agent] = (run, text, self._chain.keys(text))
        return held[1], held[2]

    def _draw(self, agent: int, run: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        return np.random.default_rng([self._seed, agent, run]).integers(0, 1 << 32, MOST_TOKENS, np.uint32)
