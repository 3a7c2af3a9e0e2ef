"""Derive findings from facts: present, in use or missing, with the command that fixes each problem. Pure functions."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence

from kvstore.doctor.capacity import LARGE_ARENA, capacity_findings
from kvstore.doctor.certificates import certificate_findings
from kvstore.doctor.contract import Finding, Level, setting_size
from kvstore.doctor.facts import ProbeResults, Requirements, Section, WantedVolume
from kvstore.health.quantities import show_size
from kvstore.tiers.io_engines.probe import SLAB_FILE
from kvstore.transport.nixl.agent import LOOPBACK

NOFILE_LEAST = 8192
TCP_BUFFER_LEAST = 4 << 20
"""Approximate bytes in flight of one stream on a link of 25 Gbit/s with 1 ms of delay."""
HOST_LEAST = 2 << 30
"""Minimum memory that huge pages leave to the host; a tenth of the memory on large hosts."""
SHM = "/dev/shm"  # noqa: S108  # named, not used
SHM_LEAST = 256 << 20
SOME_VOLUME = "--set node.nvme=/mnt/nvme0/kvstore:1TiB   # a folder on a local NVMe disk, and how much of it"


def findings(facts: ProbeResults, wanted: Requirements) -> list[Finding]:
    """List the findings on a host. Never raises, even on malformed facts."""
    looks = (
        _software, _gpu, _gds, _storage, _mounts, _memory, capacity_findings, _defaults, _limits, _network, _tls, _rdma,
        _nixl, _lab,
    )  # fmt: skip
    return [finding for look in looks for finding in look(facts, wanted)]


def healthy(found: Sequence[Finding]) -> bool:
    """Whether the host has everything that the configuration requires."""
    return all(finding.level is not Level.MISSING for finding in found)


def _unknown(area: str, section: Section, of: str = "") -> Finding:
    return Finding(area, Level.WARNING, f"{of}{': ' if of else ''}not known: the probe {section.error}")


def _software(facts: ProbeResults, _wanted: Requirements) -> Iterator[Finding]:
    system = facts["system"]
    if system.error:
        yield _unknown("software", system)
        return
    host = f"Linux {system.text('kernel')} on {system.text('machine')}, {system.number('cores')} cores"
    yield Finding("software", Level.OK, f"Python {system.text('python')}, {host}")
    packages = system.pairs("packages")
    yield Finding("software", Level.OK, ", ".join(f"{name} {version}" for name, version in packages.items()) or "no packages")
    kernel = system.text("copy_kernel")
    if kernel == "python":
        text = "copies and checksums are made in Python, several times slower: the package was installed without a C compiler"
        yield Finding(
            "software",
            Level.WARNING,
            text,
            "sudo apt install gcc   # then make and install the wheel again; in a clone: python scripts/build_kernel.py",
        )
    elif kernel is not None:
        yield Finding("software", Level.OK, f"copies and checksums by the native kernel {kernel}")


def _gpu(facts: ProbeResults, _wanted: Requirements) -> Iterator[Finding]:
    gpu = facts["gpu"]
    if gpu.error:
        yield _unknown("GPU", gpu)
        return
    cards, devices = gpu.number("cards") or 0, gpu.sections("devices")
    for device in devices:
        yield Finding("GPU", Level.OK, f"{device.text('name')}, {show_size(device.number('bytes') or 0)}")
    if devices:
        yield Finding("GPU", Level.OK, f"CUDA {gpu.text('cuda')}; driver: {gpu.text('driver')}")
        torch = facts["system"].pairs("packages").get("torch")
        if isinstance(torch, str) and torch.endswith("+cpu"):
            yield Finding("GPU", Level.WARNING, f"torch {torch} does not use it", "pip install --force-reinstall torch")
    elif not cards and not gpu.text("driver"):
        yield Finding("GPU", Level.INFO, "none: blocks live in DRAM and on NVMe")
    elif not gpu.flag("library") and not cards:
        message = "a driver of the kernel, but no NVIDIA card is seen and no libcuda.so.1: blocks live in DRAM and on NVMe"
        yield Finding("GPU", Level.WARNING, message)
    elif not gpu.flag("library"):
        yield Finding(
            "GPU", Level.WARNING, f"{cards} NVIDIA cards, but libcuda.so.1 cannot be loaded",
            "sudo apt install nvidia-driver-cuda   # or, in a container: docker run --gpus all",
        )  # fmt: skip
    else:
        yield Finding(
            "GPU", Level.WARNING, f"the driver finds no usable device (cuInit answers {gpu.number('status')})", "nvidia-smi"
        )


def _gds(facts: ProbeResults, wanted: Requirements) -> Iterator[Finding]:
    area, required = "GPUDirect Storage", wanted.gds == "required"
    if wanted.gds == "off":
        yield Finding(area, Level.INFO, "switched off (node.gds)")
        return
    if not wanted.volumes:
        level = Level.MISSING if required else Level.INFO
        yield Finding(area, level, _no_volume(facts), SOME_VOLUME if required else None)
        return
    for volume, gds in zip(wanted.volumes, facts.all("gds"), strict=False):
        if gds.error:
            level = Level.MISSING if required else Level.WARNING
            yield Finding(area, level, f"{volume.path}: not known: the probe {gds.error}")
        elif gds.flag("real") is True:
            yield Finding(area, Level.OK, f"{volume.path}: real ({gds.text('why')})")
        else:
            # missing GDS is a problem only if the host has the GDS driver
            level = Level.MISSING if required else Level.WARNING if gds.pairs("facts") else Level.INFO
            yield Finding(
                area, level, f"{volume.path}: {gds.text('path') or '?'} ({gds.text('why')}); posix is used",
                gds.text("fix") if level is not Level.INFO else None,
            )  # fmt: skip
    if not facts.all("gds"):
        yield Finding(area, Level.MISSING if required else Level.WARNING, "not known: nothing was measured")


def _storage(facts: ProbeResults, wanted: Requirements) -> Iterator[Finding]:
    if not wanted.volumes:
        alone = "" if facts["running"].texts("volumes") else ": blocks live in DRAM alone"
        yield Finding("storage", Level.INFO, _no_volume(facts) + alone, SOME_VOLUME)
    for volume, folder in zip(wanted.volumes, facts.all("volume"), strict=False):
        yield from _volume(volume, folder)


def _no_volume(facts: ProbeResults) -> str:
    """Report that no volume is configured, and name the volumes of nodes that run with another configuration."""
    running = facts["running"].texts("volumes")
    if not running:
        return "no NVMe volume is configured"
    return f"the configuration of this command names no NVMe volume; nodes that run here have {', '.join(running)}"


def _volume(volume: WantedVolume, folder: Section) -> Iterator[Finding]:
    area, path, quoted = "storage", str(volume.path), shlex.quote(str(volume.path))
    nearest = folder.text("nearest") or path
    if folder.error:
        yield _unknown(area, folder, path)
        return
    slab, damage = folder.number("slab_bytes"), folder.text("slab_damage")
    if (closed := _cannot_be_opened(path, folder)) is not None:
        yield closed
        return
    if damage is not None:
        message = f"{path}: its {SLAB_FILE} is no volume ({damage}): a node does not start on it"
        fix = f"kvstore volumes repair {quoted}   # if it was a volume; if not, move the file away"
        yield Finding(area, Level.MISSING, message, fix)
        return
    if (owner := folder.text("slab_owner")) is not None:
        message = f"{path}: node {owner} has adopted this volume: the node of this host only reads it"
        fix = "kvstore status --detail   # start this node, then stop the adopter gracefully (SIGTERM): the volume returns"
        yield Finding(area, Level.WARNING, message, fix)
    state = "a volume" if slab is not None else "no volume yet" if folder.flag("exists") else "not there yet"
    free = folder.number("free_bytes")
    yield Finding(area, Level.OK, f"{path}: {state}, {folder.text('filesystem')}, {show_size(free or 0)} free")
    short = volume.capacity_bytes - (slab or 0) - (free if free is not None else volume.capacity_bytes)
    if folder.flag("writable") is False:
        level = Level.WARNING if slab is not None else Level.MISSING
        message = "it serves what it holds, and stores nothing" if slab is not None else "no volume can be made there"
        make = "" if folder.flag("exists") else f"sudo mkdir -p {quoted} && "
        fix, why = f'{make}sudo chown "$USER" {quoted}', ""
        if folder.flag("read_only"):  # a read-only mount denies even the owner
            remount = f"sudo mount -o remount,rw {shlex.quote(folder.text('mount') or nearest)}"
            fix = remount if slab is not None else f"{SOME_VOLUME}; or, if it may be written to: {remount}"
            why = " (mounted read-only)"
        yield Finding(area, level, f"{nearest} cannot be written to{why}: {message}", fix)
    elif short > 0:
        yield Finding(
            area, Level.MISSING, f"{path}: {show_size(short)} too little for {show_size(volume.capacity_bytes)}",
            f"df -h {shlex.quote(nearest)}   # free space, or give it less in node.nvme",
        )  # fmt: skip
    refused = folder.text("direct")
    if refused is None:
        yield Finding(area, Level.OK, f"{path}: O_DIRECT works" + ("" if volume.direct else ", and is switched off"))
    elif slab is not None or folder.flag("writable"):
        level = Level.WARNING if volume.direct else Level.INFO
        yield Finding(
            area, level, f"{path}: O_DIRECT is refused ({refused}): half the speed, twice the CPU",
            f"df -T {shlex.quote(nearest)}   # a volume belongs on ext4 or XFS on a local NVMe disk" if volume.direct else None,
        )  # fmt: skip


def _cannot_be_opened(path: str, folder: Section) -> Finding | None:
    """Report why a node cannot access the folder; None if it can."""
    nearest = folder.text("nearest") or path
    if (in_the_way := folder.text("in_the_way")) is not None:
        message = f"{path}: {in_the_way} is there, and no folder: a node does not start on it"
        return Finding("storage", Level.MISSING, message, SOME_VOLUME)
    if not folder.flag("closed"):
        return None
    message = f"{path}: this user may not enter {nearest}: no volume can be opened or made there"
    if folder.flag("exists"):
        return Finding("storage", Level.MISSING, message, f'sudo chown "$USER" {shlex.quote(nearest)}')
    fix = f"sudo chmod o+x {shlex.quote(nearest)}   # lets all users pass through it; or choose a folder elsewhere (node.nvme)"
    return Finding("storage", Level.MISSING, message, fix)


def _mounts(facts: ProbeResults, wanted: Requirements) -> Iterator[Finding]:
    for path, folder in zip(wanted.mounts, facts.all("mount"), strict=False):
        if folder.error:
            yield _unknown("storage", folder, str(path))
        elif folder.flag("closed"):
            nearest = folder.text("nearest") or str(path)
            message = f"mount {path}: this user may not enter {nearest}: its blocks come from the owner"
            yield Finding(
                "storage", Level.WARNING, message, f"sudo chmod o+x {shlex.quote(nearest)}   # lets all users pass through it"
            )
        elif folder.flag("slot_manifest"):
            yield Finding("storage", Level.OK, f"{path}: a shared volume, {folder.text('filesystem')}")
        else:
            message = "no volume lies there" if folder.flag("exists") else "there is no such folder"
            fix = f"sudo mount {shlex.quote(str(path))}   # as /etc/fstab names it"
            yield Finding("storage", Level.WARNING, f"mount {path}: {message}: its blocks come from the owner", fix)


def _memory(facts: ProbeResults, wanted: Requirements) -> Iterator[Finding]:
    memory = facts["memory"]
    if memory.error:
        yield _unknown("memory", memory)
        return
    total, available = memory.number("total_bytes"), memory.number("available_bytes")
    arena = show_size(wanted.dram_bytes)
    if total is not None and wanted.dram_bytes > total:
        yield Finding(
            "memory", Level.MISSING, f"an arena of {arena} in {show_size(total)} of RAM",
            f"--set node.dram={setting_size(total // 2)}",
        )  # fmt: skip
    elif available is not None and wanted.dram_bytes > available:
        message = f"an arena of {arena}, and {show_size(available)} available now (a node that runs already has its own)"
        yield Finding("memory", Level.WARNING, message, "free -h")
    else:
        yield Finding("memory", Level.OK, f"{show_size(available or 0)} available, {arena} for the arena of this configuration")
    yield from _huge_pages(memory, wanted)
    shm = memory.number("shm_free_bytes")
    if shm is not None and shm < SHM_LEAST:
        message = f"{SHM} has {show_size(shm)} left: engines with several workers need more (the store itself needs none)"
        yield Finding("memory", Level.WARNING, message, f"sudo mount -o remount,size=50% {SHM}   # docker run --shm-size=16g")
    elif shm is not None:
        yield Finding("memory", Level.OK, f"{SHM}: {show_size(shm)} left")


def _huge_pages(memory: Section, wanted: Requirements) -> Iterator[Finding]:
    size, free, reserved = (memory.number(f"huge_page{name}") or 0 for name in ("_bytes", "s_free", "s_total"))
    transparent = memory.text("transparent")
    message = f"{reserved} reserved, {free} free" + (f", of {show_size(size)}" if size else "") + f"; transparent: {transparent}"
    if size and free * size >= wanted.dram_bytes:
        yield Finding("memory", Level.OK, f"huge pages: {message}")
    elif not wanted.huge_pages and (wanted.dram_bytes < LARGE_ARENA or wanted.huge_pages_refused or not size):
        yield Finding("memory", Level.INFO, f"huge pages: {message}; reserved ones are not asked for (node.huge_pages)")
    elif not wanted.huge_pages:
        pages = reserved - free - (-wanted.dram_bytes // size)
        message = (
            f"huge pages: {message}: too few for an arena of {show_size(wanted.dram_bytes)}; Linux 6.1 makes transparent ones"
        )
        yield Finding("memory", Level.WARNING, *_reserve(message, memory, wanted, pages))
    elif transparent in ("always", "advise", "within_size", "force"):
        yield Finding("memory", Level.OK, f"huge pages: {message}: transparent ones are used")
    elif size:
        pages = reserved - free - (-wanted.dram_bytes // size)
        message = f"huge pages: {message}: too few for the arena; Linux 6.1 makes transparent ones"
        yield Finding("memory", Level.WARNING, *_reserve(message, memory, wanted, pages))
    else:
        yield Finding("memory", Level.WARNING, "huge pages: this kernel has none")


def _reserve(message: str, memory: Section, wanted: Requirements, pages: int) -> tuple[str, str]:
    """Message and fix if ``pages`` huge pages in total would hold the arena.

    The kernel reserves huge pages at once, and no other program can use them. The fix therefore leaves enough memory to the host.
    """
    size, free, reserved = (memory.number(f"huge_page{name}") or 0 for name in ("_bytes", "s_free", "s_total"))
    total, available = memory.number("total_bytes") or 0, memory.number("available_bytes") or 0
    kept = max(HOST_LEAST, total // 10)
    space = max(0, available - kept) // size
    if pages - reserved <= space:
        return message, f"sudo sysctl -w vm.nr_hugepages={pages}"
    fits = (free + space) * size
    if wanted.dram_bytes > total:
        fits = min(fits, total // 2)  # the same limit as in the finding on the arena
    message = (
        f"{message}; reserving {show_size((pages - reserved) * size)} more of the {show_size(available)} available "
        f"would not leave {show_size(kept)} to the host"
    )
    if fits < size:
        return message, "--set node.huge_pages=false   # or free memory first"
    return message, f"--set node.dram={setting_size(fits)}   # huge pages for that can be reserved"


def _limits(facts: ProbeResults, wanted: Requirements) -> Iterator[Finding]:
    memory = facts["memory"]
    if memory.error:
        return  # said above
    locked, most, files = (memory.number(name) for name in ("memlock_soft", "memlock_hard", "nofile_hard"))
    pins = bool(facts["gpu"].sections("devices") or facts["network"].sections("rdma"))
    if locked is not None and 0 <= locked < wanted.dram_bytes:
        level = Level.WARNING if pins else Level.INFO
        message = f"memlock: {show_size(locked)}: too little to pin the arena" + ("" if pins else "; nothing here needs that")
        fix = _raise_limit(memory, "memlock", "unlimited", "LimitMEMLOCK=infinity; docker run --ulimit memlock=-1")
        if most is not None and (most < 0 or most >= wanted.dram_bytes):  # the user may raise the soft limit up to the hard limit
            fix = f"ulimit -S -l {'unlimited' if most < 0 else most >> 10}   # systemd: LimitMEMLOCK=infinity"
        yield Finding("limits", level, message, fix if pins else None)
    elif locked is not None:
        yield Finding("limits", Level.OK, f"memlock: {'unlimited' if locked < 0 else show_size(locked)}")
    if files is not None and 0 <= files < NOFILE_LEAST:
        message = f"nofile: {files}: a quarter of it bounds each address's connections"
        fix = _raise_limit(memory, "nofile", "65536", "LimitNOFILE=65536; docker run --ulimit nofile=65536")
        yield Finding("limits", Level.WARNING, message, fix)
    elif files is not None:
        yield Finding("limits", Level.OK, f"nofile: {'unlimited' if files < 0 else files}")


def _defaults(_facts: ProbeResults, wanted: Requirements) -> Iterator[Finding]:
    for default in wanted.defaults:
        yield Finding("defaults", Level.OK, default)


def _tls(facts: ProbeResults, wanted: Requirements) -> Iterator[Finding]:
    yield from certificate_findings(facts, wanted, time.time())


def _raise_limit(memory: Section, name: str, most: str, elsewhere: str) -> str:
    """Command that raises a hard limit of the shell that runs it, and of programs started there.

    ``ulimit`` cannot raise a hard limit, and a shell under sudo has limits separate from those of the calling shell.
    """
    if memory.flag("root_raises_limits") is False:
        return f"ulimit -H -a   # not even root may raise it here, but who starts this: systemd: {elsewhere}"
    return f"sudo prlimit --pid $$ --{name}={most}:{most}   # systemd: {elsewhere}"


def _network(facts: ProbeResults, _wanted: Requirements) -> Iterator[Finding]:
    network = facts["network"]
    if network.error:
        yield _unknown("network", network)
        return
    for name in ("tcp_rmem", "tcp_wmem"):
        most = network.number(name)
        if most is not None and most < TCP_BUFFER_LEAST:
            message = f"{name}: {show_size(most)} at most: too little for fast links with some delay"
            yield Finding("network", Level.WARNING, message, f"sudo sysctl -w net.ipv4.{name}='4096 131072 16777216'")
        elif most is not None:
            yield Finding("network", Level.OK, f"{name}: {show_size(most)} at most")


def _rdma(facts: ProbeResults, _wanted: Requirements) -> Iterator[Finding]:
    network, system = facts["network"], facts["system"]
    if network.error:
        return  # said above
    ports = network.sections("rdma")
    modules = system.texts("modules")
    nixl = next((name for name in modules if name.startswith("nixl")), None)
    ucx = "libucx" in modules or "libucp" in network.texts("libraries") or nixl is not None
    tools = f"NIXL: {nixl or 'not installed'}; UCX: {'there' if ucx else 'not installed'}"
    if not ports:
        yield Finding("RDMA", Level.INFO, f"no devices; {tools}")
        return
    for port in ports:
        active = "ACTIVE" in (port.text("state") or "")
        message = f"{port.text('name')}: {port.text('state')}, {port.text('layer')}, {port.text('rate')}"
        yield Finding("RDMA", Level.OK if active else Level.WARNING, message, None if active else "ibv_devinfo; rdma link show")
    if "libibverbs" not in network.texts("libraries"):
        message = "libibverbs.so.1 cannot be loaded: no program reaches the devices"
        yield Finding("RDMA", Level.WARNING, message, "sudo apt install ibverbs-providers librdmacm1")
    if network.flag("uverbs") is False:
        message = "/dev/infiniband cannot be opened by this user"
        fix = "sudo apt install --reinstall rdma-core   # its udev rules; in a container: docker run --device /dev/infiniband"
        yield Finding("RDMA", Level.WARNING, message, fix)
    if nixl is None:
        yield Finding("RDMA", Level.WARNING, tools, _install_nixl(facts))
    else:
        yield Finding("RDMA", Level.OK, tools)


def _install_nixl(facts: ProbeResults) -> str:
    cuda = facts["gpu"].text("cuda") or ""
    return f"pip install nixl-cu{13 if cuda.startswith('13') else 12}"


def _nixl(facts: ProbeResults, wanted: Requirements) -> Iterator[Finding]:
    area, asked, probe = "NIXL", wanted.nixl, facts["nixl"]
    if asked is None:
        yield Finding(area, Level.INFO, "switched off (node.nixl)")
        return
    level = Level.MISSING if asked.required else Level.WARNING
    if not asked.trusted:
        message = "a node does not start: its ports would let whoever reaches them read and write its memory and end it"
        fix = "--set node.nixl=off   # or, if all are trusted with that: --set node.nixl_trusted_network=true"
        yield Finding(area, Level.MISSING, message, fix)
    if asked.ruled_out is not None:
        message = f"not used: node.{asked.ruled_out} does not go with it"
        yield Finding(area, level, message, f"--set node.nixl=off   # or do without node.{asked.ruled_out}")
    if probe.error:
        yield Finding(area, level, f"not known: the probe {probe.error}")
    elif probe.flag("works"):
        said = ", ".join(words for words in (asked.transports, asked.devices and f"on {asked.devices}") if words)
        yield Finding(area, Level.OK, f"can be set up over UCX{f' ({said})' if said else ''}")
    else:
        there = any(name.startswith("nixl") for name in facts["system"].texts("modules"))
        named = " ".join(
            f"--set node.nixl_{name}=" for name in ("transports", "devices") if getattr(asked, name) not in ("", LOOPBACK)
        )
        look = f"{named}   # as UCX finds them" if named else "ibv_devinfo   # whether a device is there; TCP does without"
        if facts["network"].flag("sysfs") is False:  # UCX finds no device without sysfs
            look = "sudo mount -t sysfs sysfs /sys   # it is not there, and UCX finds its devices in it"
        fix = look if there else _install_nixl(facts)
        yield Finding(area, level, f"blocks move over TCP: {probe.text('why') or 'nothing was tried'}", fix)


def _lab(facts: ProbeResults, _wanted: Requirements) -> Iterator[Finding]:
    network, system = facts["network"], facts["system"]
    if network.error or system.error:
        return
    missing = [tool for tool in ("ip", "tc") if tool not in network.texts("tools")]
    if missing:
        message = f"no emulated hosts (tests, kvstore demo --dual-path): {' and '.join(missing)} not installed"
        yield Finding("network lab", Level.INFO, message, "sudo apt install iproute2")
    elif system.flag("root") is False:
        yield Finding("network lab", Level.INFO, "emulated hosts need root", "sudo kvstore demo --dual-path")
    else:
        yield Finding("network lab", Level.OK, "iproute2 and root are there")
