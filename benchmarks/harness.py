"""Shared parts of all benchmarks: interleaved measurement against a peer, and the record of each figure.

One ``Record`` holds the samples, the physical limit, the peer measured *in the same run*, the machine, the commit and the
command. Records are appended as JSON lines to ``benchmarks/results/<script>.jsonl``; ``report.py`` turns them into a table.

The speed of a machine drifts, so ``interleave`` runs all contestants once per round. Each round yields one ratio under equal
conditions, and the reported ratio is the median over the rounds. Trust ratios more than absolute values.

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
import contextlib
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

MIN_REPORTED_STEAL = 0.02
"""Share of stolen processor time from which it is reported."""
_LIBRARIES = ("grpcio", "lmdb", "numpy", "protobuf", "xxhash")


# ---- the record of a figure ----


@dataclass(frozen=True, slots=True)
class Figure:
    """Description of a measurement. ``name`` and ``parameters`` identify it; the table shows its newest record."""

    name: str
    title: str
    parameters: Mapping[str, Parameter]
    unit: str
    lower_is_better: bool = False


@dataclass(frozen=True, slots=True)
class Reference:
    """Comparison value of a figure: a peer in the same run, or a physical limit. Samples in the figure's unit."""

    name: str
    samples: Sequence[float]

    @property
    def median(self) -> float:
        """Median of all samples."""
        return statistics.median(self.samples)


@dataclass(frozen=True, slots=True)
class Target:
    """Required bound of the ratio to the peer or to the limit, or of the value itself.

    Attributes:
        of: the quantity that ``bound`` applies to.
        bound: the lowest passing value, or the highest if lower is better.
    """

    of: Literal["peer", "limit", "value"]
    bound: float


@dataclass(frozen=True, slots=True)
class CpuCost:
    """CPU seconds per unit of work, by process.

    Attributes:
        per: the unit.
        seconds: CPU seconds of all threads, user and system, by name of the process.
    """

    per: Literal["GiB", "operation", "second"]
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Storage:
    """Storage that held the measured bytes."""

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
    """None without a target."""
    transport: str
    io_engine: str
    verified: bool | None
    """Whether the measured path verified checksums. None: no bytes moved."""
    storage: Mapping[str, object] | None
    seed: int
    notes: str
    commit: str
    """Empty: not known."""
    dirty: bool
    command: str
    date: str
    host: Mapping[str, object]
    versions: Mapping[str, str]
    stolen: float | None = None
    """Share of processor time that the hypervisor gave to other guests since the script began; None: unknown."""
    cpu: Mapping[str, object] | None = None
    """A ``CpuCost``; None: not measured."""

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Parse a line of ``to_json``. Missing fields without a default raise; unknown fields are ignored."""
        names = {entry.name for entry in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in json.loads(line).items() if name in names})

    def to_json(self) -> str:
        """Serialize the record as one line."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


# ---- measurement ----


def interleave(contestants: Mapping[str, Callable[[], float]], repetitions: int, *, warm_up: int = 1) -> dict[str, list[float]]:
    """Run every contestant once per round, and return the samples of each.

    The order rotates, and after each full rotation the direction changes. So all places are equally frequent, and no contestant
    always runs after the same other one.

    Args:
        contestants: callables that measure once and return the figure (not the time, unless the figure is a time).
        repetitions: measured rounds.
        warm_up: rounds before them, whose samples are discarded.
    """
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    order = list(contestants)
    for round_number in range(-warm_up, repetitions):
        backwards = round_number > 0 and round_number // len(order) % 2  # the first of all rounds runs in the given order
        for name in reversed(order) if backwards else order:
            value = contestants[name]()
            if round_number >= 0:
                samples[name].append(value)
        order.append(order.pop(0))
    return samples


def seconds(work: Callable[[], object]) -> float:
    """Measure the wall-clock time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def gigabytes_per_second(nbytes: int, work: Callable[[], object]) -> float:
    """Measure the rate of one call that moves ``nbytes``; 1 GB = 1e9 bytes."""
    return nbytes / seconds(work) / 1e9


class CpuMeter:
    """Measures the CPU time of processes during timed calls.

    Args:
        processes: process ids by name. ``client`` is this process.
    """

    def __init__(self, **processes: int) -> None:
        # the CPU clock of another process, as clock_getcpuclockid(3) makes it
        self._clocks = {name: (~pid << 3) | 2 for name, pid in {"client": os.getpid(), **processes}.items()}
        self._seconds = dict.fromkeys(self._clocks, 0.0)
        self._units = 0.0

    def time(self, units: float, work: Callable[[], object]) -> float:
        """Run a call that does ``units`` units of work, and return its seconds."""
        before = self._read()
        elapsed_s = seconds(work)
        for name, at_s in self._read().items():
            self._seconds[name] += at_s - before[name]
        self._units += units
        return elapsed_s

    def gigabytes_per_second(self, nbytes: int, work: Callable[[], object]) -> float:
        """As the function of this name; a unit is one GiB."""
        return nbytes / self.time(nbytes / (1 << 30), work) / 1e9

    def cost(self, per: Literal["GiB", "operation"] = "GiB") -> CpuCost:
        """Return the CPU seconds per unit of all calls so far."""
        return CpuCost(per, {name: value / self._units for name, value in self._seconds.items()})

    def _read(self) -> dict[str, float]:
        return {name: time.clock_gettime(clock) for name, clock in self._clocks.items()}


def ratio(ours: Sequence[float], reference: Sequence[float]) -> float:
    """Median of the ratios per round, or the ratio of the medians if the numbers of samples differ."""
    if len(ours) == len(reference):
        return statistics.median(own / other for own, other in zip(ours, reference, strict=True))
    return statistics.median(ours) / statistics.median(reference)


# ---- machine and storage ----


def storage(path: Path, *, direct: bool, cache: str) -> Storage:
    """Find the filesystem and the device of a path.

    Args:
        path: a file or folder that exists.
        direct: whether O_DIRECT was in force.
        cache: state of the caches above the device: ``cold``, ``hot``, ``host-cached``, …
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
    """Describe the machine: CPU, cores, memory, kernel, Python."""
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
    """Read the stolen ticks and all ticks of all processors since boot; None if the system does not report them."""
    try:
        first, *ticks = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()
    except OSError:
        return None
    return (int(ticks[7]), sum(map(int, ticks[:8]))) if first == "cpu" and len(ticks) >= 8 else None


def stolen_share(before: tuple[int, int] | None, now: tuple[int, int] | None) -> float | None:
    """Share of stolen processor time between two readings; None if unknown."""
    return (now[0] - before[0]) / (now[1] - before[1]) if before and now and now[1] > before[1] else None


def _git(*arguments: str) -> str:
    """Return the output of git; empty if git is not installed, fails, or the sources were copied without their history."""
    try:
        done = subprocess.run(["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _versions() -> dict[str, str]:
    """Return the versions of the libraries that can change a figure, as far as they are installed."""
    found = {}
    for name in _LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _command() -> str:
    """Command line that repeats this run from the root of the repository."""
    program = Path(sys.argv[0]).resolve()
    shown = program.relative_to(REPOSITORY) if program.is_relative_to(REPOSITORY) else program.name
    return " ".join(["python", str(shown), *sys.argv[1:]])


def _dirty() -> bool:
    """Whether the working tree differs from the commit, apart from the results of benchmarks."""
    written = [":!benchmarks/results", ":!benchmarks/RESULTS.md"]
    return bool(_git("status", "--porcelain", "--", ".", *written))


# ---- options of a script ----


@dataclass(slots=True)
class Options:
    """Parsed command line of a benchmark, and the records of its run."""

    script: str
    mode: Mode
    repetitions: int
    seed: int
    results: Path | None
    scratch: Path | None
    records: list[Record] = field(default_factory=list)
    extra: argparse.Namespace = field(default_factory=argparse.Namespace)
    """Values of the script's own arguments."""
    ticks: tuple[int, int] | None = field(default_factory=processor_ticks)
    """Processor ticks at the start of the script."""

    def pick(self, *, full: T, quick: T, smoke: T) -> T:
        """Select a value by mode."""
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
        cpu: CpuCost | None = None,
    ) -> Record:
        """Record a figure: print one line and append the record to the results.

        If the target names a peer that was not measured in this run, nothing is appended: half a comparison is no figure.
        """
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
            versions=_versions(),
            stolen=stolen_share(self.ticks, processor_ticks()),
            cpu=dataclasses.asdict(cpu) if cpu else None,
        )
        self.records.append(record)
        if target is not None and target.of == "peer" and peer is None and self.mode != "smoke":
            print(f"{figure.name}: not recorded, because its peer is missing: {notes}", flush=True)
            return record
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
    """Format a record as one readable line."""
    parameters = " ".join(f"{name}={value}" for name, value in record.parameters.items())
    line = f"{record.figure:24} {parameters:44} {record.median:10.3f} {record.unit} (spread {record.spread:.0%})"
    if record.stolen is not None and record.stolen >= MIN_REPORTED_STEAL:
        line += f", {record.stolen:.0%} of processor time stolen by other guests"
    for against in (record.peer, record.limit):
        if against is not None:
            line += f"; {against['ratio']:.2f} of {against['name']} {against['median']:.3f}"
    if record.cpu is not None:
        line += f"; {cpu_text(record)}"
    if record.target is not None:
        sign = "<=" if record.lower_is_better else ">="
        verdict = "met" if record.passed else "NOT MET"
        line += f"; required {sign} {record.target['bound']:g} of {record.target['of']}: {verdict}"
    return line


def cpu_text(record: Record) -> str:
    """Format the CPU cost of a record: ``CPU client 0.12, node 0.05 s/GiB``; empty if it was not measured."""
    if record.cpu is None:
        return ""
    used: Mapping[str, float] = record.cpu["seconds"]  # type: ignore[assignment]
    unit, factor = ("s/GiB", 1.0) if record.cpu["per"] == "GiB" else (f"ms/{record.cpu['per']}", 1e3)
    return f"CPU {', '.join(f'{name} {value * factor:.2g}' for name, value in used.items())} {unit}"


def options(
    script: str,
    description: str | None,
    *,
    repetitions: int = 5,
    arguments: Callable[[argparse.ArgumentParser], None] | None = None,
) -> Options:
    """Parse the command line that all benchmarks share.

    Args:
        script: name of the file of results.
        description: text of ``--help``, the docstring of the script.
        repetitions: measured rounds of a full run.
        arguments: adds the script's own arguments; their values are in ``extra``.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_const", const="quick", dest="mode", help="smaller sizes and three rounds")
    size.add_argument(
        "--smoke",
        action="store_const",
        const="smoke",
        dest="mode",
        help="tiny sizes, one round, no records: checks that the benchmark runs",
    )
    parser.add_argument(
        "--repetitions", type=int, help=f"measured rounds (default {repetitions}; 3 with --quick, 1 with --smoke)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the random generators (default 1)")
    parser.add_argument("--results", type=Path, help=f"folder of the records (default {RESULTS.relative_to(REPOSITORY)})")
    parser.add_argument(
        "--scratch", type=Path, help="folder of slabs and files (default: a temporary one); the benchmark measures its filesystem"
    )
    if arguments is not None:
        arguments(parser)
    parsed = parser.parse_args()
    mode: Mode = parsed.mode or "full"
    default = {"full": repetitions, "quick": 3, "smoke": 1}[mode]
    results = parsed.results or (None if mode == "smoke" else RESULTS)
    return Options(script, mode, parsed.repetitions or default, parsed.seed, results, parsed.scratch, extra=parsed)
