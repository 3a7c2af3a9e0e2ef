"""Build hook of hatchling: compiles the native kernel for the wheel, or for an editable install.

Without a compiler the wheel is one for any machine, with the kernel in Python. ``KVSTORE_WHEEL_PLATFORM`` names the platform of a
wheel that ``CC`` compiles for, such as ``manylinux_2_17_aarch64``; ``scripts/make_wheels.py`` sets both.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent))
import build_kernel


class KernelHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the compiled kernel to wheels."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the kernel before the files of a wheel are collected."""
        if self.target_name != "wheel":
            return
        reason = build_kernel.build()
        if reason:
            build_kernel.LIBRARY.unlink(missing_ok=True)  # not one of another machine
            self.app.display_warning(f"kvstore.native: {reason}; copies and checksums are made in Python, slower")
            return
        if version != "editable":
            platform = os.environ.get("KVSTORE_WHEEL_PLATFORM") or sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"
            build_data["pure_python"] = False
            build_data["artifacts"].append("kvstore/native/_kernel.so")
