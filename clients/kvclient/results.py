"""Results of the client. A failure of the store is a value in a result, never an exception."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvstore.core.errors import InvalidArgument, KVStoreError
from kvstore.core.types import BlockKey, NodeId, Outcome, StoreOutcome, Tier, VolumeId, pack_keys

Outcomes = npt.NDArray[np.uint8]
"""One outcome per block, as its number: ``Outcome`` of a load, ``StoreOutcome`` of a store."""

PATH_HBM = "hbm"
PATH_LOCAL = "local"
PATH_PREFILL = "prefill"
PATH_DECODE = "decode"
PATH_RELAY = "relay"


@dataclass(frozen=True, slots=True)
class NodeRef:
    """A node and its addresses."""

    node_id: NodeId
    control_address: str
    data_address: str
    """Data plane on the compute network."""
    storage_address: str = ""
    """Data plane on the storage network; empty: there is only one network."""
    storage_only: bool = False
    """Whether the node hosts no engines: all its blocks, also those in DRAM, are reached over storage links."""

    @property
    def storage(self) -> str:
        """Address of its data plane over storage links."""
        return self.storage_address or self.data_address


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks ``[start, start + count)`` of the requested keys that one volume holds."""

    start: int
    count: int
    node: NodeRef
    tier: Tier
    volume_id: VolumeId

    @property
    def node_id(self) -> NodeId:
        """Node of the volume."""
        return self.node.node_id

    @property
    def end(self) -> int:
        """Position after the last block."""
        return self.start + self.count

    @property
    def distance(self) -> int:
        """Sort key of runs, nearest first: a node's DRAM is preferred to another engine's HBM."""
        return _DISTANCES[self.tier]


_DISTANCES = {Tier.DRAM: 0, Tier.HBM: 1, Tier.NVME: 2}


@dataclass(frozen=True, slots=True)
class Lookup:
    """The longest run of leading keys that can be served according to the index. Only a load proves it.

    Attributes:
        keys: all requested keys.
        hit_blocks: number of leading keys that can be served.
        runs: the volumes that hold parts of them; runs of different volumes may overlap.
        parent: key before ``keys[0]`` in the chain, None at its head.
        depth: position of ``keys[0]`` in the chain.
        seconds: duration of the lookup.
        error: the failure of the store, if there was one: then the result may be too short.
    """

    keys: Sequence[BlockKey]
    hit_blocks: int = 0
    runs: tuple[Run, ...] = ()
    parent: BlockKey | None = None
    depth: int = 0
    seconds: float = 0.0
    error: KVStoreError | None = None

    @property
    def packed(self) -> bytes:
        """All keys in one ``bytes``."""
        return pack_keys(self.keys)  # type: ignore[arg-type]  # any sequence joins

    def part(self, start: int, stop: int | None = None) -> Lookup:
        """Return the lookup of ``keys[start:stop]``, for an engine that has the first blocks itself.

            client.load(lookup.part(held_blocks), buffer)

        Args:
            start: first key.
            stop: one past the last key; None: the end of the hit.

        Raises:
            InvalidArgument: the bounds are not within the keys.
        """
        stop = max(start, self.hit_blocks) if stop is None else stop
        if not 0 <= start <= stop <= len(self.keys):
            raise InvalidArgument("the part is not within the lookup", start=start, stop=stop, keys=len(self.keys))
        runs = []
        for run in self.runs:
            first, last = max(run.start, start), min(run.end, stop)
            if first < last:
                runs.append(Run(first - start, last - first, run.node, run.tier, run.volume_id))
        return Lookup(
            keys=self.keys[start:stop],
            hit_blocks=max(0, min(self.hit_blocks, stop) - start),
            runs=tuple(runs),
            parent=self.keys[start - 1] if start else self.parent,
            depth=self.depth + start,
            seconds=self.seconds,
            error=self.error,
        )


@dataclass(frozen=True, slots=True)
class HeadLookup:
    """Which of several blocks, each the head of a separate chain, can be served according to the index. Only a load proves it.

    Attributes:
        keys: all requested keys.
        runs: the volumes that hold them; runs of different volumes may overlap.
        seconds: duration of the lookup.
        error: the failure of the store, if there was one: then blocks may be missing.
    """

    keys: Sequence[BlockKey]
    runs: tuple[Run, ...] = ()
    seconds: float = 0.0
    error: KVStoreError | None = None

    @property
    def held(self) -> npt.NDArray[np.bool_]:
        """Whether each block can be served."""
        held = np.zeros(len(self.keys), bool)
        for run in self.runs:
            held[run.start : run.end] = True
        return held


def outcome_table(*outcomes: int) -> npt.NDArray[np.bool_]:
    """Return a table that is True at the given outcomes, to be indexed with arrays of outcomes."""
    table = np.zeros(256, bool)
    table[list(outcomes)] = True
    return table


def leading(outcomes: Outcomes, good: int) -> int:
    """Return the length of the leading run of one outcome."""
    differs = outcomes != good
    return int(differs.argmax()) if differs.any() else len(outcomes)


def _shortfall(outcomes: Outcomes, kind: type[IntEnum], good: Sequence[int], error: KVStoreError | None) -> str:
    numbers, counts = np.unique(outcomes, return_counts=True)
    found = zip(numbers.tolist(), counts.tolist(), strict=True)
    bad = ", ".join(f"{count} {kind(number).name}" for number, count in found if number not in good)
    return f"{bad}: {error}" if bad and error is not None else bad


@dataclass(slots=True)
class LoadResult:
    """Result of a load. Bytes in the buffer are valid only for blocks whose outcome is HIT.

    Attributes:
        outcomes: one ``Outcome`` per block.
        bytes_by_tier: bytes of hits by the tier of their source.
        bytes_by_node: bytes of hits by the node of their source.
        bytes_by_path: bytes of hits: ``hbm``, from the engine's own pool; ``local``, from this host's node; ``prefill``, brought
            by this host from another node's memory or storage, over any network; ``decode`` and ``relay``: read from storage by
            the decode host or a third one, forwarded.
        seconds: duration.
        error: the first failure of the store, if any. Its effect is in the outcomes.
    """

    outcomes: Outcomes
    bytes_by_tier: dict[Tier, int] = field(default_factory=dict)
    bytes_by_node: dict[str, int] = field(default_factory=dict)
    bytes_by_path: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    error: KVStoreError | None = None

    @property
    def hit_blocks(self) -> int:
        """Number of leading blocks that an engine may use."""
        return leading(self.outcomes, Outcome.HIT)

    @property
    def shortfall(self) -> str:
        """Outcomes of the missing blocks with the error, for a log line; empty: all blocks arrived."""
        return _shortfall(self.outcomes, Outcome, [Outcome.HIT], self.error)

    @property
    def bytes_loaded(self) -> int:
        """Bytes of all hits."""
        return sum(self.bytes_by_path.values())

    def count(self, outcome: Outcome) -> int:
        """Return the number of blocks with an outcome, such as ``CORRUPT``.

        Example: ``result.count(Outcome.CORRUPT)``
        """
        return int(np.count_nonzero(self.outcomes == outcome))

    def outcome(self, block: int) -> Outcome:
        """Return the outcome of one block."""
        return Outcome(int(self.outcomes[block]))


_HELD = (StoreOutcome.STORED, StoreOutcome.EXISTS, StoreOutcome.IN_PROGRESS)
HELD = outcome_table(*_HELD)
"""Outcomes after which a chain may continue."""


@dataclass(slots=True)
class StoreResult:
    """Result of a store.

    Attributes:
        outcomes: one ``StoreOutcome`` per block. A chain is stored prefix first: after the first block that could not be stored
            everything is ``SKIPPED``, except in a handoff.
        bytes_stored: bytes of blocks ``STORED`` by this call.
        durable: if that was requested, whether all blocks of the call, also those that the store had already, are known to be
            durable: on a volume of the node, or on its storage node. If not, see ``error``.
        seconds: duration.
        error: the first failure of the store, if any.
        draining: whether blocks are ``SKIPPED`` because the local node drains or shuts down. Not a failure; it will not accept
            blocks soon.
    """

    outcomes: Outcomes
    bytes_stored: int = 0
    durable: bool = False
    seconds: float = 0.0
    error: KVStoreError | None = None
    draining: bool = False

    @property
    def held_blocks(self) -> int:
        """Number of leading blocks that the store holds, or is about to hold, after this call."""
        return leading(HELD[self.outcomes].view(np.uint8), 1)

    @property
    def shortfall(self) -> str:
        """Outcomes of the blocks that are not stored with the cause, for a log line; empty: all blocks are."""
        why = _shortfall(self.outcomes, StoreOutcome, _HELD, self.error)
        if self.error is None and self.skipped_blocks:
            why += ": the node drains or shuts down" if self.draining else ": the node had no space in time"
        return why

    @property
    def skipped_blocks(self) -> int:
        """Number of blocks that were not stored, for lack of space or because an earlier block was not stored."""
        return self.count(StoreOutcome.SKIPPED)

    def count(self, outcome: StoreOutcome) -> int:
        """Return the number of blocks with an outcome, such as ``EXISTS``.

        Example: ``result.count(StoreOutcome.EXISTS)``
        """
        return int(np.count_nonzero(self.outcomes == outcome))

    def outcome(self, block: int) -> StoreOutcome:
        """Return the outcome of one block."""
        return StoreOutcome(int(self.outcomes[block]))
