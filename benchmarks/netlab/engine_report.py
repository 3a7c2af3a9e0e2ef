"""What a timed engine run says of itself: times by percentile, bytes by link, and whether every byte was right."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvstore.netlab.bed import LabBed
from netlab.coordinator import Request, RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TTFT_S, TPOT_S = 4.0, 0.05
"""The objective of the published evaluation, in real time."""
_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in numbers. Times are the lab's; divide by the dilation for real ones.

    Attributes:
        variant: its name.
        jct_s: until the last token.
        good: share of the requests within the objective.
        times: ``ttft``, ``ttst``, ``tpot`` and their parts by percentile, seconds.
        snic_bytes: received by each prefill and decode host from storage.
        snic_max_over_avg: of them, over windows of a second.
        paths: bytes loaded by path.
        counts: blocks: hit, late (stored, not visible yet), lost (promised, not brought), missed by decode.
        cpu: share of the machine that was busy.
        idle_s: prefill engines had nothing to compute between their first and last work; seconds, of all together.
        series: Mbit/s received over each storage link: times, and rates by host.
    """

    variant: str
    jct_s: float
    good: float
    times: Mapping[str, Mapping[str, float]]
    snic_bytes: Mapping[str, int]
    snic_max_over_avg: float
    paths: Mapping[str, int]
    counts: Mapping[str, int]
    cpu: float
    series: Mapping[str, Sequence[float]]
    idle_s: float = 0.0


def summarize(result: RunResult, bed: LabBed, dilation: float) -> Summary:
    """Summarize a run. A wrong byte or a failed request ends the benchmark."""
    check(result)
    requests = result.requests
    readers = [*bed.prefill_hosts, *bed.decode_hosts]
    facts = [request.facts for request in requests]
    counts = {name: sum(int(one[name]) for one in facts) for name in ("blocks", "hit", "late", "lost")}
    counts["missed"] = sum(int(request.ends["missed"]) for request in requests)
    counts["stored_by_decode"] = sum(int(request.ends["stored"]) for request in requests)
    counts["tokens"] = sum(request.out for request in requests)
    paths: dict[str, int] = {}
    for one in facts:
        for path, size in one["paths"].items():
            paths[path] = paths.get(path, 0) + size
    series: dict[str, Sequence[float]] = {}
    for host in readers:
        at_s, mbit = result.recording.series(host, "storage").mbit("rx")
        series["at_s"], series[host] = at_s.tolist(), mbit.tolist()
    return Summary(
        result.variant.name,
        result.jct_s,
        sum(_good(request, dilation) for request in requests) / len(requests),
        _times(requests),
        {host: result.recording.series(host, "storage").total_bytes("rx") for host in readers},
        result.recording.max_over_avg("storage", readers),
        paths,
        counts,
        result.machine_cpu,
        series,
        sum(float(one.get("idle_s", 0.0)) for one in result.engines),
    )


def check(result: RunResult) -> None:
    """Every byte was right, every token came, every prompt arrived; or the benchmark ends."""
    errors = sorted({str(one.facts["error"]) for one in result.requests if one.facts["error"]})
    missed = sum(one.ends["missed"] for one in result.requests)
    if result.wrong() or errors or missed:
        sys.exit(f"WRONG BYTES in {result.wrong()} blocks, {missed} blocks did not reach decode; errors: {'; '.join(errors)}")
    if any(one.ends["tokens"] != one.prompt + one.out for one in result.requests):
        sys.exit("tokens are missing")


def _good(request: Request, dilation: float) -> bool:
    return request.ttft_s <= TTFT_S * dilation and request.tpot_s <= TPOT_S * dilation


def _times(requests: Sequence[Request]) -> dict[str, dict[str, float]]:
    columns = {
        "ttft": [one.ttft_s for one in requests],
        "ttst": [one.ttst_s for one in requests],
        "tpot": [one.tpot_s for one in requests],
        "assign": [one.paired_s - one.submitted_s for one in requests],
        "queue": [one.dispatched_s - one.submitted_s for one in requests],
        "prefill": [one.facts["first_s"] - one.facts["started_s"] for one in requests],
        "hand_over": [one.facts["handed_s"] - one.facts["first_s"] for one in requests],
    }
    return {
        name: {"mean": float(np.mean(values))} | {f"p{p}": float(np.percentile(values, p)) for p in _PERCENTILES}
        for name, values in columns.items()
    }


def plot(offline: Mapping[str, Sequence[Summary]], online: Sequence[Mapping[str, float | str]], file: Path) -> None:
    """Writes JCT by variant, storage links over time, TTFT by variant and what was tried online.

    Args:
        offline: runs by variant.
        online: trials: variant, agents a second, share of good requests.
        file: what to write; skipped if matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        return
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, 2, figsize=(12, 8))
    names = list(offline)
    panels[0, 0].boxplot([[run.jct_s for run in offline[name]] for name in names], tick_labels=names)
    panels[0, 0].set(ylabel="seconds", ylim=(0, None), title="offline: job completion")
    panels[1, 0].boxplot([[run.times["ttft"]["p50"] for run in offline[name]] for name in names], tick_labels=names)
    panels[1, 0].set(ylabel="seconds", ylim=(0, None), title="offline: TTFT, median")
    _links(panels[0, 1], [offline[name][-1] for name in ("+ layer-wise", "+ split") if name in offline])
    for name in sorted({str(trial["variant"]) for trial in online}):
        tried = sorted((float(trial["rate"]), float(trial["good"])) for trial in online if trial["variant"] == name)
        panels[1, 1].plot([rate for rate, _ in tried], [good for _, good in tried], "o", label=name)
    panels[1, 1].set(xlabel="agents a second", ylabel="requests within the objective", title="online", ylim=(0, 1.05))
    if online:
        panels[1, 1].legend()
    for axes in (panels[0, 0], panels[1, 0]):
        axes.tick_params(axis="x", labelrotation=20)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _links(axes: Axes, runs: Sequence[Summary]) -> None:
    for run in runs:
        at_s = np.array(run.series["at_s"])
        for host in run.snic_bytes:
            rates = np.array(run.series[host])
            whole = len(rates) // 5 * 5
            axes.plot(at_s[:whole:5], rates[:whole].reshape(-1, 5).mean(axis=1), label=f"{run.variant}: {host}")
    axes.set(xlabel="seconds", ylabel="Mbit/s", title="storage links, received", ylim=(0, None))
    axes.legend(fontsize="small")
