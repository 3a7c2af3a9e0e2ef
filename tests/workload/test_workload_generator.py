"""The generator: its statistics are those published, its sessions are real chains, and a seed says everything."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from kvstore.core.errors import InvalidArgument
from kvstore.workload.generator import PROFILES, AgentWorkload
from kvstore.workload.requests import TraceRequest


def by_session(workload: AgentWorkload) -> dict[str, list[TraceRequest]]:
    sessions: dict[str, list[TraceRequest]] = defaultdict(list)
    for request in workload:
        sessions[request.session].append(request)
    return sessions


@pytest.mark.parametrize("name", PROFILES)
def test_means_are_those_published(name: str) -> None:
    profile = PROFILES[name]
    sessions = by_session(AgentWorkload(profile, sessions=400, seed=3)).values()
    ends = [turns[-1].input_tokens + turns[-1].output_tokens for turns in sessions]
    generated = [sum(turn.output_tokens for turn in turns) for turns in sessions]
    turns_of = [len(turns) for turns in sessions]
    append = [(end - made) / count for end, made, count in zip(ends, generated, turns_of, strict=True)]
    assert np.mean(turns_of) == pytest.approx(profile.turns, rel=0.12)
    assert np.mean(ends) == pytest.approx(profile.total_tokens, rel=0.02)
    assert np.mean(append) == pytest.approx(profile.append_tokens, rel=0.12)
    assert np.mean([made / count for made, count in zip(generated, turns_of, strict=True)]) == pytest.approx(
        profile.generated_tokens, rel=0.12
    )
    contexts = [np.mean([turn.input_tokens for turn in turns]) for turns in sessions]
    assert np.mean(contexts) == pytest.approx(profile.context_tokens, rel=0.05)
    assert max(ends) <= profile.max_tokens


def test_a_turn_continues_what_the_last_one_left() -> None:
    workload = AgentWorkload(PROFILES["agentic-32k"], sessions=4, block_tokens=64)
    for turns in by_session(workload).values():
        for number, turn in enumerate(turns):
            assert turn.turn == number
            assert len(turn.block_ids) == turn.input_tokens // 64
            assert len(turn.block_ids) + len(turn.answer_ids) == (turn.input_tokens + turn.output_tokens) // 64
        for before, after in itertools.pairwise(turns):
            known = np.concatenate((before.block_ids, before.answer_ids))
            assert (after.block_ids[: len(known)] == known).all()
            assert before.timestamp_ms <= after.timestamp_ms
            assert after.input_tokens > before.input_tokens + before.output_tokens


def test_requests_come_by_time() -> None:
    times = [request.timestamp_ms for request in AgentWorkload(PROFILES["agentic-32k"], sessions=6)]
    assert times == sorted(times)


@pytest.mark.parametrize("shared", [0, 640, 700])
def test_sessions_share_exactly_the_common_prefix(shared: int) -> None:
    workload = AgentWorkload(PROFILES["agentic-32k"], sessions=3, shared_prefix_tokens=shared)
    last = [turns[-1].block_ids for turns in by_session(workload).values()]
    for one, other in itertools.combinations(last, 2):
        assert set(one.tolist()) & set(other.tolist()) == set(range(shared // 64))


def test_a_seed_says_everything() -> None:
    def flat(seed: int) -> list[tuple[Any, ...]]:
        workload = AgentWorkload(PROFILES["agentic-48k"], sessions=3, seed=seed, max_turns=10)
        return [(r.session, r.turn, r.timestamp_ms, r.input_tokens, r.output_tokens, r.block_ids.tolist()) for r in workload]

    assert flat(1) == flat(1)
    assert flat(1) != flat(2)


@pytest.mark.parametrize(
    "wrong",
    [{"sessions": 0}, {"block_tokens": 0}, {"seed": -1}, {"sessions_per_s": 0}, {"max_turns": 0}, {"shared_prefix_tokens": -1}],
)
def test_wrong_settings_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument):
        AgentWorkload(PROFILES["agentic-32k"], **{"sessions": 1, **wrong})
