"""Plots of lab runs, as PNG, each beside the JSON that it was drawn from. matplotlib is imported only when used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.core.errors import install_command


def keep(folder: Path, name: str, data: dict[str, Any]) -> None:
    """Writes ``name.json`` and, where matplotlib is installed, ``name.png``.

    Args:
        folder: where to.
        name: of both files.
        data: ``title``; ``links``: run -> link -> ``{"s": [...], "mbit": [...]}``; ``limit_mbit`` of each link; ``seconds``:
            run -> load times.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(data) + "\n", encoding="utf-8")
    try:
        import matplotlib as mpl
    except ImportError:
        print(f"no plots: matplotlib is not installed ({install_command('plots')})", flush=True)
        return
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    runs = list(data["links"])
    figure, axes = plt.subplots(1, len(runs) + 1, figsize=(5 * (len(runs) + 1), 4))
    longest = max(series["s"][-1] for links in data["links"].values() for series in links.values())
    for panel, run in zip(axes, runs, strict=False):
        for link, series in data["links"][run].items():
            panel.plot(series["s"], series["mbit"], label=link, linewidth=1)
        panel.axhline(data["limit_mbit"], color="gray", linestyle=":")
        panel.set(title=f"{run}: storage links", xlabel="seconds", ylabel="Mbit/s", xlim=(0, longest))
        panel.set_ylim(0, data["limit_mbit"] * 1.15)
        panel.legend(fontsize="small")
    for run, seconds in data["seconds"].items():
        ordered = np.sort(np.array(seconds))
        axes[-1].step(ordered, np.arange(1, len(ordered) + 1) / len(ordered), where="post", label=run)
    axes[-1].set(title="time of a load", xlabel="seconds", ylabel="share of loads", ylim=(0, 1))
    axes[-1].legend(fontsize="small")
    figure.suptitle(data["title"])
    figure.tight_layout()
    figure.savefig(folder / f"{name}.png", dpi=100, format="png", metadata={"Software": None})
    plt.close(figure)
