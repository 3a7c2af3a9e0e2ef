"""Version of this program, for results and records."""

from __future__ import annotations

import subprocess
from pathlib import Path

import kvstore


def program_version() -> dict[str, str | None]:
    """Return the version of the package, and the commit if it runs from a checkout."""
    return {"version": kvstore.__version__, "commit": _commit()}


def _commit() -> str | None:
    folder = Path(kvstore.__file__).resolve().parent.parent
    if not (folder / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
