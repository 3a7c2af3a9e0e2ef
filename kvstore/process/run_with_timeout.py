"""Runs a command that may never come back: tools that ask a driver can wait for it for ever, even beyond a kill."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_DYING_S = 1.0
MOST_OUTPUT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command went."""

    code: int | None
    """Exit code; None: it did not end in time (and was killed, as far as it could be)."""
    output: str
    """What it wrote on standard output until then, at most ``MOST_OUTPUT_BYTES``."""
    errors: str
    """The same of standard error."""


def run_bounded(command: Sequence[str], timeout_s: float, *, environment: Mapping[str, str] | None = None) -> Ran:
    """Runs a command for ``timeout_s`` seconds at most, in a process group of its own, without standard input.

    Args:
        command: program and arguments.
        timeout_s: after it, the group is killed; where even that does not end it, it is left behind.
        environment: beside this process's.

    Raises:
        OSError: there is no such program, or it cannot be started.
    """
    # files, not pipes: reading a pipe to its end would wait for whatever still holds the other end
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_DYING_S)
        output.seek(0)
        errors.seek(0)
        return Ran(
            code,
            output.read(MOST_OUTPUT_BYTES).decode(errors="replace"),
            errors.read(MOST_OUTPUT_BYTES).decode(errors="replace"),
        )
