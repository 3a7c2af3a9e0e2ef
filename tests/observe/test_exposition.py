"""Exposition of totals, histograms and gauges over a real socket, parsed by prometheus_client."""

from __future__ import annotations

import json
import math
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from kvstore.core.clock import ManualClock
from kvstore.observe import counters as counters_module
from kvstore.observe import http
from kvstore.observe.counters import Counters
from kvstore.observe.exposition import Sample, StoreCollector, registry_of
from kvstore.observe.http import MOST_AT_ONCE, MetricsServer, serve
from kvstore.observe.metric_definitions import EVENTS
from kvstore.observe.metrics import Kind
from kvstore.observe.slow_loads import MOST_KEPT, LoadRecord, RecentLoads

WAIT_S = 10.0

Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scraped(text: str) -> Values:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def shown(collector: StoreCollector) -> Values:
    from prometheus_client import generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return scraped(generate_latest(registry).decode())


def get(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=WAIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def served(counters: Counters) -> Iterator[MetricsServer]:
    server = serve("127.0.0.1:0", StoreCollector([counters]), {"/loads": lambda: {"slowest": []}}, counters)
    assert server is not None
    yield server
    server.stop()


def test_collector_adds_up_registries(counters: Counters) -> None:
    other = Counters()
    counters.add("client_hit_local_dram_blocks_total", 3)
    other.add("client_hit_local_dram_blocks_total", 4)
    other.add("transport_cap_wait_us_total", 2_500_000)
    values = shown(StoreCollector([counters, other]))
    where = (("path", "local"), ("tier", "dram"))
    assert values["kvstore_client_hit_blocks_total", where] == 7
    assert values["kvstore_transport_cap_wait_seconds_total", ()] == 2.5
    assert values["kvstore_undeclared_events_total", ()] == 0


def test_collector_shows_totals_at_zero(counters: Counters) -> None:
    values = shown(StoreCollector([counters], process="node"))
    assert values["kvstore_quarantined_blocks_total", ()] == 0
    assert values["kvstore_nvme_read_failed_blocks_total", (("outcome", "corrupt"),)] == 0
    assert not any(name.startswith("kvstore_client_") for name, _ in values)


@given(st.lists(st.floats(0, 100), max_size=50))
def test_histogram_counts_every_value_once(values: list[float]) -> None:
    counters = Counters()
    for value in values:
        counters.observe("client_lookup_seconds", value)
    found = shown(StoreCollector([counters]))
    if not values:
        assert ("kvstore_client_lookup_seconds_count", ()) not in found
        return
    for bound in (*EVENTS["client_lookup_seconds"].buckets, math.inf):
        label = "+Inf" if bound == math.inf else repr(bound)
        expected = sum(value <= bound for value in values)
        assert found["kvstore_client_lookup_seconds_bucket", (("le", label),)] == expected
    assert found["kvstore_client_lookup_seconds_count", ()] == len(values)
    assert found["kvstore_client_lookup_seconds_sum", ()] == pytest.approx(math.fsum(values))


@pytest.mark.parametrize("name", ["no_such_thing_total", "client_loads"])
def test_undeclared_event_raises_only_if_strict(
    name: str, counters: Counters, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(AssertionError, match=name):
        counters.add(name)
    monkeypatch.setattr(counters_module, "strict", False)
    counters.add(name, 2)
    counters.add(name)
    assert shown(StoreCollector([counters]))["kvstore_undeclared_events_total", ()] == 3
    assert [name in record.message for record in caplog.records] == [True], "logged once"


def test_failing_gauges_do_not_hide_others(counters: Counters, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Iterator[Sample]:
        raise RuntimeError("gone")

    collector = StoreCollector([counters], [broken, lambda: [Sample("node_sessions", 2)]])
    assert shown(collector)["kvstore_node_sessions", ()] == 2
    assert "gauges not collected" in caplog.text


def test_gauge_with_undeclared_label_raises(counters: Counters) -> None:
    with pytest.raises(KeyError):
        shown(StoreCollector([counters], [lambda: [Sample("node_sessions", 2, {"session": "x"})]]))


def test_server_serves_pages(served: MetricsServer, counters: Counters) -> None:
    counters.add("client_loads_total")
    status, text = get(served.address, "/metrics")
    assert status == 200
    assert scraped(text)["kvstore_client_loads_total", ()] == 1
    assert scraped(text)["process_open_fds", ()] > 0
    assert json.loads(get(served.address, "/loads?x=1")[1]) == {"slowest": []}
    assert json.loads(get(served.address, "/")[1]) == {"pages": ["/metrics", "/loads"]}
    status, text = get(served.address, "/secrets")
    assert (status, json.loads(text)["pages"]) == (404, ["/metrics", "/loads"])


def test_server_at_connection_limit_refuses_more(served: MetricsServer, counters: Counters) -> None:
    host, port = served.address.split(":")
    silent = [socket.create_connection((host, int(port)), WAIT_S) for _ in range(MOST_AT_ONCE - 1)]
    assert get(served.address, "/metrics")[0] == 200
    more = [socket.create_connection((host, int(port)), WAIT_S) for _ in range(2)]
    for one in more:
        one.settimeout(WAIT_S)
    assert b"" in [more[-1].recv(1)], "closed immediately: no free connection"
    assert counters.get("metrics_scrapes_refused_total") >= 1
    for one in silent + more:
        one.close()


def test_server_ends_connections_that_send_slowly(served: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "REQUEST_S", 0.3)
    host, port = served.address.split(":")
    slow = [socket.create_connection((host, int(port)), WAIT_S) for _ in range(MOST_AT_ONCE)]
    for one in slow:
        one.sendall(b"GET /metrics HTTP/1.0\r\nX-Slow: ")
    ended = 0
    while ended < len(slow):  # a byte at a time, faster than the limit of one read
        time.sleep(0.05)
        ended = 0
        for one in slow:
            try:
                one.sendall(b"x")
            except ConnectionError:
                ended += 1
    for one in slow:
        one.close()
    assert get(served.address, "/metrics")[0] == 200


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00", b"GET /metrics", b"DELETE /metrics HTTP/1.1\r\n\r\n", b"A" * 70_000]
)
def test_server_survives_garbage(served: MetricsServer, garbage: bytes) -> None:
    host, port = served.address.split(":")
    with socket.create_connection((host, int(port)), WAIT_S) as one:
        one.sendall(garbage)
    assert get(served.address, "/metrics")[0] == 200


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:99999", ":1", "no.such.host.invalid:0"])
def test_serve_invalid_address_returns_none(address: str, counters: Counters, caplog: pytest.LogCaptureFixture) -> None:
    assert serve(address, StoreCollector([counters]), {}, counters) is None
    assert address in caplog.text


def test_serve_port_in_use_returns_none(served: MetricsServer, counters: Counters) -> None:
    assert serve(served.address, StoreCollector([counters]), {}, counters) is None


def test_two_collectors_share_a_registry() -> None:
    first, second = Counters(), Counters()
    first.add("client_loads_total")
    registry = CollectorRegistry(auto_describe=True)  # as prometheus_client's own
    registry.register(StoreCollector([first, second], process="client"))
    assert registry.get_sample_value("kvstore_client_loads_total") == 1
    assert registry_of(StoreCollector([second])).get_sample_value("kvstore_client_loads_total") is None


def test_recent_loads_slowest_of_last_minute() -> None:
    clock = ManualClock()
    recent = RecentLoads(clock.now_s)
    recent.add(1e6, lambda: LoadRecord("old", 1e6, 1, 1, "too long ago"))
    clock.advance(31)
    for number in range(MOST_KEPT - 1):
        record = LoadRecord(f"r{number}", number % 97, 1, 1, "why")
        recent.add(record.seconds, lambda record=record: record)  # type: ignore[misc]
    clock.advance(30)
    found = recent.slowest()
    assert [record.seconds for record in found] == sorted((record.seconds for record in found), reverse=True)
    assert found[0].seconds == 96
    assert {record.ago_s for record in found} == {30}
    assert "old" not in {record.request_id for record in found}
    assert json.loads(json.dumps(recent.page()))["slowest"][0]["reason"] == "why"


def test_events_are_counters_and_histograms() -> None:
    assert {metric.kind for metric in EVENTS.values()} == {Kind.COUNTER, Kind.HISTOGRAM}
