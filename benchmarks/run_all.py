"""Run all benchmarks one after the other and write the table of their records.

``--only NAME …`` selects scripts; other arguments (``--quick``, ``--repetitions``) are passed to them. The exit status is 1 if a
script fails. A missed target is reported but is not an error, because a slow machine can cause it.
"""

from __future__ import annotations

import argparse
import ast
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import report

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


def _summary(script: Path) -> str:
    """First line of a script's docstring."""
    return (ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "").split("\n", 1)[0]


def main() -> None:
    """Run the selected scripts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=SCRIPTS, metavar="NAME", help=f"of {', '.join(SCRIPTS)}")
    parser.add_argument("--list", action="store_true", help="print the names and summaries of the scripts and exit")
    chosen, passed_on = parser.parse_known_args()
    if chosen.list:
        for name in SCRIPTS:
            print(f"{name}\t{_summary(HERE / f'{name}.py')}")
        return
    if shutil.which("fio") is None:
        print("WARNING: fio is not installed (sudo apt install fio): disk figures will have no peer", flush=True)
    failed = []
    for name in chosen.only:
        started = time.perf_counter()
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, str(HERE / f"{name}.py"), *passed_on], check=False).returncode:
            failed.append(name)
        print(f"   {time.perf_counter() - started:.0f} s", flush=True)
    report.main()
    print(f"table: {(HERE / 'RESULTS.md').relative_to(HERE.parent)}", flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
