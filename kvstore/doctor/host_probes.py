"""Probes of the host. Each is a function that runs in a separate process, because it may hang or crash.

``python -m kvstore.doctor.host_probes NAME [ARGUMENT]`` prints one JSON object. Probes are read-only. Each imports what others do
not need: a doctor starts at least five of them.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from kvstore.core.errors import CorruptBlock
from kvstore.process.memory.host_memory import memory_available, memory_total

PACKAGES = (
    "kvstore-dualpath", "numpy", "grpcio", "lmdb", "protobuf", "pydantic", "xxhash", "zstandard", "rich", "click", "torch",
    "vllm", "sglang", "transformers", "kvikio-cu12", "kvikio-cu13", "nixl-cu12", "nixl-cu13", "nixl",
)  # fmt: skip
LIBRARIES = {"libcuda": "libcuda.so.1", "libibverbs": "libibverbs.so.1", "librdmacm": "librdmacm.so.1", "libucp": "libucp.so.0"}
MODULES = ("torch", "kvikio", "nixl", "nixl_cu12", "nixl_cu13", "ucxx", "libucx")
_PAGE = 4096
_TIME_ERROR = 5
"""State of ``adjtimex`` for a clock that is not synchronized."""
_SYS_RESOURCE = 24
"""Number of CAP_SYS_RESOURCE, the capability to raise limits."""


def system() -> dict[str, object]:
    """Probe kernel, Python, memory and user."""
    from kvstore import native

    return {
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "root": os.geteuid() == 0,
        "clock_synchronized": _clock_synchronized(),
        "copy_kernel": native.kernel_name(),
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "modules": [name for name in MODULES if importlib.util.find_spec(name) is not None],
    }


def _clock_synchronized() -> bool | None:
    """Whether the kernel's clock follows a time server; None: the kernel does not say."""
    timex = ctypes.create_string_buffer(512)  # struct timex with modes 0: read only
    try:
        state = ctypes.CDLL(None).adjtimex(timex)
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _TIME_ERROR


def _version(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def gpu() -> dict[str, object]:
    """Probe GPUs on the bus, the kernel driver and the CUDA driver."""
    from kvstore.tiers.io_engines.probe import nvidia_cards

    found: dict[str, object] = {"cards": nvidia_cards(), "driver": _first_line(Path("/proc/driver/nvidia/version"))}
    found["udev"] = os.access("/run/udev", os.R_OK)
    found["nvidia_fs"] = _first_line(Path("/proc/driver/nvidia-fs/version")) is not None
    try:
        cuda = ctypes.CDLL(LIBRARIES["libcuda"])
    except OSError:
        return found | {"library": False}
    version, count = ctypes.c_int(), ctypes.c_int()
    status = cuda.cuInit(0)
    cuda.cuDriverGetVersion(ctypes.byref(version))
    found |= {"library": True, "status": status, "cuda": f"{version.value // 1000}.{version.value % 1000 // 10}"}
    if status:
        return found
    cuda.cuDeviceGetCount(ctypes.byref(count))
    devices = []
    for index in range(count.value):
        handle, name, memory = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
        cuda.cuDeviceGet(ctypes.byref(handle), ctypes.c_int(index))
        cuda.cuDeviceGetName(name, ctypes.c_int(256), handle)
        cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)
        devices.append({"name": name.value.decode(errors="replace"), "bytes": memory.value})
    return found | {"devices": devices}


def memory() -> dict[str, object]:
    """Probe RAM, huge pages, ``/dev/shm`` and the process limits of this user."""
    lines = [line.split() for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines()]
    values = {words[0].rstrip(":"): int(words[1]) for words in lines}
    found: dict[str, object] = {
        "total_bytes": memory_total(),  # the cgroup limit if it is lower; the same for the available memory
        "available_bytes": memory_available(),
        "huge_page_bytes": values.get("Hugepagesize", 0) << 10,
        "huge_pages_total": values.get("HugePages_Total", 0),
        "huge_pages_free": values.get("HugePages_Free", 0),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
        "transparent": _chosen(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")),
        "root_raises_limits": _root_raises_limits(),
    }
    for name, limit in (("memlock", resource.RLIMIT_MEMLOCK), ("nofile", resource.RLIMIT_NOFILE)):
        soft, hard = resource.getrlimit(limit)
        found |= {f"{name}_soft": soft, f"{name}_hard": hard}  # -1: unlimited
    try:
        shm = os.statvfs("/dev/shm")  # noqa: S108
    except OSError:
        return found
    return found | {"shm_bytes": shm.f_blocks * shm.f_frsize, "shm_free_bytes": shm.f_bavail * shm.f_frsize}


def _root_raises_limits() -> bool | None:
    """Whether root may raise the limits of processes here. Containers usually drop this capability."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines()
    return next((bool(int(line.split()[1], 16) >> _SYS_RESOURCE & 1) for line in lines if line.startswith("CapBnd:")), None)


def _chosen(path: Path) -> str | None:
    state = _first_line(path) or ""
    return state[state.find("[") + 1 : state.find("]")] or None


def network() -> dict[str, object]:
    """Probe socket buffers, RDMA devices and libraries, and the tools of the network lab."""
    tcp = {name: (_first_line(Path(f"/proc/sys/net/ipv4/{name}")) or "").split() for name in ("tcp_rmem", "tcp_wmem")}
    devices = []
    for device in sorted(Path("/sys/class/infiniband").glob("*")):
        for port in sorted((device / "ports").glob("*")):
            state, layer = _first_line(port / "state") or "?", _first_line(port / "link_layer") or "?"
            rate = _first_line(port / "rate") or "?"
            devices.append({"name": f"{device.name}:{port.name}", "state": state, "layer": layer, "rate": rate})
    return {
        **{name: int(values[2]) for name, values in tcp.items() if len(values) == 3},
        "sysfs": Path("/sys/class/net").is_dir(),
        "rdma": devices,
        "uverbs": any(os.access(path, os.R_OK | os.W_OK) for path in Path("/dev/infiniband").glob("uverbs*")),
        "libraries": [name for name, file in LIBRARIES.items() if name != "libcuda" and _loads(file)],
        "tools": [name for name in ("ip", "tc", "fio", "nvidia-smi", "ibv_devinfo") if shutil.which(name) is not None],
    }


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def folder(path: str) -> dict[str, object]:
    """Probe the folder of a volume or its nearest existing parent: file system, free space, O_DIRECT."""
    from kvstore.tiers.io_engines.probe import SLAB_FILE
    from kvstore.tiers.nvme.ownership import MANIFEST_FILE

    wanted = Path(path).absolute()
    closed, there, in_the_way = _nearest(wanted)
    space = os.statvfs(there)
    mount, filesystem = _mounted(there)
    found: dict[str, object] = {
        "exists": there == wanted,
        "nearest": str(there),
        "in_the_way": None if in_the_way is None else str(in_the_way),
        "closed": closed,
        "filesystem": filesystem,
        "mount": mount,
        "read_only": bool(space.f_flag & os.ST_RDONLY),
        "writable": os.access(there, os.W_OK | os.X_OK),
        "free_bytes": space.f_bavail * space.f_frsize,
        "device": there.stat().st_dev,
        "disk": _disk_of(there.stat().st_dev),
    }
    if closed:
        return found
    slab: Path | None = wanted / SLAB_FILE
    if there == wanted and os.path.lexists(wanted / SLAB_FILE):
        found |= _slab(wanted / SLAB_FILE)
    if "slab_bytes" not in found:
        slab = None
    return found | {"slot_manifest": any(wanted.glob(f"{MANIFEST_FILE}*")), "direct": _direct_refused(slab, there)}


def _disk_of(device: int, sys: Path = Path("/sys/dev/block")) -> str | None:
    """Disk of a file system's device, or of its partition; None: not a disk of this host."""
    place = sys / f"{os.major(device)}:{os.minor(device)}"
    try:
        found = place.resolve(strict=True)
    except OSError:
        return None
    return found.parent.name if (found / "partition").exists() else found.name


def disks() -> dict[str, object]:
    """Probe NVMe disks and the mount points of their file systems."""
    mounted: dict[str, list[str]] = {}
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        words = line.split()
        major, _, minor = words[2].partition(":")
        if (disk := _disk_of(os.makedev(int(major), int(minor)))) is not None:
            mounted.setdefault(disk, []).append(_unescaped(words[4]))
    found = []
    for block in sorted(Path("/sys/block").glob("nvme*n*")):
        size = int(_first_line(block / "size") or 0) * 512
        found.append({"name": block.name, "bytes": size, "mounts": sorted(set(mounted.get(block.name, [])))})
    return {"nvme": found}


def certificates(ca: str, cert: str, key: str) -> dict[str, object]:
    """Probe TLS files of one section: readable, matching, and the expiry of each certificate."""
    import ssl

    from kvstore.health.certificate_file import certificate_end_s, certificate_names

    for file in filter(None, (ca, cert, key)):
        try:
            Path(file).read_bytes()
        except PermissionError:
            return {"closed": file}
        except OSError as error:
            return {"broken": f"{file}: {error.strerror or error}"}
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if ca:
            context.load_verify_locations(ca)
        if cert and key:
            context.load_cert_chain(cert, key, password=lambda: "")  # reject a key with a pass phrase instead of asking for it
    except (ssl.SSLError, OSError, ValueError) as error:
        which = ", ".join(filter(None, (ca, cert, key)))
        return {"broken": f"{which} cannot be used: {getattr(error, 'reason', None) or error}"}
    found = [
        {"file": file, "ends": certificate_end_s(Path(file)), "names": ", ".join(certificate_names(Path(file)))}
        for file in filter(None, (ca, cert))
    ]
    return {"certificates": found}


def _unescaped(path: str) -> str:
    """Decode a path of the kernel, which escapes blanks as octal."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), path)


def _nearest(wanted: Path) -> tuple[bool, Path, Path | None]:
    """Find the nearest existing folder of a path.

    Returns:
        Whether access to it is denied; the folder; and the entry below it that is not a folder, if any.
    """
    there, in_the_way = Path("/"), None
    for place in (*reversed(wanted.parents), wanted):
        if not os.path.lexists(place):
            break
        if not place.is_dir():  # also a dangling link: no folder can be created there
            in_the_way = place
            break
        there = place
        if not os.access(there, os.X_OK):
            return True, there, None
    return False, there, in_the_way


def _slab(path: Path) -> dict[str, object]:
    """Size of a slab, the reason if it is not valid, and the node that has adopted its volume."""
    from kvstore.tiers.nvme.ownership import claim_in_force, home_of
    from kvstore.tiers.nvme.superblock import SUPERBLOCK_BYTES, newest_superblock

    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            home = home_of(newest_superblock(file.read(2 * SUPERBLOCK_BYTES))[0].volume_id)
        owner = claim_in_force(path.parent, home).node_id
    except OSError as error:
        return {"slab_damage": error.strerror or str(error)}
    except CorruptBlock as error:
        return {"slab_bytes": size, "slab_damage": error.message}
    return {"slab_bytes": size} | ({} if owner == home else {"slab_owner": owner or "unknown"})


def _direct_refused(slab: Path | None, there: Path) -> str | None:
    """Why O_DIRECT cannot be used; None: it can. Without a slab, tried on an unnamed temporary file."""
    import mmap

    flags = os.O_RDONLY if slab is not None else os.O_TMPFILE | os.O_RDWR
    try:
        fd = os.open(slab or there, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return error.strerror or str(error)
    try:
        with mmap.mmap(-1, _PAGE) as page:
            os.preadv(fd, [page], 0)
    except OSError as error:
        return error.strerror or str(error)
    finally:
        os.close(fd)
    return None


def _mounted(path: Path) -> tuple[str, str]:
    """Mount point, device and type of the file system of a folder."""
    best = ("", "?")
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        left, _, right = line.partition(" - ")
        mount = _unescaped(left.split()[4])
        if path.resolve().is_relative_to(mount) and len(mount) >= len(best[0]):
            best = (mount, right.split()[0])
    return best


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").split("\n", 1)[0].strip() or None
    except OSError:
        return None


PROBES: dict[str, Callable[..., dict[str, object]]] = {
    "system": system, "gpu": gpu, "memory": memory, "network": network, "folder": folder, "disks": disks,
    "certificates": certificates,
}  # fmt: skip

if __name__ == "__main__":
    print(json.dumps(PROBES[sys.argv[1]](*sys.argv[2:])), flush=True)
