"""Which path from this disk to device memory is real: measured, before the node builds on it.

GPUDirect Storage is pretended in two places: kvikio reads through host memory where it finds no GDS (*compatibility mode*), and
libcufile does the same below it, file by file. Both work, neither says so, and neither is faster than ``posix``. So the probe
reads a file of the volume into device memory and counts whose bytes they were; and since drivers hang and crash, it does so in a
process of its own, with a deadline.
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
from kvstore.tiers.io_engines.kvikio_library import CUDA_DRIVER, FORCE_COMPAT, INSTALL_KVIKIO, Kvikio, load_kvikio
from kvstore.tiers.io_engines.probe_process import PROBE_BYTES

_log = logging.getLogger(__name__)

GdsMode = Literal["auto", "required", "off"]
PROBE_TIMEOUT_S = 30.0
SLAB_FILE = "slab.kv"
"""As ``kvstore.tiers.nvme.volume_open`` names it, which imports us."""
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
    """How bytes of a volume get into device memory."""

    GDS = "gds"
    COMPAT = "compat"
    """kvikio works, but through host memory."""
    NONE = "none"
    """Not through kvikio at all."""


@dataclass(frozen=True, slots=True)
class GdsProbe:
    """What the probe found. ``mend``: a line for a shell, or a setting."""

    path: GdsPath
    why: str
    """One line for a person."""
    mend: str | None = None
    """What would make it ``GDS``; None: it is, or nobody asked."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the steps brought to light, for reports."""
    measured: bool = True
    """Whether a file was read; False: ``path`` is what the driver and kvikio allow at best."""

    def describe(self) -> str:
        """One line: the path that is real, and why."""
        return f"{'real' if self.path is GdsPath.GDS else self.path.value} ({self.why})"


def probe_gds(folder: Path, *, timeout_s: float = PROBE_TIMEOUT_S) -> GdsProbe:
    """Measures which path is real for files of a folder.

    Args:
        folder: of the volume; it exists. Where it has no slab large enough, a file is made in it and deleted.
        timeout_s: after it, the answer is that it does not work.
    """
    if (without := _no_driver()) is not None:
        return without
    with ExitStack() as made:
        try:
            path = slab_to_read(folder)
            if path is None:  # ours to delete: the process that fills it may be killed
                path = Path(made.enter_context(tempfile.NamedTemporaryFile(dir=folder, prefix=".gds-probe-")).name)
        except OSError as error:
            return GdsProbe(GdsPath.NONE, f"no file to measure with in {folder}: {error.strerror}", _look_at(folder))
        return _run_probe([str(path.absolute())], timeout_s)


def glance_at_gds(folder: Path, *, timeout_s: float = PROBE_TIMEOUT_S) -> GdsProbe:
    """As ``probe_gds``, without writing anything: where the folder has no slab to read, nothing is ``measured``."""
    if (without := _no_driver()) is not None:
        return without
    try:
        path = slab_to_read(folder)
    except OSError as error:
        return GdsProbe(GdsPath.NONE, f"{folder} cannot be read: {error.strerror}", _look_at(folder), measured=False)
    return _run_probe([] if path is None else [str(path.absolute())], timeout_s)


def slab_to_read(folder: Path) -> Path | None:
    """The slab of a volume's folder, where it has one that is large enough to measure with."""
    slab = folder / SLAB_FILE
    try:
        return slab if slab.stat().st_size >= PROBE_BYTES else None
    except (FileNotFoundError, NotADirectoryError):
        return None


def nvidia_cards(devices: Path = Path("/sys/bus/pci/devices")) -> int:
    """NVIDIA's cards on the bus of this host."""

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
        mend = _DRIVER if nvidia_cards() else _NO_CARD
        return GdsProbe(GdsPath.NONE, f"no CUDA driver on this host: {CUDA_DRIVER} cannot be loaded", mend)
    return None


def _run_probe(arguments: list[str], timeout_s: float) -> GdsProbe:
    command = [sys.executable, "-m", "kvstore.tiers.io_engines.probe_process", *arguments]
    try:
        ran = run_with_timeout(command, timeout_s, environment={"CUFILE_LOGFILE_PATH": os.devnull})
    except OSError as error:
        return GdsProbe(GdsPath.NONE, f"the probe cannot be started: {error.strerror}", "ulimit -a   # what it may start")
    return judge(ran, timeout_s, measured=bool(arguments))


def judge(ran: CommandResult, timeout_s: float, *, measured: bool = True) -> GdsProbe:
    """What the probe's process said, understood. Nothing but proof is taken for GDS, if it was to be ``measured``."""
    facts: dict[str, Any] = {}
    for line in ran.output.splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            continue  # libraries print too
        if isinstance(said, dict):
            facts.update(said)
    if not measured and ran.code == 0 and facts.get("begun") == "read" and "read_error" not in facts:
        path, why, mend = _allowed(facts)
    else:
        path, why, mend = _judge(facts, ran, timeout_s)
    return GdsProbe(path, why, mend, facts, measured)


def _allowed(facts: Mapping[str, Any]) -> tuple[GdsPath, str, str | None]:
    if facts.get("gds_available") is True and facts.get("compat_preferred") is False and not facts.get("compat_forced"):
        return (
            GdsPath.GDS,
            f"kvikio {facts.get('kvikio')} and its driver are there; not measured, for there is no volume yet",
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
        return none, f"the probe ended at '{at}' with code {ran.code}: {said or 'it said nothing'}", broken
    if facts["same"] is not True:
        return none, f"kvikio {facts.get('kvikio')} brought WRONG BYTES into device memory: it is not used", _ENABLE_GDS
    carried = facts.get("backends")
    rate = f"{facts.get('gigabytes_per_s')} GB/s"
    if facts.get("compat_forced"):
        return GdsPath.COMPAT, f"{FORCE_COMPAT} makes libcufile read through host memory", f"unset {FORCE_COMPAT}"
    if not isinstance(carried, dict):
        why = f"kvikio {facts.get('kvikio')} cannot say how it reads: 26.10 is the first that can"
        return GdsPath.COMPAT, why, INSTALL_KVIKIO.replace("install", "install --upgrade")
    if carried.get(_GDS_BACKEND, 0) >= 2 * PROBE_BYTES:  # both passes of the probe, all of it
        return GdsPath.GDS, f"kvikio {facts.get('kvikio')}, libcufile {facts.get('libcufile')}, {rate} measured", None
    available = "GDS is there, but not for this file" if facts.get("gds_available") else "no GDS"
    return GdsPath.COMPAT, f"{available}: kvikio reads through host memory, {rate} measured", _ENABLE_GDS


def choose_gds(
    mode: GdsMode,
    folder: Path,
    *,
    threads: int,
    counters: Counters,
    setting: str = "node.gds",
    look: Callable[[Path], GdsProbe] | None = None,
) -> tuple[Kvikio | None, GdsProbe]:
    """What a volume is to be opened with. Logs what was found.

    Args:
        mode: ``off``: kvikio is not touched; ``auto``: used where it is real; ``required``: or nothing.
        folder: of the volume, which exists.
        threads: requests in flight, over all volumes.
        counters: where a pretended path is counted.
        setting: what ``mode`` is called where it was set, for people.
        look: how to find out; ``glance_at_gds`` for who may not write there, and only what was measured counts. None:
            ``probe_gds``.

    Raises:
        Unsupported: GDS is required, and not real here; the message says what to do.
        InvalidArgument: there is no such mode.
    """
    if mode not in ("auto", "required", "off"):
        raise InvalidArgument(f"{setting} takes auto, required or off", gds=mode)
    if mode == "off":
        return None, GdsProbe(GdsPath.NONE, "switched off")
    found = (look or probe_gds)(folder)
    if found.path is GdsPath.GDS and not found.measured:
        found = GdsProbe(GdsPath.NONE, found.why, f"wait for a volume of at least {PROBE_BYTES >> 20} MiB", found.facts)
    if found.path is GdsPath.GDS:
        try:
            kvikio = load_kvikio(threads=threads)
        except Unsupported as error:  # it did work, a moment ago in another process
            found = GdsProbe(GdsPath.NONE, str(error), INSTALL_KVIKIO, found.facts)
        else:
            _log.info("volume at %s: GPUDirect Storage is %s", folder, found.describe())
            return kvikio, found
    if mode == "required":
        raise Unsupported(
            f"{setting} = required, but GPUDirect Storage is not real here: {found.why}. To mend it: {found.mend}."
            f" Or set {setting} = auto to go on without",
            volume=folder, path=found.path.value,
        )  # fmt: skip
    if found.path is GdsPath.COMPAT:
        counters.add(volumes_metrics.GDS_PRETENDED)
        _log.warning("volume at %s: GPUDirect Storage is only pretended (%s): posix is used", folder, found.why)
    elif found.facts:  # there is a driver, so somebody may expect it
        counters.add(volumes_metrics.GDS_NOT_USABLE)
        _log.warning("volume at %s: no GPUDirect Storage (%s): posix is used", folder, found.why)
    else:
        _log.info("volume at %s: no GPUDirect Storage: %s", folder, found.why)
    return None, found
