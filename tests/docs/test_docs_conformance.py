"""The page about testing connectors shows the recorded runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

from kvstore.testing.conformance.faults import ConnectorFault
from kvstore.testing.conformance.report import table
from kvstore.testing.conformance.runs import RunResult, RunVerdict
from kvstore.testing.conformance.targets import KNOWN

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "test-a-connector.md"
RECORD = PAGE.with_name("test-a-connector.json")


def test_conformance_page_shows_the_record() -> None:
    """Else run the command of the page with ``--output`` and put the table here."""
    rows = json.loads(RECORD.read_text(encoding="utf-8"))
    results = [RunResult(**{**row, "fault": ConnectorFault(row["fault"]), "verdict": RunVerdict(row["verdict"])}) for row in rows]
    assert {one.target for one in results} == set(KNOWN)
    assert table(results) in PAGE.read_text(encoding="utf-8")


def test_conformance_record_of_this_store_is_right() -> None:
    every = json.loads(RECORD.read_text(encoding="utf-8"))
    rows = [row for row in every if row["target"] in {"kvstore-connector", "kvstore-tier"}]
    assert {row["fault"] for row in rows} == set(ConnectorFault)
    assert {row["verdict"] for row in rows} == {RunVerdict.RIGHT}


def test_conformance_page_repeats_each_finding_and_seeded_runs() -> None:
    text = PAGE.read_text(encoding="utf-8")
    used = {fault for line in text.splitlines() if " --target " in line for fault in re.findall(r"--fault (\w+)", line)}
    bad = {row["fault"] for row in json.loads(RECORD.read_text(encoding="utf-8")) if row["verdict"] != RunVerdict.RIGHT}
    assert {ConnectorFault(fault).name.lower() for fault in bad} <= used <= {fault.name.lower() for fault in ConnectorFault}
    seeded = json.loads(PAGE.with_name("test-a-connector-seeded.json").read_text(encoding="utf-8"))
    assert "A summary is written only if no token was wrong and no run hung." in text
    assert sum(seeded["faults"].values()) == seeded["runs"]
    counts = f"{seeded['runs']} runs with {seeded['prompts']:,} prompts and {seeded['aborted']} aborted requests"
    assert f"{counts}. {seeded['loaded_tokens']:,} tokens were loaded" in text
    assert f"{seeded['counters']['load_missing_chunks']:,} chunks were found but not loaded" in text
