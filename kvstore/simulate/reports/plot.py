"""Plots of results, as PNG. matplotlib comes with the extra ``plots`` and is imported only here, when used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore.core.errors import Unsupported, install_command
from kvstore.simulate.cluster import SimConfig
from kvstore.simulate.result import SimResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def require_matplotlib() -> None:
    """Check that matplotlib is installed.

    Raises:
        Unsupported: it is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise Unsupported(f"plots require matplotlib: {install_command('plots')}") from error
    mpl.use("Agg")


def plot(results: Sequence[SimResult], config: SimConfig, gains: Mapping[str, Sequence[float]], file: Path) -> None:
    """Write JCT, TTFT, load times and the storage links' bandwidth over time by variant; gains by P:D if there are any.

    Args:
        results: results of the same sessions.
        config: their cluster.
        gains: by name of a cluster, seconds of each result in its order; empty: no sweep.
        file: output file.

    Raises:
        Unsupported: matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2 if not gains else 3, figsize=(11 if not gains else 16, 8))
    panels: list[Axes] = list(axes.flat)
    names = [result.variant for result in results]
    panels[0].bar(names, [result.most_done_s for result in results])
    panels[0].set(title="time until 95 % of the requests are done (simulated)", ylabel="seconds")
    panels[0].tick_params(axis="x", rotation=20)
    for result in results:
        _cdf(panels[1], result.ttfts, result.variant)
        _cdf(panels[2], result.loads, result.variant)
        times, rates = _rates(result)
        panels[3].plot(times, rates / 1e9, label=result.variant)
    panels[1].set(title="TTFT", xlabel="seconds", ylabel="share of requests")
    panels[2].set(title="time to load a request", xlabel="seconds", ylabel="share of requests")
    total = sum(host.snic for host in config.hosts) / 1e9
    panels[3].axhline(total, color="gray", linestyle=":", label="all storage links")
    panels[3].set(title="storage links together", xlabel="seconds", ylabel="GB/s")
    for panel in panels[1:4]:
        panel.legend(fontsize="small")
    if gains:
        for column, name in enumerate(names):
            panels[4].plot(range(len(gains)), [seconds[column] for seconds in gains.values()], marker="o", label=name)
        panels[4].set(
            title="the same by prefill and decode nodes", ylabel="seconds", xticks=range(len(gains)), xticklabels=list(gains)
        )
        panels[4].set_ylim(bottom=0)
        panels[4].legend(fontsize="small")
        panels[5].axis("off")
    figure.tight_layout()
    figure.savefig(file, dpi=110, format="png")
    plt.close(figure)


def _cdf(panel: Axes, values: npt.NDArray[np.float64], label: str) -> None:
    if len(values):
        panel.plot(np.sort(values), np.arange(1, len(values) + 1) / len(values), label=label)


def _rates(
    result: SimResult,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Middle of each sampling window, and bytes/s in it over all storage links."""
    if len(result.samples) < 2:
        return np.zeros(0), np.zeros(0)
    times = np.array([when for when, _ in result.samples])
    total = np.array([sum(counts) for _, counts in result.samples])
    return (times[1:] + times[:-1]) / 2, np.diff(total) / np.diff(times)
