"""The peer Mooncake Store: master, a process that lends its memory, and a client, each its own process, over TCP on loopback.

It runs in its own virtual environment (``.venv-bench``, made by ``make bench``), so that its packages never meet ours. All bytes
travel between two processes over TCP, as ours do; the library verifies no checksums.
"""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from harness import REPOSITORY
from kvstore.embedded.ports import free_port
from peers import PeerMissingError

ENVIRONMENT = REPOSITORY / ".venv-bench"
DRIVER = Path(__file__).with_name("mooncake_driver.py")
ANSWER_S = 120.0


class _Process:
    """One driver process, spoken to in JSON lines."""

    def __init__(self, python: Path, config: dict[str, object], log: IO[str]) -> None:
        self.process = subprocess.Popen(
            [str(python), "-I", str(DRIVER), json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.answer()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def answer(self) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=ANSWER_S)
        except queue.Empty:
            raise PeerMissingError(f"Mooncake's driver did not answer within {ANSWER_S:g} s") from None
        if not line:
            raise PeerMissingError(f"Mooncake's driver ended with code {self.process.wait(timeout=10)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **request: object) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.answer()


class Mooncake:
    """A running Mooncake Store; a context manager that ends its processes.

    Args:
        segment_bytes: memory that the lending process brings.
        python: interpreter that has the package (default: that of ``.venv-bench``).

    Raises:
        PeerMissingError: no such interpreter, or the store does not start (the log's tail is in the message).
    """

    def __init__(self, segment_bytes: int, python: Path | None = None) -> None:
        self._python = python or ENVIRONMENT / "bin" / "python"
        master = self._python.with_name("mooncake_master")
        if not master.exists():
            raise PeerMissingError("Mooncake Store is not installed beside this checkout: `make bench` installs it")
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed by close)
        self._processes: list[subprocess.Popen[str]] = []
        rpc, http, metrics = free_port(), free_port(), free_port()
        self._config: dict[str, object] = {"metadata": f"http://127.0.0.1:{http}/metadata", "master": f"127.0.0.1:{rpc}"}
        command = [str(master), f"--rpc_port={rpc}", "--rpc_address=127.0.0.1", "--enable_http_metadata_server=true"]
        command += [
            f"--http_metadata_server_port={http}",
            "--http_metadata_server_host=127.0.0.1",
            f"--metrics_port={metrics}",
            "--metrics_host=127.0.0.1",
        ]
        self._processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, text=True))
        try:
            self._start(segment_bytes=segment_bytes, local_buffer_bytes=16 << 20)
            self._client = self._start(segment_bytes=0, local_buffer_bytes=16 << 20)
        except BaseException as error:
            tail = self._tail()
            self.close()
            raise PeerMissingError(f"Mooncake Store did not start: {error}\n{tail}") from error

    def _start(self, **config: object) -> _Process:
        process = _Process(self._python, {"hostname": f"127.0.0.1:{free_port()}", **self._config, **config}, self._log)
        self._processes.append(process.process)
        return process

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-2000:]

    def _ask(self, **request: object) -> dict[str, Any]:
        answer = self._client.ask(**request)
        if answer.get("bad") or answer.get("code"):
            raise PeerMissingError(f"Mooncake Store answered {answer} to {request['do']}\n{self._tail()}")
        return answer

    def buffer(self, nbytes: int, seed: int) -> None:
        """Makes the client's memory, from which it puts and into which it gets."""
        self._ask(do="buffer", nbytes=nbytes, seed=seed)

    def put(self, names: list[str], block_bytes: int, batch: int) -> float:
        """Seconds to put all names' blocks, block i from position i of the buffer."""
        return float(self._ask(do="put", names=names, block_bytes=block_bytes, batch=batch)["seconds"])

    def get(self, names: list[str], block_bytes: int, batch: int) -> float:
        """Seconds to get them back; the bytes are compared."""
        return float(self._ask(do="get", names=names, block_bytes=block_bytes, batch=batch)["seconds"])

    def exist(self, names: list[str], calls: int) -> list[float]:
        """Seconds of each of ``calls`` presence queries for all names."""
        answer = self._ask(do="exist", names=names, calls=calls)
        return [float(value) for value in answer["seconds"]]

    def remove(self, names: list[str]) -> None:
        """Drops blocks."""
        self._ask(do="remove", names=names)

    def close(self) -> None:
        """Ends all processes."""
        for process in reversed(self._processes):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=5)
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
