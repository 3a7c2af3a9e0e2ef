"""Findings on invented hosts: messages, fixes and unmet requirements."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.config.sources import load_config
from kvstore.doctor.contract import Finding, Level
from kvstore.doctor.facts import ProbeResults, Requirements, Section, WantedNixl, WantedVolume
from kvstore.doctor.findings import findings, healthy
from kvstore.doctor.servers.daemon_findings import (
    Answer,
    RunningMetadata,
    RunningNode,
    metadata_findings,
    node_findings,
    nodes_findings,
)

GIB = 1 << 30
LAPTOP: dict[str, dict[str, Any]] = {
    "system": {
        "kernel": "6.12.0", "machine": "x86_64", "python": "3.11.2", "cores": 8, "root": False,
        "packages": {"kvstore-dualpath": "0.1.0", "torch": "2.13.0+cpu"}, "modules": ["torch"], "copy_kernel": "avx2",
    },
    "gpu": {"cards": 0, "driver": None, "library": False, "udev": True, "nvidia_fs": False},
    "memory": {
        "total_bytes": 16 * GIB, "available_bytes": 12 * GIB, "huge_page_bytes": 2 << 20, "huge_pages_total": 0,
        "huge_pages_free": 0, "transparent": "never", "memlock_soft": 8 << 20, "memlock_hard": 8 << 20, "nofile_soft": 1024,
        "nofile_hard": 1 << 20, "shm_bytes": 8 * GIB, "shm_free_bytes": 8 * GIB,
    },
    "network": {
        "tcp_rmem": 32 << 20, "tcp_wmem": 4 << 20, "rdma": [], "uverbs": False, "libraries": [], "tools": ["ip", "tc"],
    },
}  # fmt: skip
SERVER: dict[str, dict[str, Any]] = LAPTOP | {
    "system": LAPTOP["system"] | {"root": True, "packages": {"torch": "2.13.0"}, "modules": ["torch", "kvikio", "nixl_cu13"]},
    "gpu": {
        "cards": 1, "driver": "NVRM version 580.1", "library": True, "status": 0, "cuda": "13.0",
        "devices": [{"name": "NVIDIA H200", "bytes": 141 * GIB}],
    },
    "memory": LAPTOP["memory"] | {
        "total_bytes": 512 * GIB, "available_bytes": 400 * GIB, "memlock_soft": -1, "memlock_hard": -1,
        "huge_pages_total": 60_000, "huge_pages_free": 60_000,
    },
    "network": LAPTOP["network"] | {
        "rdma": [{"name": "mlx5_0:1", "state": "4: ACTIVE", "layer": "InfiniBand", "rate": "400 Gb/sec"}], "uverbs": True,
        "libraries": ["libibverbs", "librdmacm"],
    },
    "volume:0": {
        "exists": True, "nearest": "/mnt/a", "filesystem": "ext4", "writable": True, "free_bytes": 900 * GIB,
        "slot_manifest": False, "direct": None,
    },
    "nixl": {"works": True, "why": ""},
    "gds:0": {"path": "gds", "real": True, "why": "6.5 GB/s measured", "measured": True, "fix": None, "facts": {"devices": 1}},
}  # fmt: skip
VOLUME = WantedVolume(Path("/mnt/a"), 100 * GIB)
SMALL = Requirements(dram_bytes=GIB)
LARGE = Requirements(dram_bytes=64 * GIB, volumes=(VOLUME,), gds="required", huge_pages=True, nixl=WantedNixl(required=True))


def facts(base: dict[str, dict[str, Any]], **changes: dict[str, Any] | str) -> ProbeResults:
    """Change the facts of a host: fields of a probe, or its error. ``volume_0`` means ``volume:0``."""
    sections = {name: Section(said) for name, said in base.items()}
    for probe, change in changes.items():
        name = probe.replace("_", ":")
        sections[name] = Section({}, change) if isinstance(change, str) else Section(base.get(name, {}) | change)
    return ProbeResults(sections)


def of(found: list[Finding], area: str, words: str = "") -> Finding:
    matching = [finding for finding in found if finding.area == area and words in finding.message]
    assert len(matching) == 1, found
    return matching[0]


COMMANDS = frozenset(
    ("df", "dmesg", "free", "ibv_devinfo", "kvstore", "ls", "modprobe", "numactl", "nvidia-smi", "openssl", "pip",
     "rdma", "sudo", "ulimit", "unset")
)  # fmt: skip
SETTINGS = frozenset(load_config(default_files=())[1])


def assert_mends_can_be_pasted(found: Iterable[Finding]) -> None:
    """Assert that each fix is a valid shell line without placeholders, or names existing settings."""
    for fix in (finding.fix for finding in found if finding.fix is not None):
        line = fix.partition("   #")[0]
        words = shlex.split(line)
        if words[0] == "--set":
            assert all(flag == "--set" for flag in words[::2]), fix
            assert SETTINGS.issuperset(setting.partition("=")[0] for setting in words[1::2]), fix
            continue
        assert subprocess.run(["bash", "-n", "-c", line], check=False).returncode == 0, fix
        assert COMMANDS.issuperset(part.split()[0] for part in re.split(r";|&&", line)), fix
        assert re.search(r"…|\b(PATH|SIZE|ADDR|HOST|PORT)\b", line) is None, fix


def test_findings_laptop_has_no_missing() -> None:
    found = findings(facts(LAPTOP), SMALL)
    assert healthy(found)
    assert {finding.level for finding in found} == {Level.OK, Level.INFO}
    assert of(found, "GPU").message == "none: blocks live in DRAM and on NVMe"
    assert of(found, "limits", "memlock").fix is None
    assert of(found, "network lab").fix == "sudo kvstore demo --dual-path"


def test_findings_complete_server_is_ok() -> None:
    found = findings(facts(SERVER), LARGE)
    assert {finding.level for finding in found} == {Level.OK}, found
    assert "real (6.5 GB/s measured)" in of(found, "GPUDirect Storage").message
    assert not any(finding.fix for finding in found)


@pytest.mark.parametrize(
    ("changes", "area", "words", "level", "fix"),
    [
        # ---- GPU
        ({"gpu": {"library": False, "devices": None}}, "GPU", "libcuda.so.1", Level.WARNING, "nvidia-driver"),
        ({"gpu": {"library": False, "devices": None, "cards": 0}}, "GPU", "no NVIDIA card is seen", Level.WARNING, None),
        ({"gpu": {"status": 100, "devices": []}}, "GPU", "cuInit answers 100", Level.WARNING, "nvidia-smi"),
        ({"system": {"copy_kernel": "python"}}, "software", "in Python", Level.WARNING, "apt install gcc"),
        ({"system": {"packages": {"torch": "2.13.0+cpu"}}}, "GPU", "does not use it", Level.WARNING, "pip install"),
        ({"gpu": "gave no answer within 10 s"}, "GPU", "gave no answer within 10 s", Level.WARNING, None),
        # ---- GDS, which this configuration requires
        ({"gds_0": {"path": "compat", "real": False, "why": "no GDS", "fix": "modprobe nvidia-fs"}},
         "GPUDirect Storage", "compat (no GDS)", Level.MISSING, "modprobe nvidia-fs"),
        ({"gds_0": {"real": "yes"}}, "GPUDirect Storage", "posix is used", Level.MISSING, None),
        ({"gds_0": "failed with code -11: it said nothing"}, "GPUDirect Storage", "code -11", Level.MISSING, None),
        # ---- storage
        ({"volume_0": {"free_bytes": 40 * GIB}}, "storage", "60.0 GiB too little", Level.MISSING, "df -h /mnt/a"),
        ({"volume_0": {"writable": False, "free_bytes": 900 * GIB}}, "storage", "no volume can be made", Level.MISSING,
         'sudo chown "$USER" /mnt/a'),
        ({"volume_0": {"writable": False, "exists": False, "nearest": "/mnt"}}, "storage", "/mnt cannot be written to",
         Level.MISSING, 'sudo mkdir -p /mnt/a && sudo chown "$USER" /mnt/a'),
        ({"volume_0": {"writable": False, "slab_bytes": 100 * GIB}}, "storage", "stores nothing", Level.WARNING, "chown"),
        ({"volume_0": {"direct": "Invalid argument"}}, "storage", "O_DIRECT is refused", Level.WARNING, "ext4 or XFS"),
        ({"volume_0": {"writable": False, "read_only": True, "mount": "/mnt"}}, "storage", "mounted read-only", Level.MISSING,
         "--set node.nvme="),
        ({"volume_0": {"writable": False, "read_only": True, "mount": "/mnt", "slab_bytes": 100 * GIB}}, "storage",
         "mounted read-only", Level.WARNING, "sudo mount -o remount,rw /mnt"),
        ({"volume_0": {"exists": False, "nearest": "/mnt", "in_the_way": "/mnt/a"}}, "storage", "no folder", Level.MISSING,
         "--set node.nvme="),
        ({"volume_0": {"exists": False, "nearest": "/mnt", "closed": True}}, "storage", "may not enter /mnt:", Level.MISSING,
         "sudo chmod o+x /mnt"),
        ({"volume_0": {"closed": True}}, "storage", "may not enter /mnt/a:", Level.MISSING, 'sudo chown "$USER" /mnt/a'),
        ({"volume_0": {"slab_owner": "host-2"}}, "storage", "node host-2 has adopted this volume", Level.WARNING,
         "kvstore status --detail"),
        ({"volume_0": {"slab_bytes": 5, "slab_damage": "cut off"}}, "storage", "no volume (cut off)", Level.MISSING,
         "kvstore volumes repair /mnt/a"),
        ({"volume_0": "gave no answer within 10 s"}, "storage", "/mnt/a: not known", Level.WARNING, None),
        # ---- memory
        ({"memory": {"total_bytes": 32 * GIB}}, "memory", "in 32.0 GiB of RAM", Level.MISSING, "--set node.dram=16GiB"),
        ({"memory": {"available_bytes": 32 * GIB}}, "memory", "available now", Level.WARNING, "free -h"),
        ({"memory": {"huge_pages_free": 768}}, "memory", "too few", Level.WARNING, "vm.nr_hugepages=92000"),
        ({"memory": {"huge_pages_total": 0, "huge_pages_free": 0, "total_bytes": 100 * GIB, "available_bytes": 72 * GIB}},
         "memory", "would not leave 10.0 GiB to the host", Level.WARNING, "--set node.dram=62GiB"),
        ({"memory": {"huge_pages_total": 0, "huge_pages_free": 0, "total_bytes": 100 * GIB, "available_bytes": 74 * GIB}},
         "memory", "too few", Level.WARNING, "vm.nr_hugepages=32768"),
        ({"memory": {"huge_page_bytes": 0}}, "memory", "this kernel has none", Level.WARNING, None),
        ({"memory": {"shm_free_bytes": 64 << 20}}, "memory", "/dev/shm has 64.0 MiB", Level.WARNING, "remount,size=50%"),
        # ---- limits, network
        ({"memory": {"memlock_soft": 8 << 20, "memlock_hard": 8 << 20}},
         "limits", "memlock: 8.0 MiB", Level.WARNING, "sudo prlimit --pid $$ --memlock=unlimited:unlimited"),
        ({"memory": {"memlock_soft": 8 << 20}}, "limits", "memlock: 8.0 MiB", Level.WARNING, "ulimit -S -l unlimited"),
        ({"memory": {"memlock_soft": 8 << 20, "memlock_hard": 64 << 30}},
         "limits", "memlock: 8.0 MiB", Level.WARNING, f"ulimit -S -l {64 << 20}"),
        ({"memory": {"nofile_hard": 1024}}, "limits", "nofile: 1024", Level.WARNING,
         "sudo prlimit --pid $$ --nofile=65536:65536   # systemd: LimitNOFILE=65536"),
        ({"memory": {"nofile_hard": 1024, "root_raises_limits": False}}, "limits", "nofile: 1024", Level.WARNING,
         "ulimit -H -a   # not even root"),
        ({"network": {"tcp_rmem": 212_992}}, "network", "tcp_rmem: 208.0 KiB", Level.WARNING, "net.ipv4.tcp_rmem="),
        ({"network": {"rdma": [{"name": "mlx5_0:1", "state": "1: DOWN"}]}}, "RDMA", "1: DOWN", Level.WARNING, "rdma link show"),
        ({"network": {"libraries": []}}, "RDMA", "libibverbs", Level.WARNING, "ibverbs-providers"),
        ({"network": {"uverbs": False}}, "RDMA", "/dev/infiniband", Level.WARNING, "--device"),
        ({"system": {"modules": []}}, "RDMA", "NIXL: not installed", Level.WARNING, "pip install nixl-cu13"),
        ({"network": {"tools": ["ip"]}}, "network lab", "tc not installed", Level.INFO, "apt install iproute2"),
    ],
)  # fmt: skip
def test_findings_one_problem_has_fix(changes: dict[str, Any], area: str, words: str, level: Level, fix: str | None) -> None:
    found = findings(facts(SERVER, **changes), LARGE)
    finding = of(found, area, words)
    assert finding.level is level
    assert (fix in finding.fix) if fix is not None and finding.fix else finding.fix is None and fix is None
    assert healthy(found) is (level is not Level.MISSING)
    assert [other for other in found if other.level is Level.MISSING] == ([finding] if level is Level.MISSING else [])
    assert_mends_can_be_pasted(found)


@pytest.mark.parametrize("gib", [3, 10, 22, 23, 100])
def test_huge_pages_fix_leaves_memory_to_host(gib: int) -> None:
    """For any arena size, a fix leaves 2 GiB to the host, and the proposed arena size can be reserved."""
    host = facts(LAPTOP, memory={"total_bytes": 23 * GIB, "available_bytes": 22 * GIB})
    finding = of(findings(host, Requirements(dram_bytes=gib * GIB, huge_pages=True)), "memory", "too few")
    assert_mends_can_be_pasted([finding])
    if finding.fix is not None and finding.fix.startswith("--set node.dram="):
        assert gib > 19
        smaller = int(finding.fix.partition("=")[2].partition("GiB")[0])
        finding = of(findings(host, Requirements(dram_bytes=smaller * GIB, huge_pages=True)), "memory", "too few")
    assert finding.fix is not None
    pages = int(finding.fix.removeprefix("sudo sysctl -w vm.nr_hugepages="))
    assert pages * (2 << 20) <= 22 * GIB - 2.3 * GIB


def test_huge_pages_without_memory_are_not_proposed() -> None:
    for memory in ({"available_bytes": GIB}, {"available_bytes": None}, {"available_bytes": None, "total_bytes": None}):
        finding = of(findings(facts(LAPTOP, memory=memory), Requirements(dram_bytes=GIB, huge_pages=True)), "memory", "too few")
        assert (finding.fix or "").startswith("--set node.huge_pages=false")


def test_nixl_without_sysfs_proposes_mount() -> None:
    base = SERVER | {"nixl": {"works": False, "why": "NIXL_ERR_BACKEND"}, "network": SERVER["network"] | {"sysfs": False}}
    finding = of(findings(facts(base), LARGE), "NIXL")
    assert (finding.fix or "").startswith("sudo mount -t sysfs sysfs /sys")
    assert_mends_can_be_pasted([finding])


@pytest.mark.parametrize(
    ("gds", "said", "level"),
    [
        ("auto", {"path": "none", "real": False, "why": "no CUDA driver", "facts": {}, "fix": "x"}, Level.INFO),
        ("auto", {"path": "compat", "real": False, "why": "pretended", "facts": {"devices": 1}, "fix": "x"}, Level.WARNING),
        ("required", {"path": "none", "real": False, "why": "no CUDA driver", "facts": {}, "fix": "x"}, Level.MISSING),
        ("auto", {"path": "gds", "real": True, "why": "measured", "facts": {"devices": 1}}, Level.OK),
        ("off", {"path": "gds", "real": True, "why": "measured", "facts": {"devices": 1}}, Level.INFO),
    ],
)
def test_gds_level_follows_setting(gds: str, said: dict[str, Any], level: Level) -> None:
    wanted = Requirements(dram_bytes=GIB, volumes=(VOLUME,), gds=gds)
    assert of(findings(facts(SERVER | {"gds:0": said}), wanted), "GPUDirect Storage").level is level


@pytest.mark.parametrize("base", [LAPTOP, SERVER], ids=["without RDMA", "with RDMA"])
@pytest.mark.parametrize(
    ("asked", "said", "words", "level"),
    [
        (None, {}, "switched off", Level.INFO),
        (WantedNixl(required=True, transports="tcp"), {"works": True}, "over UCX (tcp)", Level.OK),
        (WantedNixl(required=True), {"works": False, "why": "no usable transports"}, "no usable transports", Level.MISSING),
        (WantedNixl(), {"works": False, "why": "no usable transports"}, "no usable transports", Level.WARNING),
        (
            WantedNixl(transports="rc", devices="mlx5_9:1"),
            {"works": False, "why": "no such device"},
            "no such device",
            Level.WARNING,
        ),
        (WantedNixl(required=True), {}, "nothing was tried", Level.MISSING),
        (WantedNixl(required=True), "failed with code -11: it said nothing", "code -11", Level.MISSING),
        (WantedNixl(), "failed with code -11: it said nothing", "code -11", Level.WARNING),
        (WantedNixl(trusted=False), {"works": True}, "a node does not start", Level.MISSING),
        (WantedNixl(required=True, ruled_out="tls"), {"works": True}, "node.tls does not go with it", Level.MISSING),
    ],
)
def test_nixl_level_follows_setting(
    base: dict[str, dict[str, Any]], asked: WantedNixl | None, said: dict[str, Any] | str, words: str, level: Level
) -> None:
    host = {name: section for name, section in base.items() if name != "nixl"}
    found = findings(facts(host, nixl=said), Requirements(dram_bytes=GIB, nixl=asked))
    assert_mends_can_be_pasted(found)
    assert of(found, "NIXL", words).level is level
    assert healthy(found) is (level is not Level.MISSING)


def test_gds_required_without_volume_or_probe_is_missing() -> None:
    for wanted in (Requirements(dram_bytes=GIB, gds="required"), Requirements(dram_bytes=GIB, gds="required", volumes=(VOLUME,))):
        found = findings(facts(LAPTOP), wanted)
        assert not healthy(found)
        assert_mends_can_be_pasted(found)


def test_volumes_and_mounts_are_separate() -> None:
    other = WantedVolume(Path("/mnt/b"), GIB, direct=False)
    base = SERVER | {
        "volume:1": SERVER["volume:0"] | {"direct": "Invalid argument"},
        "gds:1": {"real": False, "path": "compat", "facts": {"devices": 1}},
        "mount:0": {"exists": True, "slot_manifest": True, "filesystem": "ceph"}, "mount:1": {"exists": False},
        "mount:2": {"exists": False, "closed": True, "nearest": "/m"},
    }  # fmt: skip
    mounts = (Path("/m/a"), Path("/m/b"), Path("/m/c"))
    found = findings(facts(base), Requirements(dram_bytes=GIB, volumes=(VOLUME, other), mounts=mounts))
    assert of(found, "storage", "/mnt/a: O_DIRECT").level is Level.OK
    assert of(found, "storage", "/mnt/b: O_DIRECT is refused").level is Level.INFO  # direct I/O is switched off
    assert of(found, "GPUDirect Storage", "/mnt/b").level is Level.WARNING
    assert of(found, "storage", "/m/a").level is Level.OK
    assert of(found, "storage", "/m/b").level is Level.WARNING
    assert (of(found, "storage", "/m/c: this user may not enter /m").fix or "").startswith("sudo chmod o+x /m ")
    assert healthy(found)
    assert_mends_can_be_pasted(found)


def test_folders_with_blanks_are_quoted() -> None:
    spaced = Requirements(dram_bytes=GIB, volumes=(WantedVolume(Path("/mnt/my disk"), GIB),), mounts=(Path("/m/b c"),))
    found = findings(facts(SERVER | {"mount:0": {"exists": False}}, volume_0={"writable": False}), spaced)
    assert of(found, "storage", "cannot be written to").fix == "sudo chown \"$USER\" '/mnt/my disk'"
    assert of(found, "storage", "mount /m/b c").fix == "sudo mount '/m/b c'   # as /etc/fstab names it"


# ---- running nodes ----

FINE = RunningNode(
    "127.0.0.1:1",
    "a",
    ("a/dram: memfd", "a/nvme0: posix O_DIRECT", "GPUDirect Storage of a/nvme0: real (1 GB/s)"),
    {"x_total": 3},
)


def test_running_node_healthy_is_ok() -> None:
    assert {finding.level for finding in node_findings(FINE)} == {Level.OK}


@pytest.mark.parametrize(
    ("line", "required", "level"),
    [
        ("a/dram: memfd (huge pages refused: shmem_enabled is never)", False, Level.WARNING),
        ("a/nvme0: posix buffered (O_DIRECT refused: Invalid argument)", False, Level.WARNING),
        ("a/nvme0: posix O_DIRECT, read-only (No space left on device)", False, Level.WARNING),
        ("a/nvme0: posix O_DIRECT (gds left alone after failures: x)", False, Level.WARNING),
        ("NIXL: not in use: NIXL cannot be set up here (error=x)", False, Level.WARNING),
        ("NIXL: in use, UCX over TCP and CMA", False, Level.OK),
        ("NIXL: off", False, Level.OK),
        ("copies and checksums: native kernel avx512", False, Level.OK),
        ("engine vllm-worker, copies on cuda:0: load direct (measured), store batched (measured)", False, Level.OK),
        ("copies and checksums: in Python, several times slower (12 batches so far)", False, Level.WARNING),
        ("GPUDirect Storage of a/nvme0: compat (no GDS)", False, Level.INFO),
        ("GPUDirect Storage of a/nvme0: compat (no GDS)", True, Level.MISSING),
    ],
)
def test_running_node_io_paths_have_levels(line: str, required: bool, level: Level) -> None:
    found = list(node_findings(RunningNode("x", "a", (line,)), gds_required=required))
    assert of(found, "node a", line).level is level
    assert_mends_can_be_pasted(found)


def test_running_node_errors_and_silence_are_reported() -> None:
    counters = {"nvme_read_errors_total": 2, "gds_pretended_total": 1, "nvme_sync_errors_total": 0, "lookups_total": 9}
    found = list(node_findings(RunningNode("x", "a", (), counters)))
    assert [finding.message for finding in found] == ["since it started: gds_pretended 1, nvme_read_errors 2"]
    (silent,) = node_findings(RunningNode("unix:/x", error="no answer"))
    assert silent.level is Level.WARNING
    assert (silent.fix or "").startswith("kvstore health node ")
    assert_mends_can_be_pasted([*found, silent])


# ---- capacity ----

TWO = [WantedVolume(Path("/mnt/a"), 100 * GIB), WantedVolume(Path("/mnt/b"), 100 * GIB)]


def two_volumes(free: int, devices: tuple[int, int], disks: tuple[str, str], slab: int | None = None) -> ProbeResults:
    sections = {}
    for number in range(2):
        said = {"free_bytes": free, "device": devices[number], "disk": disks[number], "mount": "/mnt", "slab_bytes": slab}
        sections[f"volume:{number}"] = SERVER["volume:0"] | said
    return facts(SERVER | sections)


def test_volumes_on_one_file_system_are_added_up() -> None:
    found = findings(two_volumes(150 * GIB, (7, 7), ("nvme0n1", "nvme0n1")), Requirements(dram_bytes=GIB, volumes=TWO, gds="off"))
    together = of(found, "storage", "together they need 200.0 GiB more, and 150.0 GiB is free")
    assert together.level is Level.MISSING
    assert of(found, "storage", "share one disk (nvme0n1)").level is Level.WARNING
    assert_mends_can_be_pasted(found)


def test_existing_volumes_need_no_free_space() -> None:
    found = findings(
        two_volumes(GIB, (7, 7), ("nvme0n1", "nvme0n1"), slab=100 * GIB), Requirements(dram_bytes=GIB, volumes=TWO, gds="off")
    )
    assert healthy(found)


def test_volumes_on_partitions_of_one_disk_share_it() -> None:
    wanted = Requirements(dram_bytes=GIB, volumes=TWO, gds="off")
    found = findings(two_volumes(150 * GIB, (7, 8), ("nvme0n1", "nvme0n1")), wanted)
    assert healthy(found)
    of(found, "storage", "2 volumes share one disk (nvme0n1)")
    apart = findings(two_volumes(150 * GIB, (7, 8), ("nvme0n1", "nvme1n1")), wanted)
    assert not [finding for finding in apart if "share" in finding.message]


def test_block_table_beyond_the_host_is_a_warning() -> None:
    """2 volumes of 3 TiB and blocks of 1 MiB: 6.3 million blocks, about 7 GiB of index beside the arena."""
    wanted = Requirements(dram_bytes=60 * GIB, volumes=[WantedVolume(Path("/mnt/a"), 6 << 40)], gds="off")
    host = facts(SERVER, memory={"total_bytes": 64 * GIB, "available_bytes": 64 * GIB})
    finding = of(findings(host, wanted), "memory", "arena and block table of a full node")
    assert finding.level is Level.WARNING
    assert "1.0 GiB plus 1,000 bytes for each of 6,352,896 blocks of 1.0 MiB" in finding.message
    assert finding.fix == "--set node.dram=57GiB"
    large_blocks = Requirements(dram_bytes=60 * GIB, volumes=wanted.volumes, gds="off", block_bytes=16 << 20)
    enough = of(findings(host, large_blocks), "memory", "a full node takes")
    assert enough.level is Level.OK
    assert "(1.0 GiB plus " in enough.message


@pytest.mark.parametrize(
    ("refused", "gib", "level"), [(False, 64, Level.WARNING), (True, 64, Level.INFO), (False, 16, Level.INFO)]
)
def test_large_arena_without_huge_pages_is_a_warning(refused: bool, gib: int, level: Level) -> None:
    host = facts(SERVER, memory={"huge_pages_total": 0, "huge_pages_free": 0})
    found = findings(host, Requirements(dram_bytes=gib * GIB, huge_pages_refused=refused))
    assert of(found, "memory", "huge pages: 0 reserved").level is level
    assert_mends_can_be_pasted(found)


def test_large_host_small_arena_gets_proposal() -> None:
    disks = {
        "nvme": [{"name": "nvme1n1", "bytes": 7 << 40, "mounts": []}, {"name": "nvme0n1", "bytes": 1 << 40, "mounts": ["/"]}]
    }
    host = facts(SERVER | {"disks": disks}, memory={"numa_nodes": 2})
    found = findings(host, SMALL)
    assert of(found, "memory", "the arena takes 0.2 % of 512.0 GiB").level is Level.INFO
    assert of(found, "storage", "NVMe disk nvme1n1, 7.00 TiB, not mounted").level is Level.INFO
    assert of(found, "storage", "NVMe disk nvme0n1, 1.00 TiB, mounted at /").level is Level.INFO
    numa = of(findings(host, LARGE), "memory", "2 NUMA nodes")
    assert_mends_can_be_pasted([*found, numa])


def test_no_volume_configured_names_running_volumes() -> None:
    found = findings(facts(LAPTOP | {"running": {"volumes": ["vm/nvme0"]}}), SMALL)
    words = "the configuration of this command names no NVMe volume; nodes that run here have vm/nvme0"
    assert of(found, "storage").message == of(found, "GPUDirect Storage").message == words


def test_defaults_are_reported_with_reason() -> None:
    found = findings(facts(LAPTOP), Requirements(dram_bytes=GIB, defaults=("node.load_threads = 8 (why)",)))
    assert of(found, "defaults").message == "node.load_threads = 8 (why)"


# ---- servers ----


@pytest.mark.parametrize(
    ("server", "level", "words"),
    [
        (RunningMetadata(address="m:1", setting="client.metadata", required=True, nodes=3, nodes_alive=3), Level.OK, "3 of 3"),
        (RunningMetadata(address="m:1", setting="client.metadata", required=True, nodes=3, nodes_alive=2),
         Level.WARNING, "2 of 3"),
        (RunningMetadata(address="m:1", setting="node.metadata", required=True, answer=Answer.NONE, error="x"),
         Level.MISSING, "m:1 (node.metadata) does not answer: x"),
        (RunningMetadata(address="m:1", setting="client.metadata", required=False, answer=Answer.NONE, error="x"),
         Level.INFO, "none answers at m:1, the default"),
        (RunningMetadata(address="m:1", setting="client.metadata", required=True, answer=Answer.REFUSED, error="a token"),
         Level.WARNING, "answers, but rejects the call: a token"),
    ],
)  # fmt: skip
def test_metadata_configured_without_answer_is_missing(server: RunningMetadata, level: Level, words: str) -> None:
    (finding,) = metadata_findings([server])
    assert finding.level is level
    assert words in finding.message
    assert_mends_can_be_pasted([finding])


def test_metadata_one_of_several_away_is_a_warning() -> None:
    away = RunningMetadata(address="m:2", setting="client.metadata", required=True, answer=Answer.NONE, error="x")
    there = RunningMetadata(address="m:1", setting="client.metadata", required=True, nodes=3, nodes_alive=3)
    found = list(metadata_findings([there, away]))
    assert [one.level for one in found] == [Level.OK, Level.WARNING]
    assert "m:2 (client.metadata) does not answer: x; calls go to the other servers" in found[1].message
    assert_mends_can_be_pasted(found)


def test_node_rejecting_token_counts_as_running() -> None:
    node = RunningNode("unix:/x", error="a token is required (client.token_file is not set)", answer=Answer.REFUSED)
    (finding,) = node_findings(node)
    assert finding.level is Level.WARNING
    assert "it runs" in finding.message
    assert finding.fix is not None
    assert finding.fix.startswith("--set client.token_file=")
    assert_mends_can_be_pasted([finding])


def test_node_configured_without_answer_is_missing() -> None:
    (finding,) = node_findings(RunningNode("unix:/x", error="no", answer=Answer.NONE, required=True))
    assert finding.level is Level.MISSING


def test_no_node_and_closed_folders_are_reported() -> None:
    (nothing,) = nodes_findings([], ["/run/kvstore"], [])
    assert nothing.level is Level.INFO
    (closed,) = nodes_findings([], ["/run/kvstore"], ["/run/kvstore"])
    assert (closed.level, closed.fix) == (Level.WARNING, "sudo kvstore doctor")


def test_node_low_open_files_limit_is_warning() -> None:
    found = list(node_findings(RunningNode("x", "a", open_files=1024)))
    assert of(found, "node a", "limit of open files: 1024").level is Level.WARNING
    assert_mends_can_be_pasted(found)


# ---- malformed facts ----

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@given(data=st.data())
def test_findings_malformed_facts_never_raise(data: st.DataObject) -> None:
    sections = {}
    for name, said in SERVER.items():
        keys = sorted(said)
        changed = data.draw(st.dictionaries(st.sampled_from(keys), JSON, max_size=4))
        gone = data.draw(st.sets(st.sampled_from(keys), max_size=2))
        error = data.draw(st.none() | st.just("gave no answer"))
        sections[name] = Section({key: value for key, value in (said | changed).items() if key not in gone}, error)
    for wanted in (SMALL, LARGE):
        for finding in findings(ProbeResults(sections), wanted):
            assert finding.area
            assert finding.message
