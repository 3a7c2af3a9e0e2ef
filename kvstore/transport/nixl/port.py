"""This process's door to NIXL: one agent, the memory registered with it, the transfers under way, and the fence.

**The fence.** Once a transfer was given up, its bytes may still come: NIXL cannot take back what is on its way, and of a peer's
write this side does not even know. What stops them for certain is the end of the agent: with it go the sockets and queue pairs
through which bytes could land. So whoever gives up calls ``fence`` before the memory is used for anything else; the next transfer
makes a new agent. Transfers of others through the same agent fail with it, and are read again over TCP.

**No threads, no idle work.** NIXL's own progress thread spins. Here an agent makes progress only within calls of those who wait
for something, who sleep ``WAIT_S`` between two looks; with no transfer under way nothing runs.

NIXL is imported, and UCX loaded, at the first use. UCX is configured through the environment of the process
(``environment``), where whoever runs it has the last word.
"""

from __future__ import annotations

import gc
import importlib
import logging
import mmap
import os
import threading
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash

from kvstore.core.errors import InvalidArgument, Unsupported
from kvstore.observe.counters import Counters
from kvstore.transport.nixl.frames import Wish
from kvstore.transport.nixl.landing import Rows

log = logging.getLogger(__name__)

WAIT_S = 50e-6
"""Between two looks at a transfer: what arrives meanwhile fits the socket buffers."""
SLABS = 4
"""The bounce memory is cut into so many pieces: one read uses one or two at a time."""
NEEDS_TRUST = (
    "NIXL opens ports that check nobody: whoever reaches this process's ports may read and write its memory and end it, past"
    " tickets and tenants. Where all who reach them are trusted with that, say so"
)
NOT_EMULATED = "PROTO_EMULATION_ENABLE=n"
"""UCX's setting that leaves only what needs no answer of the other side's: writes over TCP, and all over RDMA and CMA.

Reads over TCP are emulated: the side that is read sends the bytes in a message, and where the reader has gone meanwhile, UCX ends
the process that was read ("Fatal: unexpected error: Endpoint timeout"). With this the reader's transfer fails instead. Told to
each agent by itself, as an engine may have UCX for other ends; UCX knows it since 1.21, which every ``nixl-cu12`` of 1.5 brings.
"""
_EMULATION = "UCX_PROTO_EMULATION_ENABLE"
_TCP_ALONE = frozenset(("tcp", "self", "cuda", "cuda_copy"))
"""UCX's transports none of which reads the memory of another process: with a GPU, TCP has to be named beside these."""
LOOPBACK = "lo"
"""The network device of what stays on this host."""
INFINIBAND = Path("/sys/class/infiniband")
_PROCESSES = Path("/proc/self/ns/pid")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MODULES = ("nixl_cu12", "nixl_cu13", "nixl")


class OneSidedFailed(Unsupported):
    """A transfer by NIXL did not work; the same blocks can be had over TCP. Bytes may still come until the fence."""


@dataclass(frozen=True, slots=True)
class NixlOptions:
    """How NIXL is used.

    Attributes:
        wish: as a reader: ``pull`` reads the server's memory, ``push`` has it write, ``auto``: push where there is only TCP. The
            server decides, and has nothing pulled over TCP.
        service_level: of InfiniBand traffic (UCX_IB_SL), 0 to 15: the class that switches keep apart; None: UCX's own.
        devices: network devices (UCX_NET_DEVICES), e.g. ``mlx5_0:1``; empty: as UCX finds.
        transports: UCX's transports (UCX_TLS), e.g. ``rc`` or ``tcp``; empty: as UCX finds.
        bounce_bytes: registered memory for readers and servers whose own is not registered.

    Raises:
        InvalidArgument: no such service level, no room for a bounce, or a wish to pull over TCP alone.
    """

    wish: Wish = "auto"
    service_level: int | None = None
    devices: str = ""
    transports: str = ""
    bounce_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if self.service_level is not None and not 0 <= self.service_level <= 15:
            raise InvalidArgument("InfiniBand has service levels 0 to 15", service_level=self.service_level)
        if self.bounce_bytes < SLABS * mmap.PAGESIZE:
            raise InvalidArgument("too little bounce memory", bounce_bytes=self.bounce_bytes)
        if self.wish == "pull" and self.only_tcp:
            raise InvalidArgument("nothing is pulled over UCX's TCP: wish push or auto, or leave it other transports")

    @property
    def only_tcp(self) -> bool:
        """Whether it is confined to UCX's TCP, as far as memory of hosts goes; by its own options, or the environment's."""
        transports = self.transports or os.environ.get("UCX_TLS", "")
        return bool(transports) and _TCP_ALONE.issuperset(transports.split(","))


@dataclass(frozen=True, slots=True)
class Region:
    """Memory to be registered; it stays mapped for as long as the port is open."""

    address: int
    size: int


@dataclass(frozen=True, slots=True)
class Slab:
    """A piece of registered bounce memory."""

    address: int
    memory: memoryview


@dataclass(frozen=True, slots=True)
class Transfer:
    """A transfer under way, and the agent that it belongs to."""

    epoch: int
    number: int


def environment(options: NixlOptions) -> dict[str, str]:
    """What UCX is told, unless the process's environment says otherwise.

    Without InfiniBand its modules are left out: where the host's libefa brings a second libnl into the process, the two
    end it with a segmentation fault at exit. Standard output is the process's own. UCX's own handlers of fatal signals are
    not ours to install, and what it says of requests that a fence cut short is no news.
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
    if "," in options.transports:  # a list cannot be told to one agent alone
        found["UCX_TLS"] = options.transports
    return found


def has_rdma() -> bool:
    """Whether this host has an RDMA device."""
    return INFINIBAND.is_dir() and any(INFINIBAND.iterdir())


def host_id() -> bytes:
    """16 bytes that are equal where one process may copy out of another's memory; zeros where the kernel does not say.

    Of the kernel's boot id and this process's namespace of processes: containers of one host do not reach each other's memory.
    """
    try:
        boot = uuid.UUID(_BOOT_ID.read_text(encoding="ascii").strip()).bytes
        return xxhash.xxh3_128_digest(boot + os.readlink(_PROCESSES).encode())
    except (OSError, ValueError):
        return bytes(16)


class NixlPort:
    """One agent at a time. Thread-safe; NIXL itself is called by one thread at once.

    Args:
        options: how NIXL is used.
        name: what the agent is called in logs; made unique.
        regions: memory that blocks lie in for long: an arena. Everything else goes by way of bounce memory.
        counters: where events are counted.
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
        self._agent: Any = None  # NIXL has no types
        self._agent_metadata = b""
        self._epoch = 0
        self._closed = False
        self._remote_users: dict[str, int] = {}  # agent name -> connections that use it
        self._transfers: dict[int, Any] = {}
        self._last = 0
        self._borrowed: dict[Region, int] = {}
        self.slab_bytes = options.bounce_bytes // SLABS // mmap.PAGESIZE * mmap.PAGESIZE
        self._bounce: mmap.mmap | None = None
        self._slabs: list[Slab] = []
        self._slab_free = threading.Condition()

    # ---------------------------------------------------------------- life

    def open(self) -> None:
        """Makes the agent now rather than at the first use.

        Raises:
            Unsupported: NIXL is not installed, or cannot be set up here.
        """
        with self._lock:
            self._opened()

    @property
    def epoch(self) -> int:
        """Which agent it is: rises with each fence."""
        return self._epoch

    def metadata(self) -> tuple[int, bytes]:
        """This agent, as others must know it: epoch and metadata.

        Raises:
            Unsupported: as ``open``.
        """
        with self._lock:
            self._opened()
            return self._epoch, self._agent_metadata

    def fence(self, epoch: int) -> None:
        """Ends the agent of an epoch, if it still is: after this, none of its transfers moves a byte."""
        with self._lock:
            if epoch != self._epoch:
                return
            self._end_agent()
        self._counters.add("transport_nixl_fences_total")
        log.info("ended the NIXL agent %s: bytes of a transfer that was given up could still have come", self._name)

    def close(self) -> None:
        """Ends the agent for good. Idempotent."""
        with self._lock:
            self._closed = True
            self._end_agent()

    def _opened(self) -> Any:  # noqa: ANN401 - NIXL has no types
        if self._closed:
            raise Unsupported("the NIXL port is closed")
        if self._agent is None:
            self._agent = self._made()
            self._counters.add("transport_nixl_agents_total")
        return self._agent

    def _made(self) -> Any:  # noqa: ANN401 - NIXL has no types
        for key, value in environment(self.options).items():
            os.environ.setdefault(key, value)
        # it would win over what an agent is told
        if os.environ.get(_EMULATION, "n").lower() not in {"n", "no", "0", "off"}:
            log.warning("%s is taken out of the environment: with it, who reads ends the process that it reads from", _EMULATION)
            del os.environ[_EMULATION]
        api = load()
        options = self.options
        config = api.nixl_agent_config(
            enable_prog_thread=False, backends=[], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        told = [NOT_EMULATED]
        if options.transports and "," not in options.transports:
            told.append(f"TLS={options.transports}")
        try:
            agent = api.nixl_agent(f"{self._name}-{uuid.uuid4().hex}", config)
            agent.create_backend("UCX", {"engine_config": ",".join(told)})
            slabs = self._bounce_region()
            for region in (*self._regions, slabs):
                agent.register_memory([(region.address, region.size, 0, "")], "DRAM")
            self._agent_metadata = bytes(agent.get_agent_metadata())
        except Exception as error:  # NIXL's errors share no base class
            raise Unsupported("NIXL cannot be set up here", error=repr(error)) from error
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
        """Under the lock: nobody else is in the agent, and nobody else knows it, so with our name for it it ends.

        An error keeps the frames that it came through, and what these hold, for as long as somebody has it: who calls for a fence
        may be handling one. So nothing of NIXL's is raised on, and no frame that raises holds the agent or a transfer.
        """
        for handle in self._transfers.values():
            _release(handle)
        self._transfers.clear()
        self._remote_users.clear()
        self._borrowed.clear()
        self._epoch += 1
        if self._agent is None:
            return
        lives = weakref.ref(self._agent.agent)  # what owns the connections; the rest is Python around it
        self._agent = None
        if lives() is not None:
            gc.collect()
        if lives() is not None:
            self._counters.add("transport_nixl_fences_broken_total")
            log.error("the NIXL agent %s does not end: bytes of transfers that were given up may still come", self._name)

    # ---------------------------------------------------------------- memory

    def covers(self, extent: tuple[int, int]) -> bool:
        """Whether ``[begin, end)`` lies within a registered region."""
        begin, end = extent
        return any(region.address <= begin and end <= region.address + region.size for region in self._regions)

    def borrow(self, epoch: int, region: Region) -> bool:
        """Registers a caller's memory until ``give_back``; False: it overlaps other registered memory, or NIXL refuses it.

        Regions that are the same are registered once; of those that merely overlap NIXL would not know which one to use.
        """
        with self._lock:
            if self._agent is None or epoch != self._epoch:
                return False
            if region not in self._borrowed:
                end = region.address + region.size
                for other in (*self._regions, *self._borrowed):
                    if region.address < other.address + other.size and other.address < end:
                        return False
                try:
                    self._agent.register_memory([(region.address, region.size, 0, "")], "DRAM")
                except Exception as error:  # noqa: BLE001 - NIXL's errors share no base class
                    log.debug("NIXL would not register a caller's memory: %r", error)
                    return False
                self._borrowed[region] = 0
            self._borrowed[region] += 1
            return True

    def give_back(self, epoch: int, region: Region) -> None:
        """Undoes one ``borrow``. Never raises."""
        with self._lock:
            if self._agent is None or epoch != self._epoch or region not in self._borrowed:
                return
            self._borrowed[region] -= 1
            if self._borrowed[region]:
                return
            del self._borrowed[region]
            try:
                self._agent.deregister_memory(self._agent.get_reg_descs([(region.address, region.size, 0, "")], "DRAM"))
            except Exception as error:  # noqa: BLE001 - NIXL's errors share no base class
                log.warning("NIXL would not let go of a caller's memory: %r", error)

    def take_slab(self, timeout_s: float) -> Slab | None:
        """A piece of bounce memory; None: none came free in time. Only a port that was opened has any."""
        with self._slab_free:
            if not self._slab_free.wait_for(lambda: bool(self._slabs), max(0.0, timeout_s)):
                self._counters.add("transport_nixl_bounce_timeouts_total")
                return None
            return self._slabs.pop()

    def give_slab(self, slab: Slab) -> None:
        """Gives it back; nothing may be on its way into it any more."""
        with self._slab_free:
            self._slabs.append(slab)
            self._slab_free.notify()

    # ---------------------------------------------------------------- others

    def meet(self, epoch: int, metadata: bytes) -> str:
        """Makes another agent known; answers its name. Each call is undone by one of ``leave``.

        Raises:
            OneSidedFailed: NIXL refuses it, or this is another epoch.
        """
        with self._lock:
            self._same(epoch)
            name, why = "", ""
            try:
                answered = self._agent.add_remote_agent(metadata)
                name = answered.decode() if isinstance(answered, bytes) else str(answered)
            except Exception as error:  # noqa: BLE001 - NIXL's errors share no base class
                why = repr(error)
            if why:
                raise OneSidedFailed("NIXL cannot reach the other side's agent", error=why)
            self._remote_users[name] = self._remote_users.get(name, 0) + 1
            return name

    def leave(self, epoch: int, name: str) -> None:
        """Forgets another agent, if nobody else uses it. Never raises."""
        with self._lock:
            if epoch != self._epoch or self._agent is None or name not in self._remote_users:
                return
            self._remote_users[name] -= 1
            if self._remote_users[name]:
                return
            del self._remote_users[name]
            try:
                self._agent.remove_remote_agent(name)
            except Exception as error:  # noqa: BLE001 - NIXL's errors share no base class; it has gone by itself
                log.debug("NIXL would not forget an agent: %r", error)

    # ---------------------------------------------------------------- transfers

    def start(self, epoch: int, operation: Literal["READ", "WRITE"], ours: Rows, theirs: Rows, name: str) -> Transfer | None:
        """Begins a transfer between our registered memory and another agent's; None: it is done already.

        Raises:
            OneSidedFailed: it cannot begin: NIXL refuses memory that the other agent has not registered.
        """
        with self._lock:
            self._same(epoch)
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
                return Transfer(epoch, self._last)
            if handle is not None:
                _release(handle)
                handle = None
            if state != "DONE":  # raised here, and holding nothing: see ``_end_agent``
                raise OneSidedFailed("a transfer by NIXL did not begin", error=why or state)
            return None

    def done(self, transfer: Transfer) -> bool:
        """Whether a transfer has ended well; makes progress.

        Raises:
            OneSidedFailed: it has ended badly.
        """
        with self._lock:
            self._same(transfer.epoch)
            state, why = "", ""
            try:
                state = self._agent.check_xfer_state(self._transfers[transfer.number])
            except Exception as error:  # noqa: BLE001 - NIXL's errors share no base class
                why = repr(error)
            if state == "PROC":
                return False
            _release(self._transfers.pop(transfer.number))
            if state != "DONE":
                raise OneSidedFailed("a transfer by NIXL broke", error=why or state)
            return True

    def drop(self, transfer: Transfer) -> None:
        """Gives a transfer up; its bytes may still move until the fence. Never raises."""
        with self._lock:
            handle = self._transfers.pop(transfer.number, None) if transfer.epoch == self._epoch else None
            if handle is not None:
                _release(handle)

    def progress(self, epoch: int) -> None:
        """Lets the other side's transfers go on: over TCP they need this side's help.

        Raises:
            OneSidedFailed: this is another epoch.
        """
        with self._lock:
            self._same(epoch)
            why = ""
            try:
                self._agent.get_new_notifs()
            except Exception as error:  # noqa: BLE001 - NIXL's errors share no base class
                why = repr(error)
            if why:
                raise OneSidedFailed("NIXL made no progress", error=why)

    def _same(self, epoch: int) -> None:
        if self._agent is None or epoch != self._epoch:
            raise OneSidedFailed("the NIXL agent was ended by a fence")


def load() -> Any:  # noqa: ANN401 - NIXL has no types
    """NIXL's Python interface, for CUDA 12 or 13.

    Raises:
        Unsupported: it is not installed, or not loadable here.
    """
    problems = []
    for module in _MODULES:
        try:
            return importlib.import_module(f"{module}._api")
        except ImportError as error:
            problems.append(str(error))
    raise Unsupported("NIXL is not installed: pip install 'kvstore-dualpath[nixl-cu12]'", tried="; ".join(problems))


def _release(handle: Any) -> None:  # noqa: ANN401 - NIXL has no types
    try:
        handle.release()
    except Exception as error:  # noqa: BLE001 - NIXL's errors share no base class; what it could not cancel ends with the agent
        log.debug("NIXL would not release a transfer: %r", error)
