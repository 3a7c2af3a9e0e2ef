"""``kvstore events --zmq`` in a separate process."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.embedded.children import DaemonLaunchers
from support.wait import wait_until


class Publisher:
    """Run the real command."""

    def __init__(self, folder: Path, metadata: str, **settings: object) -> None:
        self.folder, self.metadata = folder, metadata
        self.settings = {"topic": "kv@store", **settings}
        self.endpoint = self.replay = "tcp://127.0.0.1:*"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, or restart on the same ports, and wait until everything is published."""
        ready = self.folder / "ready"
        ready.unlink(missing_ok=True)
        settings = {
            "ready_file": ready,
            "metrics_listen": "127.0.0.1:0",
            "replay_batches": 8,
            "heartbeat": "200ms",
            **self.settings,
        }
        command = [sys.executable, "-m", "kvstore.cli", "events", "--metadata", self.metadata, "--zmq", self.endpoint]
        command += [
            "--replay",
            self.replay,
            *(part for key, value in settings.items() for part in ("--set", f"events.{key}={value}")),
        ]
        with (self.folder / "events.log").open("ab") as log:
            self.process = DaemonLaunchers.launcher(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_until(ready.exists, lambda: (self.folder / "events.log").read_text())
        said = json.loads(ready.read_text())
        assert said["pid"] == self.process.pid
        self.endpoint, self.replay = said["zmq"], said["replay"]

    def metrics(self) -> str:
        lines = (self.folder / "events.log").read_text().splitlines()
        line = next(line for line in reversed(lines) if "metrics at http" in line)
        with urllib.request.urlopen(line.split("metrics at ")[1], timeout=10) as answer:
            return answer.read().decode()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(20)


@contextmanager
def publishing(folder: Path, metadata: str, **settings: object) -> Iterator[Publisher]:
    publisher = Publisher(folder, metadata, **settings)
    publisher.start()
    try:
        yield publisher
    finally:
        if publisher.process is not None and publisher.process.poll() is None:
            publisher.kill()
