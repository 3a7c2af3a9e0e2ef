"""The router's pure modules against simple models: work in flight, prefix memory, balancer, metrics, body, configuration."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kvstore.config.router import RouterConfig
from kvstore.core.errors import InvalidArgument, Unavailable
from kvstore.router.engines import EngineConfig, Role, engines_of, parse_engine
from kvstore.router.health.engine_metrics import EngineMetrics, parse_metrics
from kvstore.router.health.health_checks import HealthChecks
from kvstore.router.main import make_context
from kvstore.router.placement.balancer import RotationOrder, least_loaded
from kvstore.router.placement.inflight import EngineWork, InflightEntry, InflightTokens
from kvstore.router.prompts.prefix_lookup import joined
from kvstore.router.prompts.prefix_memory import MAX_TEXT_BYTES, PIECE_BYTES, PrefixMemory, text_chain
from kvstore.router.prompts.prompt_facts import PromptFacts, PromptReader, StoreHits
from kvstore.router.prompts.request_body import CHAT, COMPLETIONS, parse_body

ENGINES = ("e0", "e1", "e2")


entries = st.builds(
    InflightEntry, st.sampled_from(ENGINES), st.integers(1, 10_000), st.integers(0, 12_000), st.integers(0, 9_000), st.booleans()
)
inflight_events = st.lists(st.tuples(st.sampled_from("bde"), st.integers(0, 5), entries), max_size=60)


@settings(max_examples=300)
@given(inflight_events)
def test_inflight_tokens_are_the_sum_of_entries(events: list[tuple[str, int, InflightEntry]]) -> None:
    inflight = InflightTokens(ENGINES)
    model: dict[tuple[int, str], InflightEntry] = {}
    for kind, attempt, entry in events:
        key = (attempt, entry.engine)
        if kind == "b":
            fields = (entry.engine, entry.prompt_tokens, entry.cached_tokens, entry.kv_tokens, entry.decoding)
            inflight.begin(str(attempt), InflightEntry(*fields))
            model[key] = InflightEntry(*fields)
        elif kind == "d":
            inflight.start_decoding(str(attempt), entry.engine)
            if key in model:
                model[key].decoding = True
        else:
            inflight.end(str(attempt), entry.engine)
            model.pop(key, None)
        for engine in ENGINES:
            mine = [one for (_, where), one in model.items() if where == engine]
            expected = EngineWork(len(mine), sum(one.cost for one in mine), sum(one.kv_tokens for one in mine))
            assert inflight.work(engine) == expected
            assert all(one.cost >= 1 for one in mine)
    for attempt, engine in model:
        inflight.end(str(attempt), engine)
    assert all(inflight.work(engine) == EngineWork() for engine in ENGINES)


texts = st.lists(st.sampled_from(["a", "b", "c"]), max_size=6).map(
    lambda parts: "".join(part * PIECE_BYTES for part in parts).encode()
)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(ENGINES), texts), max_size=12), texts, st.integers(1, 12))
def test_prefix_memory_matches_leading_pieces(seen: list[tuple[str, bytes]], asked: bytes, bound: int) -> None:
    memory = PrefixMemory(ENGINES, bound)
    for engine, text in seen:
        memory.insert(engine, text_chain(b"m", text))
    chain = text_chain(b"m", asked)
    for engine in ENGINES:
        held = memory.match(engine, chain)
        known = {piece for one, text in seen if one == engine for piece in text_chain(b"m", text)}
        leading = next((place for place, piece in enumerate(chain) if piece not in known), len(chain))
        assert held <= min(leading, bound)
        if len(known) <= bound:
            assert held == leading  # nothing was evicted
        last = [text for one, text in seen if one == engine][-1:]
        if last:  # the beginning of the last prompt is never evicted
            assert memory.match(engine, text_chain(b"m", last[0])) == min(len(last[0]) // PIECE_BYTES, bound)
        memory.forget(engine)
        assert memory.match(engine, chain) == 0


def test_text_chain_common_prefix_is_shared() -> None:
    first = parse_body(CHAT, b'{"model": "m", "messages": [{"role": "user", "content": "%s"}]}' % (b"x" * 2_000))
    body = b'{"model": "m", "messages": [{"content": "%s", "role": "user"}, {"role": "assistant", "content": "y"}]}'
    second = parse_body(CHAT, body % (b"x" * 2_000))
    chains = [text_chain(one.seed(), one.text()) for one in (first, second)]
    assert chains[0] == chains[1][: len(chains[0])]
    salted = parse_body(
        CHAT, b'{"model": "m", "cache_salt": "s", "messages": [{"role": "user", "content": "%s"}]}' % (b"x" * 2_000)
    )
    assert text_chain(salted.seed(), salted.text())[0] != chains[0][0]


_LONG = 3 << 20


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        (COMPLETIONS, "x" * _LONG),
        (COMPLETIONS, "ü" * _LONG),
        (COMPLETIONS, [123_456] * (_LONG // 6)),
        (COMPLETIONS, [[1] * _LONG, [2]]),
        (COMPLETIONS, ["x" * (_LONG // 2)] * 2),
        (COMPLETIONS, [[1]] * (_LONG // 3)),
        (CHAT, "x" * _LONG),
        (CHAT, [{"type": "text", "text": "x" * 10}] * (_LONG // 30)),
    ],
    ids=["text", "letters", "tokens", "of tokens", "of text", "many", "chat", "parts"],
)
def test_text_chain_long_prompt_hashes_beginning(path: str, prompt: list[object] | str) -> None:
    """Hashing a prompt delays all other requests."""
    texts = []
    for end in ("one", "another"):
        fields = {"prompt": prompt} if path == COMPLETIONS else {"messages": [{"role": "user", "content": prompt}, {"role": end}]}
        body = parse_body(path, json.dumps({"model": "m", **fields, "user": end}).encode())
        assert body.token_prompt is body.token_prompt
        assert body.length > _LONG
        texts.append(body.text())
    assert texts[0] == texts[1]
    assert MAX_TEXT_BYTES // 4 <= len(texts[0]) <= MAX_TEXT_BYTES
    assert text_chain(b"", texts[0]) == text_chain(b"", texts[1] + b"and more of it" * 1_000)[: len(texts[0]) // PIECE_BYTES]


def test_rotation_is_fair_as_candidates_change() -> None:
    rotation = RotationOrder()
    assert [rotation.next(["a", "b", "c"]) for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]
    assert [rotation.next(["b", "c"]) for _ in range(3)] == ["b", "c", "b"]
    assert rotation.next(["a", "b", "c"]) == "c"


@given(
    st.dictionaries(st.sampled_from(ENGINES), st.integers(0, 50), min_size=1),
    st.dictionaries(st.sampled_from(ENGINES), st.integers(0, 50)),
)
def test_least_loaded_deducts_cached_tokens(tokens: dict[str, int], near: dict[str, int]) -> None:
    loads = {name: EngineWork(1, count, 0) for name, count in tokens.items()}
    chosen = least_loaded(list(tokens), loads.__getitem__, near, RotationOrder())
    assert all(tokens[chosen] - near.get(chosen, 0) <= count - near.get(name, 0) for name, count in tokens.items())


def test_least_loaded_idle_engines_rotate() -> None:
    rotation, idle = RotationOrder(), EngineWork()
    assert {least_loaded(ENGINES, lambda _: idle, {}, rotation) for _ in range(3)} == set(ENGINES)


@given(st.binary(max_size=300))
def test_metrics_any_bytes_are_parsed(text: bytes) -> None:
    parse_metrics(text)
    metrics = parse_metrics(b"vllm:num_requests_running{" + text.replace(b"\n", b" ") + b"} nan\nvllm:kv_cache_usage_perc -1\n")
    assert metrics.running >= 0
    assert metrics.used_tokens == 0


def test_metrics_of_several_ranks_are_summed() -> None:
    text = b"".join(
        b'vllm:num_requests_running{engine="%d"} 2.0\nvllm:num_requests_waiting{engine="%d"} 1.0\n'
        b'vllm:kv_cache_usage_perc{engine="%d"} 0.5\nvllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n'
        % (rank, rank, rank)
        for rank in range(2)
    )
    metrics = parse_metrics(text + b"process_start_time_seconds 1.7e+09\n")
    assert (metrics.running, metrics.waiting, metrics.capacity_tokens, metrics.used_tokens) == (4, 2, 3_200, 1_600)
    assert metrics.started_s == 1.7e9
    assert metrics.caches == ()
    assert metrics.foreign_work(EngineWork(sequences=6)) is None
    assert metrics.foreign_work(EngineWork(sequences=3)) == EngineWork(3, 2 * 400 + 400 // 8, 1_200)


def test_metrics_name_the_caches_of_all_ranks() -> None:
    text = b"".join(
        b'vllm:kvstore_cache_info{engine="%d",cache="vllm-h-%d",model_name="m"} 1.0\n' % (rank, rank) for rank in range(2)
    )
    assert parse_metrics(text).caches == ("vllm-h-0", "vllm-h-1")


def test_metrics_with_a_cache_of_value_0_name_no_cache() -> None:
    """The engine may not publish it, or cannot: the router's memory counts for this engine."""
    text = b"".join(b'vllm:kvstore_cache_info{engine="%d",cache="vllm-h-%d"} %d.0\n' % (rank, rank, rank) for rank in range(2))
    assert parse_metrics(text).caches == ("vllm-h-1",)


def test_prefix_memory_counts_pieces_since_a_time() -> None:
    memory, chain = PrefixMemory(("e",), 100), text_chain(b"m", b"a" * 10 * PIECE_BYTES)
    memory.insert("e", chain, 10.0)
    memory.insert("e", chain[:4], 20.0)
    assert [memory.match("e", chain, since_s) for since_s in (5.0, 15.0, 25.0)] == [10, 4, 0]
    assert memory.match("e", chain) == 10


def facts_of(cache_tokens: dict[str, int] | None, chain: list[bytes]) -> PromptFacts:
    return PromptFacts(1_000, chain, 64.0, StoreHits(800, {"node-e0": 800}, cache_tokens))


@pytest.mark.parametrize(
    ("cache_tokens", "expected"),
    [
        (None, {"e0": 640, "e1": 640, "e2": 640}),
        ({}, {"e0": 600, "e2": 640}),
        ({"c1": 800}, {"e0": 600, "e1": 800, "e2": 640}),
        ({"c0": 200, "c1": 160}, {"e0": 650, "e1": 160, "e2": 640}),
    ],
)
def test_published_cache_replaces_memory(cache_tokens: dict[str, int] | None, expected: dict[str, int]) -> None:
    """e0 and e1 publish caches, e2 does not; the host of e0 has the prompt in DRAM. All saw it a while ago."""
    urls = tuple(f"{name}=http://{name}@node-{name}" for name in ENGINES)
    context = make_context(RouterConfig(engines=urls))
    chain = text_chain(b"m", b"a" * 10 * PIECE_BYTES)
    for name in ENGINES:
        context.memory.insert(name, chain, context.now_s() - 1_000)
    for name, cache in (("e0", "c0"), ("e1", "c1")):
        context.metrics[name] = EngineMetrics(caches=(cache,))
    reader = PromptReader(context, None)
    found = reader.cached_tokens(facts_of(cache_tokens, chain))
    if cache_tokens is None:
        expected = {**expected, "e0": 640 + (800 - 640) * 3 // 4}
    assert found == expected
    context.memory.insert("e1", chain, context.now_s())
    assert reader.cached_tokens(facts_of(cache_tokens, chain))["e1"] == max(640, expected.get("e1", 0)), "a moment ago"


@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists).map(lambda x: repr(x).encode())
)
def test_body_any_bytes_parsed_or_rejected(raw: bytes) -> None:
    for path in (COMPLETIONS, CHAT):
        try:
            body = parse_body(path, raw)
        except InvalidArgument:
            continue
        body.text()
        body.seed()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://h:1", EngineConfig("h:1", "http://h:1")),
        ("http://h:1/v1/", EngineConfig("h:1", "http://h:1")),
        ("e=http://h:1@n", EngineConfig("e", "http://h:1", node="n")),
        ("https://[::1]:8000@n-1", EngineConfig("::1:8000", "https://[::1]:8000", node="n-1")),
        ("http://[::1", None),
        ("=http://h:1", None),
        ("h:1", None),
        ("http://u:p@h:1", None),
        ("http://h:1/path", None),
        ("http://", None),
        ("e e=http://h:1", None),
    ],
)
def test_engine_argument_parsed_or_rejected(text: str, expected: EngineConfig | None) -> None:
    if expected is None:
        with pytest.raises(InvalidArgument):
            parse_engine(text, Role.PLAIN)
    else:
        assert parse_engine(text, Role.PLAIN) == expected


E0, P0, D0 = "e=http://e:1", "p=http://p:1", "d=http://d:1@n"


@pytest.mark.parametrize(
    "wrong",
    [
        {"engines": []},
        {"engines": [E0, E0]},
        {"engines": [E0, "x=http://e:1"]},
        {"engines": [E0], "prefill": [P0], "decode": [D0]},
        {"engines": [], "prefill": [P0]},
        {"engines": [], "decode": [D0]},
        {"engines": [], "prefill": [P0], "decode": ["d=http://d:1"]},
        {"policy": "scheduler"},
        {"listen": "0.0.0.0:80"},
        {"listen": "nowhere"},
        {"name": "a b"},
        {"ejection_time_ms": 2_000, "max_ejection_time_ms": 1_000},
    ],
)
def test_router_config_invalid_value_rejected(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        engines_of(RouterConfig(**{"engines": [E0], "policy": "least_loaded", "metadata": None, **wrong}).check())  # type: ignore[arg-type]
    assert RouterConfig(prefill=(P0,), decode=(D0,), policy="round_robin").pairs


@pytest.mark.parametrize("wrong", [{"retries": 99}, {"idle_timeout_ms": 0}, {"client_timeout_ms": 0}])
def test_router_config_value_out_of_range_rejected(wrong: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        RouterConfig(engines=(E0,), **wrong)  # type: ignore[arg-type]


def test_caches_count_only_if_all_namespaces_were_looked_up() -> None:
    one, two = StoreHits(100, {}, {"a": 64}), StoreHits(200, {}, {"a": 32, "b": 16})
    assert joined([one, two]) == StoreHits(200, {}, {"a": 64, "b": 16})
    assert joined([one, StoreHits(200, {})]) == StoreHits(200, {})


class UpstreamsThatRefuse:
    """Connections to engines, none of which accepts one until ``up``."""

    up = False

    async def get(self, path: str, _timeout_s: float) -> bytes:
        if not self.up:
            raise Unavailable("cannot connect to the engine")
        return b'{"data": []}' if path == "/v1/models" else b""


async def test_unreachable_engine_is_logged_once_per_change(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvstore.router")
    context = make_context(RouterConfig(engines=("e0=http://127.0.0.1:9",), check_interval_ms=3_600_000))
    engine: Any = UpstreamsThatRefuse()
    context.upstreams = {"e0": engine}

    async def check(times: int) -> list[str]:
        caplog.clear()
        for _ in range(times):
            checks = HealthChecks(context)
            await checks.start()
            await checks.stop()
        return [record.getMessage() for record in caplog.records]

    assert await check(3) == ["engine not usable: e0 (reason=cannot connect to the engine); it is checked until it responds"]
    engine.up = True
    assert await check(2) == ["engine healthy: e0 (models=not listed)"]
    engine.up = False
    (ejected,) = await check(4)
    assert ejected.startswith("engine ejected: e0 (cause=failed_checks,")
