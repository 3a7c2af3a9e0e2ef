"""Plot of the simulator against the paper, drawn from the newest record of each row: ``results/simulate_paper.png``."""

from __future__ import annotations

from pathlib import Path

from harness import RESULTS, Record

_PREFIX = "Simulated: "
_NAMED = ("ablation", "balance", "append", "online")
"""Kinds of rows whose titles need the heading of their table."""


def plot(records: Path, file: Path) -> None:
    """Plot simulated over published values by row. Does nothing if matplotlib is not installed.

    Args:
        records: records of ``simulate_paper.py``, JSON lines.
        file: image to write.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        return
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    newest: dict[str, tuple[str, float]] = {}
    for line in records.read_text(encoding="utf-8").splitlines():
        record = Record.from_json(line)
        ratio = record.peer["ratio"] if record.peer is not None else None
        if record.mode == "full" and isinstance(ratio, float):
            kind = record.figure.split("_")[1]
            title = record.title.removeprefix(_PREFIX)
            newest[record.figure] = f"{kind}: {title}" if kind in _NAMED else title, ratio
    names, ratios = zip(*reversed(newest.values()), strict=True)
    figure, axes = plt.subplots(figsize=(9, 0.28 * len(names) + 1))
    axes.barh(range(len(names)), [ratio - 1 for ratio in ratios], left=1.0)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(range(len(names)), names, fontsize="small")
    axes.set(xlabel="simulated / paper", title="The simulator against the DualPath paper", xlim=(0, 2))
    axes.grid(axis="x", linestyle=":")
    figure.tight_layout()
    figure.savefig(file, dpi=100, metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    plot(RESULTS / "simulate_paper.jsonl", RESULTS / "simulate_paper.png")
