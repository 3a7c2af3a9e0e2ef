"""The plan of one step, from the scheduler to the workers, and their output. Plain values that travel between processes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kvclient import BlockKey, Lookup, Paths
from kvclient.call.request_hint import RequestHint
from kvclient.engines.vllm.identity.adapters import AdapterWeights

READ_AHEAD_S: Final = 60.0
"""Maximum time for which nodes hold a prefix that was read ahead. If its request still waits, it is read ahead again."""


@dataclass(slots=True)
class GroupLoad:
    """The part of a load that fills pages of one part of a KV cache group; see ``kv_groups``.

    Attributes:
        group: index of the part.
        block_ids: pages to fill, in order.
        first_page: position of the first among the part's pages.
        lookups: the lookup of each namespace. A worker uses that of its own namespace.
        behind: the request's pages after them, which a step may fill during a layer-wise load.
    """

    group: int
    block_ids: list[int]
    first_page: int
    lookups: Mapping[bytes, Lookup]
    behind: list[int] = field(default_factory=list)


@dataclass(slots=True)
class LoadJob:
    """A prefix to load for one request.

    Attributes:
        request_id: the request to load.
        groups: one part per group with missing blocks.
        layerwise: the request is in this step's batch, and each layer waits.
        paths: the hosts whose storage links are used to read it; None: as the options say.
        limit_s: time after which it ends, whether its blocks have arrived or not; None: as the options say.
    """

    request_id: str
    groups: list[GroupLoad]
    layerwise: bool
    paths: Paths | None = None
    limit_s: float | None = None


@dataclass(slots=True)
class AheadJob:
    """A prefix that is read into the DRAM of this host while its request waits.

    Attributes:
        request_id: the request.
        lookups: the lookup of each namespace, as in ``GroupLoad``.
        paths: as in ``LoadJob``.
    """

    request_id: str
    lookups: Mapping[bytes, Lookup]
    paths: Paths | None = None


@dataclass(slots=True)
class StoreJob:
    """Full blocks of one request to store.

    Attributes:
        job_id: id of the job in the output.
        request_id: the request that computed the blocks.
        first_block: position of the first block in its chain.
        parent: key before the first block, None at the head of the chain.
        keys: keys of the blocks in the request's chain; ``GroupBlocks`` selects those of a part's pages.
        block_ids: pages of the blocks, per part.
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
class HintJob:
    """What happens next in the session of an ended request.

    Attributes:
        hint: the request's.
        keys: keys of its blocks in the store, in the request's chain.
    """

    hint: RequestHint
    keys: list[BlockKey]


@dataclass(slots=True)
class StepPlan:
    """All work of one step for a worker.

    Attributes:
        epoch: number of cache resets; identifies the weights of this step's blocks.
        weights_epoch: name of that epoch in namespaces.
        chain: the namespace whose chain the keys are of.
        loads: prefixes to load.
        stores: blocks that are complete when the step's forward pass has ended.
        has_tokens: whether the step computes anything.
        cancel_stores: cancel pending stores, because their pages must be freed.
        weights_check: number of a check of the weights that each worker makes before this step; 0: none.
        ahead: prefixes to read ahead.
        hints: of ended requests, for the node of the worker's host.
        ahead_ended: requests that left the queue without a load: the blocks that were read ahead for them are released.
        step: number of a step that is timed, for the output; 0: it is not.
    """

    epoch: int = 0
    weights_epoch: str = ""
    chain: bytes = b""
    loads: list[LoadJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)
    has_tokens: bool = False
    cancel_stores: bool = False
    weights_check: int = 0
    ahead: list[AheadJob] = field(default_factory=list)
    ahead_ended: list[str] = field(default_factory=list)
    hints: list[HintJob] = field(default_factory=list)
    step: int = 0


@dataclass(slots=True)
class LoadSample:
    """How long the load of a request took in its slowest worker, from which the next ones are predicted.

    Attributes:
        sources: bytes that it brought, by source; empty: none.
        seconds: its duration.
        layerwise: whether a step waited for its layers.
        own_node: the node of the worker's host; empty: none.
        workers: number of workers that have ended the load.
    """

    sources: dict[Hashable, int]
    seconds: float
    layerwise: bool
    own_node: str = ""
    workers: int = 1

    def merged(self, other: LoadSample | None) -> LoadSample:
        """Return the sample of both workers, or groups of workers."""
        if other is None:
            return self
        slowest = self if self.seconds >= other.seconds else other
        return replace(slowest, workers=self.workers + other.workers)


@dataclass(slots=True)
class WorkerOutput:
    """What workers have finished since their last output.

    Attributes:
        stores_done: number of workers that finished each job.
        stores_failed: jobs of which at least one worker could not store everything.
        weights: digest of the weights, by check number and rank.
        loads: by request: its load, of models with one KV cache group.
        step: number of the last timed step; 0: none.
    """

    stores_done: dict[int, int] = field(default_factory=dict)
    stores_failed: set[int] = field(default_factory=set)
    weights: dict[tuple[int, int], str] = field(default_factory=dict)
    loads: dict[str, LoadSample] = field(default_factory=dict)
    step: int = 0

    def __bool__(self) -> bool:
        return bool(self.stores_done or self.weights or self.loads or self.step)

    def merge(self, other: WorkerOutput) -> None:
        """Merge another worker's output."""
        for job_id, count in other.stores_done.items():
            self.stores_done[job_id] = self.stores_done.get(job_id, 0) + count
        self.stores_failed |= other.stores_failed
        self.weights |= other.weights
        for request_id, sample in other.loads.items():
            self.loads[request_id] = sample.merged(self.loads.get(request_id))
        self.step = max(self.step, other.step)
