"""Two served vLLM engines, one prefills and one decodes: the tokens are the model's own, also if the other side fails.

Prefixes are loaded layer by layer here; ``test_vllm_pd_windows`` loads outside of the batch.
"""

from __future__ import annotations

import http.client
import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import wait
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from support.node_stats import node_stats
from support.wait import wait_until

pytest.importorskip("vllm")

from pd_bed import BLOCK, DECODE, PREFILL, PROMPT_DEADLINE_S, Oracle, PdBed, for_decode, for_prefill, pd_bed, text, transfer_id

from kvstore.core.errors import KVStoreError
from kvstore.lab.engine_bed import ServedEngine, token_ids_of
from kvstore.testing.tiny_models import make_model

WAIT_S = 30.0


@pytest.fixture(scope="module")
def model(model_folder: Path) -> Path:
    return make_model(model_folder / "tiny")


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


@pytest.fixture(scope="module")
def bed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PdBed]:
    with pd_bed(tmp_path_factory.mktemp("pd"), model, load_mode="layerwise") as made:
        yield made


def ended(bed: PdBed, engine: ServedEngine, counter: str, before: int) -> bool:
    return bed.counts(engine).get(counter, 0) > before


@pytest.mark.parametrize("tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 333, 2100])
def test_prompts_of_all_lengths(bed: PdBed, oracle: Oracle, tokens: int) -> None:
    """2,100 tokens are computed in two steps."""
    before = bed.counts(bed.decode)
    prompt = text(("length", tokens), tokens)
    assert bed.ask(prompt) == oracle.says(prompt, 16)
    after = bed.counts(bed.decode)
    assert after["prompts"] == before.get("prompts", 0) + 1
    failed = {name: after.get(name, 0) - before.get(name, 0) for name in ("bugs", "prompts_failed")}
    assert failed == {"bugs": 0, "prompts_failed": 0}, "an arrived prompt is copied, not computed"


def test_pd_session_and_answers_load_over_both_paths(bed: PdBed, oracle: Oracle) -> None:
    history = text("session", 900)
    first = bed.counts(bed.prefill)
    stored = 0
    for turn in range(4):
        before = bed.counts(bed.prefill)
        answer = bed.ask(history, 48)
        assert answer == oracle.says(history, 48)
        assert bed.counts(bed.prefill).get("load_tokens", 0) - before.get("load_tokens", 0) == stored
        stored = (len(history) + 47) // BLOCK * BLOCK  # the last token lacks KV
        history = history + answer + text(("turn", turn), 60)
        bed.only_in_storage()
    last = bed.counts(bed.prefill)
    for path in ("prefill", "decode"):
        assert last[f"load_{path}_path_bytes"] > first.get(f"load_{path}_path_bytes", 0)


def test_the_prefill_engine_first_and_then_the_decode_engine(bed: PdBed, oracle: Oracle) -> None:
    prompt = text("sequential", 500)
    answer = bed.prefill.complete(prompt, 1, kv_transfer_params=for_prefill(transfer_id()))
    params, before = answer["kv_transfer_params"], bed.counts(bed.decode).get("prompts", 0)
    assert params["do_remote_prefill"] is True
    assert token_ids_of(bed.decode.complete(prompt, 16, kv_transfer_params=params)) == oracle.says(prompt, 16)
    assert bed.counts(bed.decode)["prompts"] == before + 1


def test_many_at_once_with_common_beginnings(bed: PdBed, oracle: Oracle) -> None:
    prompts = [text(("common", number % 3), 200 + 50 * (number % 3)) + text(number, 5 * number) for number in range(12)]
    transfers = [bed.begin(prompt, 12, transfer_id()) for prompt in prompts]
    for prompt, (_, answer) in zip(prompts, transfers, strict=True):
        assert token_ids_of(answer.result(WAIT_S)) == oracle.says(prompt, 12)


def test_the_same_prompt_twice_at_once(bed: PdBed, oracle: Oracle) -> None:
    """Each transfer has its own partial block: one transfer does not consume that of the other."""
    prompt = text("twice", 170)
    before = bed.counts(bed.decode).get("prompts", 0)
    transfers = [bed.begin(prompt, 8, transfer_id()) for _ in range(4)]
    for _, answer in transfers:
        assert token_ids_of(answer.result(WAIT_S)) == oracle.says(prompt, 8)
    assert bed.counts(bed.decode)["prompts"] == before + 4


def test_a_prompt_that_nobody_prefills_is_computed(bed: PdBed, oracle: Oracle) -> None:
    prompt = text("absent", 300)
    before = bed.counts(bed.decode).get("prompts_incomplete", 0)
    began_s = time.monotonic()
    answer = bed.decode.complete(prompt, 8, kv_transfer_params=for_decode(transfer_id()))
    assert token_ids_of(answer) == oracle.says(prompt, 8)
    assert PROMPT_DEADLINE_S <= time.monotonic() - began_s < PROMPT_DEADLINE_S + WAIT_S
    assert bed.counts(bed.decode)["prompts_incomplete"] == before + 1


def test_a_hand_over_that_fails_for_good_is_waited_for_by_nobody(bed: PdBed, oracle: Oracle) -> None:
    """The decode host's node is stopped until the prefill engine has given up, and learns of it afterwards."""
    prompt = text("stopped", 300)
    before = bed.counts(bed.prefill).get("handoffs_failed", 0)
    node = bed.cluster.node(DECODE).process
    node.send_signal(signal.SIGSTOP)
    try:
        prefilled, answer = bed.begin(prompt, 8, transfer_id())
        assert token_ids_of(prefilled.result(WAIT_S)) == oracle.says(prompt, 8)[:1]
        wait_until(lambda: ended(bed, bed.prefill, "handoffs_failed", before), "the handoff has failed")
    finally:
        node.send_signal(signal.SIGCONT)
    assert token_ids_of(answer.result(WAIT_S)) == oracle.says(prompt, 8)
    assert bed.counts(bed.prefill)["transfers_abandoned"] >= 1
    attempts = count()

    def handed_over() -> bool:
        """The decode engine gave its own hung node up, which may never have awaited that prompt; it awaits the next ones."""
        complete, prompt = fates(bed, "complete"), text(f"after the stop {next(attempts)}", 300)
        _, answer = bed.begin(prompt, 8, transfer_id())
        assert token_ids_of(answer.result(WAIT_S)) == oracle.says(prompt, 8)
        return fates(bed, "complete") > complete

    wait_until(handed_over, "prompts are handed over again")


def fates(bed: PdBed, *names: str) -> int:
    """Prompts that the decode node awaited, and that ended so."""
    counters = node_stats(bed.cluster, DECODE).counters
    return sum(counters[f"prompts_{name}_total"] for name in names)


def test_pd_shutdown_closes_each_part_despite_errors() -> None:
    from kvclient.engines.vllm.pd_connector import KVStorePDConnector

    ended: list[str] = []

    class Part:
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            ended.append(self.name)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    connector: Any = object.__new__(KVStorePDConnector)
    parts = {"_sender": Part("s"), "_receiver": Part("r"), "_worker": Part("w"), "_scheduler": Part("d")}
    vars(connector).update(parts, _restore_allocator=None, _observer=None, _cache_watch=None)
    with pytest.raises(RuntimeError, match="CUDA"):
        connector.shutdown()
    assert ended == ["s", "r", "w", "d"]


def test_a_decode_node_that_is_not_there(bed: PdBed, oracle: Oracle) -> None:
    prompt = text("lost", 300)
    before = bed.counts(bed.prefill).get("handoffs_failed", 0)
    answer = bed.prefill.complete(prompt, 1, kv_transfer_params=for_prefill(transfer_id(), "absent"))
    assert token_ids_of(answer) == oracle.says(prompt, 8)[:1]
    wait_until(lambda: ended(bed, bed.prefill, "handoffs_failed", before), "the failed handoff is counted")


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "transfer_id": "../../etc"},
        {"do_remote_prefill": True, "transfer_id": "x" * 65},
        {"do_remote_prefill": True, "transfer_id": 7},
        {"do_remote_decode": True, "transfer_id": "a"},
        {"do_remote_decode": True, "transfer_id": "a", "decode_node": {"x": 1}},
        {"do_remote_decode": True, "do_remote_prefill": True, "transfer_id": "a"},
        {"something": "else"},
    ],
)
def test_parameters_that_make_no_sense_are_as_none(bed: PdBed, oracle: Oracle, params: dict[str, object]) -> None:
    prompt = text("hostile", 100)
    assert token_ids_of(bed.decode.complete(prompt, 4, kv_transfer_params=params)) == oracle.says(prompt, 4)


def test_who_stops_waiting_leaves_nothing_behind(bed: PdBed, oracle: Oracle) -> None:
    """Clients that disconnect before their prompt arrives, and a prompt that arrives without a waiting request."""
    prompt = text("left", 260)
    transfer = transfer_id()
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "stream": True, "kv_transfer_params": for_decode(transfer)}
    connection = http.client.HTTPConnection(bed.decode.spec.host, bed.decode.port, timeout=WAIT_S)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    wait_until(lambda: bed.decode.metrics()["vllm:num_requests_waiting"] > 0, "the request waits")
    connection.close()
    wait_until(lambda: bed.decode.metrics()["vllm:num_requests_waiting"] == 0, "the request has ended")
    assert token_ids_of(bed.prefill.complete(prompt, 1, kv_transfer_params=for_prefill(transfer))) == oracle.says(prompt, 4)[:1]
    assert bed.ask(prompt, 8) == oracle.says(prompt, 8)


def test_more_prompts_than_the_decode_buffer_holds(bed: PdBed, oracle: Oracle) -> None:
    """Eight prompts of which two fit at once: they wait for their turn."""
    prompts = [text(("large", number), 1600) for number in range(8)]
    transfers = [bed.begin(prompt, 4, transfer_id()) for prompt in prompts]
    for prompt, (_, answer) in zip(prompts, transfers, strict=True):
        assert token_ids_of(answer.result(2 * WAIT_S)) == oracle.says(prompt, 4)


@pytest.mark.slow
def test_the_decode_hosts_node_dies_and_comes_back(bed: PdBed, oracle: Oracle) -> None:
    prompts = [text(("node", number), 400) for number in range(6)]
    transfers = [bed.begin(prompt, 8, transfer_id()) for prompt in prompts]
    bed.cluster.kill(DECODE)
    for prompt, (_, answer) in zip(prompts, transfers, strict=True):
        assert token_ids_of(answer.result(2 * WAIT_S)) == oracle.says(prompt, 8)
    bed.cluster.start_node(DECODE)
    again = text("node again", 400)

    def handed_over() -> bool:
        before = bed.counts(bed.decode).get("prompts", 0)
        assert bed.ask(again, 8) == oracle.says(again, 8)
        return bed.counts(bed.decode).get("prompts", 0) > before

    wait_until(handed_over, "prompts are handed over again")


@pytest.mark.slow
@pytest.mark.parametrize("victim", [PREFILL, DECODE])
def test_an_engine_dies_half_way(bed: PdBed, oracle: Oracle, victim: str) -> None:
    prompts = [text((victim, number), 500 + 40 * number) for number in range(6)]
    transfers = [bed.begin(prompt, 8, transfer_id()) for prompt in prompts]
    wait([transfers[0][0]], WAIT_S)
    bed.engines.kill(victim)
    for prompt, (prefilled, answer) in zip(prompts, transfers, strict=True):
        living = answer if victim == PREFILL else prefilled
        assert token_ids_of(living.result(2 * WAIT_S)) == oracle.says(prompt, 8 if victim == PREFILL else 1)
        dead = prefilled if victim == PREFILL else answer
        if (failed := dead.exception(WAIT_S)) is not None:
            assert isinstance(failed, KVStoreError)
    bed.engines.start(bed.spec(victim))
    for prompt in prompts[:2]:
        assert bed.ask(prompt, 8) == oracle.says(prompt, 8)
