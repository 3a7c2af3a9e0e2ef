"""A record is complete, and the table shows it correctly."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import harness
import report
import run_all
from harness import Figure, Options, Record, Reference, Target


def options(results: Path | None, mode: harness.Mode = "full") -> Options:
    return Options("sample", mode, repetitions=3, seed=7, results=results, scratch=None)


FIGURE = Figure("sample_rate", "Sample rate", {"block_bytes": 1 << 20, "verify": True}, "GB/s")


def test_interleave_alternates_the_first_runner() -> None:
    order: list[str] = []

    def contestant(name: str) -> float:
        order.append(name)
        return float(len(order))

    samples = harness.interleave({name: lambda name=name: contestant(name) for name in "abc"}, 5, warm_up=1)
    rounds = [order[i : i + 3] for i in range(0, 18, 3)]
    assert rounds[0] == ["a", "b", "c"], "some contestants need what others measured in the first round"
    assert [sorted(names) for names in rounds] == [["a", "b", "c"]] * 6
    assert len({names[0] for names in rounds}) == 3
    assert all(len(values) == 5 and min(values) > 3 for values in samples.values())


@pytest.mark.parametrize("names", ["ab", "abc", "abcd"])
def test_interleave_no_contestant_follows_one_other_alone(names: str) -> None:
    order: list[str] = []
    harness.interleave({name: lambda name=name: order.append(name) or 0.0 for name in names}, 2 * len(names), warm_up=0)
    rounds = [order[i : i + len(names)] for i in range(0, len(order), len(names))]
    after = {pair for one in rounds for pair in itertools.pairwise(one)}
    assert all((second, first) in after for first, second in after)
    assert all(sorted(place) == sorted(2 * names) for place in zip(*rounds, strict=True))


def test_ratio_is_taken_round_by_round() -> None:
    assert harness.ratio([1.0, 10.0, 100.0], [2.0, 20.0, 100.0]) == 0.5
    assert harness.ratio([4.0, 4.0], [2.0]) == 2.0


@pytest.mark.parametrize(
    ("figure", "target", "passed"),
    [
        (FIGURE, Target("peer", 0.5), True),
        (FIGURE, Target("peer", 0.51), False),
        (FIGURE, Target("limit", 0.1), None),
        (FIGURE, Target("value", 2.0), True),
        (Figure("t", "Time", {}, "ms", lower_is_better=True), Target("value", 2.0), True),
        (Figure("t", "Time", {}, "ms", lower_is_better=True), Target("value", 1.9), False),
        (FIGURE, None, None),
    ],
)
def test_record_target_decides_verdict(figure: Figure, target: Target | None, passed: bool | None) -> None:
    record = options(None).keep(figure, [1.0, 2.0, 3.0], peer=Reference("peer", [2.0, 4.0, 6.0]), target=target)
    assert record.passed is passed


def test_stolen_time_is_read_from_its_source() -> None:
    record = options(None).keep(FIGURE, [1.0, 2.0, 3.0])
    assert record.stolen is None or 0 <= record.stolen <= 1
    assert harness.stolen_share((10, 100), (16, 150)) == 0.12
    assert harness.stolen_share(None, (16, 150)) is None
    assert harness.stolen_share((10, 100), (10, 100)) is None
    for share, shown in ((0.12, True), (0.0199, False), (None, False)):
        told = dataclasses.replace(record, stolen=share)
        assert ("12% of processor time stolen by other guests" in harness.describe(told)) is shown
        assert ("12% stolen" in report.table([told])) is shown
        assert ("* stolen:" in report.circumstances([told])) is shown


def test_record_json_round_trip_keeps_host(tmp_path: Path) -> None:
    kept = options(tmp_path).keep(
        FIGURE,
        [1.0, 2.0, 4.0],
        peer=Reference("peer", [2.0, 2.0, 2.0]),
        storage=harness.storage(tmp_path, direct=True, cache="cold"),
        transport="tcp",
        io_engine="posix O_DIRECT",
        verified=True,
        notes="a note",
    )
    assert (kept.median, kept.min, kept.max, kept.spread) == (2.0, 1.0, 4.0, 1.5)
    assert kept.peer is not None
    assert kept.peer["ratio"] == 1.0
    assert kept.storage is not None
    assert kept.storage["filesystem"]
    assert kept.host["cores"]
    assert kept.versions["numpy"]
    [read] = report.read_records(tmp_path)
    assert json.loads(read.to_json()) == json.loads(kept.to_json())


def test_record_is_kept_without_git_and_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with a GPU and little else."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(harness, "_LIBRARIES", ("numpy", "no-such-library"))
    options(tmp_path).keep(FIGURE, [1.0])
    [read] = report.read_records(tmp_path)
    assert (read.commit, read.dirty, list(read.versions)) == ("", False, ["numpy"])
    assert "commit unknown" in report.circumstances([read])


def test_table_newest_full_record_is_shown(tmp_path: Path) -> None:
    for mode, value in (("full", 1.0), ("full", 2.0), ("quick", 3.0)):
        options(tmp_path, mode).keep(FIGURE, [value])  # type: ignore[arg-type]
    options(tmp_path).keep(Figure("other", "Other", {}, "ms"), [5.0])
    shown = report.newest(report.read_records(tmp_path))
    assert [(record.figure, record.median) for record in shown] == [("other", 5.0), ("sample_rate", 2.0)]


def test_table_of_a_quick_run_shows_its_records(tmp_path: Path) -> None:
    """Also beside older full records of the same figures, which the table of all records prefers."""
    before = options(tmp_path).keep(FIGURE, [1.0])
    for value in (2.0, 3.0):
        quick = options(tmp_path, "quick").keep(FIGURE, [value])
    full = dataclasses.replace(before, date="2020-01-01T00:00:00+00:00")
    assert [record.median for record in report.of_run([full, *report.read_records(tmp_path)[1:]], before.date)] == [3.0]
    assert report.of_run([full], quick.date) == []


def test_figure_without_peer_of_its_target_is_not_kept(tmp_path: Path) -> None:
    options(tmp_path).keep(FIGURE, [1.0], target=Target("peer", 0.9), notes="no fio")
    assert report.read_records(tmp_path) == []


def test_cpu_meter_counts_other_processes(tmp_path: Path) -> None:
    busy = "import sys, time\nfor line in sys.stdin:\n    while time.process_time() < float(line): pass\n    print(flush=True)"
    with subprocess.Popen([sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        meter = harness.CpuMeter(server=process.pid)
        process.stdin.write("0.5\n")

        def work() -> None:
            process.stdin.flush()  # type: ignore[union-attr]
            process.stdout.readline()  # type: ignore[union-attr]

        meter.time(2, work)
        process.stdin.close()
    cost = meter.cost("operation")
    assert cost.per == "operation"
    assert 0.05 < cost.seconds["server"] < 0.3
    assert "server" in harness.cpu_text(options(tmp_path).keep(FIGURE, [1.0], cpu=cost))


def test_every_benchmark_is_in_one_suite() -> None:
    listed = [name for suite in run_all.SUITES.values() for name in suite]
    assert len(listed) == len(set(listed))
    assert set(run_all.SCRIPTS) <= set(listed)
    assert all((run_all.HERE / f"{name}.py").is_file() for name in listed)


def test_table_shows_measured_and_missed() -> None:
    kept: list[Record] = [
        options(None).keep(FIGURE, [1.0], peer=Reference("fio", [2.0]), target=Target("peer", 0.9), verified=True),
        options(None).keep(FIGURE, [1.0], verified=False, notes="why"),
    ]
    met, alone = report.table(kept).splitlines()[2:]
    assert "1 MiB" in met
    assert "checksums verified" in met
    assert "fio: 2 → **0.5 ×**" in met
    assert "**no**" in met
    assert "unverified" in alone
    assert "Sample rate: why" in report.circumstances(kept)


README_FIGURES: list[tuple[str, str, Callable[[Record], bool]]] = [
    (
        "README.md",
        r"first token starts in (\d+ %) of the time it takes to compute it",
        lambda record: record.figure == "engine_ttft_dram_recompute" and record.parameters["tokens"] == 8192,
    ),
    (
        "docs/explanation/faq.md",
        r"95 % hit starts in (\d+ %) of the time",
        lambda record: record.figure == "engine_ttft_dram_recompute" and record.parameters["tokens"] == 8192,
    ),
    (
        "README.md",
        r"reads over both: ([\d.-]+) times the rate",
        lambda record: (
            record.figure == "netlab_rate"
            and "metadata_servers" not in record.parameters
            and (record.parameters["bed"], record.parameters["in_flight"]) == ("1P1D", 8)
            and record.parameters["policy"] in {"shorter_queue", "split"}
        ),
    ),
    (
        "README.md",
        r"and ([\d.-]+) times at 3",
        lambda record: (
            record.figure == "netlab_rate"
            and "metadata_servers" not in record.parameters
            and (record.parameters["bed"], record.parameters["in_flight"]) == ("1P1D", 3)
            and record.parameters["policy"] in {"shorter_queue", "split"}
        ),
    ),
    (
        "README.md",
        r"runs at ([\d.-]+) times the speed of one single-threaded `memcpy` between huge pages at blocks of 1 MiB and more",
        lambda record: record.figure == "dram_hit" and int(record.parameters["block_bytes"]) >= 1 << 20,
    ),
]
"""Page, pattern of a sentence with a ratio to the peer or a range of ratios, and the records that the figure follows from."""


@pytest.mark.parametrize(
    ("page", "sentence", "of"), README_FIGURES, ids=["ttft", "faq_ttft", "two_links", "two_links_few_loads", "dram_hit"]
)
def test_readme_figure_follows_from_records(page: str, sentence: str, of: Callable[[Record], bool]) -> None:
    text = " ".join((harness.REPOSITORY / page).read_text(encoding="utf-8").split())
    (written,) = re.findall(sentence, text)
    if written.endswith(" %"):
        written = f"{int(written[:-2]) / 100:.2f}"
    records = [record for record in report.newest(report.read_records(harness.RESULTS)) if of(record)]
    ratios = {
        f"{record.figure} {dict(record.parameters)}, {record.mode}, {record.date}": float(str(record.peer["ratio"]))
        for record in records
        if record.peer is not None
    }
    measured = "-".join(dict.fromkeys(f"{ratio:.2f}" for ratio in (min(ratios.values()), max(ratios.values()))))
    values = "\n".join(f"{ratio:.4f}  {name}" for name, ratio in ratios.items())
    assert written == measured, f"{page} must say {measured}; the newest records:\n{values}"


def test_missed_goals_are_explained_by_name() -> None:
    """Each row is a figure that misses its goal now, and each such figure of ``make bench`` has a row."""
    text = (harness.REPOSITORY / "docs/explanation/decisions.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| (.+?) \|", text.partition("## Goals that are not reached")[2], re.MULTILINE)) - {"figure"}
    missed = [record for record in report.page()[1] if record.passed is False]
    assert rows <= {record.title for record in missed}, "a row whose figure meets its goal, or has another name"
    default = [record for record in missed if Path(record.command.split()[1]).stem in run_all.SUITES["store"]]
    assert {record.title for record in default} <= rows, "a figure of make bench that misses its goal has no row"


def test_results_page_is_up_to_date() -> None:
    page = harness.REPOSITORY / "benchmarks" / "RESULTS.md"
    assert page.read_text(encoding="utf-8") == report.page()[0], "run: python benchmarks/report.py"


def test_summary_counts_missed_targets() -> None:
    met = options(None).keep(FIGURE, [1.0], target=Target("value", 0.5))
    missed = options(None).keep(FIGURE, [1.0], target=Target("value", 2.0))
    without_peer = options(None).keep(FIGURE, [1.0], target=Target("peer", 0.9))
    assert report.summary([met, missed, without_peer]).startswith("1 of 2 targets is missed.")
    assert report.summary([met]).startswith("0 of 1 targets are missed.")
