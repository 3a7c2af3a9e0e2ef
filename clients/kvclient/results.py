"""What the client answers: values, never exceptions, for everything that can go wrong on our side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.core.errors import InvalidArgument, KVStoreError
from kvstore.core.types import BlockKey, NodeId, Outcome, StoreOutcome, Tier, VolumeId, pack_keys

Outcomes = npt.NDArray[np.uint8]
"""One outcome a block, as its number: ``Outcome`` of a load, ``StoreOutcome`` of a store."""

PATH_HBM = "hbm"
PATH_LOCAL = "local"
PATH_PREFILL = "prefill"
PATH_DECODE = "decode"
PATH_RELAY = "relay"


@dataclass(frozen=True, slots=True)
class NodeRef:
    """A node as a lookup names it."""

    node_id: NodeId
    control_address: str
    data_address: str
    """Data plane on the compute network."""
    storage_address: str = ""
    """Data plane on the storage network; empty: there is but one network."""
    storage_only: bool = False
    """It hosts no engines: all it has, its DRAM too, lies beyond storage links."""

    @property
    def storage(self) -> str:
        """Where its data plane is reached over storage links."""
        return self.storage_address or self.data_address


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks ``[start, start + count)`` of the keys asked for lie in one volume."""

    start: int
    count: int
    node: NodeRef
    tier: Tier
    volume_id: VolumeId

    @property
    def node_id(self) -> NodeId:
        """Whose volume it is."""
        return self.node.node_id

    @property
    def end(self) -> int:
        """Position behind the last block."""
        return self.start + self.count

    @property
    def distance(self) -> int:
        """By which runs are preferred, nearest first: another engine's HBM is left alone while a node's DRAM has the block."""
        return _DISTANCES[self.tier]


_DISTANCES = {Tier.DRAM: 0, Tier.HBM: 1, Tier.NVME: 2}


@dataclass(frozen=True, slots=True)
class Lookup:
    """The longest run of leading keys that can be served, as the index knows it: a hint, which only a load proves.

    Attributes:
        keys: all keys asked for.
        hit_blocks: how many leading ones can be served.
        runs: who holds which part of them; runs of different volumes may overlap.
        parent: key before ``keys[0]`` in the chain, None at its head.
        depth: position of ``keys[0]`` in the chain.
        seconds: how long the lookup took.
        error: why the answer is less than it might be, if the store failed.
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
        """All keys, 16 bytes each."""
        return pack_keys(self.keys)  # type: ignore[arg-type]  # any sequence joins

    def part(self, start: int, stop: int | None = None) -> Lookup:
        """The lookup of ``keys[start:stop]`` only: for an engine that holds the first blocks itself.

        ``stop`` None: the end of the hit.

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


def outcome_table(*outcomes: int) -> npt.NDArray[np.bool_]:
    """A table that, indexed with outcomes, says which are among some."""
    table = np.zeros(256, bool)
    table[list(outcomes)] = True
    return table


def leading(outcomes: Outcomes, good: int) -> int:
    """Length of the leading run of one outcome."""
    differs = outcomes != good
    return int(differs.argmax()) if differs.any() else len(outcomes)


@dataclass(slots=True)
class LoadResult:
    """What a load brought. Bytes in the buffer are valid only for blocks whose outcome is HIT.

    Attributes:
        outcomes: one ``Outcome`` a block.
        bytes_by_tier: bytes of hits by where they lay before.
        bytes_by_node: bytes of hits by whose they were.
        bytes_by_path: bytes of hits: ``hbm``, from the engine's own pool; ``local``, from this host's node; ``prefill``, from
            another node's data plane; ``decode`` and ``relay``: read from storage by the decode host or a third one, forwarded.
        seconds: how long it took.
        error: the first failure of ours on the way, if any. What it cost is in the outcomes.
    """

    outcomes: Outcomes
    bytes_by_tier: dict[Tier, int] = field(default_factory=dict)
    bytes_by_node: dict[str, int] = field(default_factory=dict)
    bytes_by_path: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    error: KVStoreError | None = None

    @property
    def hit_blocks(self) -> int:
        """Leading blocks that an engine may use."""
        return leading(self.outcomes, Outcome.HIT)

    @property
    def bytes_loaded(self) -> int:
        """Bytes of all hits."""
        return sum(self.bytes_by_path.values())

    def count(self, outcome: Outcome) -> int:
        """How many blocks met one fate, e.g. ``CORRUPT``."""
        return int(np.count_nonzero(self.outcomes == outcome))

    def outcome(self, block: int) -> Outcome:
        """What became of one block."""
        return Outcome(int(self.outcomes[block]))


HELD = outcome_table(StoreOutcome.STORED, StoreOutcome.EXISTS, StoreOutcome.IN_PROGRESS)
"""Outcomes behind which a chain may go on."""


@dataclass(slots=True)
class StoreResult:
    """What a store did.

    Attributes:
        outcomes: one ``StoreOutcome`` a block. A chain is stored prefix first: behind the first block that could not be
            stored everything is ``SKIPPED``; not so where a prompt is handed over.
        bytes_stored: bytes of blocks ``STORED`` by this call.
        durable: whether everything this call stored is known to be on NVMe (where that was asked for; else see ``error``).
        seconds: how long it took.
        error: the first failure of ours on the way, if any.
        draining: whether what is ``SKIPPED`` is so because the node of this host drains or ends; no failure, and it will not
            take anything soon.
    """

    outcomes: Outcomes
    bytes_stored: int = 0
    durable: bool = False
    seconds: float = 0.0
    error: KVStoreError | None = None
    draining: bool = False

    @property
    def held_blocks(self) -> int:
        """Leading blocks that the store holds, or is about to, after this call."""
        return leading(HELD[self.outcomes].view(np.uint8), 1)

    @property
    def skipped_blocks(self) -> int:
        """Blocks that were not taken, for want of room or as they came behind one that was not."""
        return self.count(StoreOutcome.SKIPPED)

    def count(self, outcome: StoreOutcome) -> int:
        """How many blocks met one fate, e.g. ``EXISTS``."""
        return int(np.count_nonzero(self.outcomes == outcome))

    def outcome(self, block: int) -> StoreOutcome:
        """What became of one block."""
        return StoreOutcome(int(self.outcomes[block]))
