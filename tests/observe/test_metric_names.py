"""Code, declarations, dashboard and alert rules speak of the same metrics: none is undeclared, none is dead."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from kvproto.v1 import admin_pb2, metadata_pb2, node_pb2
from kvstore.core.errors import ErrorKind
from kvstore.core.types import Outcome, StoreOutcome, Tier
from kvstore.observe import metric_definitions
from kvstore.observe.metrics import EVENTS, METRICS, PREFIX, Kind, event

REPOSITORY = Path(__file__).resolve().parents[2]
NO_EVENTS = {"blocks_total", "huge_pages_total", "s_total"}
"""End like one, and are none."""


@cache
def sources() -> list[tuple[str, ast.AST]]:
    """Each file, by its place in the repository, parsed."""
    found = [path for folder in ("kvstore", "clients") for path in (REPOSITORY / folder).rglob("*.py")]
    return [(str(path.relative_to(REPOSITORY)), ast.parse(path.read_text())) for path in found if path.parent.name != "observe"]


def pattern_of(text: ast.JoinedStr) -> str:
    return "".join(re.escape(str(part.value)) if isinstance(part, ast.Constant) else r"[A-Za-z_]+" for part in text.values)


def calls(tree: ast.AST, function: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function:
            yield node


def looks_like_an_event(value: object) -> bool:
    return isinstance(value, str) and (bool(re.fullmatch(r"[a-z][a-z0-9_]*_total", value)) or value in EVENTS)


@cache
def counted() -> tuple[dict[str, str], dict[str, str]]:
    """Names, and patterns of names, that code counts under; each with where."""
    literal: dict[str, str] = {}
    built: dict[str, str] = {}
    for place, tree in sources():
        inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        inside |= {id(node.args[0]) for function in ("Sample", "event") for node in calls(tree, function)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr) and re.search(r"(_total|_seconds)$", pattern_of(node)):
                built[pattern_of(node)] = f"{place}:{node.lineno}"
            elif isinstance(node, ast.Constant) and id(node) not in inside and looks_like_an_event(node.value):
                literal[node.value] = f"{place}:{node.lineno}"
        for call in calls(tree, "event"):
            metric = METRICS[PREFIX + ast.literal_eval(call.args[0])]
            literal.update(dict.fromkeys(metric.events, f"{place}:{call.lineno}"))
    return literal, built


def test_all_that_is_counted_is_declared() -> None:
    literal, built = counted()
    undeclared = {name: where for name, where in literal.items() if name not in {*EVENTS, *METRICS, *NO_EVENTS}}
    undeclared |= {
        pattern: where
        for pattern, where in built.items()
        if pattern not in NO_EVENTS and not any(re.fullmatch(pattern, one) for one in (*EVENTS, *METRICS))
    }
    assert undeclared == {}


def test_no_event_is_declared_in_vain() -> None:
    literal, built = counted()
    counted_elsewhere = {*literal, "metrics_scrapes_refused_total"}  # by the package that declares
    dead = [one for one in EVENTS if one not in counted_elsewhere and not any(re.fullmatch(pattern, one) for pattern in built)]
    assert dead == []


def test_no_gauge_is_declared_in_vain() -> None:
    shown = set()
    for _, tree in sources():
        shown |= {PREFIX + ast.literal_eval(call.args[0]) for call in calls(tree, "Sample")}
    declared = {name for name, metric in METRICS.items() if not metric.events} - {f"{PREFIX}undeclared_events_total"}
    assert shown == declared


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_names_say_what_they_count(metric: object) -> None:
    assert isinstance(metric, type(next(iter(METRICS.values()))))
    assert re.fullmatch(r"kvstore_[a-z0-9_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
    if metric.kind is Kind.HISTOGRAM:
        assert metric.name.endswith("_seconds")
        assert list(metric.buckets) == sorted(set(metric.buckets))
    assert not re.search(r"_(ms|us|mb|gb|kb|minutes)(_|$)", metric.name), "base units: seconds, bytes"
    assert metric.help
    assert "\n" not in metric.help


def test_labels_know_all_values_of_what_they_stand_for() -> None:
    assert set(METRICS["kvstore_rpc_errors_total"].labels["kind"]) == set(ErrorKind)
    assert set(metric_definitions.TIERS) == {tier.name.lower() for tier in Tier}
    reads = METRICS["kvstore_nvme_read_failed_blocks_total"].labels["outcome"]
    assert set(reads) == {one.name.lower() for one in Outcome} - {"hit"}
    stores = METRICS["kvstore_client_store_outcome_blocks_total"].labels["outcome"]
    assert set(stores) == {one.name.lower() for one in StoreOutcome}
    methods = {
        method.name
        for module in (admin_pb2, metadata_pb2, node_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert set(METRICS["kvstore_rpc_seconds"].labels["method"]) == methods - {"Publish", "WatchBlocks"}


def test_every_total_is_shown_from_the_start_by_somebody() -> None:
    prefixes = (
        "hook_",
        "sglang_",
        "metrics_",
        *(prefix for shown in metric_definitions.SHOWN_AT_ZERO.values() for prefix in shown),
    )
    assert [name for name, metric in EVENTS.items() if metric.kind is Kind.COUNTER and not name.startswith(prefixes)] == []


def test_an_event_is_found_by_its_labels() -> None:
    assert event("client_hit_blocks_total", path="local", tier="dram") == "client_hit_local_dram_blocks_total"
    with pytest.raises(KeyError):
        event("client_hit_blocks_total", path="elsewhere", tier="dram")
