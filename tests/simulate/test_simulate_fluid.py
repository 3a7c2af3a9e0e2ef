"""Fluid links against a naive solver, and bytes against the clock."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import InvalidArgument
from kvstore.simulate.network.fluid import FluidNetwork, Route, route

LINKS = 6


def naive(capacities: list[float], flows: list[Route]) -> list[float]:
    """All flows grow together; those that meet a full link stop."""
    rates = [0.0] * len(flows)
    growing = set(range(len(flows)))
    while growing:
        steps = []
        for link, capacity in enumerate(capacities):
            weight = sum(dict(flows[i]).get(link, 0) for i in growing)
            if weight:
                used = sum(rates[i] * dict(flows[i]).get(link, 0) for i in range(len(flows)))
                steps.append((max(0.0, capacity - used) / weight, link))
        step, full = min(steps)
        for i in growing:
            rates[i] += step
        growing -= {i for i in growing if full in dict(flows[i])}
    return rates


routes = st.lists(st.tuples(st.integers(0, LINKS - 1), st.sampled_from([0.5, 1.0, 2.0])), min_size=1, max_size=4).map(
    lambda uses: route(*uses)
)
capacities = st.lists(st.floats(0.5, 50), min_size=LINKS, max_size=LINKS)


@given(capacities, st.lists(routes, min_size=1, max_size=14))
def test_fluid_rates_match_naive_solver(spaces: list[float], flows: list[Route]) -> None:
    network = FluidNetwork(spaces)
    for count, path in enumerate(flows, start=1):
        network.start(path, 1e12, 0.0, lambda: None)
        expected = naive(spaces, flows[:count])
        for other, rate in zip(flows[:count], expected, strict=True):
            assert network.rate(other) == pytest.approx(rate, rel=1e-6)


@given(capacities, st.lists(st.tuples(routes, st.floats(0.1, 100), st.floats(0, 3)), min_size=1, max_size=12))
def test_fluid_every_byte_arrives_at_fair_rates(spaces: list[float], flows: list[tuple[Route, float, float]]) -> None:
    network = FluidNetwork(spaces)
    running: dict[int, Route] = {}
    now = 0.0
    coming = sorted(enumerate(flows), key=lambda entry: entry[1][2])
    while coming or running:
        starts = coming[0][1][2] if coming else math.inf
        end = network.next_end()
        if starts <= end:
            number, (path, nbytes, now) = coming.pop(0)
            network.start(path, nbytes, now, lambda number=number: running.pop(number))  # type: ignore[misc]
            running[number] = path
        else:
            assert end >= now
            now = end
            for flow in network.take_ended(now):
                flow.ended()
        expected = naive(spaces, list(running.values()))
        for path, rate in zip(running.values(), expected, strict=True):
            assert network.rate(path) == pytest.approx(rate, rel=1e-6)
    network.settle(now)
    for link in range(LINKS):
        asked = sum(nbytes * dict(path).get(link, 0) for path, nbytes, _ in flows)
        assert network.moved[link] == pytest.approx(asked, rel=1e-6, abs=1e-6)
        assert network.moved[link] <= spaces[link] * now * (1 + 1e-6)


def test_fluid_two_flows_share_a_link() -> None:
    network = FluidNetwork([10.0, math.inf])
    done: list[str] = []
    network.start(route((0, 1.0), (1, 1.0)), 100.0, 0.0, lambda: done.append("first"))
    assert network.next_end() == pytest.approx(10)
    network.start(route((0, 1.0)), 10.0, 5.0, lambda: done.append("second"))
    assert network.next_end() == pytest.approx(7)
    for flow in network.take_ended(7.0):
        flow.ended()
    assert done == ["second"]
    assert network.next_end() == pytest.approx(11)


def test_fluid_unlimited_flow_ends_at_once() -> None:
    network = FluidNetwork([math.inf])
    network.start(route((0, 1.0)), 5.0, 3.0, lambda: None)
    assert network.next_end() == 3.0
    assert len(network.take_ended(3.0)) == 1
    assert network.next_end() == math.inf


def test_nonsense_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        FluidNetwork([0.0])
    with pytest.raises(InvalidArgument):
        FluidNetwork([1.0]).start(route((0, 1.0)), -1.0, 0.0, lambda: None)
