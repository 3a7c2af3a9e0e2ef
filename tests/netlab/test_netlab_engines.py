"""Timed engines on a lab: agents' turns go through prefill, handoff and decode, each turn finds what the last one left."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kvstore.core.spec import CacheSpec
from kvstore.netlab.bed import LabBed
from netlab.agents import Chains, Trajectory, Turn, trajectories
from netlab.coordinator import LADDER, ORACLE, Coordinator, RunResult
from netlab.engine_bed import EngineBed, EngineSettings
from netlab.engine_report import check, summarize

BED = LabBed(1, 1, 1, snic_mbit=240.0, cnic_mbit=1920.0, storage_mbit=1920.0)
SETTINGS = EngineSettings(model="llama-3-8b", dilation=0.3, block_tokens=32, layers_together=8)
AGENTS = [
    Trajectory(2000, (Turn(100, 150), Turn(64, 150), Turn(90, 40))),
    Trajectory(1300, (Turn(35, 160), Turn(1, 140), Turn(33, 33))),
]


def accounted(result: RunResult, layer_bytes: int, layers: int) -> None:
    """Every token came, every block is accounted for, and turns find what earlier ones left."""
    check(result)
    assert len(result.requests) == 6
    for request in result.requests:
        facts, tokens = request.facts, SETTINGS.block_tokens
        assert request.ends["tokens"] == request.prompt + request.out
        assert facts["blocks"] == -(-request.prompt // tokens)
        assert facts["hit"] + facts["late"] + facts["lost"] == min(request.known, request.prompt - 1) // tokens
        read = sum(facts["paths"].values()) // (layer_bytes * layers)
        assert facts["hit"] <= read <= facts["hit"] + facts["lost"]  # blocks after a lost block may have arrived
        assert request.ends["stored"] == (request.prompt + request.out - 1) // tokens - request.prompt // tokens
        assert request.submitted_s <= request.facts["first_s"] < request.ends["second_s"] <= request.ends["last_s"]
        if request.turn == 2:  # what decode filled in turn 0 was stored a whole turn ago; its last batch may be late
            assert facts["hit"] + facts["lost"] > AGENTS[request.agent].prompt(0) // tokens


def test_every_token_and_byte_of_two_agents_is_accounted_for(lab_possible: None, tmp_path: Path) -> None:
    with EngineBed(BED, SETTINGS, AGENTS, scratch=tmp_path) as bed:
        coordinator = Coordinator(bed, AGENTS)
        size = bed.spec.layer_block_bytes
        basic, split = (coordinator.run(variant, [0.0, 0.0]) for variant in (LADDER[0], LADDER[-1]))
        by_server = dataclasses.replace(LADDER[-1], by_server=True)
        served, again = (coordinator.run(by_server, [0.0, 0.0], at_once=1) for _ in range(2))
        for result in (basic, split, served, again):
            accounted(result, size, bed.spec.layers)
        assert all(set(request.facts["paths"]) <= {"prefill", "local"} for request in basic.requests)
        summary = summarize(split, BED, SETTINGS.dilation)
        assert summary.counts["tokens"] == sum(turn.out for agent in AGENTS for turn in agent.turns)
        for result in (served, again):  # one agent after the other
            turns = sorted(result.requests, key=lambda request: request.submitted_s)
            assert [request.agent for request in turns] == [0, 0, 0, 1, 1, 1]
            assert turns[3].submitted_s > turns[2].ends["last_s"]
            assert all(request.generation for request in turns), "the metadata server names the attempt"
        oracle = coordinator.run(ORACLE, [0.0, 0.1])
        assert oracle.recording.series("prefill-0", "storage").total_bytes("rx") < basic.requests[0].facts["hit"] * size
        assert all(request.ends["tokens"] == request.prompt + request.out for request in oracle.requests)


def test_agents_continue_their_own_text_and_no_others() -> None:
    made = trajectories("agentic-64k", 5, 3, seed=3)
    for agent in made:
        assert agent.prompt(1) == agent.prompt(0) + agent.turns[0].out + agent.turns[1].append
        assert agent.known(1) == agent.prompt(0) + agent.turns[0].out - 1
        assert agent.end == agent.prompt(2) + agent.turns[2].out
    spec = CacheSpec(model="m", block_tokens=16, layers=1, layer_block_bytes=64)
    one, other = (Chains(spec, 1, [100, 100]) for _ in range(2))
    prompt = one.keys(0, 1, 230)
    assert len(prompt) == 15
    assert prompt == other.keys(0, 1, 230), "all processes make the same"
    assert one.stored(0) == prompt[:6]
    assert one.keys(0, 1, 240)[:14] == prompt[:14], "the tail's key is another than the full block's"
    assert one.keys(0, 1, 240)[14] != prompt[14]
    assert one.keys(0, 2, 230)[:6] == prompt[:6]
    assert not set(one.keys(0, 2, 230)[6:]) & set(prompt)
    assert not set(one.keys(1, 1, 230)) & set(prompt)


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_appends_grow_by_their_factor(factor: float) -> None:
    plain, more = (trajectories("agentic-32k", 4, 2, 1, append_factor=one) for one in (1.0, factor))
    for before, after in zip(plain, more, strict=True):
        assert before.context == after.context
        assert [turn.append * factor for turn in before.turns] == [turn.append for turn in after.turns]
