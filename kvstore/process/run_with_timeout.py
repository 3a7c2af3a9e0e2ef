"""Run a command that may hang. Tools that call a driver can block in the kernel, where even SIGKILL does not end them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_KILL_WAIT_S = 1.0
MAX_OUTPUT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Result of a command."""

    code: int | None
    """Exit code; None: the command timed out and was killed, if possible."""
    output: str
    """Standard output until now, at most ``MAX_OUTPUT_BYTES``."""
    errors: str
    """Standard error until now, at most ``MAX_OUTPUT_BYTES``."""


def run_with_timeout(command: Sequence[str], timeout_s: float, *, environment: Mapping[str, str] | None = None) -> CommandResult:
    """Run a command in its own process group, without standard input.

    Args:
        command: program and arguments.
        timeout_s: time limit; then the group is killed. A process that does not die is abandoned.
        environment: added to this process's.

    Raises:
        OSError: the program does not exist, or cannot be started.
    """
    # files, not pipes: a surviving child keeps a pipe open, and reading it to its end would block
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
                process.wait(_KILL_WAIT_S)
        output.seek(0)
        errors.seek(0)
        return CommandResult(
            code,
            output.read(MAX_OUTPUT_BYTES).decode(errors="replace"),
            errors.read(MAX_OUTPUT_BYTES).decode(errors="replace"),
        )
