"""A workload read once: chains, keys, sizes, and the expected hits."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvstore.core.errors import InvalidArgument
from kvstore.core.limits import MAX_LAYER_BLOCK_BYTES, MIN_LAYER_BLOCK_BYTES
from kvstore.core.spec import CacheSpec
from kvstore.core.types import BlockKey
from kvstore.workload.bounds import ChainIds, HitCount, unbounded_hits
from kvstore.workload.chains import BlockKeys
from kvstore.workload.requests import TraceInfo, TraceRequest

MAX_DISTINCT_BLOCKS = 1 << 23
"""Maximum number of distinct blocks. Their keys and chains require about two gigabytes of memory."""


@dataclass(frozen=True, slots=True)
class Workload:
    """All requests of a workload, in order, as chains of block keys."""

    info: TraceInfo
    spec: CacheSpec
    chains: list[ChainIds]
    keys: BlockKeys
    unbounded: HitCount
    """Hits of an unlimited store."""

    @property
    def unique_blocks(self) -> int:
        """Number of distinct blocks: the size of an unlimited store."""
        return len(self.keys)

    @property
    def largest_request(self) -> int:
        """Number of blocks of the longest prompt."""
        return max((len(chain) for chain in self.chains), default=0)

    def requests(self) -> Iterator[list[BlockKey]]:
        """Keys of each request, from the head of its chain."""
        return map(self.keys.keys_of, self.chains)


def read_workload(
    info: TraceInfo, requests: Iterable[TraceRequest], block_bytes: int, layers: int, limit: int | None
) -> Workload:
    """Read a workload and derive its keys.

    Args:
        info: properties of all requests.
        requests: the requests, in order.
        block_bytes: bytes of a full block.
        layers: number of its layer blocks; must divide it.
        limit: maximum number of requests; None: all.

    Raises:
        InvalidArgument: the layers do not divide the block, a line of a trace file is wrong, or the workload is too large.
    """
    if layers < 1 or block_bytes % layers:
        raise InvalidArgument("the layers must divide the block", block_bytes=block_bytes, layers=layers)
    layer_bytes = block_bytes // layers
    if not MIN_LAYER_BLOCK_BYTES <= layer_bytes <= MAX_LAYER_BLOCK_BYTES:
        raise InvalidArgument(
            f"--block-bytes over --layers is the size of a layer block, from {MIN_LAYER_BLOCK_BYTES} to {MAX_LAYER_BLOCK_BYTES} "
            "bytes: change one of them",
            block_bytes=block_bytes, layers=layers,
        )  # fmt: skip
    spec = CacheSpec(
        model=f"replay/{info.name}",
        block_tokens=info.block_tokens,
        layers=layers,
        layer_block_bytes=layer_bytes,
        dtype="uint8",
        layout="payload-of-key",
    )
    keys = BlockKeys(spec)
    chains: list[ChainIds] = []
    for request in itertools.islice(requests, limit):
        chains.append(keys.intern(request.session, request.block_ids))
        if len(keys) > MAX_DISTINCT_BLOCKS:
            raise InvalidArgument(
                "the workload has too many distinct blocks; set --limit",
                name=info.name, request=len(chains), limit_blocks=MAX_DISTINCT_BLOCKS,
            )  # fmt: skip
    if not chains:
        raise InvalidArgument("the workload has no requests", name=info.name)
    return Workload(info, spec, chains, keys, unbounded_hits(chains))
