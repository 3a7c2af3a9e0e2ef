"""Request ids in a process that forks, as engines do."""

from __future__ import annotations

import subprocess
import sys

FORKED = """
import os
from kvstore.observe.tracing import new_request_id
read, write = os.pipe()
new_request_id()
if os.fork() == 0:
    os.write(write, new_request_id().encode())
    os._exit(0)
print(os.read(read, 100).decode(), new_request_id())
"""


def test_request_ids_after_fork_differ() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=True, timeout=60)
    child, parent = done.stdout.split()
    assert child.partition("-")[0] != parent.partition("-")[0]
