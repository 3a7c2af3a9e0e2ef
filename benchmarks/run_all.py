"""Run benchmarks one after the other, print the table of this run, and write the table of all records.

Without arguments, the suite ``store`` runs: the figures of the README, within 15 minutes on two cores. ``--suite NAME …`` selects
others, ``--only NAME …`` single scripts. Other arguments (``--quick``, ``--repetitions``) are passed to the scripts. The exit
status is 1 if a script fails. A missed target is reported but is not an error, because a slow machine can cause it.
"""

from __future__ import annotations

import argparse
import ast
import datetime as dt
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import report
from harness import RESULTS

HERE = Path(__file__).resolve().parent
NOT_A_BENCHMARK = {"harness", "report", "run_all", "simulate_parts", "simulate_plot", "engine_child"}


def _needs_engine(script: str) -> bool:
    """Whether a script requires an inference engine. Such scripts are skipped if none is installed."""
    return script.startswith("engine_") or script.endswith("_vllm")


SCRIPTS = sorted(
    path.stem
    for path in HERE.glob("*.py")
    if path.stem not in NOT_A_BENCHMARK
    and not path.stem.startswith("gpu_")  # `make bench-gpu`
    and not (_needs_engine(path.stem) and find_spec("transformers") is None)
)
"""Scripts to run, one at a time so that they do not disturb each other."""


SUITES: dict[str, tuple[str, ...]] = {
    "store": ("dram_hit", "tcp_load", "put_get", "nvme_client", "lookup"),
    "parts": (
        "data_plane", "device_copies", "device_pipeline", "dram_copy", "forwarding", "gds_read", "hbm_pool", "interpreter_wait",
        "load_choice",
        "lookup_growth", "micro_index", "nixl_transport", "node_memory", "nvme", "observe_cost", "planner", "rest_cost",
        "scheduling", "read_ahead", "sharded_index", "small_loads", "verified_cpu",
    ),
    "engines": (
        "engine_lmcache", "engine_load_choice", "engine_overhead", "engine_router_sessions", "engine_sglang",
        "engine_transformers", "engine_ttft",
    ),
    "model": ("engine_int8",),
    "netlab": ("netlab_engines", "netlab_loads", "netlab_traffic_class", "netlab_vllm"),
    "scale": ("audit_cost", "hints", "large_index", "server_rest", "server_scaling", "shard_loss"),
    "simulate": ("simulate_lab", "simulate_paper", "simulate_split"),
}  # fmt: skip
"""Scripts by suite. Each script is in one."""


def _summary(script: Path) -> str:
    """First line of a script's docstring."""
    return (ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "").split("\n", 1)[0]


def main() -> None:
    """Run the selected scripts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen_by = parser.add_mutually_exclusive_group()
    chosen_by.add_argument("--only", nargs="+", choices=SCRIPTS, metavar="NAME", help=f"of {', '.join(SCRIPTS)}")
    chosen_by.add_argument("--suite", nargs="+", choices=SUITES, default=["store"], help="default: store")
    parser.add_argument("--results", type=Path, help="folder of the records")
    parser.add_argument("--list", action="store_true", help="print the names and summaries of the scripts and exit")
    chosen, passed_on = parser.parse_known_args()
    if chosen.list:
        for name in SCRIPTS:
            print(f"{name}\t{_summary(HERE / f'{name}.py')}")
        return
    scripts = chosen.only or [name for suite in chosen.suite for name in SUITES[suite] if name in SCRIPTS]
    passed_on += ["--results", str(chosen.results)] if chosen.results else []
    began = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    if shutil.which("fio") is None:
        print("WARNING: fio is not installed (sudo apt install fio): disk figures will have no peer", flush=True)
    failed = []
    for name in scripts:
        started = time.perf_counter()
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, str(HERE / f"{name}.py"), *passed_on], check=False).returncode:
            failed.append(name)
        print(f"   {time.perf_counter() - started:.0f} s", flush=True)
    print(report.table(report.of_run(report.read_records(chosen.results or RESULTS), began)), flush=True)
    report.write()
    print(f"table of all records: {(HERE / 'RESULTS.md').relative_to(HERE.parent)}", flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
