"""Traffic to put through a lab: real processes on its hosts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.netlab import Host
from kvstore.testing.netlab_traffic import Network

TRAFFIC = Path(__file__).with_name("traffic.py")


class Peer:
    """A traffic process on a host."""

    def __init__(self, host: Host, *arguments: object) -> None:
        self.process = host.popen(
            [sys.executable, "-S", str(TRAFFIC), *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def line(self) -> Any:
        """The next thing it says; fails if it ended instead."""
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        if not text:
            _, err = self.process.communicate(timeout=10)
            pytest.fail(f"traffic process ended with code {self.process.returncode}: {err.decode()[-500:]}")
        return json.loads(text)

    def end(self) -> None:
        """Kills it if need be, and reaps it."""
        self.process.kill()
        self.process.communicate(timeout=10)


def measure_mbit(source: Host, target: Host, network: Network, megabytes: int = 8, tos: int = 0) -> float:
    """Rate of a bulk transfer as its receiver saw it, Mbit/s of payload."""
    sink = Peer(target, "sink", target.ip(network))
    sender = Peer(source, "send", target.ip(network), sink.line(), megabytes << 20, tos)
    received = sink.line()
    for peer in (sink, sender):
        peer.end()
    assert received["bytes"] == megabytes << 20
    return float(received["bytes"] * 8e-6 / received["seconds"])
