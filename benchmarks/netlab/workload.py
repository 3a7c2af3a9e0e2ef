"""The load of the lab's engines: a slice of a trace, or generated chains, as files that drivers on other hosts read.

A request loads what it *hits*: the leading blocks that earlier requests brought. All of them are in storage beforehand, so
that a run measures loads alone; requests of one session follow one another, different sessions overlap.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from kvstore.core.keys import KeyChain
from kvstore.core.spec import CacheSpec
from kvstore.core.types import BlockKey
from kvstore.workload.chains import BlockKeys, ChainIds
from kvstore.workload.requests import TraceRequest
from kvstore.workload.traces import open_trace

KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class Load:
    """One request's hit: ``chain[i]`` is the number of its i-th block's key."""

    session: int
    chain: ChainIds


@dataclass(frozen=True, slots=True)
class Workload:
    """Keys of all blocks, and the loads made of them.

    Attributes:
        keys: by number.
        chains: whole chains to store; their numbers cover all keys.
        loads: in the order in which they are to begin.
        name: for records.
    """

    keys: list[BlockKey]
    chains: list[ChainIds]
    loads: list[Load]
    name: str

    def blocks(self, loads: Sequence[int]) -> int:
        """Blocks that some loads bring together."""
        return sum(len(self.loads[number].chain) for number in loads)

    def save(self, path: Path) -> None:
        """Writes it as one file."""
        both = [*self.chains, *(load.chain for load in self.loads)]
        np.savez(
            path,
            keys=np.frombuffer(b"".join(self.keys), np.uint8).reshape(-1, KEY_BYTES),
            numbers=np.concatenate(both).astype(np.int32),
            lengths=np.array([len(chain) for chain in both], np.int64),
            sessions=np.array([load.session for load in self.loads], np.int64),
        )

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads what ``save`` wrote."""
        with np.load(path) as file:
            keys = [BlockKey(row.tobytes()) for row in file["keys"]]
            ends = np.cumsum(file["lengths"])
            parts = np.split(file["numbers"].astype(np.int64), ends[:-1])
            sessions = file["sessions"].tolist()
        stored = len(parts) - len(sessions)
        loads = [Load(session, chain) for session, chain in zip(sessions, parts[stored:], strict=True)]
        return cls(keys, parts[:stored], loads, path.stem)


def from_trace(path: Path, spec: CacheSpec, sessions: int, most_loads: int) -> Workload:
    """The first loads of the first sessions of a trace that share no block: turn by turn, all sessions in their order.

    So all sessions run together from begin to end, as agents do that start at once; by the trace's own clock a run would end with
    the turns of one session, one after the other, over links without other traffic. A block that two sessions load at once
    crosses a link once; which policy gains by that is chance, and no matter of links.

    Args:
        path: a trace of blocks as large as the namespace's.
        spec: the namespace.
        sessions: how many.
        most_loads: how many requests that hit anything.
    """
    trace = open_trace(path)
    by_session: dict[str, list[TraceRequest]] = {}
    for request in trace:
        by_session.setdefault(request.session, []).append(request)
    chosen: dict[str, int] = {}
    heads: set[int] = set()
    for session, turns in by_session.items():
        mine = {int(turn.block_ids[0]) for turn in turns if len(turn.block_ids)}  # an id includes the whole prefix
        if len(chosen) < sessions and not mine & heads:
            chosen[session] = len(chosen)
            heads |= mine
    together = itertools.zip_longest(*(by_session[session] for session in chosen))
    requests = [turn for turns in together for turn in turns if turn is not None]
    table = BlockKeys(spec)
    chains: list[ChainIds] = []
    loads: list[Load] = []
    for request in requests:
        known = len(table)
        chain = table.intern(request.session, request.block_ids)
        hit = int(np.count_nonzero(chain < known))
        if len(table) > known:
            chains.append(chain)
        if hit:
            loads.append(Load(chosen[request.session], chain[:hit]))
        if len(loads) == most_loads:
            break
    keys = table.keys_of(np.arange(len(table)))
    return Workload(keys, chains, loads, trace.info.name)


def made_up(spec: CacheSpec, blocks: int, chains: int, loads: int, seed: int) -> Workload:
    """Chains of equal length that share nothing, each loaded as a separate session, again and again in turn."""
    tokens = np.random.default_rng(seed).integers(0, 1 << 32, (chains, blocks * spec.block_tokens), np.uint32)
    maker = KeyChain(spec)
    keys = [key for row in tokens for key in maker.keys(row)]
    numbers = np.arange(len(keys), dtype=np.int64).reshape(chains, blocks)
    return Workload(keys, list(numbers), [Load(at % chains, numbers[at % chains]) for at in range(loads)], "made up")


def stores(workload: Workload) -> Iterator[tuple[npt.NDArray[np.int64], int]]:
    """Blocks to store: (numbers of a chain's blocks not stored before, how many precede them), parents first."""
    seen = np.zeros(len(workload.keys), bool)
    for chain in workload.chains:
        new = ~seen[chain]
        if new.any():
            first = int(new.argmax())
            seen[chain] = True
            yield chain[first:], first
