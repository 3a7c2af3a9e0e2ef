"""The shipped dashboard, alert rules and scrape configuration as tests read them, and a real Prometheus that evaluates them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvstore.embedded import children
from kvstore.embedded.ports import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
DASHBOARD = DEPLOY / "grafana" / "kvstore.json"
SCRAPES = (DEPLOY / "prometheus" / "prometheus.yml", DEPLOY / "compose" / "prometheus.yml")
RUNBOOK = REPOSITORY / "kvstore" / "admin" / "alerts.md"
VLLM_PREFIX = "vllm:kvstore_"
SCRAPE_S = 1
WINDOW_S = 60
"""Value of ``$__rate_interval``."""
START_S = 60.0

SELECTOR = re.compile(r"\b((?:vllm:)?kvstore_[a-z0-9_]+)\b(?:\{([^}]*)\})?\s*(\[[^\]]+\])?")
MATCHER = re.compile(r'\s*([a-z_]+)\s*(=~|!~|!=|=)\s*"([^"]*)"\s*')


# ---------------------------------------------------------------- what is shipped
def panels() -> Iterator[dict[str, Any]]:
    """All panels in order, including rows and the panels inside them."""
    waiting = list(json.loads(DASHBOARD.read_text())["panels"])
    while waiting:
        panel = waiting.pop(0)
        waiting = [*panel.get("panels", []), *waiting]
        yield panel


def targets() -> list[tuple[str, str, dict[str, str]]]:
    """Title of the row, title of the panel, and a query of it."""
    found, row = [], ""
    for panel in panels():
        row = panel["title"] if panel["type"] == "row" else row
        found += [(row, panel["title"], target) for target in panel.get("targets", [])]
    return found


def alerts() -> list[dict[str, Any]]:
    """All alert rules."""
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def filled(expression: str) -> str:
    """A panel's expression with Grafana's variables filled in, as for all nodes."""
    return expression.replace("$__rate_interval", f"{WINDOW_S}s").replace("$instance", ".*")


# ---------------------------------------------------------------- what a scrape shows
@dataclass(frozen=True)
class Selector:
    """A metric with the label matchers of an expression."""

    name: str
    matchers: tuple[tuple[str, str, str], ...] = ()

    def takes(self, name: str, labels: Mapping[str, str]) -> bool:
        """Whether a series is selected."""
        return name == self.name and all(_holds(labels.get(label, ""), *rest) for label, *rest in self.matchers)


def selectors(expression: str) -> list[Selector]:
    """All series that an expression selects."""
    return [
        Selector(name, tuple(MATCHER.fullmatch(one).groups() for one in matchers.split(",") if one))  # type: ignore[union-attr,misc]
        for name, matchers, _ in SELECTOR.findall(filled(expression))
    ]


def _holds(value: str, operator: str, wanted: str) -> bool:
    same = value == wanted if "~" not in operator else re.fullmatch(wanted, value) is not None
    return same is (operator in {"=", "=~"})


@dataclass(frozen=True)
class Series:
    """One sample of a scrape."""

    name: str
    labels: Mapping[str, str]
    value: float


def scraped(address: str) -> list[Series]:
    """Scrape ``/metrics`` at ``host:port``. Prometheus adds ``instance``."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return [
        Series(one.name, {**one.labels, "instance": address}, one.value)
        for family in text_string_to_metric_families(text)
        for one in family.samples
    ]


# ---------------------------------------------------------------- a real Prometheus
@dataclass
class Prometheus:
    """A Prometheus with the shipped alert rules, on loopback. A context manager.

    Args:
        folder: for its data and log.
        jobs: addresses to scrape, by job.
    """

    folder: Path
    jobs: Mapping[str, Sequence[str]]
    address: str = ""
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @staticmethod
    def installed() -> bool:
        """Whether this machine has the program."""
        return shutil.which("prometheus") is not None

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        config = {
            "global": {
                "scrape_interval": f"{SCRAPE_S}s",
                "scrape_timeout": f"{SCRAPE_S}s",
                "evaluation_interval": f"{SCRAPE_S}s",
            },
            "rule_files": [str(ALERTS)],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": list(addresses)}]} for job, addresses in self.jobs.items()
            ],
        }
        (self.folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.address = f"127.0.0.1:{free_port('127.0.0.1')}"
        command = ["prometheus", f"--config.file={self.folder / 'prometheus.yml'}", f"--web.listen-address={self.address}"]
        command += [f"--storage.tsdb.path={self.folder / 'data'}", "--log.level=warn"]
        with (self.folder / "prometheus.log").open("wb") as log:
            self._process = children.start(command, stdout=log, stderr=log)
        end_s = time.monotonic() + START_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > end_s:
                self.close()
                raise AssertionError((self.folder / "prometheus.log").read_text())
            time.sleep(0.05)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End it."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Evaluate an expression now: labels and value of each series of the result."""
        asked = urllib.parse.urlencode({"query": filled(expression)})
        found = self._get(f"/api/v1/query?{asked}")
        assert found["resultType"] == "vector"
        return [(one["metric"], float(one["value"][1])) for one in found["result"]]

    def rules(self) -> dict[str, dict[str, Any]]:
        """State of each alert rule, by its name."""
        return {rule["name"]: rule for group in self._get("/api/v1/rules")["groups"] for rule in group["rules"]}

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://{self.address}{path}", timeout=30) as answer:
            return json.load(answer)["data"]

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=5):
                return True
        except OSError:
            return False
