"""Write ``benchmarks/RESULTS.md`` from the newest record of each figure.

The record of a full run replaces that of a quick run, whatever their dates. Smoke runs are not shown.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from harness import REPOSITORY, RESULTS, TOLD_STOLEN, Parameter, Record

ORDER = (
    "dram_hit",
    "nvme_load",
    "nvme_store_durable",
    "tcp_load",
    "lookup_p50",
    "lookup_keys",
    "lookup_growth",
    "lookup_index_bytes",
    "lookup_restart",
    "put",
    "get",
)
"""Figures in the order of the table; others follow by name."""

LAB = ("netlab_", "engines_", "traffic_class_", "planner_", "scheduling_")
"""Figures of loading over two storage links, mostly on emulated hosts: a table of their own. By the beginning of their names."""
ENGINES = ("engine_", "sglang_", "router_", "transformers_")
"""Prefixes of figures of real engines, on the CPU, with the hooks."""
ELSEWHERE = ("simulate_",)
"""Figures that have a table of their own elsewhere (``simulate.md``)."""

HEAD = """# Measured

Made by `benchmarks/report.py` from the newest record of each figure in `benchmarks/results/`. A ratio is the median over rounds
in which both sides ran one after the other, on one machine.

"""


def read_records(results: Path) -> list[Record]:
    """All records below a folder, oldest first within a file."""
    return [
        Record.from_json(line)
        for path in sorted(results.glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.strip()
    ]


def _identity(record: Record) -> tuple[str, tuple[tuple[str, Parameter], ...]]:
    return record.figure, tuple(sorted(record.parameters.items()))


def newest(records: Iterable[Record]) -> list[Record]:
    """One record a figure, in the order of the table."""
    chosen: dict[object, Record] = {}
    for record in sorted(records, key=lambda entry: (entry.mode == "full", entry.date)):
        chosen[_identity(record)] = record
    rank = {name: place for place, name in enumerate(ORDER)}
    return sorted(
        chosen.values(), key=lambda record: (rank.get(record.figure, len(rank)), record.figure, _sortable(record.parameters))
    )


def _sortable(parameters: Mapping[str, Parameter]) -> list[tuple[str, float, str]]:
    return [
        (name, float(value) if isinstance(value, (int, float)) else 0.0, str(value)) for name, value in sorted(parameters.items())
    ]


def _against(reference: Mapping[str, object] | None) -> str:
    if reference is None:
        return ""
    return f"{reference['name']}: {_number(reference['median'])} → **{_number(reference['ratio'])} ×**"


def _number(value: object) -> str:
    assert isinstance(value, (int, float))
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _size(name: str, value: Parameter) -> str:
    if name.endswith("bytes") and isinstance(value, int):
        for unit, width in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
            if value >= 1 << width and value % (1 << width) == 0:
                return f"{value >> width} {unit}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _target(record: Record) -> str:
    if record.target is None:
        return ""
    bound, of = record.target["bound"], record.target["of"]
    unit = f" {record.unit}" if of == "value" else f" × {of}"
    return f"{'≤' if record.lower_is_better else '≥'} {bound:g}{unit}"


def _verdict(record: Record) -> str:
    return {True: "yes", False: "**no**", None: "" if record.target is None else "peer not here"}[record.passed]


def table(records: list[Record]) -> str:
    """Markdown, one row a record."""
    rows = ["| figure | parameters | median (min … max) | peer | limit | asked | met |", "|---|---|---|---|---|---|---|"]
    for record in records:
        parameters = ", ".join(
            f"{name.removesuffix('_bytes').replace('_', ' ')} {_size(name, value)}" for name, value in record.parameters.items()
        )
        checked = {True: ", checksums verified", False: ", unverified", None: ""}[record.verified]
        value = f"{_number(record.median)} {record.unit} ({_number(record.min)} … {_number(record.max)})"
        if record.stolen is not None and record.stolen >= TOLD_STOLEN:
            value += f", {record.stolen:.0%} stolen"
        row = (
            record.title,
            parameters + checked,
            value,
            _against(record.peer),
            _against(record.limit),
            _target(record),
            _verdict(record),
        )
        rows.append("| " + " | ".join(row) + " |")
    return "\n".join(rows) + "\n"


def circumstances(records: list[Record]) -> str:
    """Where and how the shown records were made: one line a distinct circumstance."""
    lines = []
    for host in {str(record.host): record.host for record in records}.values():
        memory = float(str(host["memory_bytes"])) / (1 << 30)
        lines.append(
            f"* machine: {host['cores']} × {host['cpu']}, {memory:.0f} GiB, Linux {host['kernel']}, Python {host['python']}"
        )
    places = {str(record.storage): record.storage for record in records if record.storage}.values()
    for place in places:
        direct = "O_DIRECT" if place["direct"] else "buffered"
        lines += [f"* storage: {place['filesystem']} on {place['device']}, {direct}, cache {place['cache']}"]
    for commit, dirty, date in sorted({(record.commit[:12], record.dirty, record.date[:10]) for record in records}):
        lines.append(f"* commit {commit}{' with uncommitted changes' if dirty else ''}, {date}")
    if any(record.mode == "quick" for record in records):
        lines.append("* some rows come from a `--quick` run: smaller sizes, three rounds")
    if any(record.stolen is not None and record.stolen >= TOLD_STOLEN for record in records):
        lines.append("* stolen: the share of the machine's time that its host gave to other guests meanwhile")
    lines += [f"* {record.title}: {record.notes}" for record in records if record.notes]
    return "\n".join(dict.fromkeys(lines)) + "\n"


def write() -> list[Record]:
    """Write all tables. Returns the records shown."""
    records = [
        record for record in newest(read_records(RESULTS)) if record.mode != "smoke" and not record.figure.startswith(ELSEWHERE)
    ]
    lab = [record for record in records if record.figure.startswith(LAB)]
    engines = [record for record in records if record.figure.startswith(ENGINES)]
    store = [record for record in records if not record.figure.startswith(LAB + ENGINES)]
    titled = {"The store": store, "Two storage links": lab, "Engines on the CPU": engines}
    text = "\n".join(f"## {title}\n\n{table(some)}\n{circumstances(some)}" for title, some in titled.items() if some)
    (REPOSITORY / "benchmarks" / "RESULTS.md").write_text(HEAD + text, encoding="utf-8")
    return records


def main() -> None:
    """Command line; exits 1 where a shown figure misses its target and ``--strict`` is given."""
    missed = [record for record in write() if record.passed is False]
    for record in missed:
        print(f"not met: {record.title} {dict(record.parameters)}")
    if missed and "--strict" in sys.argv[1:]:
        sys.exit(1)


if __name__ == "__main__":
    main()
