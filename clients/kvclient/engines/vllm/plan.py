"""What the scheduler side tells the worker side in one step, and what comes back. Plain values: they travel between processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvclient import BlockKey, Lookup, Paths
from kvclient.engines.vllm.identity.adapters import AdapterWeights


@dataclass(slots=True)
class GroupLoad:
    """The part of a load that fills pages of one KV cache group.

    Attributes:
        group: which.
        block_ids: pages to fill, in order.
        first_block: position of the first in its chain.
        lookups: by namespace: who holds these blocks. A worker takes its own.
        behind: the request's pages after them, which a step may fill while a layer-wise load goes on.
    """

    group: int
    block_ids: list[int]
    first_block: int
    lookups: Mapping[bytes, Lookup]
    behind: list[int] = field(default_factory=list)


@dataclass(slots=True)
class LoadJob:
    """A prefix to be loaded for one request.

    Attributes:
        request_id: whose.
        groups: one part a group that lacks something.
        layerwise: the request is in this step's batch, and each layer waits.
        paths: over which hosts' storage links it is read; None: this host's.
    """

    request_id: str
    groups: list[GroupLoad]
    layerwise: bool
    paths: Paths | None = None


@dataclass(slots=True)
class SaveJob:
    """Full blocks of one request to be stored.

    Attributes:
        job_id: names it in the answer.
        request_id: whose.
        first_block: position of the first block in its chain.
        parent: key before the first block, None at the head of the chain.
        keys: of the blocks, one after the other, in the request's chain; ``NamespaceKeyMask`` makes those of a namespace.
        block_ids: by group: their pages.
        adapter: the weights that the keys name, if the request has an adapter.
    """

    job_id: int
    request_id: str
    first_block: int
    parent: BlockKey | None
    keys: list[BlockKey]
    block_ids: Sequence[list[int]]
    adapter: AdapterWeights | None = None


@dataclass(slots=True)
class StepPlan:
    """All that one step asks of a worker.

    Attributes:
        epoch: counts the resets of the cache: which weights the blocks of this step belong to.
        weights_epoch: the name of that epoch in namespaces.
        chain: the namespace whose chain the keys are of.
        loads: prefixes to load.
        saves: blocks that are complete when the step's forward pass has ended.
        has_tokens: whether the step computes anything.
        give_up_saves: the pages of what is not stored yet are wanted back.
        weights_check: number of a check of the weights that each worker makes before this step; 0: none.
    """

    epoch: int = 0
    weights_epoch: str = ""
    chain: bytes = b""
    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    has_tokens: bool = False
    give_up_saves: bool = False
    weights_check: int = 0


@dataclass(slots=True)
class StepAnswer:
    """What workers have finished since their last answer.

    Attributes:
        saved: by job: how many workers are done with it.
        not_saved: jobs of which at least one worker could not store everything.
        weights: digest of the weights by number of the check and rank.
        weights_changed: a check found other weights than the one before.
    """

    saved: dict[int, int] = field(default_factory=dict)
    not_saved: set[int] = field(default_factory=set)
    weights: dict[tuple[int, int], str] = field(default_factory=dict)
    weights_changed: bool = False

    def __bool__(self) -> bool:
        return bool(self.saved or self.weights)

    def merge(self, other: StepAnswer) -> None:
        """Adds another worker's answer."""
        for job_id, count in other.saved.items():
            self.saved[job_id] = self.saved.get(job_id, 0) + count
        self.not_saved |= other.not_saved
        self.weights |= other.weights
        self.weights_changed |= other.weights_changed
