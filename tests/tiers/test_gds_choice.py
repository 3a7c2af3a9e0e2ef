"""Choice of the GDS path: the probe's output is parsed, and only a measured read counts as GPUDirect Storage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.config.node import NodeConfig, VolumeSection
from kvstore.core.errors import InvalidArgument, Unsupported
from kvstore.node.durability.recovery import open_volumes
from kvstore.observe.counters import Counters
from kvstore.process.run_with_timeout import CommandResult, run_with_timeout
from kvstore.tiers.io_engines import kvikio_library, probe
from kvstore.tiers.io_engines.kvikio_library import Kvikio, load_kvikio
from kvstore.tiers.io_engines.probe import GdsMode, GdsPath, GdsProbe, choose_gds, judge
from kvstore.tiers.io_engines.probe_process import PROBE_BYTES

DRIVER: dict[str, Any] = {"begun": "driver", "cuda_init": 0, "cuda_version": 12090, "devices": 1, "device": "a GPU"}
KVIKIO: dict[str, Any] = {"kvikio": "26.10.00", "gds_available": True, "compat_preferred": False, "libcufile": "1.14"}
READ: dict[str, Any] = {"same": True, "backends": {"GDS": 2 * PROBE_BYTES}, "gigabytes_per_s": 6.5}
REAL = DRIVER | KVIKIO | READ


@pytest.mark.parametrize(
    ("said", "code", "path", "words"),
    [
        (REAL, 0, GdsPath.GDS, "6.5 GB/s measured"),
        (REAL | {"backends": {"POSIX": 2 * PROBE_BYTES}}, 0, GdsPath.COMPAT, "not for this file"),
        (REAL | {"backends": {"POSIX": PROBE_BYTES, "GDS": PROBE_BYTES}}, 0, GdsPath.COMPAT, "through host memory"),
        (REAL | {"backends": {}}, 0, GdsPath.COMPAT, "through host memory"),
        (REAL | {"backends": None}, 0, GdsPath.COMPAT, "version 26.10 or later"),
        (REAL | {"backends": {"POSIX": 1}, "gds_available": False}, 0, GdsPath.COMPAT, "no GDS"),
        (REAL | {"compat_forced": True}, 0, GdsPath.COMPAT, "CUFILE_FORCE_COMPAT_MODE"),
        (REAL | {"same": False}, 0, GdsPath.NONE, "WRONG BYTES"),
        (REAL | {"same": "yes"}, 0, GdsPath.NONE, "WRONG BYTES"),
        (DRIVER | KVIKIO | {"read_error": "cuMemAlloc answers 2"}, 0, GdsPath.NONE, "cuMemAlloc answers 2"),
        (DRIVER | {"kvikio_error": "kvikio is not installed"}, 0, GdsPath.NONE, "not installed"),
        (DRIVER | {"cuda_init": 100}, 0, GdsPath.NONE, "cuInit answers 100"),
        (DRIVER | KVIKIO | {"begun": "read"}, -11, GdsPath.NONE, "ended at 'read' with code -11"),
        (DRIVER | KVIKIO | {"begun": "read"}, None, GdsPath.NONE, "hung at 'read'"),
        (REAL, None, GdsPath.NONE, "hung"),
        ({}, 1, GdsPath.NONE, "ended at 'start' with code 1: no module of that name"),
    ],
)
def test_judge_probe_output(said: dict[str, Any], code: int | None, path: GdsPath, words: str) -> None:
    lines = [json.dumps({name: value}) for name, value in said.items()]
    found = judge(
        CommandResult(code, "\n".join(["a library's chatter", "[1, 2]", *lines]), "Traceback\nno module of that name\n"), 30.0
    )
    assert found.path is path
    assert words in found.why
    assert (found.fix is None) == (path is GdsPath.GDS)
    shell_words = ("kvstore", "nvidia-smi", "pip", "sudo", "unset", sys.executable)
    assert found.fix is None or found.fix.split()[0] in shell_words, "a line for a shell"


@pytest.mark.parametrize(
    ("begun", "code", "fix"),
    [("start", None, "kvstore doctor"), ("driver", None, "nvidia-smi"), ("driver", -11, "nvidia-smi"),
     ("driver", 1, "nvidia-smi"), ("read", -11, "sudo modprobe nvidia-fs")],
)  # fmt: skip
def test_judge_failed_probe_names_remedy_of_its_step(begun: str, code: int | None, fix: str) -> None:
    """A CUDA driver that hangs, crashes or has no ``cuInit`` is not repaired by a kernel module for disks."""
    found = judge(CommandResult(code, json.dumps({"begun": begun}), "AttributeError: undefined symbol: cuInit\n"), 30.0)
    assert (found.fix or "").startswith(fix)


def test_judge_no_card_proposes_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "CUDA_DRIVER", "libnosuchdriver.so.1")
    for cards, fix in ((0, "--set node.gds=off"), (1, "sudo apt install nvidia-driver-cuda")):
        monkeypatch.setattr(probe, "nvidia_cards", lambda cards=cards: cards)
        assert (probe.probe_gds(tmp_path).fix or "").startswith(fix)


def test_nvidia_cards_counts_gpus_on_the_bus(tmp_path: Path) -> None:
    """NVIDIA bridges, NVIDIA network cards and other vendors' displays do not count."""
    for number, (vendor, kind) in enumerate([("0x10de", "0x030200"), ("0x10de", "0x068000"), ("0x1002", "0x030000")]):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "vendor").write_text(vendor + "\n")
        (tmp_path / str(number) / "class").write_text(kind + "\n")
    (tmp_path / "empty").mkdir()
    assert probe.nvidia_cards(tmp_path) == 1


@pytest.mark.parametrize("output", ["", "\x00\xff", "{", '{"same": true', "null\n3\n", '{"backends": 5, "same": true}'])
def test_judge_nonsense_is_not_gds(output: str) -> None:
    assert judge(CommandResult(0, output, ""), 30.0).path is not GdsPath.GDS


def test_probe_without_driver_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "CUDA_DRIVER", "libnosuchdriver.so.1")
    monkeypatch.setattr(probe, "run_with_timeout", None)
    found = probe.probe_gds(tmp_path)
    assert found.path is GdsPath.NONE
    assert "no CUDA driver" in found.why
    assert found.facts == {}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the C library as the CUDA driver."""
    monkeypatch.setattr(probe, "CUDA_DRIVER", "libc.so.6")


@pytest.mark.usefixtures("driver")
def test_probe_killed_removes_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def killed(command: list[str], _timeout_s: float, **_more: object) -> CommandResult:
        asked.append(command[-1])
        Path(command[-1]).write_bytes(b"half of it")
        return CommandResult(None, json.dumps({"begun": "read"}), "")

    monkeypatch.setattr(probe, "run_with_timeout", killed)
    assert "hung at 'read'" in probe.probe_gds(tmp_path).why
    assert asked[0].startswith(str(tmp_path / ".gds-probe-"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("driver")
def test_probe_reads_slab_and_glance_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def told(command: list[str], _timeout_s: float, **_more: object) -> CommandResult:
        asked.append(command[3:])
        return CommandResult(
            0, "\n".join(json.dumps({name: value}) for name, value in (DRIVER | KVIKIO | {"begun": "read"}).items()), ""
        )

    monkeypatch.setattr(probe, "run_with_timeout", told)
    found = probe.glance_at_gds(tmp_path)
    assert (found.path, found.measured) == (GdsPath.GDS, False)
    assert "not measured" in found.why
    assert list(tmp_path.iterdir()) == []
    with (tmp_path / "slab.kv").open("wb") as slab:
        slab.truncate(PROBE_BYTES)
    for look in (probe.glance_at_gds, probe.probe_gds):
        assert look(tmp_path).path is GdsPath.NONE  # nothing was read, so nothing is believed
    assert asked == [[], [str(tmp_path / "slab.kv")], [str(tmp_path / "slab.kv")]]
    assert [path.name for path in tmp_path.iterdir()] == ["slab.kv"]


@pytest.mark.usefixtures("driver")
def test_probe_that_cannot_run_is_not_gds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no file to measure with" in probe.probe_gds(tmp_path / "missing").why
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    for look in (probe.glance_at_gds, probe.probe_gds):
        found = look(tmp_path)
        assert (found.path, found.why) == (GdsPath.NONE, "the probe cannot be started: No such file or directory")


@pytest.mark.parametrize(
    ("said", "code", "path"),
    [
        ({}, 0, GdsPath.GDS),
        ({"gds_available": False}, 0, GdsPath.COMPAT),
        ({"gds_available": "yes"}, 0, GdsPath.COMPAT),
        ({"compat_preferred": True}, 0, GdsPath.COMPAT),
        ({"compat_forced": True}, 0, GdsPath.COMPAT),
        ({"begun": "kvikio"}, 0, GdsPath.NONE),
        ({}, 1, GdsPath.NONE),
        ({"read_error": "no"}, 0, GdsPath.NONE),
    ],
)
def test_judge_without_read_is_not_measured(said: dict[str, Any], code: int, path: GdsPath) -> None:
    found = judge(CommandResult(code, json.dumps(DRIVER | KVIKIO | {"begun": "read"} | said), ""), 30.0, measured=False)
    assert (found.path, found.measured) == (path, False)


@pytest.mark.parametrize(("forced", "is_forced"), [(None, False), ("", False), ("false", False), ("TRUE", True), ("1", True)])
def test_libcufile_compat_is_forbidden_unless_forced(
    monkeypatch: pytest.MonkeyPatch, forced: str | None, is_forced: bool
) -> None:
    monkeypatch.setenv(kvikio_library.ALLOW_COMPAT, "true")
    monkeypatch.delenv(kvikio_library.FORCE_COMPAT, raising=False)
    if forced is not None:
        monkeypatch.setenv(kvikio_library.FORCE_COMPAT, forced)
    else:
        monkeypatch.setenv(kvikio_library.FORCE_COMPAT, "")  # so that it is put back
        monkeypatch.delenv(kvikio_library.FORCE_COMPAT)
    kvikio_library.forbid_pretence()
    assert os.environ[kvikio_library.ALLOW_COMPAT] == "false"
    assert kvikio_library.compat_is_forced() is is_forced


def test_broken_kvikio_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    """kvikio is missing, half installed, or fails during import: always ``Unsupported``."""
    monkeypatch.setattr(kvikio_library, "CUDA_DRIVER", "libc.so.6")
    monkeypatch.setattr(kvikio_library, "_loaded", None)
    monkeypatch.setattr(kvikio_library, "forbid_pretence", lambda: None)
    for error, words in (
        (ImportError("libkvikio.so: cannot open"), "pip install 'kvstore-dualpath\\[gds-cu12\\]'"),
        (RuntimeError("cuFile not found\nand more"), "cannot be used"),
        (AttributeError("no such thing"), "cannot be used"),
    ):

        def breaks(_name: str, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(kvikio_library.importlib, "import_module", breaks)
        with pytest.raises(Unsupported, match=words):
            load_kvikio(threads=1)
    monkeypatch.setattr(kvikio_library, "CUDA_DRIVER", "libnosuchdriver.so.1")
    with pytest.raises(Unsupported, match="no CUDA driver on this host"):
        load_kvikio(threads=1)


def found_is(monkeypatch: pytest.MonkeyPatch, path: GdsPath, **facts: object) -> None:
    monkeypatch.setattr(probe, "probe_gds", lambda _folder: GdsProbe(path, "the reason", "the remedy", facts))


@pytest.mark.parametrize(
    ("path", "facts", "counted"),
    [
        (GdsPath.COMPAT, {"devices": 1}, {"gds_pretended_total": 1}),
        (GdsPath.NONE, {"devices": 1}, {"gds_not_usable_total": 1}),
        (GdsPath.NONE, {}, {}),
    ],
)
def test_choose_gds_without_gds_path_falls_back_or_raises(
    path: GdsPath, facts: dict[str, object], counted: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found_is(monkeypatch, path, **facts)
    counters = Counters()
    kvikio, found = choose_gds("auto", tmp_path, threads=4, counters=counters)
    assert kvikio is None
    assert found.describe() == f"{path.value} (the reason)"
    assert counters.snapshot() == counted
    with pytest.raises(Unsupported, match=r"node.gds = required.*the reason.*the remedy.*node.gds = auto") as caught:
        choose_gds("required", tmp_path, threads=4, counters=counters)
    assert caught.value.fields["path"] == path.value


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_choose_gds_with_gds_path_uses_kvikio(mode: GdsMode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found_is(monkeypatch, GdsPath.GDS)
    loaded = object.__new__(Kvikio)
    monkeypatch.setattr(probe, "load_kvikio", lambda threads: loaded)
    assert choose_gds(mode, tmp_path, threads=4, counters=Counters())[0] is loaded


def test_choose_gds_unloadable_kvikio_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found_is(monkeypatch, GdsPath.GDS, devices=1)

    def refuse(threads: int) -> Kvikio:
        raise Unsupported("kvikio cannot be used")

    monkeypatch.setattr(probe, "load_kvikio", refuse)
    counters = Counters()
    kvikio, found = choose_gds("auto", tmp_path, threads=4, counters=counters)
    assert (kvikio, found.path) == (None, GdsPath.NONE)
    assert counters.snapshot() == {"gds_not_usable_total": 1}
    with pytest.raises(Unsupported, match=r"node.gds = required.*kvikio cannot be used"):
        choose_gds("required", tmp_path, threads=4, counters=counters)


def test_choose_gds_off_probes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "probe_gds", None)
    assert choose_gds("off", tmp_path, threads=4, counters=Counters()) == (None, GdsProbe(GdsPath.NONE, "switched off"))
    with pytest.raises(InvalidArgument, match="auto, required or off"):
        choose_gds("on", tmp_path, threads=4, counters=Counters())  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_node_with_gds_loads_no_kvikio(mode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node shows what engines can do, and reads into host memory itself."""

    def loaded(threads: int) -> Kvikio:
        raise AssertionError("kvikio in the node's process")

    found_is(monkeypatch, GdsPath.GDS)
    monkeypatch.setattr(probe, "load_kvikio", loaded)
    config = NodeConfig(
        node_id="n", run_dir=tmp_path, nvme=(VolumeSection(path=tmp_path / "v", capacity_bytes=32 << 20),), gds=mode
    )
    opened = open_volumes(config, Counters())
    try:
        assert opened.gds_lines == ["GPUDirect Storage of n/nvme0: real (the reason)"]
        assert ["gds" in slab.io_engine for slab in opened.slabs] == [False]
    finally:
        for slab in opened.slabs:
            slab.close()


def test_volume_folder_not_made_error_names_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    volume = VolumeSection(path=tmp_path / "file" / "v", capacity_bytes=32 << 20)
    with pytest.raises(InvalidArgument, match=r"set node\.nvme to a folder"):
        open_volumes(NodeConfig(node_id="n", run_dir=tmp_path, nvme=(volume,)), Counters())


@pytest.mark.parametrize("volume", [True, False])
def test_node_gds_required_and_missing_exits(volume: bool, tmp_path: Path) -> None:
    """If GPUDirect Storage is required but unavailable, the node exits with an error."""
    arguments = ["--set", "node.gds=required", "--dram", "16MiB"]
    arguments += ["--nvme", f"{tmp_path / 'nvme'}:32MiB"] if volume else []
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", "node", *arguments, "--set", f"node.run_dir={tmp_path / 'run'}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("Error: node.gds = required")
    assert ("node.gds = auto" if volume else "needs an NVMe volume") in last


def test_hanging_command_is_killed_with_children() -> None:
    ran = run_with_timeout(
        [sys.executable, "-c", "print('before', flush=True); import os, time; os.fork(); time.sleep(600)"], 1.0
    )
    assert ran == CommandResult(None, "before\n", "")


def test_command_gets_environment_and_returns_errors() -> None:
    ran = run_with_timeout(["sh", "-c", "echo $SAID; echo bad >&2; exit 3"], 30.0, environment={"SAID": "so"})
    assert ran == CommandResult(3, "so\n", "bad\n")
    with pytest.raises(FileNotFoundError):
        run_with_timeout(["/no/such/program"], 1.0)


def test_choose_gds_unmeasured_path_is_not_used(tmp_path: Path) -> None:
    """Models a volume that is too small to measure, in a folder without write permission."""

    def look(_: Path) -> GdsProbe:
        return GdsProbe(GdsPath.GDS, "the driver says so", measured=False)

    kvikio, found = choose_gds("auto", tmp_path, threads=4, counters=Counters(), look=look)
    assert (kvikio, found.path) == (None, GdsPath.NONE)
    with pytest.raises(Unsupported, match=r"HbmPool.*the driver says so.*at least 16 MiB"):
        choose_gds("required", tmp_path, threads=4, counters=Counters(), setting="HbmPool(gds=...)", look=look)
