"""The simulated cluster: hosts with their links and memories, and the workload."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum

from kvstore.core.errors import InvalidArgument
from kvstore.dualpath.compute_budget import QUOTA_S
from kvstore.dualpath.groups import EngineKind
from kvstore.roofline.engine_model import EngineModel
from kvstore.roofline.hardware import Gpu
from kvstore.roofline.models import Model
from kvstore.simulate.sessions import AgentSession

HOPPER_SNIC = 50e9
"""400 Gb/s, bytes/s."""
PUBLISHED_SNIC = 40 * 2**30
"""Bytes/s that KV cache clients read over such a link at most: the peak that 3FS publishes for one 400 Gb/s NIC."""
HOPPER_CNIC = 50e9
HOST_DRAM = 500e9
"""Two sockets of DDR5, reads and writes together, bytes/s."""
GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class SimHost:
    """One simulated node.

    Attributes:
        name: unique.
        role: of all its engines.
        engines: how many.
        group: engines of equal group compute in step (experts spread over them) and fetch work together.
        snic: storage link, bytes/s.
        cnic: each compute link in each direction, bytes/s.
        cnics: compute links; engine i uses link i modulo this. One: the node's links as one of their sum.
        dram: memory bandwidth, reads and writes together, bytes/s.
        stage_bytes: space of its prefill or decode buffer.
    """

    name: str
    role: EngineKind
    engines: int
    group: str
    snic: float
    cnic: float
    cnics: int = 1
    dram: float = math.inf
    stage_bytes: float = math.inf

    def __post_init__(self) -> None:
        if self.engines < 1 or self.cnics < 1 or not min(self.snic, self.cnic, self.dram, self.stage_bytes) > 0:
            raise InvalidArgument("engines, links and memory of a host must be above zero", host=self.name)


class DispatchPolicy(StrEnum):
    """Rule that assigns requests to engines."""

    ROUND_ROBIN = "round_robin"
    """Round robin, independent of the load, like a simple router."""
    PAPER = "paper"
    """By tokens and reading queues, with ``kvstore.dualpath.scheduler``."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Enabled parts of dual-path loading.

    Attributes:
        name: display name.
        path: name of a path policy.
        layerwise: prefill holds one layer's KV at a time and moves KV while it computes; otherwise a request's KV is loaded
            into HBM before the computation, kept there, and sent afterwards.
        scheduling: how engines are chosen.
    """

    name: str
    path: str
    layerwise: bool = True
    scheduling: DispatchPolicy = DispatchPolicy.PAPER


POLICIES = {name: Variant(name, name) for name in ("prefill_only", "round_robin", "shorter_queue", "split", "oracle")}
"""Configurations that differ only in the path policy."""

LADDER = {
    variant.name: variant
    for variant in (
        Variant("basic", "prefill_only", layerwise=False, scheduling=DispatchPolicy.ROUND_ROBIN),
        Variant("+layerwise", "prefill_only", scheduling=DispatchPolicy.ROUND_ROBIN),
        Variant("+both paths", "round_robin", scheduling=DispatchPolicy.ROUND_ROBIN),
        Variant("+scheduler", "shorter_queue"),
        Variant("+split", "split"),
    )
}
"""Cumulative steps; each name includes all earlier steps."""

VARIANTS = {**POLICIES, **LADDER}


@dataclass(frozen=True, slots=True)
class SimConfig:
    """Configuration of a run. Bytes and seconds are those of the engine models (scaled, if they are).

    Attributes:
        hosts: prefill and decode nodes, at least one each.
        prefill, decode: the engine model of each role.
        sessions: the workload.
        variant: enabled parts.
        block_tokens: tokens per block.
        block_bytes: bytes of a full block; None: derived from the model.
        storage: bytes/s of all storage together.
        layer_groups: parts in which storage is read, first layers first; compute may start after the first part. One, as in the
            paper: a prompt's storage read must be complete.
        reads_in_flight: requests that one storage link serves at the same time, others wait in order; None: unlimited.
        relays: third nodes offered to the planner per request.
        quota_s: attention time of a prefill batch, over all layers.
        batch_tokens: maximum new tokens of a prefill batch without a quota (not layer-wise).
        fetch_s: minimum time between fetches of an engine group.
        split_least_bytes: minimum bytes per side of a request that ``split`` divides.
        compute: False: prefill and decode need no time, only transfers do.
        write_back: decode nodes write the KV of new and generated tokens to storage.
        collectives: exchanges between experts on different hosts use the compute links. They have a higher class than KV, so
            that they take bandwidth from it but do not wait.
    """

    hosts: tuple[SimHost, ...]
    prefill: EngineModel
    decode: EngineModel
    sessions: tuple[AgentSession, ...] = field(repr=False)
    variant: Variant = POLICIES["split"]
    block_tokens: int = 64
    block_bytes: int | None = None
    storage: float = math.inf
    layer_groups: int = 1
    reads_in_flight: int | None = 16
    relays: int = 8
    quota_s: float = QUOTA_S
    batch_tokens: int = 8192
    fetch_s: float = 0.02
    split_least_bytes: int = 4 << 20
    compute: bool = True
    write_back: bool = True
    collectives: bool = True

    def __post_init__(self) -> None:
        if {host.role for host in self.hosts} != {EngineKind.PREFILL, EngineKind.DECODE}:
            raise InvalidArgument("hosts must include a prefill and a decode host")
        if len({host.name for host in self.hosts}) < len(self.hosts):
            raise InvalidArgument("two hosts have the same name")
        if self.layer_groups < 1 or self.block_tokens < 1 or self.relays < 0 or not self.storage > 0:
            raise InvalidArgument("layer_groups, block_tokens and storage must be above zero, and relays not negative")
        if not (self.quota_s > 0 and self.fetch_s > 0 and self.batch_tokens > 0) or self.reads_in_flight == 0:
            raise InvalidArgument("quota_s, fetch_s, batch_tokens and reads_in_flight must be above zero")

    @property
    def token_bytes(self) -> float:
        """KV bytes per token."""
        return self.full_block_bytes / self.block_tokens

    @property
    def full_block_bytes(self) -> int:
        """Bytes per full block."""
        if self.block_bytes is not None:
            return self.block_bytes
        return max(1, round(self.prefill.token_bytes * self.block_tokens))

    def of(self, role: EngineKind) -> list[SimHost]:
        """Return the hosts of a role."""
        return [host for host in self.hosts if host.role is role]

    def but(self, **changes: object) -> SimConfig:
        """Return the configuration with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


def uniform(
    model: Model,
    gpu: Gpu,
    sessions: tuple[AgentSession, ...],
    *,
    decode_gpu: Gpu | None = None,
    prefill_nodes: int | None = None,
    decode_nodes: int | None = None,
    gpus_per_node: int = GPUS_PER_NODE,
    snic: float = HOPPER_SNIC,
    cnic: float = HOPPER_CNIC,
    dram: float = HOST_DRAM,
    stage_bytes: float | None = None,
    cnic_per_gpu: bool = False,
    variant: Variant = POLICIES["split"],
) -> SimConfig:
    """Build a cluster of equal nodes; missing values are the model's defaults.

    ``decode_gpu`` is the type of the decode nodes if it differs. A mixture of experts is spread over the model's default number
    of nodes of a role, or all if there are fewer.

    Raises:
        InvalidArgument: an engine does not fit a node, or the model does not fit the GPUs.
    """
    prefill_nodes = model.prefill_nodes if prefill_nodes is None else prefill_nodes
    decode_nodes = model.decode_nodes if decode_nodes is None else decode_nodes
    if min(prefill_nodes, decode_nodes) < 1:
        raise InvalidArgument(
            "prefill_nodes and decode_nodes must be at least 1", prefill_nodes=prefill_nodes, decode_nodes=decode_nodes
        )
    engines, left = divmod(gpus_per_node, model.tensor_parallel)
    if engines < 1 or left:
        raise InvalidArgument(
            "the GPUs per node must be a multiple of the GPUs per engine, the tensor parallelism of the model",
            gpus_per_node=gpus_per_node,
            gpus_per_engine=model.tensor_parallel,
        )
    hosts: list[SimHost] = []
    models: dict[EngineKind, EngineModel] = {}
    for role, nodes, usual, kind in (
        (EngineKind.PREFILL, prefill_nodes, model.prefill_nodes, gpu),
        (EngineKind.DECODE, decode_nodes, model.decode_nodes, decode_gpu or gpu),
    ):
        together = min(nodes, usual) if model.expert_parallel else 1
        group_gpus = together * gpus_per_node if model.expert_parallel else model.tensor_parallel
        models[role] = EngineModel(model, kind, model.tensor_parallel, group_gpus)
        if models[role].kv_space_bytes <= 0:
            raise InvalidArgument(f"{model.name} does not fit {group_gpus} GPUs of type {kind.name}", role=role.value)
        hosts += [
            SimHost(
                f"{role.value}-{index}",
                role,
                engines,
                f"{role.value}-group-{index // together}",
                snic,
                cnic if cnic_per_gpu else cnic * gpus_per_node,
                gpus_per_node if cnic_per_gpu else 1,
                dram,
                model.stage_bytes if stage_bytes is None else stage_bytes,
            )
            for index in range(nodes)
        ]
    return SimConfig(tuple(hosts), models[EngineKind.PREFILL], models[EngineKind.DECODE], sessions, variant)
