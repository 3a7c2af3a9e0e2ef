"""Lookups and jobs of vLLM's secondary tier, without vLLM: deadlines, a store that hangs, failures, ends."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvclient import KVStoreError, Lookup, Unavailable
from kvclient.engines.vllm.tier.counters import TierCounters
from kvclient.engines.vllm.tier.facts import TierGroup
from kvclient.engines.vllm.tier.jobs import ChunkJobs, EndedJob, JobPart
from kvclient.engines.vllm.tier.lookups import ChunkLookups
from kvclient.engines.vllm.tier.options import TierOptions
from kvclient.engines.vllm.tier.requests import TierRequest, TierRequests
from kvstore.core.errors import InvalidArgument
from support.wait import wait_until

SOON_S = 0.2
LATER_S = 30.0
GROUPS = {0: TierGroup(0, 32, 1, chained=True)}
KEYS = [bytes([at]) * 32 + bytes(4) for at in range(4)]


class FakeStore:
    """Holds some keys; hangs while it is closed by ``gate``."""

    def __init__(self, held: Sequence[bytes] = (), error: Exception | None = None) -> None:
        self.held, self.error = set(held), error
        self.gate = threading.Event()
        self.gate.set()
        self.calls = 0

    def _call(self) -> None:
        self.calls += 1
        assert self.gate.wait(LATER_S)
        if self.error is not None:
            raise self.error

    def find(self, positions: Mapping[bytes, int | None], _: Sequence[bytes]) -> tuple[dict[bytes, bool], None, None]:
        self._call()
        return {key: key in self.held for key in positions}, None, None

    def load(self, chunks: Sequence[bytes], *_: Any) -> tuple[list[bytes], Counter[str], str]:
        self._call()
        return [key for key in chunks if key in self.held], Counter(local=4, decode=3), ""

    def store(self, chunks: Sequence[bytes], *_: Any) -> tuple[list[bytes], int, str]:
        return self.load(chunks)[0], 7, ""


@pytest.fixture
def counters() -> TierCounters:
    return TierCounters()


@pytest.fixture
def lookups(counters: TierCounters) -> Iterator[ChunkLookups]:
    made = ChunkLookups(SOON_S, counters, lambda: None)
    yield made
    made.shutdown()


@pytest.fixture
def jobs(counters: TierCounters) -> Iterator[ChunkJobs]:
    made = ChunkJobs(1, counters, lambda: None)
    yield made
    made.shutdown()


def request(name: str = "r") -> TierRequest:
    return TierRequest(SimpleNamespace(request_id=name, block_hashes=[key[:32] for key in KEYS], lora_request=None))


def ask(lookups: ChunkLookups, one: TierRequest, store: FakeStore) -> list[bool | None]:
    """One step of vLLM."""
    answers = [lookups.ask(one, 0, key, at) for at, key in enumerate(KEYS)]
    lookups.flush({0: store}, GROUPS)  # type: ignore[dict-item]
    return answers


def part(store: FakeStore, keys: Sequence[bytes]) -> list[JobPart]:
    return [JobPart(store, keys, (), None)]  # type: ignore[arg-type]


def ends(jobs: ChunkJobs) -> list[EndedJob]:
    """Every job's end. A drain would cancel a job whose thread has not taken it yet."""
    wait_until(lambda: not jobs.busy, "no job runs")
    return list(jobs.ended())


def job(number: int, keys: Sequence[bytes] = KEYS, *, loads: bool = True) -> EndedJob:
    return EndedJob(number, loads, tuple(keys))


# ---- lookups ----
def test_lookup_of_a_step_is_one_call(lookups: ChunkLookups) -> None:
    store, one = FakeStore(KEYS[:2]), request()
    assert ask(lookups, one, store) == [None] * 4
    wait_until(lambda: ask(lookups, one, store) == [True, True, False, False], "the answers have come")
    assert store.calls == 1


def test_lookup_hung_store_is_a_miss_in_time(lookups: ChunkLookups, counters: TierCounters) -> None:
    store, requests = FakeStore(KEYS), [request(str(at)) for at in range(20)]
    store.gate.clear()
    for one in requests:
        ask(lookups, one, store)
    wait_until(lambda: all(ask(lookups, one, store) == [False] * 4 for one in requests), "no request waits any more")
    assert counters.totals()["lookup_failures"] == len(requests)
    assert counters.totals()["connected"] == 0
    store.gate.set()
    later = request("later")
    wait_until(lambda: ask(lookups, later, store) == [True] * 4, "the store answers again")
    assert store.calls <= 3, "lookups that nobody waits for are not sent"
    assert counters.totals()["connected"] == 1


@pytest.mark.parametrize("error", [None, Unavailable("away"), ValueError("a bug")])
def test_lookup_under_way_is_busy_until_it_wakes(error: Exception | None, counters: TierCounters) -> None:
    woken = threading.Event()
    lookups = ChunkLookups(LATER_S, counters, woken.set)
    store = FakeStore(KEYS, error)
    store.gate.clear()
    assert not lookups.busy
    ask(lookups, request(), store)
    assert lookups.busy
    store.gate.set()
    assert woken.wait(LATER_S)
    assert not lookups.busy
    lookups.shutdown()


@pytest.mark.parametrize("error", [Unavailable("away"), ValueError("a bug")])
def test_lookup_failed_is_not_a_miss_of_later_requests(error: Exception, lookups: ChunkLookups, counters: TierCounters) -> None:
    store, one, other = FakeStore(KEYS, error), request(), request("other")
    wait_until(lambda: ask(lookups, one, store) == [False] * 4, "the lookup has failed")
    assert counters.totals()["lookup_failures" if isinstance(error, KVStoreError) else "bugs"] == 1
    store.error = None
    wait_until(lambda: ask(lookups, other, store) == [True] * 4, "the store answers")


def test_answers_of_an_earlier_epoch_are_dropped(lookups: ChunkLookups) -> None:
    requests, store, changed = TierRequests(), FakeStore(KEYS), FakeStore()
    requests.add(request().request)
    old = requests.get("r")
    assert old is not None
    old.found[0] = Lookup([])
    store.gate.clear()
    ask(lookups, old, store)
    requests.renew()
    store.gate.set()
    wait_until(lambda: len(old.answers) == 4, "the late answers have come")
    new = requests.get("r")
    assert new is not None
    assert not new.found
    wait_until(lambda: ask(lookups, new, changed) == [False] * 4, "the new epoch has no chunks")


def test_failed_load_is_a_miss_of_all_present_requests(lookups: ChunkLookups) -> None:
    requests, store = TierRequests(), FakeStore(KEYS)
    requests.add(request("a").request)
    requests.record_failed(frozenset(KEYS[1:2]))
    requests.add(request("b").request)
    a, b = requests.get("a"), requests.get("b")
    assert a is not None
    assert b is not None
    wait_until(lambda: ask(lookups, a, store) == [True, False, True, True], "one key has failed")
    wait_until(lambda: ask(lookups, b, store) == [True] * 4, "later requests try again")


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["add", "forget"]), st.sampled_from("abc")),
            st.tuples(st.just("fail"), st.frozensets(st.sampled_from(KEYS))),
            st.tuples(st.just("renew"), st.none()),
        ),
        max_size=40,
    )
)
def test_failed_loads_are_kept_once_while_needed(steps: list[tuple[str, Any]]) -> None:
    requests = TierRequests()
    failed: dict[str, set[bytes]] = {}
    for step, what in steps:
        if step == "add":
            requests.add(request(what).request)
            failed[what] = set()
        elif step == "forget":
            requests.forget(what)
            failed.pop(what, None)
        elif step == "fail":
            requests.record_failed(what)
            failed = {name: keys | what for name, keys in failed.items()}
        else:
            requests.renew()
            failed = {name: set() for name in failed}
        for name, keys in failed.items():
            one = requests.get(name)
            assert one is not None
            assert {key for key in KEYS if one.answer(key) is False} == keys
        assert requests.failed_chunks == len(set().union(*failed.values()))


def test_requests_with_adapters_are_unknown() -> None:
    requests = TierRequests()
    assert not requests.add(SimpleNamespace(request_id="r", lora_request=object()))
    assert requests.get("r") is None
    requests.forget("r")
    assert not len(requests)


@pytest.mark.parametrize(
    ("media", "streamed", "named", "kept"),
    [(1, False, False, False), (0, True, False, False), (0, False, False, True), (1, True, True, True)],
)
def test_requests_with_unnamed_media_are_unknown(media: int, streamed: bool, named: bool, kept: bool) -> None:
    requests = TierRequests()
    one = SimpleNamespace(request_id="r", lora_request=None, mm_features=[object()] * media, resumable=streamed)
    assert requests.add(one, media_named=named) is kept
    assert len(requests) == kept


# ---- jobs ----
def test_job_ends_once_with_what_arrived(jobs: ChunkJobs, counters: TierCounters) -> None:
    jobs.submit(job(1), part(FakeStore(KEYS[:3]), KEYS), LATER_S)
    (ended,) = ends(jobs)
    assert (ended.job_id, ended.arrived, ended.nbytes) == (1, tuple(KEYS[:3]), 7)
    assert not list(jobs.ended())
    assert not jobs.busy
    assert counters.totals()["load_missing_chunks"] == 1
    assert (counters.totals()["load_local_path_bytes"], counters.totals()["load_decode_path_bytes"]) == (4, 3)


@pytest.mark.parametrize("error", [Unavailable("away"), ValueError("a bug"), MemoryError()])
def test_job_failed_ends(error: Exception, jobs: ChunkJobs, counters: TierCounters) -> None:
    jobs.submit(job(1, loads=False), part(FakeStore(KEYS, error), KEYS), LATER_S)
    (ended,) = ends(jobs)
    assert (ended.job_id, ended.arrived) == (1, ())
    assert counters.totals()["store_missing_chunks"] == len(KEYS)
    assert counters.totals()["bugs"] == (not isinstance(error, KVStoreError))


@pytest.mark.parametrize(
    ("parts", "seconds", "cause"),
    [
        (part(FakeStore(KEYS, Unavailable("away")), KEYS), LATER_S, "away"),
        (part(FakeStore(), KEYS), 0.0, "the deadline passed"),
        ([], LATER_S, "the tier has no namespace for them"),
    ],
)
def test_job_failed_logs_the_cause(
    parts: list[JobPart], seconds: float, cause: str, jobs: ChunkJobs, caplog: pytest.LogCaptureFixture
) -> None:
    jobs.submit(job(1, loads=False), parts, seconds)
    assert len(ends(jobs)) == 1
    assert caplog.messages == [f"chunks not stored (amount=4, cause={cause})"]


def test_job_drained_before_it_began_ends(jobs: ChunkJobs, counters: TierCounters) -> None:
    hung = FakeStore(KEYS)
    hung.gate.clear()
    for number in range(5):
        jobs.submit(job(number), part(hung, KEYS), LATER_S)
    wait_until(lambda: hung.calls == 1, "the first job has begun")
    threading.Timer(SOON_S, hung.gate.set).start()
    jobs.drain()
    ended = {job.job_id: job.arrived for job in jobs.ended()}
    assert ended == {0: tuple(KEYS), 1: (), 2: (), 3: (), 4: ()}
    assert hung.calls == 1
    assert counters.totals()["load_missing_chunks"] == 4 * len(KEYS)


def test_load_does_not_wait_for_stores(jobs: ChunkJobs) -> None:
    hung = FakeStore(KEYS)
    hung.gate.clear()
    jobs.submit(job(1, loads=False), part(hung, KEYS), LATER_S)
    jobs.submit(job(2), part(FakeStore(KEYS), KEYS), LATER_S)
    seen: list[int] = []

    def shown() -> bool:
        seen.extend(job.job_id for job in jobs.ended())
        return seen == [2]

    wait_until(shown, "the load has ended")
    hung.gate.set()


def test_job_deadline_counts_from_its_submission(jobs: ChunkJobs) -> None:
    ends_s: list[float] = []

    class Timed(FakeStore):
        def load(self, chunks: Sequence[bytes], *how: Any) -> tuple[list[bytes], Counter[str], str]:
            ends_s.append(how[2])
            return super().load(chunks)

    slow = Timed(KEYS)
    slow.gate.clear()
    before_s = time.monotonic()
    for number in range(2):
        jobs.submit(job(number), part(slow, KEYS), SOON_S)
    after_s = time.monotonic()
    threading.Timer(SOON_S, slow.gate.set).start()
    wait_until(lambda: not jobs.busy, "both have ended")
    assert all(before_s + SOON_S <= end_s <= after_s + SOON_S for end_s in ends_s)
    assert len(ends_s) == 2


# ---- no threads ----
@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may start no further thread."""

    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


@pytest.mark.usefixtures("no_threads")
def test_lookup_without_a_thread_is_a_miss(lookups: ChunkLookups, counters: TierCounters) -> None:
    store, one = FakeStore(KEYS), request()
    assert ask(lookups, one, store) == [None] * 4
    assert ask(lookups, one, store) == [False] * 4
    assert not lookups.busy
    assert (counters.totals()["lookup_failures"], store.calls) == (1, 0)


@pytest.mark.usefixtures("no_threads")
@pytest.mark.parametrize("loads", [True, False])
def test_job_without_a_thread_ends(loads: bool, jobs: ChunkJobs, counters: TierCounters) -> None:
    store = FakeStore(KEYS)
    jobs.submit(job(1, loads=loads), part(store, KEYS), LATER_S)
    (ended,) = jobs.ended()
    assert (ended.job_id, ended.arrived, store.calls) == (1, (), 0)
    assert counters.totals()["load_missing_chunks" if loads else "store_missing_chunks"] == len(KEYS)


# ---- counts ----
def test_counts_are_taken_once(counters: TierCounters) -> None:
    counters.add("resets")
    counters.failed("lookup_failures", 2, "lookup failed")
    assert counters.take() == ({"resets": 1, "lookup_failures": 2}, False)
    assert counters.take() == ({}, None)
    counters.add("resets")
    counters.answered()
    assert counters.take() == ({"resets": 1}, True)
    assert counters.totals()["resets"] == 2


def test_store_answers_again_is_logged_once(counters: TierCounters, caplog: pytest.LogCaptureFixture) -> None:
    counters.answered()
    counters.failed("lookup_failures", 1, "lookup failed", Unavailable("away"))
    counters.answered()
    counters.answered()
    assert caplog.messages == ["lookup failed (amount=1, cause=away)", "store answers again"]


def test_tier_without_metadata_server_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="metadata server"):
        TierOptions.from_extra_config({"kvstore": {"metadata": "", "node": "unix:/n.sock"}})


@pytest.mark.parametrize("option", [{"block_labels": 1}, {"events_blocks": 0}, {"events_blocks": True}])
def test_tier_options_for_routers_are_checked(option: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(option))):
        TierOptions.from_extra_config({"kvstore": option})
