"""Files in ``/dev/shm`` that hold the host memory of vLLM's offloading. vLLM removes them only if an engine stops gracefully."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

FOLDER: Final = Path("/dev/shm")  # noqa: S108  # where vLLM makes them
_MAPPED: Final = re.compile(rf"{FOLDER}/vllm_offload_[^/\n]+\.mmap")


class OffloadFiles:
    """The files of one process, which may be killed."""

    def __init__(self) -> None:
        self._paths: set[Path] = set()

    def note(self, pid: int) -> None:
        """Remember the files that a process has mapped. Call it before the process is killed."""
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:  # the process has ended
            return
        self._paths.update(map(Path, _MAPPED.findall(maps)))

    def remove(self) -> int:
        """Remove the files that are left, and return their number. The process must have ended."""
        left = [path for path in self._paths if path.exists()]
        for path in left:
            path.unlink(missing_ok=True)
        self._paths.clear()
        return len(left)
