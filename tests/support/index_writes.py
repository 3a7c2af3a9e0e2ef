"""The one write transaction of an LMDB index, held by another process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HOLDER = """
import sys
import lmdb
txn = lmdb.open(sys.argv[1], max_dbs=8, map_size=0, create=False).begin(write=True)
print("held", flush=True)
sys.stdin.read()
txn.abort()
"""


@contextmanager
def writes_held(index: Path) -> Iterator[None]:
    """Let no process write to an index: those that try wait, as they do for a process that is stopped inside a write."""
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER, str(index)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    with holder:
        assert holder.stdout.readline() == b"held\n"
        yield
