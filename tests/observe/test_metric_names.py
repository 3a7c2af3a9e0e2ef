"""Metric declarations match the code: every counted name is declared, every declared name is used."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from kvproto.v1 import admin_pb2, metadata_pb2, node_pb2
from kvstore.core.errors import ErrorKind
from kvstore.core.types import Outcome, StoreOutcome, Tier
from kvstore.observe import metric_definitions
from kvstore.observe.metric_definitions import EVENTS, METRICS, label_values
from kvstore.observe.metrics import PREFIX, Kind

REPOSITORY = Path(__file__).resolve().parents[2]
SAMPLED = {name.removeprefix(PREFIX) for name, metric in METRICS.items() if not metric.events}
USED_BY_OBSERVE = {"metrics_scrapes_refused_total", "undeclared_events_total"}


@cache
def sources() -> list[tuple[str, ast.AST]]:
    """Path and syntax tree of every module outside of ``kvstore.observe``."""
    found = [path for folder in ("kvstore", "clients") for path in (REPOSITORY / folder).rglob("*.py")]
    return [
        (str(path.relative_to(REPOSITORY)), ast.parse(path.read_text()))
        for path in found
        if not path.is_relative_to(REPOSITORY / "kvstore" / "observe")
    ]


def events_of(module: str, name: str) -> list[str]:
    """Events, or the sampled metric, of one constant of ``metric_definitions``."""
    found = getattr(getattr(metric_definitions, module), name)
    return [found] if isinstance(found, str) else list(found.values())


def test_code_counts_by_constants() -> None:
    """The type checker accepts only declared events. This finds event names in code that it does not check."""
    literal = [
        f"{path}:{node.lineno} {node.value}"
        for path, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in EVENTS
    ]
    assert literal == []


def test_declared_names_are_used() -> None:
    used = {
        event
        for _, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id.endswith("_metrics")
        for event in events_of(node.value.id.removesuffix("_metrics"), node.attr)
    }
    assert {*EVENTS, *SAMPLED} - used - USED_BY_OBSERVE == set()


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_metric_name_has_unit_and_suffix(metric: object) -> None:
    assert isinstance(metric, type(next(iter(METRICS.values()))))
    assert re.fullmatch(r"kvstore_[a-z0-9_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
    if metric.kind is Kind.HISTOGRAM:
        assert metric.name.endswith("_seconds")
        assert list(metric.buckets) == sorted(set(metric.buckets))
    assert not re.search(r"_(ms|us|mb|gb|kb|minutes)(_|$)", metric.name), "base units: seconds, bytes"
    assert metric.help
    assert "\n" not in metric.help


def test_labels_list_all_values_of_their_enum() -> None:
    assert set(METRICS["kvstore_rpc_errors_total"].labels["kind"]) == set(ErrorKind)
    assert set(label_values.TIERS) == {tier.name.lower() for tier in Tier}
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


def test_every_counter_is_shown_at_zero() -> None:
    prefixes = (
        "hook_",
        "sglang_",
        "metrics_",
        *(prefix for shown in metric_definitions.SHOWN_AT_ZERO.values() for prefix in shown),
    )
    assert [name for name, metric in EVENTS.items() if metric.kind is Kind.COUNTER and not name.startswith(prefixes)] == []


def test_family_event_is_found_by_labels() -> None:
    assert metric_definitions.client.HIT_BLOCKS["local", "dram"] == "client_hit_local_dram_blocks_total"
    with pytest.raises(KeyError):
        metric_definitions.client.HIT_BLOCKS["elsewhere", "dram"]
