"""The peer fio: the speed of the disk for a program that only reads and writes.

It raises ``PeerMissingError`` if fio is not installed (``sudo apt install fio``): the figure is then kept without its peer.
Its buffers are in transparent huge pages, as the store's arena is: a virtual disk is much slower with pages of 4 KiB.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from peers import PeerMissingError

HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Environment in which ``malloc`` asks for transparent huge pages (glibc 2.35 and later). fio allocates its buffers by it."""
NOTE = "fio asks for transparent huge pages"


@dataclass(frozen=True, slots=True)
class Fio:
    """Jobs on one file that is laid out once and then only read and overwritten, as a slab is.

    Attributes:
        file: the file, on the filesystem that is measured; made and filled by ``prepare``.
        file_bytes: its size.
        engine: fio's I/O engine.
    """

    file: Path
    file_bytes: int
    engine: str = "io_uring"

    def _run(self, *arguments: str) -> dict[str, float]:
        program = shutil.which("fio")
        if program is None:
            raise PeerMissingError("fio is not installed: sudo apt install fio")
        command = [
            program,
            "--name=peer",
            f"--filename={self.file}",
            f"--size={self.file_bytes}",
            "--direct=1",
            "--iomem=malloc",
            "--output-format=json",
        ]
        command += [f"--ioengine={self.engine}", *arguments]
        done = subprocess.run(command, env=os.environ | HUGE_PAGES, capture_output=True, text=True, check=False, timeout=300)
        if done.returncode:
            raise PeerMissingError(f"fio failed: {done.stderr[-500:]}")
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        return {"read": job["read"]["bw_bytes"] / 1e9, "write": job["write"]["io_bytes"] / max(job["job_runtime"], 1) / 1e6}

    def prepare(self) -> None:
        """Fill the file with incompressible bytes, before the rounds."""
        self._run("--rw=write", "--bs=4M", "--iodepth=4", "--refill_buffers", "--end_fsync=1")

    def read(self, nbytes: int, block_bytes: int, depth: int, seed: int) -> float:
        """GB/s of random O_DIRECT reads, ``depth`` in flight, of ``nbytes`` in all."""
        arguments = [f"--bs={block_bytes}", f"--iodepth={depth}", f"--io_size={nbytes}", f"--randseed={seed}"]
        return self._run("--rw=randread", *arguments)["read"]

    def write_durable(self, nbytes: int, block_bytes: int, depth: int) -> float:
        """GB/s of O_DIRECT overwrites, ``depth`` in flight, closed by one fsync whose time counts."""
        arguments = [f"--bs={block_bytes}", f"--iodepth={depth}", f"--io_size={nbytes}", "--end_fsync=1"]
        return self._run("--rw=write", *arguments)["write"]
