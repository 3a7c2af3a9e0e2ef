"""The router's pure parts against simple models: health, books, memory, choice, what engines say of themselves."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.core.errors import InvalidArgument
from kvstore.router.body import CHAT, COMPLETIONS, parse_body
from kvstore.router.choice import Turn, least_loaded
from kvstore.router.config import EngineConfig, HealthLimits, Role, RouterConfig, parse_engine
from kvstore.router.engine_metrics import parse_metrics
from kvstore.router.ledger import EngineLoad, Entry, Ledger
from kvstore.router.pool import Pool
from kvstore.router.prefix_memory import MAX_TEXT_BYTES, PIECE_BYTES, PrefixMemory, text_chain
from kvstore.router.upstream import retry_after_s

ENGINES = ("e0", "e1", "e2")
LIMITS = HealthLimits(failed_checks=2, failed_requests=3, eject_s=1.0, eject_most_s=8.0)


class Health(RuleBasedStateMachine):
    """Events in any order: who is in must be what the plain rules say."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.pool = Pool([EngineConfig(name, f"http://{name}:1") for name in ENGINES], LIMITS)
        self.up = dict.fromkeys(ENGINES, False)
        self.out_until = dict.fromkeys(ENGINES, -math.inf)
        self.checks = dict.fromkeys(ENGINES, 0)
        self.lost = dict.fromkeys(ENGINES, 0)

    def _out(self, name: str) -> None:
        self.up[name] = False
        self.checks[name] = self.lost[name] = 0
        health = self.pool.engines[name]
        # two sums of floats at most: a time at some seconds is told to less than a nanosecond
        assert LIMITS.eject_s - 1e-9 <= health.out_until_s - self.now_s <= LIMITS.eject_most_s + 1e-9
        self.out_until[name] = health.out_until_s

    @rule(seconds=st.floats(0.0, 20.0))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(name=st.sampled_from(ENGINES))
    def check_succeeds(self, name: str) -> None:
        came_in = self.pool.check_succeeded(name, self.now_s, ["m"])
        self.checks[name] = 0
        expected = not self.up[name] and self.now_s >= self.out_until[name]
        assert came_in == expected
        if expected:
            self.up[name], self.lost[name] = True, 0

    @rule(name=st.sampled_from(ENGINES))
    def check_fails(self, name: str) -> None:
        went_out = self.pool.check_failed(name, self.now_s, "why")
        self.checks[name] += 1
        assert went_out == (self.up[name] and self.checks[name] >= LIMITS.failed_checks)
        if went_out:
            self._out(name)

    @rule(name=st.sampled_from(ENGINES))
    def request_is_lost(self, name: str) -> None:
        went_out = self.pool.failed(name, self.now_s, "why")
        self.lost[name] += 1
        others = any(up for other, up in self.up.items() if other != name)
        assert went_out == (self.up[name] and others and self.lost[name] >= LIMITS.failed_requests)
        if went_out:
            self._out(name)

    @rule(name=st.sampled_from(ENGINES))
    def request_succeeds(self, name: str) -> None:
        self.pool.succeeded(name)
        self.lost[name] = 0

    @precondition(lambda self: any(self.up.values()))
    @rule(name=st.sampled_from(ENGINES))
    def connection_is_refused(self, name: str) -> None:
        assert self.pool.refused(name, self.now_s, "why") == self.up[name]
        if self.up[name]:
            self._out(name)

    @rule(name=st.sampled_from(ENGINES), seconds=st.floats(0.1, 100.0))
    def has_no_room(self, name: str, seconds: float) -> None:
        self.pool.busy(name, self.now_s, seconds)

    @invariant()
    def those_that_are_in_get_requests(self) -> None:
        up = [name for name, is_up in self.up.items() if is_up]
        candidates = self.pool.candidates(Role.PLAIN, self.now_s)
        assert set(candidates) <= set(up)
        assert bool(candidates) == bool(up)
        assert self.pool.candidates(Role.DECODE, self.now_s) == []


TestHealth = Health.TestCase


def test_time_out_doubles_and_is_forgiven_after_a_long_good_time() -> None:
    pool = Pool([EngineConfig("e0", "http://h:1")], LIMITS)
    now_s, outs = 0.0, []
    for _ in range(6):
        assert pool.check_succeeded("e0", now_s)
        assert pool.refused("e0", now_s, "why")
        outs.append(pool.engines["e0"].out_until_s - now_s)
        now_s = pool.engines["e0"].out_until_s
    assert outs == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert pool.check_succeeded("e0", now_s)
    assert not pool.check_succeeded("e0", now_s + 8.5)  # it stays in
    assert pool.refused("e0", now_s + 9.0, "why")
    assert pool.engines["e0"].out_until_s == now_s + 10.0


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999", "-5", "soon", "", "Wed, 21 Oct 2026 07:28:00 GMT"])
def test_a_retry_after_that_is_no_time_counts_as_none(text: str) -> None:
    assert retry_after_s(text) == 1.0


def test_a_retry_after_counts_within_bounds() -> None:
    assert [retry_after_s(text) for text in ("7", "2.5", "0", "3600")] == [7.0, 2.5, 0.1, 30.0]


entries = st.builds(
    Entry, st.sampled_from(ENGINES), st.integers(1, 10_000), st.integers(0, 12_000), st.integers(0, 9_000), st.booleans()
)
ledger_events = st.lists(st.tuples(st.sampled_from("bde"), st.integers(0, 5), entries), max_size=60)


@settings(max_examples=300)
@given(ledger_events)
def test_the_ledger_is_the_sum_of_its_entries_and_empty_at_the_end(events: list[tuple[str, int, Entry]]) -> None:
    ledger = Ledger(ENGINES)
    model: dict[tuple[int, str], Entry] = {}
    for kind, attempt, entry in events:
        key = (attempt, entry.engine)
        if kind == "b":
            fields = (entry.engine, entry.prompt_tokens, entry.near_tokens, entry.room_tokens, entry.decoding)
            ledger.begin(str(attempt), Entry(*fields))
            model[key] = Entry(*fields)
        elif kind == "d":
            ledger.decodes(str(attempt), entry.engine)
            if key in model:
                model[key].decoding = True
        else:
            ledger.end(str(attempt), entry.engine)
            model.pop(key, None)
        for engine in ENGINES:
            mine = [one for (_, where), one in model.items() if where == engine]
            expected = EngineLoad(len(mine), sum(one.cost for one in mine), sum(one.room_tokens for one in mine))
            assert ledger.load(engine) == expected
            assert all(one.cost >= 1 for one in mine)
    for attempt, engine in model:
        ledger.end(str(attempt), engine)
    assert all(ledger.load(engine) == EngineLoad() for engine in ENGINES)


texts = st.lists(st.sampled_from(["a", "b", "c"]), max_size=6).map(
    lambda parts: "".join(part * PIECE_BYTES for part in parts).encode()
)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(ENGINES), texts), max_size=12), texts, st.integers(1, 12))
def test_memory_holds_leading_pieces_without_gaps(seen: list[tuple[str, bytes]], asked: bytes, bound: int) -> None:
    memory = PrefixMemory(ENGINES, bound)
    for engine, text in seen:
        memory.saw(engine, text_chain(b"m", text))
    chain = text_chain(b"m", asked)
    for engine in ENGINES:
        held = memory.held(engine, chain)
        known = {piece for one, text in seen if one == engine for piece in text_chain(b"m", text)}
        leading = next((place for place, piece in enumerate(chain) if piece not in known), len(chain))
        assert held <= min(leading, bound)
        if len(known) <= bound:
            assert held == leading  # nothing was forgotten
        last = [text for one, text in seen if one == engine][-1:]
        if last:  # whatever else is forgotten, the head of what came last is not
            assert memory.held(engine, text_chain(b"m", last[0])) == min(len(last[0]) // PIECE_BYTES, bound)
        memory.forget(engine)
        assert memory.held(engine, chain) == 0


def test_texts_that_begin_alike_have_chains_that_begin_alike() -> None:
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
def test_of_long_prompts_the_head_is_hashed(path: str, prompt: list[object] | str) -> None:
    """What is done with a prompt holds up all other requests meanwhile."""
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


def test_round_robin_is_fair_whoever_comes_and_goes() -> None:
    turn = Turn()
    assert [turn.next(["a", "b", "c"]) for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]
    assert [turn.next(["b", "c"]) for _ in range(3)] == ["b", "c", "b"]
    assert turn.next(["a", "b", "c"]) == "c"


@given(
    st.dictionaries(st.sampled_from(ENGINES), st.integers(0, 50), min_size=1),
    st.dictionaries(st.sampled_from(ENGINES), st.integers(0, 50)),
)
def test_the_least_loaded_has_the_least_to_do_before_it_is_done(tokens: dict[str, int], near: dict[str, int]) -> None:
    loads = {name: EngineLoad(1, count, 0) for name, count in tokens.items()}
    chosen = least_loaded(list(tokens), loads.__getitem__, near, Turn())
    assert all(tokens[chosen] - near.get(chosen, 0) <= count - near.get(name, 0) for name, count in tokens.items())


def test_idle_engines_share() -> None:
    turn, idle = Turn(), EngineLoad()
    assert {least_loaded(ENGINES, lambda _: idle, {}, turn) for _ in range(3)} == set(ENGINES)


@given(st.binary(max_size=300))
def test_whatever_an_engine_says_of_itself_is_read(text: bytes) -> None:
    parse_metrics(text)
    metrics = parse_metrics(b"vllm:num_requests_running{" + text.replace(b"\n", b" ") + b"} nan\nvllm:kv_cache_usage_perc -1\n")
    assert metrics.running >= 0
    assert metrics.used_tokens == 0


def test_figures_of_ranks_behind_one_address_are_summed() -> None:
    text = b"".join(
        b'vllm:num_requests_running{engine="%d"} 2.0\nvllm:num_requests_waiting{engine="%d"} 1.0\n'
        b'vllm:kv_cache_usage_perc{engine="%d"} 0.5\nvllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n'
        % (rank, rank, rank)
        for rank in range(2)
    )
    metrics = parse_metrics(text + b"process_start_time_seconds 1.7e+09\n")
    assert (metrics.running, metrics.waiting, metrics.capacity_tokens, metrics.used_tokens) == (4, 2, 3_200, 1_600)
    assert metrics.started_s == 1.7e9
    assert metrics.beyond(EngineLoad(sequences=6)) is None
    assert metrics.beyond(EngineLoad(sequences=3)) == EngineLoad(3, 2 * 400 + 400 // 8, 1_200)


@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists).map(lambda x: repr(x).encode())
)
def test_any_bytes_are_a_body_or_refused(raw: bytes) -> None:
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
def test_engines_as_people_write_them(text: str, expected: EngineConfig | None) -> None:
    if expected is None:
        with pytest.raises(InvalidArgument):
            parse_engine(text, Role.PLAIN)
    else:
        assert parse_engine(text, Role.PLAIN) == expected


E0, P0, D0 = (
    EngineConfig("e", "http://e:1"),
    EngineConfig("p", "http://p:1", Role.PREFILL),
    EngineConfig("d", "http://d:1", Role.DECODE, "n"),
)


@pytest.mark.parametrize(
    "wrong",
    [
        {"engines": []},
        {"engines": [E0, E0]},
        {"engines": [E0, EngineConfig("x", "http://e:1")]},
        {"engines": [E0, P0, D0]},
        {"engines": [P0]},
        {"engines": [D0]},
        {"engines": [P0, EngineConfig("d", "http://d:1", Role.DECODE)]},
        {"policy": "scheduler"},
        {"listen": "0.0.0.0:80"},
        {"listen": "nowhere"},
        {"retries": 99},
        {"idle_timeout_s": 0},
        {"client_timeout_s": 0},
        {"name": "a b"},
    ],
)
def test_a_configuration_that_cannot_work_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        RouterConfig(**{"engines": [E0], "policy": "least_loaded", **wrong})  # type: ignore[arg-type]
    assert RouterConfig([P0, D0], policy="round_robin").pairs
