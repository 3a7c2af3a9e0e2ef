"""Build hook of hatchling: compiles the native kernel for the wheel, or for an editable install.

Without a compiler the wheel is one for any machine, with the kernel in Python. ``KVSTORE_WHEEL_PLATFORM`` names the platform of a
wheel that ``CC`` compiles for, such as ``manylinux_2_17_aarch64``; ``scripts/make_wheels.py`` sets both. Such a wheel must have a
kernel, and the kernel in the working tree stays as it is: it may be one of another machine.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent))
import build_kernel

_IN_WHEEL = "kvstore/native/_kernel.so"


class KernelHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the compiled kernel to wheels."""

    _foreign: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the kernel before the files of a wheel are collected."""
        if self.target_name != "wheel":
            return
        platform = os.environ.get("KVSTORE_WHEEL_PLATFORM")
        if platform and version != "editable":
            self._add_foreign(platform, build_data)
            return
        reason = build_kernel.build()
        if reason:
            build_kernel.LIBRARY.unlink(missing_ok=True)  # not one of another machine
            self.app.display_warning(f"kvstore.native: {reason}; copies and checksums are made in Python, slower")
            return
        if version != "editable":
            _tag(build_data, sysconfig.get_platform().replace("-", "_").replace(".", "_"))
            build_data["artifacts"].append(_IN_WHEEL)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002  # the interface of hooks
        """Remove the kernel that was compiled for another machine."""
        if self._foreign is not None:
            self._foreign.cleanup()
            self._foreign = None

    def _add_foreign(self, platform: str, build_data: dict[str, Any]) -> None:
        """Compile a kernel outside of the working tree and add it.

        Raises:
            RuntimeError: the compiler failed.
        """
        self._foreign = tempfile.TemporaryDirectory(prefix="kvstore-kernel-")
        library = Path(self._foreign.name) / build_kernel.LIBRARY.name
        reason = build_kernel.build(library)
        if reason:
            raise RuntimeError(f"no kernel for {platform}: {reason}")
        _tag(build_data, platform)
        build_data["force_include"][str(library)] = _IN_WHEEL


def _tag(build_data: dict[str, Any], platform: str) -> None:
    build_data["tag"] = f"py3-none-{platform}"
    build_data["pure_python"] = False
