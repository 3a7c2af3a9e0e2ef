"""Probe of GPUDirect Storage: which path from this disk to device memory works, by measurement.

Two layers silently fall back to host memory: kvikio without GDS (*compatibility mode*), and libcufile below it, per file.
Neither is faster than ``posix``. So the probe reads a file of the volume into device memory and counts the bytes of each
backend. Drivers hang and crash, so it runs in a separate process with a deadline.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from kvstore.core.errors import InvalidArgument, Unsupported
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import volumes as volumes_metrics
from kvstore.process.run_with_timeout import CommandResult, run_with_timeout
from kvstore.tiers.io_engines.kvikio_library import CUDA_DRIVER, FORCE_COMPAT, INSTALL_KVIKIO, UPGRADE_KVIKIO, Kvikio, load_kvikio
from kvstore.tiers.io_engines.probe_process import PROBE_BYTES

_log = logging.getLogger(__name__)

GdsMode = Literal["auto", "required", "off"]
PROBE_TIMEOUT_S = 30.0
SLAB_FILE = "slab.kv"
"""As in ``kvstore.tiers.nvme.volume_open``, which imports this module."""
_GDS_BACKEND = "GDS"
_ENABLE_GDS = (
    "sudo modprobe nvidia-fs   # or enable PCI P2PDMA; the volume on ext4 or XFS on a local NVMe disk;"
    " /usr/local/cuda/gds/tools/gdscheck -p says more"
)
_DRIVER = "sudo apt install nvidia-driver-cuda   # or without: --set node.gds=off"
_NO_CARD = "--set node.gds=off   # no NVIDIA card is seen on this host, so no driver would find one"
_BROKEN_DRIVER = "nvidia-smi   # says what the CUDA driver has; dmesg, what broke; or without: --set node.gds=off"
_LOOK_AGAIN = "kvstore doctor   # the probe did not even begin: a host that is too busy, or an installation that is not whole"
_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")


class GdsPath(StrEnum):
    """Path of a volume's bytes into device memory."""

    GDS = "gds"
    COMPAT = "compat"
    """kvikio works, but through host memory."""
    NONE = "none"
    """kvikio does not work."""


@dataclass(frozen=True, slots=True)
class GdsProbe:
    """Result of a probe."""

    path: GdsPath
    why: str
    """The reason, in one line."""
    fix: str | None = None
    """A shell command or a setting that would make it ``GDS``; None: it is, or the mode is off."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts from the steps of the probe, for reports."""
    measured: bool = True
    """Whether a file was read; False: ``path`` is the best that driver and kvikio allow."""

    def describe(self) -> str:
        """One line with the path and the reason."""
        return f"{'real' if self.path is GdsPath.GDS else self.path.value} ({self.why})"


def probe_gds(folder: Path, *, timeout_s: float = PROBE_TIMEOUT_S) -> GdsProbe:
    """Measure which path works for files of a folder.

    Args:
        folder: an existing folder of a volume. If its slab is missing or too small, a temporary file is created in it.
        timeout_s: time limit; after it, the path counts as not working.
    """
    if (without := _no_driver()) is not None:
        return without
    with ExitStack() as made:
        try:
            path = slab_to_read(folder)
            if path is None:  # deleted here: the process that fills it may be killed
                path = Path(made.enter_context(tempfile.NamedTemporaryFile(dir=folder, prefix=".gds-probe-")).name)
        except OSError as error:
            return GdsProbe(GdsPath.NONE, f"no file to measure with in {folder}: {error.strerror}", _look_at(folder))
        return _run_probe([str(path.absolute())], timeout_s)


def glance_at_gds(folder: Path, *, timeout_s: float = PROBE_TIMEOUT_S) -> GdsProbe:
    """As ``probe_gds``, without writing: without a slab to read, nothing is ``measured``."""
    if (without := _no_driver()) is not None:
        return without
    try:
        path = slab_to_read(folder)
    except OSError as error:
        return GdsProbe(GdsPath.NONE, f"{folder} cannot be read: {error.strerror}", _look_at(folder), measured=False)
    return _run_probe([] if path is None else [str(path.absolute())], timeout_s)


def slab_to_read(folder: Path) -> Path | None:
    """The slab in a folder, if it is large enough for a measurement."""
    slab = folder / SLAB_FILE
    try:
        return slab if slab.stat().st_size >= PROBE_BYTES else None
    except (FileNotFoundError, NotADirectoryError):
        return None


def nvidia_cards(devices: Path = Path("/sys/bus/pci/devices")) -> int:
    """NVIDIA devices on the PCI bus of this host."""

    def says(file: Path) -> str:
        try:
            return file.read_text(encoding="ascii", errors="replace").strip()
        except OSError:
            return ""

    cards = (device for device in devices.glob("*") if says(device / "vendor") == _NVIDIA)
    return sum(says(device / "class").startswith(_DISPLAY_CLASSES) for device in cards)


def _look_at(folder: Path) -> str:
    return f"ls -ld {shlex.quote(str(folder))}"


def _no_driver() -> GdsProbe | None:
    try:
        ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        fix = _DRIVER if nvidia_cards() else _NO_CARD
        return GdsProbe(GdsPath.NONE, f"no CUDA driver on this host: {CUDA_DRIVER} cannot be loaded", fix)
    return None


def _run_probe(arguments: list[str], timeout_s: float) -> GdsProbe:
    command = [sys.executable, "-m", "kvstore.tiers.io_engines.probe_process", *arguments]
    try:
        ran = run_with_timeout(command, timeout_s, environment={"CUFILE_LOGFILE_PATH": os.devnull})
    except OSError as error:
        return GdsProbe(GdsPath.NONE, f"the probe cannot be started: {error.strerror}", "ulimit -a   # what it may start")
    return judge(ran, timeout_s, measured=bool(arguments))


def judge(ran: CommandResult, timeout_s: float, *, measured: bool = True) -> GdsProbe:
    """Interpret the output of the probe's process. If it was to be ``measured``, only a measurement proves GDS."""
    facts: dict[str, Any] = {}
    for line in ran.output.splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            continue  # libraries print to stdout as well
        if isinstance(said, dict):
            facts.update(said)
    if not measured and ran.code == 0 and facts.get("begun") == "read" and "read_error" not in facts:
        path, why, fix = _allowed(facts)
    else:
        path, why, fix = _judge(facts, ran, timeout_s)
    return GdsProbe(path, why, fix, facts, measured)


def _allowed(facts: Mapping[str, Any]) -> tuple[GdsPath, str, str | None]:
    if facts.get("gds_available") is True and facts.get("compat_preferred") is False and not facts.get("compat_forced"):
        return (
            GdsPath.GDS,
            f"kvikio {facts.get('kvikio')} and its driver are available; not measured, because there is no volume yet",
            None,
        )
    return GdsPath.COMPAT, f"kvikio {facts.get('kvikio')} would read through host memory", _ENABLE_GDS


def _judge(facts: Mapping[str, Any], ran: CommandResult, timeout_s: float) -> tuple[GdsPath, str, str | None]:
    none, at = GdsPath.NONE, facts.get("begun", "start")
    broken = {"start": _LOOK_AGAIN, "driver": _BROKEN_DRIVER}.get(str(at), _ENABLE_GDS)
    if ran.code is None:
        return none, f"the probe hung at '{at}' and was ended after {timeout_s:.0f} s", broken
    if facts.get("cuda_init"):
        return none, f"the CUDA driver finds no usable device (cuInit answers {facts['cuda_init']})", "nvidia-smi"
    if "kvikio_error" in facts:
        return none, str(facts["kvikio_error"]), INSTALL_KVIKIO
    if "read_error" in facts:
        return none, f"kvikio {facts.get('kvikio')} cannot read into device memory: {facts['read_error']}", _ENABLE_GDS
    if "same" not in facts:
        said = ran.errors.strip().rsplit("\n", 1)[-1][:200]
        return none, f"the probe ended at '{at}' with code {ran.code}: {said or 'no output'}", broken
    if facts["same"] is not True:
        return none, f"kvikio {facts.get('kvikio')} read WRONG BYTES into device memory; it is not used", _ENABLE_GDS
    carried = facts.get("backends")
    rate = f"{facts.get('gigabytes_per_s')} GB/s"
    if facts.get("compat_forced"):
        return GdsPath.COMPAT, f"{FORCE_COMPAT} makes libcufile read through host memory", f"unset {FORCE_COMPAT}"
    if not isinstance(carried, dict):
        why = f"kvikio {facts.get('kvikio')} does not report how it reads; version 26.10 or later does"
        return GdsPath.COMPAT, why, UPGRADE_KVIKIO
    if carried.get(_GDS_BACKEND, 0) >= 2 * PROBE_BYTES:  # both passes of the probe, all of it
        return GdsPath.GDS, f"kvikio {facts.get('kvikio')}, libcufile {facts.get('libcufile')}, {rate} measured", None
    available = "GDS works, but not for this file" if facts.get("gds_available") else "no GDS"
    return GdsPath.COMPAT, f"{available}: kvikio reads through host memory, {rate} measured", _ENABLE_GDS


def check_gds(
    mode: GdsMode,
    folder: Path,
    *,
    counters: Counters,
    setting: str = "node.gds",
    look: Callable[[Path], GdsProbe] | None = None,
) -> GdsProbe:
    """Probe whether GPUDirect Storage works for a volume, and log the result. Nothing is loaded into this process.

    Args:
        mode: ``off``: do not probe; ``auto``: log what is found; ``required``: fail if it does not work.
        folder: an existing folder of the volume.
        counters: counts a volume on which GDS falls back to host memory.
        setting: name of the setting with ``mode``, for messages.
        look: the probe: ``glance_at_gds`` for a folder that must not be written to; then only a measurement counts. None:
            ``probe_gds``.

    Raises:
        Unsupported: GDS is required and does not work; the message has the remedy.
        InvalidArgument: unknown mode.
    """
    if mode not in ("auto", "required", "off"):
        raise InvalidArgument(f"{setting} must be auto, required or off", gds=mode)
    if mode == "off":
        return GdsProbe(GdsPath.NONE, "switched off")
    found = (look or probe_gds)(folder)
    if found.path is GdsPath.GDS and not found.measured:
        found = GdsProbe(GdsPath.NONE, found.why, f"wait for a volume of at least {PROBE_BYTES >> 20} MiB", found.facts)
    _report(found, mode, folder, counters, setting)
    return found


def choose_gds(
    mode: GdsMode,
    folder: Path,
    *,
    threads: int,
    counters: Counters,
    setting: str = "node.gds",
    look: Callable[[Path], GdsProbe] | None = None,
) -> tuple[Kvikio | None, GdsProbe]:
    """Choose the I/O engine of a volume for reads into device memory: kvikio, if ``check_gds`` finds GPUDirect Storage.

    Args:
        mode: as for ``check_gds``.
        folder: as for ``check_gds``.
        threads: number of requests in flight, over all volumes.
        counters: as for ``check_gds``.
        setting: as for ``check_gds``.
        look: as for ``check_gds``.

    Raises:
        Unsupported: GDS is required and does not work; the message has the remedy.
        InvalidArgument: unknown mode.
    """
    found = check_gds(mode, folder, counters=counters, setting=setting, look=look)
    if found.path is not GdsPath.GDS:
        return None, found
    try:
        return load_kvikio(threads=threads), found
    except Unsupported as error:  # it worked in the probe's process
        found = GdsProbe(GdsPath.NONE, str(error), INSTALL_KVIKIO, found.facts)
    _report(found, mode, folder, counters, setting)
    return None, found


def _report(found: GdsProbe, mode: GdsMode, folder: Path, counters: Counters, setting: str) -> None:
    """Log and count the result of a probe; raise if GDS is required and does not work."""
    if found.path is GdsPath.GDS:
        _log.info("GPUDirect Storage probed: volume at %s (%s)", folder, found.describe())
        return
    if mode == "required":
        raise Unsupported(
            f"{setting} = required, but GPUDirect Storage does not work here: {found.why}. To repair it: {found.fix}."
            f" Or set {setting} = auto to run without it",
            volume=folder, path=found.path.value,
        )  # fmt: skip
    if found.path is GdsPath.COMPAT:
        counters.add(volumes_metrics.GDS_PRETENDED)
        _log.warning("GPUDirect Storage falls back to host memory: volume at %s (%s); posix is used", folder, found.why)
    elif found.facts:  # with a driver, GDS may be expected
        counters.add(volumes_metrics.GDS_NOT_USABLE)
        _log.warning("GPUDirect Storage not usable: volume at %s (%s); posix is used", folder, found.why)
    else:
        _log.info("GPUDirect Storage not used: volume at %s (%s)", folder, found.why)
