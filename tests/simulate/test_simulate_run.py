"""Whole runs: bytes are conserved, limits hold, and faster configurations are faster."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.errors import InvalidArgument
from kvstore.dualpath.compute_budget import PromptChunk, fill_batch
from kvstore.dualpath.groups import EngineKind
from kvstore.recompute.prefill_estimate import pairs
from kvstore.roofline.calibration import StepTimes
from kvstore.roofline.engine_model import EngineModel, PrefillChunk
from kvstore.roofline.hardware import GPUS
from kvstore.roofline.models import model_named
from kvstore.simulate.capacity import capacity
from kvstore.simulate.cluster import LADDER, POLICIES, VARIANTS, SimConfig, SimHost, Variant, uniform
from kvstore.simulate.engines.prefill import AttentionTime
from kvstore.simulate.result import SimResult
from kvstore.simulate.run import simulate
from kvstore.simulate.sessions import AgentSession, SessionTurn, arriving, at_once, sessions_of, thinned
from kvstore.workload.generator import PROFILES, AgentWorkload

H100 = GPUS["h100"]
MODEL = model_named("ds-27b")


def bed(prefill: int, decode: int, sessions: list[AgentSession], variant: str, **changes: object) -> SimConfig:
    """Hosts with one engine and slow links, no computing: exactly what an emulated network has."""
    hosts = [SimHost(f"p{i}", EngineKind.PREFILL, 1, f"p{i}", snic=1e9, cnic=8e9) for i in range(prefill)]
    hosts += [SimHost(f"d{i}", EngineKind.DECODE, 1, f"d{i}", snic=1e9, cnic=8e9) for i in range(decode)]
    engine = EngineModel(model_named("llama-3-8b"), H100)
    config = SimConfig(
        tuple(hosts), engine, engine, tuple(sessions), VARIANTS[variant], block_bytes=1 << 20, compute=False, split_least_bytes=1
    )
    return config.but(**changes)


def load_of(blocks: int, count: int = 1) -> list[AgentSession]:
    return [AgentSession(0.0, (SessionTurn(blocks * 64, 1, 1),)) for _ in range(count)]


def agents(count: int, every: int = 24) -> tuple[AgentSession, ...]:
    return at_once(thinned(sessions_of(AgentWorkload(PROFILES["agentic-32k"], count, seed=3), 64), every))


AGENTS = agents(48)


def check(result: SimResult) -> None:
    """Properties of every run."""
    assert result.finished == result.requests
    assert sum(result.snic_bytes) == pytest.approx(result.read_bytes, rel=1e-6)
    assert result.snic_use <= 1 + 1e-6
    assert result.cnic_use <= 1 + 1e-6
    assert result.dram_use <= 1 + 1e-6
    assert result.prefill_use <= 1 + 1e-6
    assert result.decode_use <= 1 + 1e-6
    assert (result.ttfts >= 0).all()


def test_simulate_split_over_two_sides_halves_load_time() -> None:
    alone = simulate(bed(1, 1, load_of(1000), "prefill_only")).load.mean
    assert alone == pytest.approx(1000 * (1 << 20) / 1e9, rel=1e-6)
    assert simulate(bed(1, 1, load_of(1000), "shorter_queue")).load.mean == pytest.approx(alone)
    assert simulate(bed(1, 1, load_of(1000), "split")).load.mean == pytest.approx(alone / 2, rel=0.01)


def test_simulate_split_with_relays_divides_load_time() -> None:
    alone = simulate(bed(1, 2, load_of(1200), "prefill_only")).load.mean
    split = simulate(bed(1, 2, load_of(1200), "split"))
    assert split.load.mean == pytest.approx(alone / 3, rel=0.01)
    assert split.snic_bytes == pytest.approx([400 * (1 << 20)] * 3, rel=0.01)


@pytest.mark.parametrize("model", ["llama-3-8b", "ds-27b"])
def test_simulate_quota_bounds_measured_attention(model: str) -> None:
    """The FLOP of sparse attention are bounded by its top tokens. Measured times grow with the pairs."""
    times = StepTimes(0.01, 1e-5, 1e-9)
    engine = EngineModel(model_named(model), H100, measured=times)
    waiting = [PromptChunk(cached, 3_000) for cached in (60_000, 0, 30_000, 60_000, 60_000)]
    batch = fill_batch(waiting, AttentionTime(engine), 0.3)
    used = sum(times.pair_s * pairs(chunk.cached, chunk.tokens) for chunk in batch)
    last = times.pair_s * pairs(batch[-1].cached + batch[-1].tokens, 1)
    assert used <= 0.3 < used + last
    assert len(batch) < len(waiting)


def test_simulate_attention_without_time_bounds_tokens() -> None:
    """With a quota, attention in zero time would admit every waiting prompt to one pass."""
    engine = EngineModel(model_named("llama-3-8b"), H100, measured=StepTimes(0.0, 1e-3, 0.0))
    sessions = [AgentSession(0.0, (SessionTurn(64, 4096, 1),)) for _ in range(8)]
    found = simulate(bed(1, 1, sessions, "split", compute=True, batch_tokens=4096).but(prefill=engine))
    check(found)
    assert sorted(found.ttfts)[1] < 3 * 4.096


@settings(max_examples=25)
@given(
    prefill=st.integers(1, 3),
    decode=st.integers(1, 3),
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=12),
    variant=st.sampled_from(sorted(VARIANTS)),
    groups=st.sampled_from([1, 4]),
    slots=st.sampled_from([None, 1, 3]),
)
def test_simulate_delivers_every_byte_within_link_rates(
    prefill: int, decode: int, sizes: list[int], variant: str, groups: int, slots: int | None
) -> None:
    sessions = [session for size in sizes for session in load_of(size)]
    result = simulate(bed(prefill, decode, sessions, variant, layer_groups=groups, reads_in_flight=slots))
    check(result)
    if variant == "oracle":
        assert result.read_bytes == 0
        return
    asked = sum(sizes) * (1 << 20)
    assert result.read_bytes == asked
    nodes = prefill if VARIANTS[variant].path == "prefill_only" else prefill + decode
    assert result.seconds >= asked / (nodes * 1e9) * (1 - 1e-6)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_simulate_every_variant_is_deterministic(variant: str) -> None:
    config = uniform(MODEL, H100, AGENTS, variant=VARIANTS[variant])
    result = simulate(config)
    check(result)
    again = simulate(config)
    assert again.to_json() == result.to_json()
    assert (again.ttfts == result.ttfts).all()


def test_simulate_oracle_is_a_lower_bound() -> None:
    many = agents(256)
    seconds = {name: simulate(uniform(MODEL, H100, many, variant=policy, snic=8e9)).seconds for name, policy in POLICIES.items()}
    assert seconds["oracle"] == min(seconds.values())
    for name in ("shorter_queue", "split"):
        assert seconds["prefill_only"] / seconds[name] <= 2.02  # one prefill and one decode node
        assert seconds["prefill_only"] / seconds[name] > 1.4
    assert seconds["split"] <= seconds["shorter_queue"] * 1.03


def test_simulate_layerwise_needs_less_hbm() -> None:
    """Two requests of which only one fits: not layer-wise, the second's load waits for the first's push."""
    space = uniform(MODEL, H100, ()).prefill.kv_space_bytes
    tokens = int(space * 0.6 / MODEL.token_bytes) // 64 * 64
    sessions = tuple(AgentSession(0.0, (SessionTurn(tokens, 256, 1),)) for _ in range(16))  # two an engine
    plenty = {"stage_bytes": 1e13}
    by = {
        layerwise: simulate(
            uniform(
                MODEL,
                H100,
                sessions,
                variant=Variant("x", "prefill_only", layerwise=layerwise, scheduling=LADDER["basic"].scheduling),
                **plenty,
            )  # type: ignore[arg-type]
        )
        for layerwise in (False, True)
    }
    assert by[True].seconds < by[False].seconds


def test_simulate_compute_starts_before_last_layers() -> None:
    sessions = [AgentSession(0.0, (SessionTurn(512 * 64, 4096, 1),))]
    whole, grouped = (simulate(bed(1, 1, sessions, "prefill_only", compute=True, layer_groups=groups)) for groups in (1, 8))
    assert grouped.load.mean == pytest.approx(whole.load.mean)
    assert grouped.ttft.mean < whole.ttft.mean * 0.8
    assert grouped.ttft.mean >= grouped.load.mean * (1 - 1e-6)


def test_simulate_small_buffers_do_not_deadlock() -> None:
    longest = max(turn.hit + turn.new + turn.out for session in AGENTS for turn in session.turns) * MODEL.token_bytes
    check(simulate(uniform(MODEL, H100, AGENTS, stage_bytes=longest * 1.01)))
    with pytest.raises(InvalidArgument, match="staging"):
        simulate(uniform(MODEL, H100, AGENTS, stage_bytes=longest / 2))


def test_simulate_links_per_gpu_or_node_carry_equal_bytes() -> None:
    each, together = (simulate(uniform(MODEL, H100, AGENTS, cnic_per_gpu=split)) for split in (True, False))
    check(each)
    assert each.read_bytes == together.read_bytes
    assert each.seconds == pytest.approx(together.seconds, rel=0.05)


def test_simulate_dense_model_finishes() -> None:
    check(simulate(uniform(model_named("qwen2.5-32b"), GPUS["h200"], agents(8))))


def test_simulate_thinning_and_arrivals_are_seeded() -> None:
    sessions = [AgentSession(8.0, tuple(SessionTurn(64 * i, 1, 1) for i in range(1, 11)))] * 40
    thin = thinned(sessions, 4)
    assert thinned(sessions, 1) == sessions
    assert {session.start_s for session in thin} == {2.0}
    kept = [turn.hit for session in thin for turn in session.turns]
    assert len(kept) == pytest.approx(100, abs=5)
    assert sum(kept) / len(kept) == pytest.approx(64 * 5.5, rel=0.05)
    assert arriving(sessions, 2.0, 5) == arriving(sessions, 2.0, 5)
    assert arriving(sessions, 2.0, 5) != arriving(sessions, 2.0, 6)
    with pytest.raises(InvalidArgument):
        thinned(sessions, 0)
    with pytest.raises(InvalidArgument):
        arriving(sessions, 0, 1)


def test_sessions_hits_match_an_unbounded_store() -> None:
    workload = AgentWorkload(PROFILES["agentic-32k"], 3, seed=9)
    before: dict[str, int] = {}
    expected = []
    for request in workload:
        held = before.get(request.session, 0) // 64 * 64
        expected.append((min(held, (request.input_tokens - 1) // 64 * 64), request.input_tokens))
        before[request.session] = request.input_tokens + request.output_tokens
    found = sorted((turn.hit, turn.hit + turn.new) for session in sessions_of(workload, 64) for turn in session.turns)
    assert found == sorted(expected)
    longer = sessions_of(workload, 64, append_factor=2.0)
    assert sum(t.new for s in longer for t in s.turns) == pytest.approx(2 * sum(t - h for h, t in expected), rel=0.01)


def test_capacity_search_brackets_the_limit() -> None:
    pool = thinned(sessions_of(AgentWorkload(PROFILES["agentic-32k"], 24, seed=2), 64), 24)
    config = uniform(MODEL, H100, (), variant=POLICIES["prefill_only"], snic=2e9)
    found = capacity(config, pool, every=24, lives=2.0, first_guess=0.1)
    kept = [point.kept for point in found.points]
    assert kept == sorted(kept, reverse=True)
    assert found.agents_s == max(point.agents_s for point in found.points if point.kept)
    over = min(point.agents_s for point in found.points if not point.kept)
    assert over <= found.agents_s * 1.07
    with pytest.raises(InvalidArgument):
        capacity(config, [], every=1)


def test_nonsense_is_refused() -> None:
    host = SimHost("a", EngineKind.PREFILL, 1, "a", 1.0, 1.0)
    engine = EngineModel(MODEL, H100, group_gpus=8)
    with pytest.raises(InvalidArgument, match="a prefill and a decode"):
        SimConfig((host,), engine, engine, ())
    with pytest.raises(InvalidArgument, match="the same name"):
        SimConfig((host, SimHost("a", EngineKind.DECODE, 1, "b", 1.0, 1.0)), engine, engine, ())
    with pytest.raises(InvalidArgument, match="does not fit"):
        uniform(model_named("ds-660b"), H100, (), prefill_nodes=1)
    with pytest.raises(InvalidArgument):
        uniform(MODEL, H100, (), prefill_nodes=0)
    with pytest.raises(InvalidArgument):
        uniform(model_named("llama-2-70b"), H100, (), gpus_per_node=6)


def test_simulate_write_back_writes_new_tokens_once() -> None:
    sessions = [AgentSession(0.0, (SessionTurn(640, 100, 20),)) for _ in range(3)]
    written, none = (simulate(bed(1, 1, sessions, "split", write_back=write)) for write in (True, False))
    check(written)
    assert written.written_bytes == pytest.approx([0, 3 * 120 * (1 << 20) / 64])
    assert none.written_bytes == [0, 0]
    assert written.seconds == pytest.approx(none.seconds, rel=0.1)


def test_simulate_exchanges_between_hosts_use_compute_links() -> None:
    config = uniform(model_named("ds-660b"), H100, AGENTS[:8])
    alone = simulate(uniform(MODEL, H100, AGENTS[:8])).cnic_use
    assert simulate(config).cnic_use > simulate(config.but(collectives=False)).cnic_use
    one_host = uniform(MODEL, H100, AGENTS[:8]).but(collectives=False)
    assert simulate(one_host).cnic_use == alone  # experts of one host exchange over its own links between GPUs


def test_simulate_roles_may_have_different_gpus() -> None:
    same, other = (simulate(uniform(MODEL, H100, AGENTS, decode_gpu=gpu)) for gpu in (None, GPUS["h20"]))
    assert other.tpot.mean < same.tpot.mean  # more bandwidth
    assert other.decode_gpus.gpu.name == "h20"
    assert other.decode_gpus.ridge < same.decode_gpus.ridge
    for result in (same, other):
        for used in (result.prefill_gpus, result.decode_gpus):
            assert 0 < used.mfu < 1
            assert 0 < used.mbu < 1
            assert used.to_json()["bound"] in {"compute", "memory"}
        assert result.prefill_gpus.intensity > result.decode_gpus.intensity


def test_simulate_experts_share_work_of_uneven_batches() -> None:
    """Routed experts run on all engines of a group, so that one engine's long batch costs less than if all had it."""
    engine = EngineModel(model_named("ds-660b"), H100, group_gpus=16)
    alone, all_alike = (engine.prefill_seconds([PrefillChunk(0, 4000)], tokens) for tokens in (4000, None))
    assert 0.3 < alone / all_alike < 0.7
    assert engine.prefill_seconds([PrefillChunk(0, 4000)], 16 * 4000) == pytest.approx(all_alike)


def test_simulate_long_prompt_is_cut_without_a_quota() -> None:
    """A prompt of several budgets holds up a short one of another engine's batch for one budget, not for all."""
    sessions = (AgentSession(0.0, (SessionTurn(0, 40_000, 1),)), AgentSession(0.0, (SessionTurn(0, 64, 1),)))
    cut, whole = (
        simulate(uniform(MODEL, H100, sessions, variant=LADDER["basic"]).but(batch_tokens=tokens)) for tokens in (2048, 65_536)
    )
    assert cut.ttfts.min() < whole.ttfts.min() / 4


def test_simulate_empty_workload_takes_no_time() -> None:
    result = simulate(uniform(MODEL, H100, ()))
    assert result.requests == 0
    assert math.isnan(result.ttft.mean)
    assert result.to_json()["ttft"]["mean"] is None
