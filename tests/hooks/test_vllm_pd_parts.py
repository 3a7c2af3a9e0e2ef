"""Prefill and decode on separate engines, without vLLM: parameters of requests, and decisions of both engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_requests import BLOCK, SPEC, Pool, Request, request
from hypothesis import given
from hypothesis import strategies as st

from kvclient import InvalidArgument, KeyChain
from kvclient.engines.vllm.counters import ConnectorCounters
from kvclient.engines.vllm.identity.adapters import Adapters
from kvclient.engines.vllm.identity.kv_groups import GroupView
from kvclient.engines.vllm.pd.options import PdOptions
from kvclient.engines.vllm.pd.params import Role, Transfer, not_handed_over, read_transfer
from kvclient.engines.vllm.pd.plan import AbandonJob, PdPlan, PdWorkerOutput
from kvclient.engines.vllm.pd.scheduler import PdScheduler, TransferState
from kvclient.engines.vllm.plan import WorkerOutput

CHAIN = KeyChain(SPEC)
HERE = Transfer(Role.DECODE, "t1")
THERE = Transfer(Role.PREFILL, "t1", "d0")

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = ("do_remote_decode", "do_remote_prefill", "transfer_id", "decode_node")


# ---- parameters ----
@given(json_values | st.dictionaries(st.sampled_from(NAMES), json_values | st.just(True) | st.just("a-1")))
def test_transfer_params_are_accepted_absent_or_rejected(params: Any) -> None:
    try:
        transfer = read_transfer(params)
    except InvalidArgument:
        return
    if transfer is not None:
        assert 0 < len(transfer.transfer_id) <= 64
        assert bool(transfer.decode_node) == (transfer.role is Role.PREFILL)


def test_transfer_prefill_answer_is_read_by_decode() -> None:
    told = {"do_remote_decode": True, "transfer_id": "a.b-c_1", "decode_node": "d0", "other": [1]}
    transfer = read_transfer(told)
    assert transfer == Transfer(Role.PREFILL, "a.b-c_1", "d0")
    received = read_transfer(transfer.for_decode(b"\x01" * 16))
    assert received == Transfer(Role.DECODE, "a.b-c_1", namespace="01" * 16)
    assert received.can_come_to(b"\x01" * 16)
    assert not received.can_come_to(b"\x02" * 16)
    assert Transfer(Role.DECODE, "t").can_come_to(b"\x02" * 16), "routers that ask both engines at once do not know"
    assert read_transfer(transfer.for_decode(None)) is None, "nobody waits for what will not come"


@pytest.mark.parametrize(("transfer_id", "shown"), [("a b", "'a b'"), ("x" * 65, f"'{'x' * 64}'"), (3, "int")])
def test_transfer_id_invalid_is_named(transfer_id: object, shown: str) -> None:
    with pytest.raises(InvalidArgument) as rejected:
        read_transfer({"do_remote_decode": True, "transfer_id": transfer_id, "decode_node": "d0"})
    assert rejected.value.fields == {"got": shown}
    assert "1 to 64 letters" in str(rejected.value)


def test_tail_keys_of_two_transfers_differ() -> None:
    key = CHAIN.tail([1, 2])
    masked = {Transfer(Role.DECODE, f"t{number}").tail_key(key) for number in range(100)}
    assert len(masked | {key}) == 101
    assert THERE.tail_key(key) == HERE.tail_key(key)


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt_deadline_s": 0},
        {"handoff_deadline_s": "soon"},
        {"max_prompts": 0},
        {"path_layer_group": -1},
        {"load_mode": "both"},
        {"prompt_deadline": 3},
    ],
)
def test_options_invalid_values_are_rejected(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        PdOptions.from_mapping(wrong)


@pytest.mark.parametrize(
    ("kind", "needed"),
    [
        ("full", [0, 0, 0, 0, 0]),
        ("mla", [0, 0, 0, 0, 0]),
        ("full:64", [0, 0, 1, 64, 65]),
        ("sliding:64", [0, 0, 1, 64, 65]),
        ("chunked:64", [0, 0, 64, 64, 128]),
        ("full+sliding:64", [0, 0, 0, 0, 0]),
    ],
)
def test_group_first_needed_token_by_kind(kind: str, needed: list[int]) -> None:
    group = GroupView(("l",), BLOCK, kind, "float32")
    assert [group.first_needed(token) for token in (0, 63, 64, 127, 128)] == needed


# ---- the decode engine ----
def decisions(pool: Pool | None = None, windows: tuple[int, ...] = (0,), workers: int = 1) -> PdScheduler:
    groups = [GroupView(("l",), BLOCK, f"sliding:{window}" if window else "full", "float32") for window in windows]
    made = PdScheduler(BLOCK, [group.first_needed for group in groups], 0.5, ConnectorCounters(), workers=workers)
    made.bind_pool(pool if pool is not None else Pool(64))
    return made


def prompt(tokens: int, name: str = "r") -> Request:
    made = request(tokens, name)
    made.num_prompt_tokens = tokens
    return made


def step(made: PdScheduler, scheduled: dict[str, int] | None = None, pages: Any = None) -> PdPlan:
    return made.build_step_plan(scheduled or {}, {}, lambda _request_id: pages)


def test_keys_of_partial_blocks_name_salt_adapter_and_images() -> None:
    def awaited(**fields: object) -> bytes:
        one = prompt(2)
        vars(one).update(fields)
        made = decisions()
        made.on_new_request(one, HERE, CHAIN)
        (job,) = step(made).awaits
        (key,) = job.keys
        return bytes(key)

    image = SimpleNamespace(identifier="cat", mm_position=SimpleNamespace(offset=0, length=2))
    adapter = SimpleNamespace(lora_name="x", lora_int_id=1, lora_path="/x")
    keys = {
        awaited(),
        awaited(cache_salt="a"),
        awaited(cache_salt="b"),
        awaited(mm_features=[image]),
        awaited(lora_request=adapter),
    }
    assert len(keys) == 5


def test_decode_prompt_of_another_namespace_is_not_awaited() -> None:
    """Else each request of a pair with different tensor-parallel sizes waits for the deadline."""
    counters = ConnectorCounters()
    made = PdScheduler(BLOCK, [lambda _token: 0], 0.5, counters)
    for name, namespace in (("ours", CHAIN.spec.namespace), ("other", b"\x02" * 16)):
        made.on_new_request(prompt(10, name), replace(HERE, namespace=namespace.hex()), CHAIN)
    assert [job.request_id for job in step(made).awaits] == ["ours"]
    assert made.pop_given_up("other"), "served like any other request"
    assert counters.totals()["prompts_of_other_namespaces"] == 1


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"do_remote_decode": True, "transfer_id": "t", "decode_node": "d0"}, False),
        ({"do_remote_prefill": True, "transfer_id": "t"}, None),
        ({"do_remote_decode": True}, None),
        (None, None),
    ],
)
def test_prefill_without_transfer_tells_the_decode_engine(params: dict[str, Any] | None, told: bool | None) -> None:
    answer = not_handed_over(params)
    assert (answer and answer["do_remote_prefill"]) is told


def test_decode_prompt_is_awaited_arrives_and_is_copied() -> None:
    made, one = decisions(workers=2), prompt(10)
    made.on_new_request(one, HERE, CHAIN)
    (job,) = step(made).awaits
    assert job.transfer_id == "t1"
    full = CHAIN.keys(one.all_token_ids)
    assert job.keys == [*full, HERE.tail_key(CHAIN.tail(one.all_token_ids[8:], full[-1]))]
    assert made.state("r") is TransferState.AWAITED
    made.on_worker_output(PdWorkerOutput(known={"r": 1}))
    assert made.state("r") is TransferState.AWAITED, "the other worker does not know yet"
    made.on_worker_output(PdWorkerOutput(known={"r": 1}))
    assert made.state("r") is TransferState.ARRIVED
    assert made.get_num_new_matched_tokens(one, 4) == 5, "the engine computes the last token"
    made.update_state_after_alloc(one, [[7, 8, 9]], 5)
    (take,) = step(made).copies
    assert (take.first_blocks, take.block_ids) == ([1], [[8, 9]])
    assert made.on_copies_finished({"r", "other"}) == [(one, 2)]
    assert made.state("r") is TransferState.ENDED
    assert not made.pop_given_up("r")


def test_decode_prompt_missing_in_one_worker_is_given_up() -> None:
    made, one = decisions(workers=2), prompt(9)
    made.on_new_request(one, HERE, CHAIN)
    step(made)
    made.on_worker_output(PdWorkerOutput(known={"r": 1}, incomplete={"r"}))
    assert made.state("r") is TransferState.ENDED, "the other worker need not answer"
    assert step(made).drops == ["r"]
    made.on_worker_output(PdWorkerOutput(known={"r": 1}))
    assert not step(made).drops
    assert made.pop_given_up("r")
    assert not made.pop_given_up("r"), "said once"


def test_decode_failed_pages_are_reported() -> None:
    made, one = decisions(), prompt(9)
    made.on_new_request(one, HERE, CHAIN)
    made.on_worker_output(PdWorkerOutput(known={"r": 1}))
    made.update_state_after_alloc(one, [[3, 4]], 8)
    made.on_copies_failed({4}, set())
    assert made.on_copies_finished({"r"}) == [(one, 0)]


@pytest.mark.parametrize(
    ("tokens", "external", "pages", "copied"),
    [
        (8, 7, [0, 6], ([1], [[6]])),  # the last token, 7, sees tokens from 4
        (9, 8, [0, 6], ([1], [[6]])),  # the engine computes the only token of the last page
        (11, 6, [5, 6, 7], ([1], [[6, 7]])),
    ],
)
def test_decode_copies_what_the_last_token_sees(tokens: int, external: int, pages: list[int], copied: Any) -> None:
    made, one = decisions(windows=(4,)), prompt(tokens)
    made.on_new_request(one, HERE, CHAIN)
    made.on_worker_output(PdWorkerOutput(known={"r": 1}))
    made.update_state_after_alloc(one, [pages], external)
    (take,) = step(made).copies
    assert (take.first_blocks, take.block_ids) == copied


def test_decode_prompt_cached_here_is_dropped() -> None:
    """All but the last token is in the engine's own cache."""
    made, one = decisions(), prompt(9)
    made.on_new_request(one, HERE, CHAIN)
    made.on_worker_output(PdWorkerOutput(known={"r": 1}))
    assert made.get_num_new_matched_tokens(one, 8) == 0
    assert step(made).drops == ["r"]
    assert made.pop_given_up("r")


@pytest.mark.parametrize("change", ["", "files", "replaced"])
def test_decode_prompt_of_a_changed_adapter_is_dropped(change: str, tmp_path: Path) -> None:
    one, counters = prompt(9), ConnectorCounters()
    adapters, weights = Adapters(counters), tmp_path / "old" / "adapter_model.safetensors"
    made = PdScheduler(BLOCK, [lambda _token: 0], 0.5, counters, adapters=adapters)
    old, new = (SimpleNamespace(lora_name="x", lora_int_id=1, lora_path=str(tmp_path / name)) for name in ("old", "new"))
    for adapter in (old, new):
        Path(adapter.lora_path).mkdir()
        (Path(adapter.lora_path) / weights.name).write_bytes(b"weights")
        (Path(adapter.lora_path) / "adapter_config.json").write_text("{}")
    one.lora_request = old
    made.on_new_request(one, HERE, CHAIN, adapters.weights(old))
    made.on_worker_output(PdWorkerOutput(known={"r": 1}))
    if change == "files":
        weights.write_bytes(b"others")
    elif change == "replaced":
        adapters.end_replacement(new, adapters.begin_replacement(new))
    assert made.get_num_new_matched_tokens(one, 0) == (0 if change else 8)
    assert step(made).drops == (["r"] if change else [])
    assert made.pop_given_up("r") == bool(change), "served like any other request"
    assert counters.totals().get("prompts_failed", 0) == bool(change)


@pytest.mark.parametrize("stage", ["awaited", "here"])
def test_decode_request_ended_while_waiting_is_dropped(stage: str) -> None:
    made = decisions()
    made.on_new_request(prompt(9), HERE, CHAIN)
    step(made)
    if stage == "here":
        made.on_worker_output(PdWorkerOutput(known={"r": 1}))
    assert made.request_finished("r") is None
    assert step(made).drops == ["r"]
    made.on_worker_output(PdWorkerOutput(known={"r": 1}))  # too late: ignored


def test_decode_request_ended_before_its_step_is_not_awaited() -> None:
    made = decisions()
    for name in ("r", "kept"):
        made.on_new_request(prompt(9, name), HERE, CHAIN)
    made.request_finished("r")
    plan = step(made)
    assert [job.request_id for job in plan.awaits] == ["kept"], "nobody would drop a prompt that arrives later"
    assert not plan.drops


def test_decode_request_that_reads_no_prefix_awaits_nothing() -> None:
    """One that wants logprobs of its prompt: vLLM computes all of it."""
    made, one = decisions(), prompt(9)
    one.skip_reading_prefix_cache = True
    made.on_new_request(one, HERE, CHAIN)
    assert not step(made).awaits
    assert made.pop_given_up("r"), "served like any other request"


def test_decode_prompt_that_is_not_read_is_dropped() -> None:
    """vLLM's own cache holds as much."""
    made, one = decisions(), prompt(9)
    made.on_new_request(one, HERE, CHAIN)
    step(made)
    assert not made.pop_unread("r"), "it is awaited"
    made.on_worker_output(PdWorkerOutput(known={"r": 1}))
    assert made.get_num_new_matched_tokens(one, 4) == 4
    assert made.pop_unread("r")
    assert step(made).drops == ["r"]
    assert made.state("r") is TransferState.ENDED
    assert not made.pop_unread("r")


def test_decode_awaits_only_visible_part_of_window() -> None:
    made = decisions(windows=(0, 9))
    made.on_new_request(prompt(41), HERE, CHAIN)
    (job,) = step(made).awaits
    assert job.first_needed == [0, 8]
    assert len(job.keys) == 11


# ---- the prefill engine ----
@given(chunks=st.lists(st.integers(1, 13), min_size=1, max_size=6))
def test_prefill_sends_each_block_once_when_complete(chunks: list[int]) -> None:
    tokens = sum(chunks)
    pool, one = Pool(100), prompt(tokens)
    made = decisions(pool)
    made.on_new_request(one, THERE, CHAIN)
    pages = [list(range(1, -(-tokens // BLOCK) + 2))]
    sent: list[Any] = []
    for chunk in chunks:
        for job in step(made, {"r": chunk}, pages).sends:
            assert job.first_block == len(sent)
            assert job.parent == (sent[-1][0] if sent else None)
            sent += zip(job.keys, job.block_ids[0], strict=True)
            assert pool.pinned == set(job.block_ids[0])
            made.on_worker_output(PdWorkerOutput(WorkerOutput({job.job_id: 1}, set())))
            assert not pool.pinned
        one.num_computed_tokens += chunk
    full = CHAIN.keys(one.all_token_ids)
    tail = (
        [THERE.tail_key(CHAIN.tail(one.all_token_ids[len(full) * BLOCK :], full[-1] if full else None))] if tokens % BLOCK else []
    )
    assert [key for key, _ in sent] == [*full, *tail]
    assert [page for _, page in sent] == pages[0][: len(sent)]
    one.all_token_ids.append(1)
    assert not step(made, {"r": 1}, pages).sends, "what is generated is not the prompt's"
    assert made.request_finished("r") == THERE.for_decode(CHAIN.spec.namespace)
    assert not made.has_abandons


def test_prefill_failed_handoff_is_retried_once() -> None:
    pool, one = Pool(100), prompt(12)
    made = decisions(pool)
    made.on_new_request(one, THERE, CHAIN)
    pages = [[1, 2, 3]]
    for attempt, chunk in enumerate((5, 5, 2)):
        plan = step(made, {"r": chunk}, pages)
        assert plan.abandons == ([AbandonJob("d0", "t1")] if attempt == 2 else []), "twice is certain"
        jobs = plan.sends
        assert [(job.first_block, len(job.keys)) for job in jobs] == [[(0, 1)], [(0, 2)], []][attempt]
        made.on_worker_output(PdWorkerOutput(WorkerOutput({job.job_id: 1 for job in jobs}, {job.job_id for job in jobs})))
        one.num_computed_tokens += chunk
    assert not pool.pinned
    assert not made.has_pins
    assert made.request_finished("r") == THERE.for_decode(None)
    assert not made.has_abandons, "said once"


@pytest.mark.parametrize("then", ["whole", "failed", "other weights"])
def test_prefill_defers_blocks_of_step_with_unconfirmed_load(then: str) -> None:
    pool, one = Pool(100), prompt(12)
    made = decisions(pool, workers=2)
    made.on_new_request(one, THERE, CHAIN)
    pages = [[1, 2, 3]]
    assert made.build_step_plan({"r": 9}, {}, lambda _: pages, hold=True).sends == []
    assert pool.pinned == {1, 2}
    one.num_computed_tokens = 9
    if then == "whole":
        jobs = step(made, {"r": 3}, pages).sends
        assert [(job.first_block, len(job.keys)) for job in jobs] == [(0, 2), (2, 1)]
        made.on_worker_output(PdWorkerOutput(WorkerOutput({job.job_id: 2 for job in jobs}, set())))
        assert made.request_finished("r") == THERE.for_decode(CHAIN.spec.namespace)
    elif then == "failed":
        made.drop_deferred()
        assert not pool.pinned
        one.num_computed_tokens = 0
        (job,) = step(made, {"r": 12}, pages).sends
        assert (job.first_block, len(job.keys)) == (0, 3)
        made.on_worker_output(PdWorkerOutput(WorkerOutput({job.job_id: 2}, set())))
    else:
        made.forget()
        plan = step(made)
        assert (plan.sends, plan.abandons) == ([], [AbandonJob("d0", "t1")])
    assert not pool.pinned


def test_prefill_handoff_failed_after_request_is_abandoned() -> None:
    """No step remains for a retry, and the request was already answered."""
    made = decisions(workers=2)
    made.on_new_request(prompt(9), THERE, CHAIN)
    (job,) = step(made, {"r": 9}, [[1, 2, 3]]).sends
    assert made.request_finished("r") == THERE.for_decode(CHAIN.spec.namespace)
    made.on_worker_output(PdWorkerOutput(WorkerOutput({job.job_id: 1}, {job.job_id})))
    made.on_worker_output(PdWorkerOutput(WorkerOutput({job.job_id: 1}, {job.job_id})))
    assert step(made).abandons == [AbandonJob("d0", "t1")], "once, however many workers failed"


def test_prefill_request_ended_early_is_abandoned() -> None:
    made = decisions()
    made.on_new_request(prompt(12), THERE, CHAIN)
    step(made, {"r": 5}, [[1, 2, 3]])
    assert made.request_finished("r") == THERE.for_decode(None)
    assert step(made).abandons == [AbandonJob("d0", "t1")]


def test_prefill_pinned_pages_are_bounded() -> None:
    pool = Pool(12)
    made = decisions(pool)
    for name in "ab":
        made.on_new_request(prompt(32, name), THERE, CHAIN)
    assert len(step(made, {"a": 32}, [list(range(1, 9))]).sends) == 1, "one may always, however large"
    skipped = step(made, {"b": 32}, [list(range(1, 9))])
    assert not skipped.sends
    assert skipped.abandons == [AbandonJob("d0", "t1")], "whoever waits for it is told"
    assert len(pool.pinned) == 8
    assert made.request_finished("b") == THERE.for_decode(None)


def test_changed_weights_end_pending_transfers() -> None:
    made = decisions()
    made.on_new_request(prompt(9, "a"), HERE, CHAIN)
    step(made)
    made.on_new_request(prompt(9, "b"), HERE, CHAIN)
    made.on_new_request(prompt(9, "c"), THERE, CHAIN)
    made.forget()
    plan = step(made, {"c": 9}, [[1, 2, 3]])
    assert set(plan.drops) == {"a", "b"}
    assert plan.abandons == [AbandonJob("d0", "t1")]
    assert not plan.awaits
    assert not plan.sends
    assert made.pop_given_up("a")
    assert made.pop_given_up("b")


@pytest.mark.parametrize("incomplete", [set(), {"r"}])
def test_decode_prompt_known_after_weights_change_stays_ended(incomplete: set[str]) -> None:
    """The same output of the workers can end the check of the weights and report the prompt."""
    made, one = decisions(), prompt(9)
    made.on_new_request(one, HERE, CHAIN)
    step(made)
    made.forget()
    made.on_worker_output(PdWorkerOutput(known={"r": 1}, incomplete=incomplete))
    assert made.state("r") is TransferState.ENDED
    assert step(made).drops == ["r"], "once"
    assert made.pop_given_up("r"), "served like any other request"
