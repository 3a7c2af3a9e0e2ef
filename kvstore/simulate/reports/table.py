"""Results for people, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from kvstore.dualpath.groups import EngineKind
from kvstore.dualpath.pd_ratio import Bed, judge
from kvstore.simulate.capacity import TPOT_S, TTFT_S, Capacity
from kvstore.simulate.cluster import SimConfig
from kvstore.simulate.result import SimResult


def bound_sentence(config: SimConfig) -> str:
    """Describe the bound of equation 9 of the DualPath paper for a cluster of equal nodes, and the limit of its storage."""
    verdict = judge(bed_of(config))
    hosts = config.of(EngineKind.PREFILL)
    prefill, every = (sum(host.snic for host in some) for some in (hosts, config.hosts))
    if config.storage >= every:
        return verdict.sentence
    name = f"{len(hosts)}P{len(config.hosts) - len(hosts)}D"
    limit = config.storage / min(config.storage, prefill)
    short = (
        f"{name}: the storage servers send at most {config.storage / 1e9:g} GB/s, less than the {every / 1e9:g} GB/s of all "
        f"storage links, so loads can be at most {limit:.2f} times as fast as over the prefill nodes alone."
    )
    return short if verdict.free else f"{short} {verdict.sentence}"


def bed_of(config: SimConfig) -> Bed:
    """The cluster in terms of equation 9 of the DualPath paper: its first prefill host represents all."""
    host = config.of(EngineKind.PREFILL)[0]
    links = host.cnics if host.cnics > 1 else host.engines
    return Bed(
        len(config.of(EngineKind.PREFILL)),
        len(config.of(EngineKind.DECODE)),
        links,
        host.cnic * host.cnics / links,
        host.snic,
        host.dram,
    )


def print_results(results: Sequence[SimResult], every: int, title: str, console: Console) -> None:
    """Print one row per variant.

    Gains are relative to the first variant, by the time until 95 % is done: the rest is the longest sessions.
    """
    times = _table(title, ("variant", "95 % done s", "all s", "gain", "TTFT s", "p99", "TTST s", "TPOT ms"))
    links = _table("storage and load", ("variant", "load s", "storage GB/s", "SNIC max/avg", "SNIC", "CNIC", "prefill", "decode"))
    for result in results:
        times.add_row(
            result.variant,
            f"{result.most_done_s * every:,.0f}",
            f"{result.seconds * every:,.0f}",
            f"{results[0].most_done_s / result.most_done_s:.2f}x",
            f"{result.ttft.mean:.2f}",
            f"{result.ttft.p99:.2f}",
            f"{result.ttst.mean:.3f}",
            f"{result.tpot.mean * 1000:.1f}",
        )
        links.add_row(
            result.variant,
            "" if math.isnan(result.load.mean) else f"{result.load.mean:.2f}",
            f"{result.read_rate / 1e9:.1f}",
            "" if math.isnan(result.snic_balance) else f"{result.snic_balance:.2f}",
            *(f"{use:.0%}" for use in (result.snic_use, result.cnic_use, result.prefill_use, result.decode_use)),
        )
    console.print(times)
    console.print(links)
    console.print(_gpu_table(results))
    console.print(
        "SNIC, CNIC, prefill, decode: how busy they are. MFU, MBU: share of peak FLOP/s and HBM bandwidth over the run; "
        "FLOP/B below the ridge point: memory is the limit.",
        style="dim",
    )


def _gpu_table(results: Sequence[SimResult]) -> Table:
    """How well each role's GPUs are used."""
    table = _table("GPUs", ("variant", "role", "GPUs", "MFU", "MBU", "FLOP/B", "ridge", "limit"))
    for result in results:
        for role, used in (("prefill", result.prefill_gpus), ("decode", result.decode_gpus)):
            known = not math.isnan(used.intensity)
            table.add_row(
                result.variant if role == "prefill" else "",
                role,
                f"{used.gpus} {used.gpu.name}",
                f"{used.mfu:.0%}",
                f"{used.mbu:.0%}",
                f"{used.intensity:,.0f}" if known else "",
                f"{used.ridge:,.0f}",
                used.bound if known else "",
            )
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    """Names to the left, numbers to the right; narrow enough for a terminal of 80 columns."""
    table = Table(title=title)
    for name in columns:
        table.add_column(name, justify="left" if name == "variant" else "right", no_wrap=name == "variant")
    return table


def print_sweep(clusters: Mapping[str, Sequence[SimResult]], nodes: Mapping[str, int], every: int, console: Console) -> None:
    """Print one row per P:D; ``nodes`` is its cost."""
    first = next(iter(clusters.values()))
    table = Table(title="prefill:decode nodes (95 % done s); gain and requests/s per node: best policy without the oracle")
    table.add_column("cluster")
    for result in first:
        table.add_column(result.variant, justify="right")
    table.add_column("gain", justify="right")
    table.add_column("per node", justify="right")
    each = {name: max(result.requests_per_s for result in _real(results)) / nodes[name] for name, results in clusters.items()}
    best = max(each, key=each.__getitem__)
    for name, results in clusters.items():
        cells = [f"{result.most_done_s * every:,.0f}" for result in results]
        gain = max(result.requests_per_s for result in _real(results)) / results[0].requests_per_s
        table.add_row(name, *cells, f"{gain:.2f}x", f"{each[name]:.2f}{'  <- best' if name == best else ''}")
    console.print(table)


def _real(results: Sequence[SimResult]) -> list[SimResult]:
    """Without the oracle, unless it is alone."""
    return [result for result in results if result.variant != "oracle"] or list(results)


def print_capacity(found: Sequence[Capacity], console: Console) -> None:
    """Print one row per variant."""
    table = Table(title=f"agents/s within mean TTFT {TTFT_S:g} s and mean TPOT {TPOT_S * 1000:g} ms")
    for name in ("variant", "agents/s", "gain", "TTFT s", "TTST s", "TPOT ms"):
        table.add_column(name, justify="left" if name == "variant" else "right")
    for capacity in found:
        at = next((point for point in reversed(capacity.points) if point.kept), None)
        gain = f"{capacity.agents_s / found[0].agents_s:.2f}x" if found[0].agents_s else ""
        shown = (f"{at.ttft_s:.2f}", f"{at.ttst_s:.3f}", f"{at.tpot_s * 1000:.1f}") if at is not None else ("", "", "")
        table.add_row(capacity.variant, f"{capacity.agents_s:.3f}", gain, *shown)
    console.print(table)


def sweep_json(clusters: Mapping[str, Sequence[SimResult]]) -> dict[str, Any]:
    """Seconds until 95 % of the requests are done, by cluster and variant."""
    return {name: {result.variant: result.most_done_s for result in results} for name, results in clusters.items()}
