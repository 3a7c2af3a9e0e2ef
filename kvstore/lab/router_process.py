"""The router as a real process, started by its command line: for tests with engines, and for benchmarks."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from kvstore.core.errors import DeadlineExceeded, Internal
from kvstore.embedded.children import DaemonLaunchers

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
_SHOWN_LINES = 30


class RouterProcess:
    """One router. A context manager.

    Args:
        arguments: of ``kvstore router``; it listens on a free port of loopback.
        folder: for its log.
        name: of its log.
    """

    def __init__(self, arguments: Sequence[str], folder: Path, name: str = "router") -> None:
        self._arguments = list(arguments)
        self._folder = folder
        self.log_path = folder / f"{name}.log"
        self._ready_file = folder / f"{name}.ready"
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""
        """``host:port``, once it has started."""

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._ready_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "kvstore.cli", "router", "--listen", "127.0.0.1:0"]
        command += ["--ready-file", str(self._ready_file), *self._arguments]
        with self.log_path.open("ab") as log:
            process = DaemonLaunchers.launcher(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._process = process
        end_s = time.monotonic() + START_TIMEOUT_S
        while not self._ready_file.exists():
            if process.poll() is not None:
                raise Internal(f"the router ended at start: {self.log_tail()}")
            if time.monotonic() > end_s:
                self.stop()
                raise DeadlineExceeded(f"the router is not ready: {self.log_tail()}")
            time.sleep(0.02)
        self.address = json.loads(self._ready_file.read_text())["address"]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Base URL for OpenAI clients."""
        return f"http://{self.address}/v1"

    def stop(self) -> int:
        """Stop the router gracefully. Return its exit code."""
        if self._process is None:
            return 0
        self._process.terminate()
        try:
            return self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait(STOP_TIMEOUT_S)

    def log_tail(self) -> str:
        """The end of its log."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-_SHOWN_LINES:])
