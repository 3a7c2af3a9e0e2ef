"""Dashboard and alert rules use existing metrics, labels and label values, each according to its kind."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from monitored import ALERTS, DASHBOARD, MATCHER, REPOSITORY, RUNBOOK, SCRAPES, SELECTOR, VLLM_PREFIX, alerts, panels, targets

from kvclient.engines.vllm.counters import COUNTERS
from kvstore.observe.metric_definitions import METRICS
from kvstore.observe.metrics import Kind, Limit, Metric

OF_PROMETHEUS = {"instance", "job"}
SERIES: dict[str, Metric] = {series: metric for metric in METRICS.values() for series in metric.series}
SERIES |= {
    f"{VLLM_PREFIX}{name}_total": Metric(f"{VLLM_PREFIX}{name}_total", Kind.COUNTER, text, "vLLM")
    for name, text in COUNTERS.items()
}

_GROUPING = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")
_FORECAST = re.compile(r"\b(predict_linear)\(([^\[\]()]+)\[\w+\], [^()]+\)")
"""A forecast of a gauge, the only function here that requires a window of one."""
_ROUND = re.compile(r"\b(rate|irate|increase)\s*\(\s*((?:vllm:)?kvstore_[a-z0-9_]+)")


def problems(expression: str) -> Iterator[str]:
    """Errors in a PromQL expression."""
    known: set[str] = {*OF_PROMETHEUS}
    for name, matchers, window in SELECTOR.findall(_FORECAST.sub(r"\1(\2)", expression)):
        metric = SERIES.get(name)
        if metric is None:
            yield f"unknown metric {name}"
            continue
        labels = {*metric.labels, *OF_PROMETHEUS, *(["le"] if name.endswith("_bucket") else [])}
        known |= labels
        if (metric.kind is not Kind.GAUGE) != bool(window) and not (metric.kind is Kind.COUNTER and not window):
            yield f"{name} is a {metric.kind} and requires {'no window' if window else 'a window'}"
        for matcher in filter(None, (matchers or "").split(",")):
            found = MATCHER.fullmatch(matcher)
            if found is None:
                yield f"invalid matcher {matcher}"
                continue
            label, operator, value = found.groups()
            if label not in labels:
                yield f"{name} has no label {label}"
                continue
            values = metric.labels.get(label)
            if isinstance(values, tuple):
                wanted = value.split("|") if "~" in operator else [value]
                yield from (f"{name}: {label} is never {one}" for one in wanted if one not in values)
    if re.search(r"\bup\b", expression):
        known |= OF_PROMETHEUS
    for function, name in _ROUND.findall(expression):
        if name in SERIES and SERIES[name].kind is Kind.GAUGE:
            yield f"{function} of the gauge {name}"
    for group in _GROUPING.findall(expression):
        yield from (
            f"no metric of the expression has the label {label}"
            for label in map(str.strip, group.split(","))
            if label not in known
        )
    if "histogram_quantile" in expression and not re.search(r"by \([^)]*\ble\b[^)]*\)\s*\(rate\(kvstore_\w+_bucket", expression):
        yield "histogram_quantile requires rates of buckets, by le"


def labels_in(expression: str) -> set[str]:
    """Labels that the result of an expression may have."""
    grouped = {label.strip() for group in re.findall(r"\bby\s*\(([^)]*)\)", expression) for label in group.split(",")}
    of_metrics = {label for name, _, _ in SELECTOR.findall(expression) for label in SERIES[name].labels}
    return (grouped or of_metrics) | OF_PROMETHEUS


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: str(rule["alert"]))
def test_alert_rule_names_exist(rule: dict[str, object]) -> None:
    expression = str(rule["expr"])
    assert list(problems(expression)) == []
    texts = rule["annotations"]
    assert isinstance(texts, dict)
    assert texts.keys() == {"summary", "description", "runbook_url"}
    for text in texts.values():
        for label in re.findall(r"\$labels\.([a-z_]+)", text):
            assert label in labels_in(expression), f"{label} is not a label of the alert"
        for name in re.findall(r"\b(?:vllm:)?kvstore_[a-z0-9_]+", text):
            assert name in SERIES, f"unknown metric {name} in the text"
    assert rule["labels"] in ({"severity": "page"}, {"severity": "warning"})


@pytest.mark.parametrize(
    ("row", "panel", "target"), targets(), ids=lambda value: value if isinstance(value, str) else value["refId"]
)
def test_dashboard_target_names_exist(row: str, panel: str, target: dict[str, str]) -> None:
    assert row
    assert panel
    assert list(problems(target["expr"])) == []
    for label in re.findall(r"\{\{([a-z_]+)\}\}", target["legendFormat"]):
        assert label in labels_in(target["expr"]), f"{label} is not a label of the result"


def test_dashboard_and_alerts_need_no_client_metrics() -> None:
    """Engine hooks serve no metrics by default. vLLM's own metrics have an optional row, and optional branches in rules."""
    asked = [target["expr"] for _, _, target in targets()] + [str(rule["expr"]) for rule in alerts()]
    assert [one for one in asked if "kvstore_client_" in one] == []
    assert {row for row, _, target in targets() if VLLM_PREFIX in target["expr"]} == {
        "vLLM engines (if Prometheus scrapes their /metrics)"
    }
    for rule in alerts():
        branches = re.split(r"\bor\b", str(rule["expr"]))
        assert any(VLLM_PREFIX not in branch for branch in branches), rule["alert"]


def test_vllm_readme_counters_exist() -> None:
    text = (REPOSITORY / "clients" / "kvclient" / "engines" / "vllm" / "README.md").read_text()
    (section,) = re.findall(r"^### Metrics$(.*?)^##", text, re.MULTILINE | re.DOTALL)
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")][1:]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(named) > 10
    assert named <= COUNTERS.keys()


def test_dashboard_variables_are_used_and_exist() -> None:
    document = json.loads(DASHBOARD.read_text())
    variables = {one["name"]: one for one in document["templating"]["list"]}
    text = json.dumps(document["panels"])
    used = set(re.findall(r"\$\{?([a-z]\w*)", text))
    assert used == variables.keys()
    (asked,) = re.findall(r"label_values\((\w+), (\w+)\)", variables["instance"]["definition"])
    assert asked[0] in SERIES
    assert asked[1] in OF_PROMETHEUS


def test_alert_runbook_has_one_heading_per_alert() -> None:
    names = [str(rule["alert"]) for rule in alerts()]
    assert re.findall(r"^## (KVStore\w+)$", RUNBOOK.read_text(), re.MULTILINE) == names
    for rule in alerts():
        assert rule["annotations"]["runbook_url"] == f"docs/how-to/{RUNBOOK.name}#{str(rule['alert']).lower()}"


def test_alert_runbook_has_meaning_and_action() -> None:
    sections = re.split(r"^## ", RUNBOOK.read_text(), flags=re.MULTILINE)[1:]
    for section in sections:
        if section.startswith("KVStore"):
            assert section.count("**What it means.**") == section.count("**What to do.**") == 1, section


def test_panels_do_not_overlap() -> None:
    found = list(panels())
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in _shown(found))
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in found}) == len(found)


def _shown(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Panels outside of collapsed rows. Opening a row moves the panels below it."""
    hidden = {panel["id"] for row in found for panel in row.get("panels", []) if row["collapsed"]}
    return [panel for panel in found if panel["id"] not in hidden]


def test_miss_reason_is_normal_or_alerts() -> None:
    (rule,) = (rule for rule in alerts() if rule["alert"] == "KVStoreLoadsFail")
    alarming = set(re.findall(r'reason=~"([^"]+)"', str(rule["expr"]))[0].split("|"))
    reasons = METRICS["kvstore_node_load_missed_blocks_total"].labels["reason"]
    assert not isinstance(reasons, Limit)
    assert alarming | {"miss", "draining"} == set(reasons)


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("rate(kvstore_gone_total[5m])", "unknown metric kvstore_gone_total"),
        ('kvstore_volume_blocks{teir="dram"}', "has no label teir"),
        ('kvstore_volume_blocks{tier="tape"}', "tier is never tape"),
        ('kvstore_client_missed_blocks_total{reason=~"corrupt|bored"}', "reason is never bored"),
        ("rate(kvstore_node_sessions[5m])", "of the gauge"),
        ("sum by (reach) (rate(kvstore_client_loads_total[5m]))", "has the label reach"),
        ("histogram_quantile(0.9, rate(kvstore_client_load_seconds_bucket[5m]))", "by le"),
        ("rate(kvstore_client_load_seconds[5m])", "unknown metric kvstore_client_load_seconds"),
    ],
)
def test_problems_reports_wrong_expression(expression: str, problem: str) -> None:
    assert any(problem in one for one in problems(expression))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool on this machine")
@pytest.mark.parametrize("command", [["rules", str(ALERTS)], ["config", str(SCRAPES[0])]])
def test_promtool_accepts_files(command: list[str]) -> None:
    done = subprocess.run(["promtool", "check", *command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
