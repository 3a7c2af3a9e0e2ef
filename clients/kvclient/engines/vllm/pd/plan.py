"""The part of a step's plan that concerns prefill/decode transfers, and the workers' output. Plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvclient import BlockKey
from kvclient.engines.vllm.identity.adapters import AdapterWeights
from kvclient.engines.vllm.plan import WorkerOutput


@dataclass(slots=True)
class SendJob:
    """Blocks of a prompt that one step completes, handed over layer by layer while it computes.

    Attributes:
        job_id: id of the job in the output.
        decode_node: destination node.
        first_block: position of the first block in its chain.
        parent: key before it; None at the head of the chain.
        keys: keys of the blocks; with ``tail`` the last key is that of a partial block.
        tail: whether the last block is partial.
        block_ids: by group: their pages, from the first that the group still has (a sliding window has left the others behind).
        adapter: the weights that the keys name, if the request has an adapter.
    """

    job_id: int
    decode_node: str
    first_block: int
    parent: BlockKey | None
    keys: list[BlockKey]
    tail: bool
    block_ids: Sequence[list[int]]
    adapter: AdapterWeights | None = None


@dataclass(slots=True)
class AbandonJob:
    """A prompt that will not reach its decode engine whole.

    Attributes:
        decode_node: node of the decode host.
        transfer_id: id of the transfer on that node.
    """

    decode_node: str
    transfer_id: str


@dataclass(slots=True)
class AwaitJob:
    """A prompt that another engine hands over.

    Attributes:
        request_id: whose.
        keys: all of its blocks, a partial last one included.
        first_needed: per group, the first block that decoding requires.
        transfer_id: id with which the other engine may end the wait.
    """

    request_id: str
    keys: list[BlockKey]
    first_needed: Sequence[int]
    transfer_id: str = ""


@dataclass(slots=True)
class CopyJob:
    """A prompt that has arrived, to be copied into the engine's pages.

    Attributes:
        request_id: whose.
        first_blocks: per group, position of the first copied block; the engine has the earlier ones or no longer requires them.
        block_ids: per group, the pages from there on.
    """

    request_id: str
    first_blocks: Sequence[int]
    block_ids: Sequence[list[int]]


@dataclass(slots=True)
class PdPlan:
    """The transfers of one step.

    Attributes:
        sends: handoffs of this step.
        awaits: prompts to wait for from now on.
        copies: prompts to copy.
        drops: requests whose prompts are no longer awaited.
        abandons: prompts of ours that will not be handed over whole.
    """

    sends: list[SendJob] = field(default_factory=list)
    awaits: list[AwaitJob] = field(default_factory=list)
    copies: list[CopyJob] = field(default_factory=list)
    drops: list[str] = field(default_factory=list)
    abandons: list[AbandonJob] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.sends or self.awaits or self.copies or self.drops or self.abandons)


@dataclass(slots=True)
class PdWorkerOutput:
    """What workers have finished since their last output.

    Attributes:
        sent: as ``WorkerOutput`` says it of stores: handoffs that are over, and those among them that failed.
        known: per request, the number of workers that know the outcome of its prompt.
        incomplete: requests whose prompt is incomplete on at least one worker.
    """

    sent: WorkerOutput = field(default_factory=WorkerOutput)
    known: dict[str, int] = field(default_factory=dict)
    incomplete: set[str] = field(default_factory=set)

    def merge(self, other: PdWorkerOutput) -> None:
        """Merge another worker's output."""
        self.sent.merge(other.sent)
        for request_id, count in other.known.items():
            self.known[request_id] = self.known.get(request_id, 0) + count
        self.incomplete |= other.incomplete

    def __bool__(self) -> bool:
        return bool(self.sent.stores_done or self.known)
