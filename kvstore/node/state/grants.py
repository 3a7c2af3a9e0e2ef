"""Records that the table exchanges with callers that store, load or wait."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.core.types import BlockKey, BlockRun, StoreOutcome
from kvstore.node.state.model import Block
from kvstore.node.state.namespaces import NodeNamespace
from kvstore.tiers.contract import Slot


@dataclass(slots=True)
class SlotGrant:
    """Slots granted to one store, until it is completed or abandoned."""

    namespace: NodeNamespace
    run: BlockRun
    outcomes: list[StoreOutcome]
    slots: dict[BlockKey, Slot] = field(default_factory=dict)
    """Granted and not yet completed, in order of the run."""
    depths: dict[BlockKey, int] = field(default_factory=dict)
    parents: dict[BlockKey, BlockKey | None] = field(default_factory=dict)
    tail: BlockKey | None = None
    """Key of the partial last block, which is handed over to waiting callers and neither written back nor kept; None: none."""
    revoked: list[Slot] = field(default_factory=list)
    """Slots of keys that were taken from the store. They are reserved as long as its writer may write to them."""
    guarded: Block | None = None
    """The parent of the run if it has a replica in one tier only: pinned, so that its eviction does not free space for its
    children."""


@dataclass(slots=True)
class KeyWaiter:
    """Keys that a caller waits for. Guarded by the table's lock."""

    namespace: NodeNamespace
    missing: dict[BlockKey, list[int]] = field(default_factory=dict)
    """Positions of each key that is not in DRAM yet."""
    arrivals: list[tuple[int, Block]] = field(default_factory=list)
    """(position, block), pinned, and not yet taken by the caller."""


@dataclass(slots=True)
class LoadClaim:
    """Actions of a load for each key, as positions in the keys of the load."""

    resident: dict[int, Block] = field(default_factory=dict)
    """In DRAM; pinned."""
    durable: dict[int, Block] = field(default_factory=dict)
    """On NVMe; pinned and claimed: the load reads them."""
    absent: list[int] = field(default_factory=list)
    """Not on this node."""
    claimed_absent: list[int] = field(default_factory=list)
    """Those of ``absent`` that the load may fetch from another node."""
    busy: list[int] = field(default_factory=list)
    """Another load or store is bringing the block."""
