"""Dynamo's standalone KV indexer, the code of its router, in a separate process: needs the package ``ai-dynamo-runtime``.

The wheel has 75 MB, so an environment has it only on request. To run the tests that use it::

    make install-dynamo
    make test-store TEST_ARGS=tests/events

``KVSTORE_DYNAMO_PYTHON`` names the Python of another environment that has it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.ports import free_ports
from support.wait import wait_until

ENGINES = Path(__file__).resolve().parents[2] / ".venv-engines" / "bin" / "python"
PROGRAM = "import sys; from dynamo._core import run_kv_indexer; run_kv_indexer(sys.argv[1:])"


def dynamo_python() -> str:
    """The Python that has Dynamo's runtime; the test is skipped without one."""
    python = os.environ.get("KVSTORE_DYNAMO_PYTHON", str(ENGINES) if ENGINES.exists() else sys.executable)
    found = subprocess.run([python, "-c", "import dynamo._core"], capture_output=True, check=False, timeout=60)
    if found.returncode:
        pytest.skip("Dynamo's KV indexer is NOT TESTED here: run make install-dynamo")
    return python


class DynamoIndexer:
    """Its HTTP interface.

    Args:
        port: of the HTTP server.
    """

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def post(self, path: str, **body: Any) -> Any:
        """Call a method."""
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"content-type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.loads(answer.read())

    def register(self, instance: int, model: str, block_size: int, endpoint: str, replay: str) -> None:
        """Subscribe to a stream as to that of a worker."""
        self.post(
            "/register", instance_id=instance, model_name=model, block_size=block_size, endpoint=endpoint, replay_endpoint=replay
        )

    def prefix(self, model: str, tokens: list[int]) -> dict[str, dict[str, Any]]:
        """Return by instance: leading tokens of a prompt by tier."""
        found: dict[str, dict[str, Any]] = self.post("/query", model_name=model, token_ids=tokens)["instances"]
        return found

    def is_up(self) -> bool:
        """Whether it answers."""
        try:
            urllib.request.urlopen(self._url + "/health", timeout=2).close()
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True


@contextmanager
def dynamo_indexer(folder: Path) -> Iterator[DynamoIndexer]:
    """A running indexer."""
    python, (port,), log = dynamo_python(), free_ports(1), folder / "dynamo.log"
    with log.open("wb") as out:
        process = subprocess.Popen([python, "-c", PROGRAM, "--port", str(port), "--threads", "1"], stdout=out, stderr=out)
    try:
        indexer = DynamoIndexer(port)
        wait_until(indexer.is_up, log.read_text)
        yield indexer
    finally:
        process.terminate()
        process.wait(10)
