"""The demo: a prefill host, a decode host and a storage host run a generated agentic workload."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvclient import KVClient
from kvclient.options import ClientOptions
from kvstore.core.spec import CacheSpec
from kvstore.core.types import BlockKey
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.observe.program_version import program_version
from kvstore.replay.engine import ReplayTotals, RequestRunner
from kvstore.replay.progress import Report, silent
from kvstore.replay.report import tally_json
from kvstore.workload.chains import BlockKeys
from kvstore.workload.generator import PROFILES, AgentWorkload

PREFILL, DECODE, STORAGE = "prefill-1", "decode-1", "storage-1"
_DEADLINE_S = 30.0
_LOOKUP_SHARD_MS = 250
"""All processes share one machine, so a shard may be late only because it waits for a processor."""


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """Sizes of a demo."""

    sessions: int = 10
    max_turns: int = 60
    seed: int = 1
    profile: str = "agentic-32k"
    shared_prefix_tokens: int = 2_048
    block_bytes: int = 64 << 10
    layers: int = 4
    prefill_dram_bytes: int = 96 << 20
    decode_dram_bytes: int = 96 << 20
    storage_dram_bytes: int = 96 << 20
    storage_nvme_bytes: int = 1 << 30
    servers: int = 1
    """Metadata servers."""
    shards: int = 0
    """Shards of a Valkey Cluster that holds the index, with a replica each; 0: the index is a file."""

    def workload(self) -> AgentWorkload:
        """The requests."""
        return AgentWorkload(
            PROFILES[self.profile],
            self.sessions,
            seed=self.seed,
            shared_prefix_tokens=self.shared_prefix_tokens,
            max_turns=self.max_turns,
        )

    def spec(self) -> CacheSpec:
        """The namespace."""
        return CacheSpec(
            model="demo",
            block_tokens=self.workload().block_tokens,
            layers=self.layers,
            layer_block_bytes=self.block_bytes // self.layers,
            dtype="uint8",
            layout="payload-of-key",
        )

    def nodes(self) -> list[NodeSpec]:
        """The hosts; the storage host first, since the others write to it."""
        return [
            NodeSpec(STORAGE, ("storage",), self.storage_dram_bytes, self.storage_nvme_bytes),
            NodeSpec(PREFILL, ("prefill",), self.prefill_dram_bytes, write_back_to=STORAGE),
            NodeSpec(DECODE, ("decode",), self.decode_dram_bytes, write_back_to=STORAGE),
        ]


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """One request: the prompt to prefill, and the blocks that decoding adds."""

    keys: list[BlockKey]
    prompt_blocks: int


def read_turns(plan: DemoPlan) -> tuple[list[DemoRequest], int]:
    """All turns, and the number of prompt blocks that an unlimited store would serve."""
    keys = BlockKeys(plan.spec())
    turns = []
    possible = 0
    for request in plan.workload():
        known = len(keys)
        chain = keys.intern(request.session, np.concatenate((request.block_ids, request.answer_ids)))
        prompt = len(request.block_ids)
        possible += int(np.count_nonzero(chain[:prompt] < known))
        turns.append(DemoRequest(keys.keys_of(chain), prompt))
    return turns, possible


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Result of a demo."""

    plan: DemoPlan
    tally: ReplayTotals
    seconds: float
    possible_hits: int
    """Prompt blocks that an unlimited store would have served."""

    @property
    def problem(self) -> str | None:
        """Error of the demo, if any."""
        tally = self.tally
        if tally.wrong_bytes:
            return f"{tally.wrong_bytes:,} wrong bytes in {tally.wrong_blocks:,} blocks"
        if tally.blocks_hit > self.possible_hits:
            return f"{tally.blocks_hit:,} hits where only {self.possible_hits:,} are possible"
        if self.possible_hits and not tally.blocks_hit:
            return "no hit at all: the store did not serve; its errors are in the summary"
        return None

    def to_json(self) -> dict[str, Any]:
        """All of it, as plain data."""
        return {
            **tally_json(self.tally, self.seconds),
            "unbounded_hit_blocks": self.possible_hits,
            "block_bytes": self.plan.block_bytes,
            "layers": self.plan.layers,
            "seed": self.plan.seed,
            "sessions": self.plan.sessions,
            "servers": self.plan.servers,
            "shards": self.plan.shards,
            **program_version(),
        }


def demo_cluster(plan: DemoPlan, base_dir: Path | None = None) -> LocalCluster:
    """The store of a demo, not started yet."""
    settings = (("lookup_shard", f"{_LOOKUP_SHARD_MS}ms"),) if plan.shards else ()
    return LocalCluster(plan.nodes(), base_dir, settings, servers=plan.servers, shards=plan.shards)


def run_demo(plan: DemoPlan, base_dir: Path | None = None, report: Report = silent) -> DemoResult:
    """Start the store and run the workload on it."""
    with demo_cluster(plan, base_dir) as cluster:
        return run_workload(cluster, plan, report)


def run_workload(cluster: LocalCluster, plan: DemoPlan, report: Report = silent) -> DemoResult:
    """Simulate an engine pair on a running store: prompts are prefilled on one host, answers decoded on the other.

    Each turn looks its prompt up from the prefill host, loads and checks the hits, and stores the rest. The decode host stores
    the blocks that decoding fills, and the next turn finds them there.
    """
    turns, possible = read_turns(plan)
    largest = max(len(turn.keys) for turn in turns)
    tally = ReplayTotals()
    with ExitStack() as clients:
        options = ClientOptions(client_name="demo", default_deadline_s=_DEADLINE_S, lookup_deadline_s=_DEADLINE_S)
        prefill, decode = (
            RequestRunner(
                clients.enter_context(
                    KVClient.connect(
                        cluster.metadata_address, spec=plan.spec(), node=cluster.node(host).local_socket, options=options
                    )
                ),
                tally,
                largest,
            )
            for host in (PREFILL, DECODE)
        )
        started_s = time.perf_counter()
        for done, turn in enumerate(turns, start=1):
            prefill.serve(turn.keys[: turn.prompt_blocks])
            decode.store(turn.keys, turn.prompt_blocks)
            report(done, tally.note())
        seconds = time.perf_counter() - started_s
    return DemoResult(plan, tally, seconds, possible)
