"""A complete replay: a separate store, all requests of a workload, and the result."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvclient import KVClient
from kvclient.options import ClientOptions
from kvstore.core.errors import InvalidArgument
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.health.quantities import show_size
from kvstore.observe.program_version import program_version
from kvstore.replay.capacity import StoreCapacity
from kvstore.replay.engine import ReplayTotals, RequestRunner
from kvstore.replay.plan import Workload
from kvstore.replay.progress import Report, silent
from kvstore.replay.report import tally_json, tally_rows
from kvstore.workload.bounds import HitCount, best_hits

NODE_ID = "replay"
_DEADLINE_S = 60.0
"""A replay waits, so that timeouts of a slow machine do not count as misses."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Result of a replay."""

    workload: Workload
    capacity: StoreCapacity
    policy: str
    tally: ReplayTotals
    seconds: float
    best: HitCount | None
    """The best possible result at this capacity; None if everything fits."""

    @property
    def exact(self) -> bool:
        """Whether the replay had every hit of an unlimited store."""
        return self.tally.blocks_hit == self.workload.unbounded.hit_blocks

    def to_json(self) -> dict[str, Any]:
        """All of it, as plain data."""
        workload = self.workload
        return {
            **tally_json(self.tally, self.seconds),
            "trace": {
                "name": workload.info.name,
                "format": workload.info.format,
                "block_tokens": workload.info.block_tokens,
                "unique_blocks": workload.unique_blocks,
            },
            "block_bytes": workload.spec.block_bytes,
            "layers": workload.spec.layers,
            "policy": self.policy,
            "capacity": {
                "dram_bytes": self.capacity.dram_bytes,
                "nvme_bytes": self.capacity.nvme_bytes,
                "blocks": self.capacity.blocks(workload.spec.shape),
                "limited": self.capacity.limited,
            },
            "unbounded_hit_blocks": workload.unbounded.hit_blocks,
            "unbounded_hit_ratio": workload.unbounded.ratio,
            "belady_hit_blocks": None if self.best is None else self.best.hit_blocks,
            "belady_hit_ratio": None if self.best is None else self.best.ratio,
            **program_version(),
        }


def replay(
    workload: Workload,
    capacity: StoreCapacity,
    policy: str,
    base_dir: Path | None = None,
    report: Report = silent,
    started: Callable[[LocalCluster], None] = lambda _cluster: None,
) -> ReplayResult:
    """Run all requests in order against a metadata server and one node, each a separate process.

    Args:
        workload: the workload.
        capacity: capacity of the node.
        policy: its eviction policy.
        base_dir: folder for its volume; None: a temporary one.
        report: called after each request.
        started: called after the store has started.

    Raises:
        InvalidArgument: ``base_dir`` contains the volume of an earlier replay, whose blocks would count as hits.
    """
    if base_dir is not None and capacity.nvme_bytes and (volume := base_dir / f"{NODE_ID}-nvme").exists():
        raise InvalidArgument(
            "an earlier replay left its blocks here, which would count as hits: remove the volume, or name another folder",
            volume=volume,
        )
    node = NodeSpec(NODE_ID, dram_bytes=capacity.dram_bytes, nvme_bytes=capacity.nvme_bytes, policy=policy)
    tally = ReplayTotals()
    with LocalCluster([node], base_dir) as cluster:
        started(cluster)
        options = ClientOptions(client_name="replay", default_deadline_s=_DEADLINE_S, lookup_deadline_s=_DEADLINE_S)
        with KVClient.connect(
            cluster.metadata_address, spec=workload.spec, node=cluster.node(NODE_ID).local_socket, options=options
        ) as client:
            runner = RequestRunner(client, tally, workload.largest_request)
            started_s = time.perf_counter()
            for done, keys in enumerate(workload.requests(), start=1):
                runner.serve(keys)
                report(done, tally.note())
            seconds = time.perf_counter() - started_s
    best = best_hits(workload.chains, capacity.blocks(workload.spec.shape)) if capacity.limited else None
    return ReplayResult(workload, capacity, policy, tally, seconds, best)


def replay_rows(result: ReplayResult) -> dict[str, str]:
    """Rows of the summary table."""
    workload = result.workload
    unbounded = workload.unbounded
    rows = {
        "trace": f"{workload.info.name} ({workload.info.format}), {workload.unique_blocks:,} distinct blocks",
        "blocks": f"{show_size(workload.spec.block_bytes)} in {workload.spec.layers} layers",
        "store": f"{result.capacity}, eviction {result.policy}",
        **tally_rows(result.tally, result.seconds),
        "hits, unlimited store": f"{unbounded.hit_blocks:,} ({unbounded.ratio:.2%}), if nothing were evicted",
    }
    if result.best is not None:
        rows["hits, best possible"] = f"{result.best.hit_blocks:,} ({result.best.ratio:.2%}) at this capacity"
    return rows


def verdict(result: ReplayResult) -> str | None:
    """Error of a replay, if any."""
    tally = result.tally
    unbounded = result.workload.unbounded.hit_blocks
    if tally.wrong_bytes:
        return f"{tally.wrong_bytes:,} wrong bytes in {tally.wrong_blocks:,} blocks"
    if tally.blocks_hit > unbounded:
        return f"{tally.blocks_hit:,} hits where only {unbounded:,} are possible"
    if not result.capacity.limited and not result.exact:
        return f"{unbounded - tally.blocks_hit:,} hits are missing although there was space for every block"
    return None
