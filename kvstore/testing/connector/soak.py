"""A soak test of a hook: any number of seeded runs with faults, each repeatable by its seed.

    PYTHONPATH=tests/engines python -m kvstore.testing.connector.soak test_vllm_kit:TestVllm --seeds 0:200

A wrong token or a hung run ends it with code 1 and names the seed. Otherwise it prints a line every twenty runs, and a summary,
which ``--output`` also writes to a file. A summary is written only if no token was wrong and no run hung.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvstore.observe.program_version import program_version
from kvstore.testing.connector.conversations import SOON, Conversations, WrongTokensError, run_seeded
from kvstore.testing.connector.driver import HookDriver
from kvstore.testing.connector.faulty_store import MIB, FaultyStore

HANG_S = 120.0
"""A run that takes longer hangs."""
_FRESH_EVERY = 20
"""Runs after which engine and store are replaced: corrupt blocks accumulate, and their slots are lost."""
_ROOM = ((64 * MIB, 64 * MIB), (6 * MIB, 8 * MIB), (16 * MIB, 0))
"""Memory and disk of the store, in turn: ample; hardly any; no disk at all."""


def soak(driver: HookDriver, seeds: Sequence[int], options: dict[str, object], folder: Path) -> dict[str, Any] | None:
    """Do the runs. Returns their summary; None: a token was wrong, which ended them."""
    talk = Conversations.make(driver)
    faults: Counter[str] = Counter()
    counters: Counter[str] = Counter()
    loaded = asked = aborted = 0
    began_s = time.monotonic()
    for batch, first in enumerate(range(0, len(seeds), _FRESH_EVERY)):
        dram, nvme = _ROOM[batch % len(_ROOM)]
        with (
            FaultyStore(folder / str(batch), dram_bytes=dram, nvme_bytes=nvme) as store,
            closing(driver.open(store.address, {**SOON, **options})) as engine,
        ):
            for seed in seeds[first : first + _FRESH_EVERY]:
                faulthandler.dump_traceback_later(HANG_S, exit=True)
                try:
                    report = run_seeded(seed, engine, store, talk)
                except WrongTokensError as error:
                    print(f"seed {seed}, space {dram >> 20}+{nvme >> 20} MiB: WRONG TOKENS: {error}")
                    return None
                finally:
                    faulthandler.cancel_dump_traceback_later()
                faults[f"{report.fault}{' meanwhile' if report.during else ''}"] += 1
                loaded += report.loaded_tokens
                asked += report.asked
                aborted += report.aborted
            failures = {name: value for name, value in sorted(engine.counters().items()) if value and _counts_failures(name)}
            counters.update(failures)
        seconds = time.monotonic() - began_s
        done = f"{min(first + _FRESH_EVERY, len(seeds))} runs, {seconds:.0f} s, {asked} prompts, {aborted} aborted"
        print(f"{done}, {loaded} tokens loaded; {failures}", flush=True)
    for name, count in sorted(faults.items()):
        print(f"{count:5} {name}")
    return {
        "runs": len(seeds),
        "seconds": round(time.monotonic() - began_s),
        "prompts": asked,
        "aborted": aborted,
        "loaded_tokens": loaded,
        "counters": dict(sorted(counters.items())),
        "faults": dict(sorted(faults.items())),
    }


def _origin() -> dict[str, object]:
    """Return what was run, when and where. The version of vLLM is null if it is not installed."""
    try:
        vllm = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        vllm = None
    return {
        "commit": program_version()["commit"],
        "date": datetime.now(UTC).date().isoformat(),
        "vllm": vllm,
        "host": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
    }


def _counts_failures(counter: str) -> bool:
    return any(word in counter for word in ("fail", "missing", "corrupt", "lost", "expired", "timeout", "bug"))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", help="MODULE:CLASS of the hook's conformance suite, whose driver is taken")
    parser.add_argument("--seeds", default="0:200", help="FIRST:END (0:200)")
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=TEXT", help="a further option of the hook")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="also write the summary to a file")
    given = parser.parse_args()
    module, _, name = given.suite.partition(":")
    first, _, end = given.seeds.partition(":")
    options: dict[str, object] = dict(one.partition("=")[::2] for one in given.set)
    with tempfile.TemporaryDirectory(prefix="kvstore-soak-") as folder:
        driver = getattr(importlib.import_module(module), name).make_driver(Path(folder))
        summary = soak(driver, range(int(first), int(end)), options, Path(folder))
    if summary is None:
        return 1
    if given.output is not None:
        given.output.write_text(json.dumps({"suite": given.suite, **_origin(), **summary}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
