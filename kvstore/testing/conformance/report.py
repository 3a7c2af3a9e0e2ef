"""The table of a run: a row per fault, a column per connector."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvstore.testing.conformance.faults import ConnectorFault
from kvstore.testing.conformance.runs import RunResult, RunVerdict


def table(results: Sequence[RunResult]) -> str:
    """Return a Markdown table. A connector that has never loaded anything is marked, because then nothing was tested."""
    targets = list(dict.fromkeys(one.target for one in results))
    runs: dict[tuple[ConnectorFault, str], list[RunResult]] = {}
    for one in results:
        runs.setdefault((one.fault, one.target), []).append(one)
    faults = [fault for fault in ConnectorFault if any(one.fault is fault for one in results)]
    rows = [["fault", *targets], *([str(fault), *(_cell(runs.get((fault, name), [])) for name in targets)] for fault in faults)]
    loaded = {name: sum(one.loaded_tokens for one in results if one.target == name) for name in targets}
    rows.append(["tokens loaded", *(f"{loaded[name]:,}" if loaded[name] else "none: nothing was tested" for name in targets)])
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(results: Sequence[RunResult]) -> str:
    verdicts = Counter(one.verdict for one in results)
    if not verdicts:
        return "-"
    if len(verdicts) == 1:
        [verdict] = verdicts
        return str(verdict)
    return ", ".join(f"{verdict} {verdicts[verdict]} of {len(results)}" for verdict in RunVerdict if verdict in verdicts)
