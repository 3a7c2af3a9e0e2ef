"""One of a process's NIXL agents: its registered memory, the transfers under way, and the fence.

**The fence.** After a transfer was abandoned, its bytes may still arrive: NIXL cannot recall them, and this side does not even
know of a write by a peer. Only the end of the agent stops them for certain, because it closes the sockets and queue pairs
through which the bytes come. The caller that abandons a transfer therefore calls ``fence`` before the memory is used for
anything else. The next transfer makes a new agent. Other transfers through the same agent fail with it, and their blocks are
read again over TCP.

**No threads, no idle work.** NIXL's own progress thread spins. Here an agent makes progress only within the calls of waiting
threads, which sleep ``WAIT_S`` between two polls. Without a transfer, nothing runs.

NIXL is imported and UCX is loaded at the first use. UCX is configured through the environment of the process (see
``environment``); variables that the operator has set take precedence.
"""

from __future__ import annotations

import gc
import importlib
import logging
import mmap
import os
import threading
import time
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash

from kvstore.core.cancel_scope import CancelScope
from kvstore.core.errors import InvalidArgument, Unsupported, install_command
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import transport as transport_metrics
from kvstore.transport.nixl.address_table import Rows
from kvstore.transport.nixl.frames import RequestedMode
from kvstore.transport.tcp.one_sided import OneSidedFailed

log = logging.getLogger(__name__)

SERVING = "serves"
"""Part of the name of each agent that serves an arena. Another node refuses to write into an agent with such a name."""

WAIT_S = 50e-6
"""Polling interval of a transfer. The bytes that arrive in between fit the socket buffers."""
SLABS = 4
"""Number of slabs in the bounce memory. One read uses one or two at a time."""
NEEDS_TRUST = (
    "NIXL opens ports without authentication: any host that reaches them may read and write its memory and end it, past"
    " tickets and tenants. Declare the network as trusted if that is acceptable"
)
NOT_EMULATED = "PROTO_EMULATION_ENABLE=n"
"""UCX setting that disables emulated operations. Writes over TCP, and all operations over RDMA and CMA, need no emulation.

Reads over TCP are emulated: the target sends the bytes in a message, and if the reader has died, UCX ends the target process
("Fatal: unexpected error: Endpoint timeout"). With this setting the reader's transfer fails instead. It is set per agent, because
an engine may use UCX for other purposes. UCX has it since 1.21, which every ``nixl-cu12`` of 1.5 contains.
"""
_EMULATION = "UCX_PROTO_EMULATION_ENABLE"
_TCP_ALONE = frozenset(("tcp", "self", "cuda", "cuda_copy"))
"""UCX transports that cannot read the memory of another process. With a GPU, TCP must be configured together with these."""
LOOPBACK = "lo"
"""Network device of traffic that stays on this host."""
INFINIBAND = Path("/sys/class/infiniband")
_PROCESSES = Path("/proc/self/ns/pid")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MODULES = ("nixl_cu12", "nixl_cu13", "nixl")


@dataclass(frozen=True, slots=True)
class NixlOptions:
    """How NIXL is used.

    Attributes:
        mode: how this process reads: ``pull`` reads the server's memory, ``push`` lets the server write, ``auto`` pushes if only
            TCP is available. The server decides, and always pushes over TCP.
        service_level: service level of InfiniBand traffic (UCX_IB_SL), 0 to 15; None: UCX's default.
        devices: network devices (UCX_NET_DEVICES), e.g. ``mlx5_0:1``; empty: chosen by UCX.
        transports: UCX transports (UCX_TLS), e.g. ``rc`` or ``tcp``; empty: chosen by UCX.
        bounce_bytes: registered memory through which unregistered memory is copied.

    Raises:
        InvalidArgument: the service level or the bounce memory is out of bounds, or pulling is requested over TCP only.
    """

    mode: RequestedMode = "auto"
    service_level: int | None = None
    devices: str = ""
    transports: str = ""
    bounce_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if self.service_level is not None and not 0 <= self.service_level <= 15:
            raise InvalidArgument("the InfiniBand service level must be 0 to 15", service_level=self.service_level)
        if self.bounce_bytes < SLABS * mmap.PAGESIZE:
            raise InvalidArgument("bounce memory too small", bounce_bytes=self.bounce_bytes)
        if self.mode == "pull" and self.only_tcp:
            raise InvalidArgument("pulling over UCX's TCP is not supported; use mode push or auto, or allow other transports")

    @property
    def only_tcp(self) -> bool:
        """Whether these options, or the environment, leave UCX only TCP between the memory of two hosts."""
        transports = self.transports or os.environ.get("UCX_TLS", "")
        return bool(transports) and _TCP_ALONE.issuperset(transports.split(","))


@dataclass(frozen=True, slots=True)
class Region:
    """Memory to be registered. It must stay mapped while the agent is open."""

    address: int
    size: int


@dataclass(frozen=True, slots=True)
class Slab:
    """A piece of registered bounce memory."""

    address: int
    memory: memoryview


@dataclass(frozen=True, slots=True)
class NixlTransfer:
    """A transfer under way, and the epoch of its agent."""

    epoch: int
    number: int


def environment(options: NixlOptions) -> dict[str, str]:
    """Return the environment variables for UCX. Variables that are already set take precedence.

    Without an InfiniBand device, UCX's InfiniBand modules are not loaded: the host's libefa may bring a second libnl into the
    process, and the two cause a segmentation fault at exit. UCX must not write to standard output, nor install handlers for fatal
    signals. Its messages about requests that a fence cancelled are not useful.
    """
    found = {
        "UCX_LOG_FILE": "stderr",
        "UCX_LOG_LEVEL": "error",
        "UCX_WARN_UNUSED_ENV_VARS": "n",
        "UCX_ERROR_SIGNALS": "",
        "NIXL_LOG_LEVEL": "ERROR",
    }
    if not has_rdma():
        found["UCX_MODULES"] = "^ib"
    if options.service_level is not None:
        found["UCX_IB_SL"] = str(options.service_level)
    if options.devices:
        found["UCX_NET_DEVICES"] = options.devices
    if "," in options.transports:  # a list cannot be set per agent
        found["UCX_TLS"] = options.transports
    return found


def has_rdma() -> bool:
    """Return whether this host has an RDMA device."""
    return INFINIBAND.is_dir() and any(INFINIBAND.iterdir())


def host_id() -> bytes:
    """Return 16 bytes that are equal for processes that can read each other's memory; zeros if they cannot be determined.

    Made from the kernel's boot id and the PID namespace, because containers of one host cannot read each other's memory.
    """
    try:
        boot = uuid.UUID(_BOOT_ID.read_text(encoding="ascii").strip()).bytes
        return xxhash.xxh3_128_digest(boot + os.readlink(_PROCESSES).encode())
    except (OSError, ValueError):
        return bytes(16)


class NixlAgent:
    """A NIXL agent of this process, which is replaced after each fence. Thread-safe; one thread at a time calls NIXL.

    Args:
        options: how NIXL is used.
        name: name of the agent in logs; a unique suffix is added.
        regions: memory that stays registered: an arena. Other memory is copied through the bounce memory.
        counters: counts events.
    """

    def __init__(
        self,
        options: NixlOptions,
        *,
        name: str = "kvstore",
        regions: Sequence[Region] = (),
        counters: Counters | None = None,
    ) -> None:
        self.options = options
        self._name = name
        self._regions = list(regions)
        self._counters = counters if counters is not None else Counters()
        self._lock = threading.Lock()
        self._agent: Any = None  # NIXL is untyped
        self._agent_metadata = b""
        self._epoch = 0
        self._unfenced: set[int] = set()
        """Epochs whose agent did not end."""
        self._closed = False
        self._remote_users: dict[str, int] = {}  # agent name -> connections that use it
        self._transfers: dict[int, Any] = {}
        self._last = 0
        self.slab_bytes = options.bounce_bytes // SLABS // mmap.PAGESIZE * mmap.PAGESIZE
        self._bounce: mmap.mmap | None = None
        self._slabs: list[Slab] = []
        self._slab_free = threading.Condition()

    # ---------------------------------------------------------------- lifecycle

    def open(self) -> None:
        """Create the agent now instead of at the first use.

        Raises:
            Unsupported: NIXL is not installed, or cannot be set up on this host.
        """
        with self._lock:
            self._open_agent()

    @property
    def epoch(self) -> int:
        """Number of the current agent; incremented by each fence."""
        return self._epoch

    def metadata(self) -> tuple[int, bytes]:
        """Return the epoch, and the agent's metadata for other agents.

        Raises:
            Unsupported: as ``open``.
        """
        with self._lock:
            self._open_agent()
            return self._epoch, self._agent_metadata

    def fence(self, epoch: int) -> bool:
        """End the agent of an epoch, if it still exists.

        Returns:
            Whether the transfers of that epoch move no more bytes. If not, the memory of abandoned transfers must never be used
            again, and this object makes no further agent.
        """
        with self._lock:
            if epoch != self._epoch:
                return epoch not in self._unfenced
            self._end_agent()
            fenced = epoch not in self._unfenced
        if fenced:
            self._counters.add(transport_metrics.NIXL_FENCES)
            log.info("NIXL agent fenced: %s (epoch=%d)", self._name, epoch)
        return fenced

    def close(self) -> None:
        """End the agent permanently. Idempotent."""
        with self._lock:
            self._closed = True
            self._end_agent()

    def _open_agent(self) -> Any:  # noqa: ANN401 - NIXL is untyped
        if self._closed:
            raise Unsupported("the NIXL agent is closed")
        if self._unfenced:
            raise Unsupported("an earlier NIXL agent did not end; restart this process to use NIXL again")
        if self._agent is None:
            self._agent = self._create_agent()
            self._counters.add(transport_metrics.NIXL_AGENTS)
        return self._agent

    def _create_agent(self) -> Any:  # noqa: ANN401 - NIXL is untyped
        for key, value in environment(self.options).items():
            os.environ.setdefault(key, value)
        # the environment variable would override the agent's setting
        if os.environ.get(_EMULATION, "n").lower() not in {"n", "no", "0", "off"}:
            log.warning("environment variable removed: %s (a reader could end the process that it reads from)", _EMULATION)
            del os.environ[_EMULATION]
        api = load()
        options = self.options
        config = api.nixl_agent_config(
            enable_prog_thread=False, backends=[], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        settings = [NOT_EMULATED]
        if options.transports and "," not in options.transports:
            settings.append(f"TLS={options.transports}")
        try:
            agent = api.nixl_agent(f"{self._name}-{uuid.uuid4().hex}", config)
            agent.create_backend("UCX", {"engine_config": ",".join(settings)})
            slabs = self._bounce_region()
            for region in (*self._regions, slabs):
                agent.register_memory([(region.address, region.size, 0, "")], "DRAM")
            self._agent_metadata = bytes(agent.get_agent_metadata())
        except Exception as error:  # NIXL's errors share no base class
            raise Unsupported("NIXL cannot be set up on this host", error=repr(error)) from error
        return agent

    def _bounce_region(self) -> Region:
        if self._bounce is None:
            self._bounce = mmap.mmap(-1, SLABS * self.slab_bytes)
            whole = memoryview(self._bounce)
            base = int(np.frombuffer(whole, np.uint8).__array_interface__["data"][0])
            starts = range(0, SLABS * self.slab_bytes, self.slab_bytes)
            with self._slab_free:
                self._slabs = [Slab(base + start, whole[start : start + self.slab_bytes]) for start in starts]
        return Region(
            int(np.frombuffer(self._bounce, np.uint8).__array_interface__["data"][0]), SLABS * self.slab_bytes
        )  # fmt: skip

    def _end_agent(self) -> None:
        """End the agent, by dropping the only reference to it. The caller holds the lock, so no other thread uses the agent.

        An exception keeps the frames that it passed through, and all that these reference, while it is being handled, and the
        caller of ``fence`` may be handling one. Therefore NIXL's exceptions are never raised on, and no frame that raises
        references the agent or a transfer.
        """
        while self._transfers:
            _release(self._transfers.popitem()[1])  # a local name would keep the handle, which keeps the agent
        self._remote_users.clear()
        epoch, self._epoch = self._epoch, self._epoch + 1
        if self._agent is None:
            return
        alive = weakref.ref(self._agent.agent)  # the C++ object that owns the connections
        self._agent = None
        if alive() is not None:
            gc.collect()
        if alive() is not None:
            self._unfenced.add(epoch)
            self._counters.add(transport_metrics.NIXL_FENCES_BROKEN)
            log.error("NIXL agent not fenced: %s (late bytes may still arrive; NIXL is off until a restart)", self._name)

    # ---------------------------------------------------------------- memory

    def covers(self, extent: tuple[int, int]) -> bool:
        """Return whether ``[begin, end)`` is inside a permanently registered region."""
        begin, end = extent
        return any(region.address <= begin and end <= region.address + region.size for region in self._regions)

    def acquire_slab(self, timeout_s: float, scope: CancelScope | None = None) -> Slab | None:
        """Return a slab of bounce memory; None: none became free in time, or before the scope was cancelled.

        The agent must be open.
        """
        end_s = time.monotonic() + timeout_s
        scope = CancelScope() if scope is None else scope
        with self._slab_free:
            while not self._slabs:
                if scope.cancelled:
                    return None
                left_s = min(end_s - time.monotonic(), scope.left_s())
                if left_s <= 0:
                    self._counters.add(transport_metrics.NIXL_BOUNCE_TIMEOUTS)
                    return None
                scope.wait(self._slab_free, left_s)
            return self._slabs.pop()

    def release_slab(self, slab: Slab) -> None:
        """Return a slab. No transfer may still write into it."""
        with self._slab_free:
            self._slabs.append(slab)
            self._slab_free.notify()

    # ---------------------------------------------------------------- remote agents

    def add_remote(self, epoch: int, metadata: bytes) -> str:
        """Add another agent; return its name. Each call must be undone by one ``remove_remote``.

        Raises:
            OneSidedFailed: NIXL refuses the metadata, or the epoch is over.
        """
        with self._lock:
            self._check_epoch(epoch)
            name, why = "", ""
            try:
                answered = self._agent.add_remote_agent(metadata)
                name = answered.decode() if isinstance(answered, bytes) else str(answered)
            except Exception as error:  # noqa: BLE001 - NIXL's errors share no base class
                why = repr(error)
            if why:
                raise OneSidedFailed("NIXL refused the agent of the peer", error=why)
            self._remote_users[name] = self._remote_users.get(name, 0) + 1
            return name

    def remove_remote(self, epoch: int, name: str) -> None:
        """Remove another agent, if no other connection uses it. Never raises."""
        with self._lock:
            if epoch != self._epoch or self._agent is None or name not in self._remote_users:
                return
            self._remote_users[name] -= 1
            if self._remote_users[name]:
                return
            del self._remote_users[name]
            try:
                self._agent.remove_remote_agent(name)
            except Exception as error:  # noqa: BLE001 - NIXL's errors share no base class; the agent may be gone already
                log.debug("remote agent not removed: %r", error)

    # ---------------------------------------------------------------- transfers

    def start(self, epoch: int, operation: Literal["READ", "WRITE"], ours: Rows, theirs: Rows, name: str) -> NixlTransfer | None:
        """Begin a transfer between this and another agent's registered memory. None: it is complete already.

        Raises:
            OneSidedFailed: NIXL refuses the transfer, e.g. because the other agent has not registered the memory.
        """
        with self._lock:
            self._check_epoch(epoch)
            handle, state, why = None, "", ""
            try:
                local, remote = self._agent.get_xfer_descs(ours, "DRAM"), self._agent.get_xfer_descs(theirs, "DRAM")
                handle = self._agent.initialize_xfer(operation, local, remote, name)
                state = self._agent.transfer(handle)
            except Exception as error:  # noqa: BLE001 - NIXL's errors share no base class
                why = repr(error)
            if state == "PROC":
                self._last += 1
                self._transfers[self._last] = handle
                return NixlTransfer(epoch, self._last)
            if handle is not None:
                _release(handle)
                handle = None
            if state != "DONE":  # raised without a reference to the transfer, see ``_end_agent``
                raise OneSidedFailed("the NIXL transfer did not begin", error=why or state)
            return None

    def is_done(self, transfer: NixlTransfer) -> bool:
        """Make progress; return whether a transfer is complete.

        Raises:
            OneSidedFailed: the transfer failed.
        """
        with self._lock:
            self._check_epoch(transfer.epoch)
            state, why = "", ""
            try:
                state = self._agent.check_xfer_state(self._transfers[transfer.number])
            except Exception as error:  # noqa: BLE001 - NIXL's errors share no base class
                why = repr(error)
            if state == "PROC":
                return False
            _release(self._transfers.pop(transfer.number))
            if state != "DONE":
                raise OneSidedFailed("the NIXL transfer failed", error=why or state)
            return True

    def abandon(self, transfer: NixlTransfer) -> None:
        """Abandon a transfer. Its bytes may still arrive until the fence. Never raises."""
        with self._lock:
            handle = self._transfers.pop(transfer.number, None) if transfer.epoch == self._epoch else None
            if handle is not None:
                _release(handle)

    def progress(self, epoch: int) -> None:
        """Make progress for the peer's transfers, which need it over TCP.

        Raises:
            OneSidedFailed: the epoch is over, or NIXL failed.
        """
        with self._lock:
            self._check_epoch(epoch)
            why = ""
            try:
                self._agent.get_new_notifs()
            except Exception as error:  # noqa: BLE001 - NIXL's errors share no base class
                why = repr(error)
            if why:
                raise OneSidedFailed("NIXL made no progress", error=why)

    def _check_epoch(self, epoch: int) -> None:
        if self._agent is None or epoch != self._epoch:
            raise OneSidedFailed("a fence ended the NIXL agent")


def load() -> Any:  # noqa: ANN401 - NIXL is untyped
    """Import NIXL's Python interface, for CUDA 12 or 13.

    Raises:
        Unsupported: NIXL is not installed, or cannot be loaded.
    """
    problems = []
    for module in _MODULES:
        try:
            return importlib.import_module(f"{module}._api")
        except ImportError as error:
            problems.append(str(error))
    raise Unsupported(f"NIXL is not installed: {install_command('nixl-cu12')}", tried="; ".join(problems))


def _release(handle: Any) -> None:  # noqa: ANN401 - NIXL is untyped
    try:
        handle.release()
    except Exception as error:  # noqa: BLE001 - NIXL's errors share no base class; the end of the agent ends the transfer
        log.debug("transfer not released: %r", error)
