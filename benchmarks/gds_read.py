"""Measure cold NVMe reads of an engine through the I/O engines posix and kvikio, against fio.

Without a GPU both engines fill host memory in place of a device's, and kvikio runs with a stub of the CUDA driver in its
*compatibility mode*. This is not GPUDirect Storage: it uses the same calls, futures and fallbacks with direct reads enabled, and
shows the cost of kvikio compared with ``preadv``. With a GPU (``--device cuda:0``) both fill device memory: posix through host
memory, kvikio through the path that the node's probe selects, which the record names. Every load is verified; the time includes
copying the bytes back from the device for this check.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
from harness import Figure, Options, Reference, Target
from kvstore.lab.stub_cuda import build_stub, with_stub
from nvme import IO_THREADS
from peers import PeerMissingError
from peers.fio import Fio

_CHILD_S = 60.0
NO_GDS = "compatibility mode: no GPUDirect Storage"


class Child:
    """Parent side of the reading process."""

    def __init__(self, asked: dict[str, Any], stub: Path | None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rig.gds_child"],
            cwd=Path(__file__).parent,
            env=None if stub is None else with_stub(stub),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.said: dict[str, Any] = self._ask(json.dumps(asked))

    def _ask(self, line: str) -> Any:  # noqa: ANN401
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"the reading process ended with code {self._process.wait(_CHILD_S)}")
        return json.loads(answer)

    def load(self, engine: str) -> Callable[[], float]:
        """Create a contestant that returns the GB/s of one load through an engine."""
        return lambda: float(self._ask(engine))

    def close(self) -> None:
        """Stop the process."""
        self._process.communicate(timeout=_CHILD_S)


def measure(options: Options, folder: Path, device: str, block_bytes: int, total: int) -> None:
    """Measure one block size."""
    with_kvikio, missing, stub = True, "", None
    if importlib.util.find_spec("kvikio") is None:
        with_kvikio, missing = False, "kvikio is not installed"
    elif device == "host" and (stub := build_stub(folder)) is None:
        with_kvikio, missing = False, "there is no C compiler for the stand-in of the CUDA driver"
    (folder / "volumes").mkdir()
    asked = {"folder": str(folder / "volumes"), "block_bytes": block_bytes, "total_bytes": total, "seed": options.seed}
    child = Child({**asked, "device": device, "kvikio": with_kvikio}, stub if device == "host" else None)
    engines: dict[str, str] = child.said["engines"]
    contestants = {name: child.load(name) for name in engines}
    fio = Fio(folder / "fio", total)
    try:
        fio.prepare()
        contestants["fio"] = lambda: fio.read(total, block_bytes, IO_THREADS, options.seed)
    except PeerMissingError as error:
        missing = "; ".join(filter(None, (missing, str(error))))
    rounds = harness.interleave(contestants, options.repetitions)
    child.close()
    against_fio = Reference("fio io_uring", rounds["fio"]) if "fio" in rounds else None
    real = child.said["path"] == "gds"
    best = "kvikio" if real else "posix"  # the engine that a node would use on this host
    for name, engine in engines.items():
        used = engine if name == "posix" or real else f"{engine}, {NO_GDS}"
        parameters: dict[str, harness.Parameter] = {
            "block_bytes": block_bytes,
            "total_bytes": total,
            "depth": IO_THREADS,
            "into": "host memory" if device == "host" else "GPU",
            "engine": name if name == "posix" or real else "kvikio, compatibility mode",
        }
        options.keep(
            Figure("gds_read", "NVMe read through an I/O engine, cold", parameters, "GB/s"),
            rounds[name],
            peer=against_fio,
            limit=None if name == "posix" else Reference("posix", rounds["posix"]),
            target=Target("peer", 0.9) if name == best else None,
            storage=harness.storage(folder, direct="O_DIRECT" in engines["posix"], cache="cold in this system"),
            io_engine=used,
            verified=True,
            notes=missing,
        )


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="host", help="destination of the reads: host (default) or cuda:N")


def main() -> None:
    """Measure all block sizes."""
    options = harness.options("gds_read", __doc__, arguments=_arguments)
    for block_bytes in options.pick(full=(1 << 20, 4 << 20), quick=(1 << 20,), smoke=(1 << 20,)):
        folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-", dir=options.scratch))
        try:
            measure(
                options, folder, options.extra.device, block_bytes, options.pick(full=256 << 20, quick=128 << 20, smoke=32 << 20)
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
