"""A workload read once and made ready: chains, keys, sizes, and the hits it must have."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvstore.core.errors import InvalidArgument
from kvstore.core.spec import CacheSpec
from kvstore.core.types import BlockKey
from kvstore.workload.bounds import ChainIds, HitCount, unbounded_hits
from kvstore.workload.chains import BlockKeys
from kvstore.workload.requests import TraceInfo, TraceRequest


@dataclass(frozen=True, slots=True)
class Workload:
    """All requests of a workload, in order, as chains of block keys."""

    info: TraceInfo
    spec: CacheSpec
    chains: list[ChainIds]
    keys: BlockKeys
    unbounded: HitCount
    """Hits with room for everything."""

    @property
    def unique_blocks(self) -> int:
        """Distinct blocks: what a store must hold for all hits."""
        return len(self.keys)

    @property
    def largest_request(self) -> int:
        """Blocks of the longest prompt."""
        return max((len(chain) for chain in self.chains), default=0)

    def requests(self) -> Iterator[list[BlockKey]]:
        """Keys of each request, from the head of its chain."""
        return map(self.keys.keys_of, self.chains)


def read_workload(
    info: TraceInfo, requests: Iterable[TraceRequest], block_bytes: int, layers: int, limit: int | None
) -> Workload:
    """Reads a workload and makes its keys.

    Args:
        info: what holds for all requests.
        requests: the requests, in order.
        block_bytes: bytes of a Full Block.
        layers: Layer Blocks it is made of; must divide it.
        limit: stop after so many requests; None: all.

    Raises:
        InvalidArgument: the layers do not divide the block, or a line of a trace file is wrong.
    """
    if layers < 1 or block_bytes % layers:
        raise InvalidArgument("the layers must divide the block", block_bytes=block_bytes, layers=layers)
    spec = CacheSpec(
        model=f"replay/{info.name}",
        block_tokens=info.block_tokens,
        layers=layers,
        layer_block_bytes=block_bytes // layers,
        dtype="uint8",
        layout="payload-of-key",
    )
    keys = BlockKeys(spec)
    chains = [keys.intern(request.session, request.block_ids) for request in itertools.islice(requests, limit)]
    if not chains:
        raise InvalidArgument("the workload has no requests", name=info.name)
    return Workload(info, spec, chains, keys, unbounded_hits(chains))
