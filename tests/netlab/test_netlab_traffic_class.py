"""The store's own traffic beside a latency-critical flow on one compute link: the flow's latency falls with each of the means."""

from __future__ import annotations

import pytest

from netlab.traffic_class import TrafficBed, cases

MBIT = 300.0
SECONDS = 0.7


@pytest.mark.slow
@pytest.mark.usefixtures("lab_possible")
def test_a_latency_critical_flow_keeps_its_latency_beside_kv() -> None:
    with TrafficBed(MBIT, cases(MBIT)) as bed:
        seen = {case.name: bed.run(case.name, SECONDS) for case in cases(MBIT)}
    nothing, link = seen.pop("nothing"), MBIT * 125_000
    # directions only, with room to spare: in figures, see the benchmark of this name
    assert nothing.kv_bytes_per_s > link / 2, "KV fills the link"
    for name, one in seen.items():
        assert one.p50_ms < nothing.p50_ms / 2, (name, one, nothing)
        assert one.p99_ms < nothing.p99_ms * 0.7, (name, one, nothing)
        assert one.kv_bytes_per_s > link / 4, (name, one, nothing)
    assert seen["cap"].kv_bytes_per_s < link * 0.85
    assert seen["yield"].kv_bytes_per_s < link * 0.95
