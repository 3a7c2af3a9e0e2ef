"""What every benchmark shares: repetition side by side with its peer, and a record of each figure.

A number without its record does not exist. One ``Record`` says what was measured, how often, against which physical limit
and which peer *in the same run*, on what machine, from which commit and by which command; records are appended as JSON lines to
``benchmarks/results/<script>.jsonl`` and ``report.py`` makes the table of them.

Machines drift, and neighbours make them drift faster: ``interleave`` runs all contestants once a round, so that each round
gives one ratio under equal conditions, and what is reported is the median of those ratios. Believe ratios, not absolutes.

A script looks like this::

    options = harness.options("nvme", __doc__)
    samples = harness.interleave({"ours": read_ours, "fio": read_fio}, options.repetitions)
    options.keep(
        Figure("nvme_load", "NVMe load, cold", {"block_bytes": 1 << 20}, "GB/s"),
        samples["ours"],
        peer=Reference("fio", samples["fio"]),
        target=Target("peer", 0.9),
        storage=harness.storage(path, direct=True, cache="cold"),
    )
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal, Self, TypeVar

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results"

T = TypeVar("T")
Mode = Literal["full", "quick", "smoke"]
Parameter = str | int | float | bool

TOLD_STOLEN = 0.02
"""A machine of which less was stolen counts as ours alone."""
_LIBRARIES = ("grpcio", "lmdb", "numpy", "protobuf", "xxhash")


# ---- what a record says ----


@dataclass(frozen=True, slots=True)
class Figure:
    """What was measured. ``name`` and ``parameters`` tell figures apart; the newest record of each makes the table."""

    name: str
    title: str
    parameters: Mapping[str, Parameter]
    unit: str
    lower_is_better: bool = False


@dataclass(frozen=True, slots=True)
class Reference:
    """What a figure is held against: a peer in the same run, or a physical limit. Samples in the figure's unit."""

    name: str
    samples: Sequence[float]

    @property
    def median(self) -> float:
        """Of all samples."""
        return statistics.median(self.samples)


@dataclass(frozen=True, slots=True)
class Target:
    """What was asked for: a bound of the ratio to the peer or the limit, or of the value itself.

    Attributes:
        of: what ``bound`` speaks of.
        bound: the least that passes, or, where lower is better, the most.
    """

    of: Literal["peer", "limit", "value"]
    bound: float


@dataclass(frozen=True, slots=True)
class Storage:
    """Where bytes lay."""

    path: str
    filesystem: str
    device: str
    direct: bool
    cache: str


@dataclass(frozen=True, slots=True)
class Record:
    """One measured figure with everything that is needed to judge or repeat it."""

    figure: str
    title: str
    parameters: Mapping[str, Parameter]
    unit: str
    lower_is_better: bool
    mode: Mode
    samples: Sequence[float]
    median: float
    min: float
    max: float
    spread: float
    """(max - min) / median of our samples."""
    limit: Mapping[str, object] | None
    peer: Mapping[str, object] | None
    target: Mapping[str, object] | None
    passed: bool | None
    """None where there was no target, or its peer is not on this machine."""
    transport: str
    io_engine: str
    verified: bool | None
    """Were checksums of the bytes verified on the way? None: no bytes moved."""
    storage: Mapping[str, object] | None
    seed: int
    notes: str
    commit: str
    dirty: bool
    command: str
    date: str
    host: Mapping[str, object]
    versions: Mapping[str, str]
    stolen: float | None = None
    """Share of the processors' time that the hypervisor gave to other guests since the script began; None: not told."""

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Reads what ``to_json`` wrote; fields that it lacks are an error, fields it has too many are ignored."""
        names = {entry.name for entry in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in json.loads(line).items() if name in names})

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


# ---- measuring ----


def interleave(contestants: Mapping[str, Callable[[], float]], repetitions: int, *, warm_up: int = 1) -> dict[str, list[float]]:
    """Runs every contestant once a round, in turning order, and returns the samples of each.

    Args:
        contestants: each call measures once and returns the figure (not the time, unless that is the figure).
        repetitions: rounds that count.
        warm_up: rounds before them that do not.
    """
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    order = list(contestants)
    for round_number in range(-warm_up, repetitions):
        for name in order:
            value = contestants[name]()
            if round_number >= 0:
                samples[name].append(value)
        order.append(order.pop(0))  # nobody always runs right after the same neighbour
    return samples


def seconds(work: Callable[[], object]) -> float:
    """Wall-clock time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def gigabytes_per_second(nbytes: int, work: Callable[[], object]) -> float:
    """Rate of one call that moves ``nbytes``; 1 GB = 1e9 bytes."""
    return nbytes / seconds(work) / 1e9


def ratio(ours: Sequence[float], reference: Sequence[float]) -> float:
    """Ours to theirs: the median of the rounds' ratios, or, where the numbers of samples differ, the ratio of medians."""
    if len(ours) == len(reference):
        return statistics.median(mine / theirs for mine, theirs in zip(ours, reference, strict=True))
    return statistics.median(ours) / statistics.median(reference)


# ---- where it was measured ----


def storage(path: Path, *, direct: bool, cache: str) -> Storage:
    """Filesystem and device below a path, as mounted.

    Args:
        path: a file or folder that exists.
        direct: was O_DIRECT really in force?
        cache: state of whatever caches lie above the device: ``cold``, ``hot``, ``host-cached``, …
    """
    mounts = []
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        left, right = line.split(" - ")
        mounts.append((left.split()[4], *right.split()[:2]))
    resolved = path.resolve()
    mount, filesystem, device = max(
        (entry for entry in mounts if resolved.is_relative_to(entry[0])), key=lambda entry: len(entry[0])
    )
    return Storage(str(mount), filesystem, device, direct, cache)


@functools.cache
def host() -> dict[str, object]:
    """The machine: CPU, cores, memory, kernel, Python."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if "model name" in line
        ),
        "unknown",
    )
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def processor_ticks() -> tuple[int, int] | None:
    """Of all processors since the start of the system: ticks that were stolen, and all."""
    try:
        first, *ticks = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()
    except OSError:
        return None
    return (int(ticks[7]), sum(map(int, ticks[:8]))) if first == "cpu" and len(ticks) >= 8 else None


def stolen_share(before: tuple[int, int] | None, now: tuple[int, int] | None) -> float | None:
    """Of the time between two looks."""
    return (now[0] - before[0]) / (now[1] - before[1]) if before and now and now[1] > before[1] else None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _command() -> str:
    """How to run it again, from the root of the repository."""
    program = Path(sys.argv[0]).resolve()
    shown = program.relative_to(REPOSITORY) if program.is_relative_to(REPOSITORY) else program.name
    return " ".join(["python", str(shown), *sys.argv[1:]])


def _dirty() -> bool:
    """Does the working tree differ from the commit? What the benchmarks write themselves does not count."""
    written = [":!benchmarks/results", ":!benchmarks/RESULTS.md"]
    return bool(_git("status", "--porcelain", "--", ".", *written))


# ---- one script's run ----


@dataclass(slots=True)
class Options:
    """What the command line of a benchmark says, and where its records go."""

    script: str
    mode: Mode
    repetitions: int
    seed: int
    results: Path | None
    scratch: Path | None
    records: list[Record] = field(default_factory=list)
    extra: argparse.Namespace = field(default_factory=argparse.Namespace)
    """What the script's own arguments say."""
    ticks: tuple[int, int] | None = field(default_factory=processor_ticks)
    """When it began."""

    def pick(self, *, full: T, quick: T, smoke: T) -> T:
        """A size by mode."""
        return {"full": full, "quick": quick, "smoke": smoke}[self.mode]

    def keep(
        self,
        figure: Figure,
        samples: Sequence[float],
        *,
        limit: Reference | None = None,
        peer: Reference | None = None,
        target: Target | None = None,
        storage: Storage | None = None,
        transport: str = "",
        io_engine: str = "",
        verified: bool | None = None,
        notes: str = "",
    ) -> Record:
        """Makes the record of a figure, prints its line and appends it to the results."""
        median = statistics.median(samples)
        ratios = {
            name: ratio(samples, against.samples) for name, against in (("limit", limit), ("peer", peer)) if against is not None
        }
        passed: bool | None = None
        if target is not None and (value := median if target.of == "value" else ratios.get(target.of)) is not None:
            passed = value <= target.bound if figure.lower_is_better else value >= target.bound
        record = Record(
            figure=figure.name,
            title=figure.title,
            parameters=dict(figure.parameters),
            unit=figure.unit,
            lower_is_better=figure.lower_is_better,
            mode=self.mode,
            samples=list(samples),
            median=median,
            min=min(samples),
            max=max(samples),
            spread=(max(samples) - min(samples)) / median if median else 0.0,
            limit=_reference(limit, ratios.get("limit")),
            peer=_reference(peer, ratios.get("peer")),
            target=dataclasses.asdict(target) if target else None,
            passed=passed,
            transport=transport,
            io_engine=io_engine,
            verified=verified,
            storage=dataclasses.asdict(storage) if storage else None,
            seed=self.seed,
            notes=notes,
            commit=_git("rev-parse", "HEAD"),
            dirty=_dirty(),
            command=_command(),
            date=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            host=host(),
            versions={name: metadata.version(name) for name in _LIBRARIES},
            stolen=stolen_share(self.ticks, processor_ticks()),
        )
        self.records.append(record)
        if self.results is not None:
            self.results.mkdir(parents=True, exist_ok=True)
            with (self.results / f"{self.script}.jsonl").open("a", encoding="utf-8") as file:
                file.write(record.to_json() + "\n")
        print(describe(record), flush=True)
        return record


def _reference(reference: Reference | None, measured_ratio: float | None) -> dict[str, object] | None:
    if reference is None:
        return None
    return {"name": reference.name, "samples": list(reference.samples), "median": reference.median, "ratio": measured_ratio}


def describe(record: Record) -> str:
    """One line for a person."""
    parameters = " ".join(f"{name}={value}" for name, value in record.parameters.items())
    line = f"{record.figure:24} {parameters:44} {record.median:10.3f} {record.unit} (spread {record.spread:.0%})"
    if record.stolen is not None and record.stolen >= TOLD_STOLEN:
        line += f", {record.stolen:.0%} of the machine's time stolen by others"
    for against in (record.peer, record.limit):
        if against is not None:
            line += f"; {against['ratio']:.2f} of {against['name']} {against['median']:.3f}"
    if record.target is not None:
        sign = "<=" if record.lower_is_better else ">="
        verdict = {True: "met", False: "NOT MET", None: "not measured"}[record.passed]
        line += f"; wanted {sign} {record.target['bound']:g} of {record.target['of']}: {verdict}"
    return line


def options(
    script: str,
    description: str | None,
    *,
    repetitions: int = 5,
    arguments: Callable[[argparse.ArgumentParser], None] | None = None,
) -> Options:
    """Parses the command line that all benchmarks share.

    Args:
        script: names the file of results.
        description: shown by ``--help``: the module's docstring.
        repetitions: rounds that count in a full run.
        arguments: adds the script's own; their values are in ``extra``.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--quick", action="store_const", const="quick", dest="mode", help="smaller sizes, three rounds: a short look"
    )
    size.add_argument(
        "--smoke",
        action="store_const",
        const="smoke",
        dest="mode",
        help="tiny and once: only shows that the benchmark runs; keeps no record",
    )
    parser.add_argument(
        "--repetitions", type=int, help=f"rounds that count (default {repetitions}; 3 with --quick, 1 with --smoke)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of everything drawn at random (default 1)")
    parser.add_argument(
        "--results", type=Path, help=f"folder that records are appended to (default {RESULTS.relative_to(REPOSITORY)})"
    )
    parser.add_argument(
        "--scratch", type=Path, help="folder for slabs and files (default: a temporary one); its filesystem is what is measured"
    )
    if arguments is not None:
        arguments(parser)
    parsed = parser.parse_args()
    mode: Mode = parsed.mode or "full"
    default = {"full": repetitions, "quick": 3, "smoke": 1}[mode]
    results = parsed.results or (None if mode == "smoke" else RESULTS)
    return Options(script, mode, parsed.repetitions or default, parsed.seed, results, parsed.scratch, extra=parsed)
