"""The simulator's results for a bed of timed engines: the same hosts, links, engines and agents, as it sees them."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.dualpath.compute_budget import QUOTA_S
from kvstore.dualpath.groups import EngineKind
from kvstore.netlab.bed import LabBed
from kvstore.simulate.cluster import DispatchPolicy, SimConfig, SimHost
from kvstore.simulate.cluster import Variant as SimVariant
from kvstore.simulate.result import SimResult
from kvstore.simulate.run import simulate
from kvstore.simulate.sessions import AgentSession, SessionTurn
from netlab.agents import Trajectory
from netlab.coordinator import Variant
from netlab.engine_bed import BYTES_PER_MBIT, DECODE_BUFFER, PREFILL_BUFFER, EngineSettings

_FETCH_S = 0.001
"""The lab's coordinator asks for work whenever something has ended."""


def simulated(bed: LabBed, settings: EngineSettings, made: Sequence[Trajectory], variant: Variant) -> SimResult:
    """Runs what the lab runs; times and bytes are the lab's.

    Args:
        bed: the hosts and their links.
        settings: the engines; ``loads`` of a storage link are served at the same time.
        made: the agents, all of which begin at once.
        variant: how requests are served.
    """
    return simulate(sim_config(bed, settings, made, variant))


def sim_config(bed: LabBed, settings: EngineSettings, made: Sequence[Trajectory], variant: Variant) -> SimConfig:
    """As ``simulated``, not run."""
    engine, spec = settings.engine(bed), settings.spec(bed)
    hosts = [
        SimHost(name, role, 1, role.value, bed.snic_mbit * BYTES_PER_MBIT, bed.cnic_mbit * BYTES_PER_MBIT, stage_bytes=space)
        for role, names, space in (
            (EngineKind.PREFILL, bed.prefill_hosts, PREFILL_BUFFER),
            (EngineKind.DECODE, bed.decode_hosts, DECODE_BUFFER),
        )
        for name in names
    ]
    return SimConfig(
        tuple(hosts),
        engine,
        engine,
        tuple(_session(one, settings.block_tokens) for one in made),
        SimVariant(
            variant.name,
            variant.policy,
            layerwise=variant.layerwise,
            scheduling=DispatchPolicy.PAPER if variant.scheduled else DispatchPolicy.ROUND_ROBIN,
        ),
        block_tokens=settings.block_tokens,
        block_bytes=spec.block_bytes,
        storage=bed.storage * bed.storage_mbit * BYTES_PER_MBIT,
        layer_groups=-(-spec.layers // variant.layer_group) if variant.layer_group else 1,
        reads_in_flight=settings.loads,
        quota_s=QUOTA_S * settings.dilation,
        fetch_s=_FETCH_S,
        write_back=False,  # the lab's decode hosts write nothing to the storage links
    )


def _session(one: Trajectory, block_tokens: int) -> AgentSession:
    turns = []
    for number, turn in enumerate(one.turns):
        prompt = one.prompt(number)
        hit = min(one.known(number), prompt - 1) // block_tokens * block_tokens
        turns.append(SessionTurn(hit, prompt - hit, turn.out))
    return AgentSession(0.0, tuple(turns))
