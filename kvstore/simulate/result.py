"""Results of a run: latencies, throughput, and the balance of the links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.dualpath.groups import EngineKind
from kvstore.roofline.utilization import Utilization
from kvstore.simulate.cluster import SimConfig
from kvstore.simulate.engines.job import Job
from kvstore.simulate.network.event_loop import EventLoop

PERCENTILES = (50, 90, 99)
DONE_SHARE = 0.95
"""Requests whose end is the end of a run for throughput: the last ones are the tail of the longest sessions."""
_BUSY_SHARE = 0.5
"""A sampling window counts for the balance if the links together carry at least this share of the run's busiest window."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes per host, samples of (time, SNIC bytes so far per host), and (FLOP, HBM bytes) of each role."""

    snic_bytes: list[float]
    cnic_out_bytes: list[float]
    cnic_in_bytes: list[float]
    dram_bytes: list[float]
    samples: list[tuple[float, list[float]]]
    prefill_busy_s: float
    decode_busy_s: float
    prefill_work: tuple[float, float]
    decode_work: tuple[float, float]
    written_bytes: list[float]


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds: the mean, and percentiles by name. NaN without measurements."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class SimResult:
    """Result of a run.

    Attributes:
        variant: enabled parts.
        requests: number of requests; ``finished`` of them.
        seconds: simulated time: the job completion time of an offline batch.
        most_done_s: time at which 95 % (``DONE_SHARE``) of the finished requests were done, without the longest sessions.
        ttft: from a request's arrival to its first token.
        ttst: from the first to the second token.
        tpot: time per token after the second.
        load: from pairing until the prefill engine has the last byte of KV, for requests that read from storage.
        sessions_s: from a session's first request to its last token.
        read_bytes: planned bytes read from storage.
        snic_bytes: over each host's storage link, in the order of hosts.
        snic_use: of all storage links together, over the run.
        snic_balance: max/avg bytes of storage links in a window, mean over busy windows; only of prefill hosts if only they may
            read.
        cnic_use: the busiest direction of any host's compute links.
        dram_use: the busiest host's memory.
        prefill_use, decode_use: share of time in which engines computed.
        written_bytes: KV of new and generated tokens written to storage, in the order of hosts.
        prefill_gpus, decode_gpus: how well the GPUs of each role were used over the run.
        events: number of simulated events.
        arrivals, first_tokens, tpots: by finished request, for windows and plots.
        loads: load times of requests that read from storage.
        samples: (time, SNIC bytes so far per host).
    """

    variant: str
    requests: int
    finished: int
    seconds: float
    most_done_s: float
    ttft: Latency
    ttst: Latency
    tpot: Latency
    load: Latency
    sessions_s: float
    read_bytes: float
    snic_bytes: list[float]
    snic_use: float
    snic_balance: float
    cnic_use: float
    dram_use: float
    prefill_use: float
    decode_use: float
    written_bytes: list[float]
    prefill_gpus: Utilization
    decode_gpus: Utilization
    events: int
    arrivals: npt.NDArray[np.float64]
    ttfts: npt.NDArray[np.float64]
    tpots: npt.NDArray[np.float64]
    loads: npt.NDArray[np.float64]
    samples: list[tuple[float, list[float]]]

    @property
    def read_rate(self) -> float:
        """Bytes/s read from storage over the whole run."""
        return sum(self.snic_bytes) / self.seconds if self.seconds else 0.0

    @property
    def requests_per_s(self) -> float:
        """Requests per second until most were done, without the tail of the longest sessions."""
        return DONE_SHARE * self.finished / self.most_done_s

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain values, without the arrays for plots."""
        plain: tuple[str, ...] = (
            "variant",
            "requests",
            "finished",
            "seconds",
            "most_done_s",
            "sessions_s",
            "read_bytes",
            "snic_use",
            "snic_balance",
        )
        plain += ("cnic_use", "dram_use", "prefill_use", "decode_use", "events", "snic_bytes", "written_bytes")
        out: dict[str, Any] = {name: getattr(self, name) for name in plain}
        for name in ("ttft", "ttst", "tpot", "load"):
            latency: Latency = getattr(self, name)
            out[name] = {key: _finite(getattr(latency, key)) for key in ("mean", "p50", "p90", "p99")}
        out["read_rate"] = self.read_rate
        out["prefill_gpus"], out["decode_gpus"] = self.prefill_gpus.to_json(), self.decode_gpus.to_json()
        return {key: _finite(value) if isinstance(value, float) else value for key, value in out.items()}


def collect(config: SimConfig, jobs: Sequence[Job], traffic: Traffic, loop: EventLoop, total: int) -> SimResult:
    """Compute the result of a run from its records."""
    done = [job for job in jobs if not math.isnan(job.finished)]
    arrivals = np.array([job.arrived for job in done], dtype=np.float64)
    first = np.array([job.first_token for job in done], dtype=np.float64)
    second = np.array([job.second_token for job in done], dtype=np.float64)
    ended = np.array([job.finished for job in done], dtype=np.float64)
    later = np.array([max(0, job.turn.out - 2) for job in done], dtype=np.float64)
    tpots = np.where(later > 0, (ended - second) / np.maximum(later, 1), np.nan)
    loads = np.array([job.loaded - job.paired for job in jobs if job.read_bytes and not math.isnan(job.loaded)], dtype=np.float64)
    seconds = float(ended.max()) if len(ended) and len(done) == total else loop.now
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    for job in done:
        starts[job.session] = min(job.arrived, starts.get(job.session, math.inf))
        ends[job.session] = max(job.finished, ends.get(job.session, 0.0))
    whole = [ends[session] - starts[session] for session in starts]
    per_second = seconds or math.inf
    cnic = [host.cnic * host.cnics for host in config.hosts]
    both = [max(pair) for pair in zip(traffic.cnic_out_bytes, traffic.cnic_in_bytes, strict=True)]
    return SimResult(
        variant=config.variant.name,
        requests=total,
        finished=len(done),
        seconds=seconds,
        most_done_s=float(np.percentile(ended, 100 * DONE_SHARE)) if len(ended) else math.nan,
        ttft=_latency(first - arrivals),
        ttst=_latency(second - first),
        tpot=_latency(tpots),
        load=_latency(loads),
        sessions_s=float(np.mean(whole)) if whole else math.nan,
        read_bytes=sum(job.read_bytes for job in jobs),
        snic_bytes=traffic.snic_bytes,
        snic_use=sum(traffic.snic_bytes) / sum(host.snic for host in config.hosts) / per_second,
        snic_balance=balance(traffic.samples, _readers(config)),
        cnic_use=max(used / rate for used, rate in zip(both, cnic, strict=True)) / per_second,
        dram_use=max(used / host.dram for used, host in zip(traffic.dram_bytes, config.hosts, strict=True)) / per_second,
        prefill_use=traffic.prefill_busy_s / per_second,
        decode_use=traffic.decode_busy_s / per_second,
        written_bytes=traffic.written_bytes,
        prefill_gpus=_utilization(config, EngineKind.PREFILL, traffic.prefill_work, seconds),
        decode_gpus=_utilization(config, EngineKind.DECODE, traffic.decode_work, seconds),
        events=loop.events,
        arrivals=arrivals,
        ttfts=first - arrivals,
        tpots=tpots,
        loads=loads,
        samples=traffic.samples,
    )


def _utilization(config: SimConfig, role: EngineKind, work: tuple[float, float], seconds: float) -> Utilization:
    """Compare the work of a role with its GPUs; the time is that of the engines, without dilation."""
    engine = config.prefill if role is EngineKind.PREFILL else config.decode
    gpus = sum(host.engines for host in config.of(role)) * engine.tensor_parallel
    return Utilization(engine.gpu, gpus, engine.model.weight_bytes, *work, seconds / engine.scale.dilation)


def balance(samples: Sequence[tuple[float, Sequence[float]]], readers: Sequence[int]) -> float:
    """Mean over busy windows of max/avg bytes of the readers' links; NaN without a window."""
    if len(samples) < 3:
        return math.nan
    bytes_of = np.diff(np.array([[counts[reader] for reader in readers] for _, counts in samples]), axis=0)
    together = bytes_of.sum(axis=1)
    busy = together >= _BUSY_SHARE * together.max()
    if not together.max():
        return math.nan
    return float(np.mean(bytes_of[busy].max(axis=1) / bytes_of[busy].mean(axis=1)))


def _readers(config: SimConfig) -> list[int]:
    only_prefill = config.variant.path == "prefill_only"
    return [index for index, host in enumerate(config.hosts) if not only_prefill or host.role.value == "prefill"]


def _latency(values: npt.NDArray[np.float64]) -> Latency:
    known = values[~np.isnan(values)]
    if not len(known):
        return Latency(math.nan, math.nan, math.nan, math.nan)
    p50, p90, p99 = (float(value) for value in np.percentile(known, PERCENTILES))
    return Latency(float(known.mean()), p50, p90, p99)


def _finite(value: float) -> float | None:
    """Replace NaN, which JSON does not support, by None."""
    return value if math.isfinite(value) else None
