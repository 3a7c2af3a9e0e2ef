"""A cluster's networks on one machine: per host a network namespace, a storage link and a compute link with exact rates.

::

    namespace of host a        namespace "switch"         namespace of host b
      snic 198.18.0.1 ─────── s0 ─ storage bridge ─ s1 ─────── snic 198.18.0.2
      cnic 198.19.0.1 ─────── c0 ─ compute bridge ─ c1 ─────── cnic 198.19.0.2

Real processes run inside (``LabHost.popen``) over real TCP; each link is shaped at both ends, MTU 9000. Tests can cut and
restore links, change their rates under traffic, kill a host's processes, and assign KV traffic to a traffic class. Labs are
independent: several may run at once, with the same addresses. A lab requires root, ``iproute2`` and a kernel with veth, bridge,
tbf, htb and u32; ``available`` names missing ones. Keep the sum of the rates in use below about 15 Gbit/s for two cores: above
it the CPU is the limit.

``python -m kvstore.netlab.lab clean`` removes the labs of dead owners (each new lab does so too).
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Self, get_args

from kvstore.core.errors import Conflict, Internal, InvalidArgument, KVStoreError, NotFound
from kvstore.embedded import children
from kvstore.embedded.children import DaemonLaunchers
from kvstore.netlab import netns
from kvstore.netlab.links import MTU, LinkSettings, LinkTrafficClass, change_lines, check_rate
from kvstore.netlab.traffic import DEFAULT_INTERVAL_S, CounterFile, Counts, LabNic, LinkRecorder, Network

NETWORKS: tuple[Network, ...] = get_args(Network)
MAX_HOSTS = 200
_SUBNET = {"storage": "198.18.0", "compute": "198.19.0"}
"""Of the range set aside for benchmarks of networks (RFC 2544)."""
_NIC = {"storage": "snic", "compute": "cnic"}
_PORT = {"storage": "s", "compute": "c"}
_SWITCH = "switch"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_KV_SHARE = 0.01
"""What KV is guaranteed of a classified link unless the caller says otherwise."""


@dataclass(frozen=True, slots=True)
class HostSpec:
    """One host of a lab.

    Attributes:
        name: letters, digits, ``_`` and ``-``; also names its NICs in plots.
        snic_mbit: rate of its storage NIC, each direction, Mbit/s; None: as fast as the CPU goes.
        cnic_mbit: the same of its compute NIC.

    Raises:
        InvalidArgument: an impossible name or rate.
    """

    name: str
    snic_mbit: float | None = None
    cnic_mbit: float | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name == _SWITCH:
            raise InvalidArgument(
                f"a host's name must have 1 to 64 letters, digits, '_' and '-', and must not be {_SWITCH!r}", name=self.name
            )
        for rate in (self.snic_mbit, self.cnic_mbit):
            check_rate(rate)


class LabHost:
    """One host of a running lab; made by ``NetLab``."""

    def __init__(self, spec: HostSpec, index: int, lab: str) -> None:
        self.spec = spec
        self.name = spec.name
        self.namespace = f"{lab}-{spec.name}"
        """For ``ip -n`` and ``ip netns exec`` by hand."""
        self._switch = f"{lab}-{_SWITCH}"
        self._index = index
        self._fd = -1
        self._links: dict[Network, LinkSettings] = {network: LinkSettings(None) for network in NETWORKS}

    @property
    def storage_ip(self) -> str:
        """Address of its storage NIC."""
        return self.ip("storage")

    @property
    def compute_ip(self) -> str:
        """Address of its compute NIC."""
        return self.ip("compute")

    def ip(self, network: Network) -> str:
        """Address of one of its NICs."""
        return f"{_SUBNET[network]}.{self._index + 1}"

    # ---------------------------------------------------------------- processes
    def popen(
        self,
        argv: Sequence[str],
        *,
        stdin: int | IO[bytes] | None = subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a process on this host. It is killed when the *thread* that started it ends, and with the lab at the latest.

        Args:
            argv: program and arguments.
            stdin: as of ``subprocess.Popen``.
            stdout: as of ``subprocess.Popen``.
            stderr: as of ``subprocess.Popen``.
            env: environment; None: ours.
            cwd: working folder; None: ours.

        Raises:
            OSError: no such program.
        """
        log = stdout if stdout is stderr and not isinstance(stdout, int) else None
        if log is not None and stdin == subprocess.DEVNULL and env is None and cwd is None:  # as daemons are started
            return DaemonLaunchers.launcher(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, netns=self._fd)
        return children.start(argv, stdin=stdin, stdout=stdout, stderr=stderr, env=env, cwd=cwd, netns=self._fd)

    def run(self, argv: Sequence[str], *, timeout_s: float = 60.0, stdin: bytes = b"") -> bytes:
        """Run a program on this host to its end.

        Returns:
            Its standard output.

        Raises:
            Internal: it exited with a nonzero code; the message contains the end of its standard error.
            subprocess.TimeoutExpired: it took too long; it was killed.
        """
        process = self.popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            out, err = process.communicate(stdin, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
        if process.returncode:
            raise Internal(
                f"{argv[0]} ended with code {process.returncode} on host {self.name}: {err[-2000:].decode(errors='replace')}"
            )
        return bytes(out)

    def kill(self) -> int:
        """SIGKILL to every process on this host, as when its power fails; returns how many there were."""
        return netns.kill_inside(self.namespace)

    # ---------------------------------------------------------------- links
    def cut(self, network: Network) -> None:
        """Unplug a cable: all packets are dropped in both directions, without a reset."""
        netns.batch("ip", [f"link set {self.port(network)} down"], self._switch)

    def restore(self, network: Network) -> None:
        """Connect the cable again. Connections continue as soon as TCP tries again."""
        netns.batch("ip", [f"link set {self.port(network)} up"], self._switch)

    def shape(self, network: Network, mbit: float | None) -> None:
        """Another rate for both directions of a link, from now on.

        Raises:
            InvalidArgument: an impossible rate, or one that the link's traffic class does not fit.
        """
        self._change(network, replace(self._links[network], rate_mbit=mbit))

    def classify(
        self, network: Network, *, kv_dscp: int, kv_ceil_mbit: float | None = None, kv_floor_mbit: float | None = None
    ) -> None:
        """Assign marked KV traffic of a limited link to a low class, in both directions: other traffic has priority.

        Args:
            network: the link.
            kv_dscp: the mark, 1 to 63: KV sockets set ``IP_TOS`` to ``kv_dscp << 2``.
            kv_ceil_mbit: maximum rate of KV; None: all unused capacity.
            kv_floor_mbit: guaranteed rate of KV; the rest of the link is guaranteed to other traffic; None: 1 % of the link.

        Raises:
            InvalidArgument: the link has no rate, or the numbers do not fit it.
        """
        settings = self._links[network]
        if settings.rate_mbit is None:
            raise InvalidArgument(
                "a traffic class requires a link with a rate; set its rate first", host=self.name, network=network
            )
        floor = kv_floor_mbit if kv_floor_mbit is not None else max(1.0, _KV_SHARE * settings.rate_mbit)
        self._change(network, replace(settings, kv=LinkTrafficClass(kv_dscp, floor, kv_ceil_mbit)))

    def unclassify(self, network: Network) -> None:
        """All traffic alike again."""
        self._change(network, replace(self._links[network], kv=None))

    def settings(self, network: Network) -> LinkSettings:
        """How a link is shaped now."""
        return self._links[network]

    def port(self, network: Network) -> str:
        """Interface of the switch that this host's NIC is plugged into."""
        return f"{_PORT[network]}{self._index}"

    def _change(self, network: Network, settings: LinkSettings) -> None:
        before = self._links[network]
        netns.batch("tc", change_lines(_NIC[network], before, settings), self.namespace)
        netns.batch("tc", change_lines(self.port(network), before, settings), self._switch)
        self._links[network] = settings

    # ---------------------------------------------------------------- set-up
    def link_lines(self) -> list[str]:
        """Commands of ``ip`` that create its links, for the switch's namespace."""
        lines = []
        for network in NETWORKS:
            port, nic = self.port(network), _NIC[network]
            lines += [
                f"link add {port} mtu {MTU} type veth peer name {nic} mtu {MTU} netns {self.namespace}",
                f"link set {port} addrgenmode none",  # no IPv6 chatter in the counters
                f"link set {port} master br-{network} up",
            ]
        return lines

    def _address_lines(self) -> list[str]:
        """For ``ip``, in the host's namespace."""
        lines = ["link set lo up"]
        for network in NETWORKS:
            nic = _NIC[network]
            lines += [f"link set {nic} addrgenmode none", f"addr add {self.ip(network)}/24 dev {nic}", f"link set {nic} up"]
        return lines

    def configure(self) -> None:
        """Open the namespace and set addresses and rates; for ``NetLab``."""
        self._fd = os.open(netns.NETNS_DIR / self.namespace, os.O_RDONLY | os.O_CLOEXEC)
        netns.batch("ip", self._address_lines(), self.namespace)
        self.shape("storage", self.spec.snic_mbit)
        self.shape("compute", self.spec.cnic_mbit)

    def close(self) -> None:
        """Close the namespace; for ``NetLab``."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class NetLab:
    """Hosts on a storage network and a compute network. A context manager; everything is removed at the end, also after SIGKILL.

    Args:
        hosts: 1 to ``MAX_HOSTS`` hosts.

    Raises:
        InvalidArgument: too many hosts, or two with one name.
    """

    def __init__(self, hosts: Sequence[HostSpec]) -> None:
        names = [spec.name for spec in hosts]
        if not 1 <= len(hosts) <= MAX_HOSTS or len(set(names)) != len(names):
            raise InvalidArgument(f"a lab must have 1 to {MAX_HOSTS} hosts of different names", hosts=names)
        self.name = netns.new_lab_name()
        self._hosts = {spec.name: LabHost(spec, index, self.name) for index, spec in enumerate(hosts)}
        self._guard: netns.LabReaper | None = None
        self._switch_fd = -1
        self._counters: CounterFile | None = None

    def __enter__(self) -> Self:
        """Build the networks.

        Raises:
            Unsupported: ip or tc is not installed.
            IprouteFailed: the kernel refuses; ``available`` says what it lacks.
        """
        if self._guard is not None:
            raise Conflict("this lab runs already", lab=self.name)
        netns.remove_stale()
        self._guard = netns.LabReaper(self.name)
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Kill every process on the hosts and remove the networks; recordings stay readable."""
        if self._guard is None:
            return
        for host in self._hosts.values():
            host.close()
        if self._counters is not None:
            self._counters.close()
            self._counters = None
        if self._switch_fd >= 0:
            os.close(self._switch_fd)
            self._switch_fd = -1
        netns.remove_lab(self.name)
        self._guard.close()
        self._guard = None

    # ---------------------------------------------------------------- looking
    @property
    def hosts(self) -> tuple[LabHost, ...]:
        """In the order given."""
        return tuple(self._hosts.values())

    def host(self, name: str) -> LabHost:
        """One host.

        Raises:
            NotFound: no such host.
        """
        if name not in self._hosts:
            raise NotFound("no such host in this lab", host=name, hosts=", ".join(self._hosts))
        return self._hosts[name]

    def sample(self) -> dict[LabNic, Counts]:
        """Bytes over every NIC since the lab began.

        Raises:
            NotFound: the lab does not run.
        """
        if self._counters is None:
            raise NotFound("this lab does not run", lab=self.name)
        return dict(zip(self._counters.nics, self._counters.read(), strict=True))

    def record(self, interval_s: float = DEFAULT_INTERVAL_S) -> LinkRecorder:
        """A recording of every NIC, to be entered as a context: ``with lab.record() as recording: ...``."""
        return LinkRecorder(self._open_counters(), interval_s)

    # ---------------------------------------------------------------- set-up
    def _build(self) -> None:
        switch = f"{self.name}-{_SWITCH}"
        netns.batch("ip", [f"netns add {name}" for name in (switch, *(host.namespace for host in self.hosts))])
        self._switch_fd = os.open(netns.NETNS_DIR / switch, os.O_RDONLY | os.O_CLOEXEC)
        netns.call_inside(self._switch_fd, _bridge_without_firewall)
        lines = []
        for network in NETWORKS:
            lines += [
                f"link add br-{network} type bridge",
                f"link set br-{network} addrgenmode none mtu {MTU}",
                f"link set br-{network} up",
            ]
        netns.batch("ip", [*lines, *(line for host in self.hosts for line in host.link_lines())], switch)
        for host in self.hosts:
            host.configure()
        self._counters = self._open_counters()

    def _open_counters(self) -> CounterFile:
        if self._switch_fd < 0:
            raise NotFound("this lab does not run", lab=self.name)
        ports = {LabNic(host.name, network): host.port(network) for host in self.hosts for network in NETWORKS}
        return CounterFile(self._switch_fd, ports)


def _bridge_without_firewall() -> None:
    """Saves frames the way through the (empty) tables of iptables. Read-only in some containers: then they take it."""
    with contextlib.suppress(OSError):
        Path("/proc/sys/net/bridge/bridge-nf-call-iptables").write_text("0", encoding="ascii")


# ---------------------------------------------------------------- can it run here?
def available() -> str | None:
    """Why no lab can run here, found by trying; None: it can. Takes some 20 ms."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for name in ("ip", "tc"):
        if netns.tool(name) is None:
            return f"{name} is not installed: install iproute2"
    lab = netns.new_lab_name()
    probe = f"{lab}-probe"
    classes = LinkSettings(100.0, LinkTrafficClass(8, 1.0))
    plain = LinkSettings(100.0)
    steps: list[tuple[str, str, list[str], str | None]] = [
        ("network namespaces cannot be made (CAP_SYS_ADMIN and a writable /run/netns)", "ip", [f"netns add {probe}"], None),
        ("no veth links", "ip", ["link add v0 type veth peer name v1", "link set v0 up"], probe),
        ("no bridges", "ip", ["link add bridge0 type bridge", "link set v1 master bridge0 up"], probe),
        ("no tbf queues", "tc", change_lines("v0", LinkSettings(None), plain), probe),
        ("no htb queues, bfifo queues or u32 filters", "tc", change_lines("v0", plain, classes), probe),
    ]
    try:
        for what, name, lines, namespace in steps:
            try:
                netns.batch(name, lines, namespace)
            except KVStoreError as error:
                return f"{what}: {error}"
    finally:
        netns.remove_lab(lab)
    return None


def main(arguments: Sequence[str]) -> int:
    """``clean``: removes the labs of dead owners. ``check``: says whether a lab can run here, and how long one takes to build."""
    if list(arguments) == ["clean"]:
        removed = netns.remove_stale()
        sys.stdout.write("".join(f"removed {lab}\n" for lab in removed) or "nothing to remove\n")
        return 0
    if list(arguments) == ["check"]:
        reason = available()
        if reason is not None:
            sys.stdout.write(f"no lab can run here: {reason}\n")
            return 1
        begin_s = time.monotonic()
        with NetLab([HostSpec(f"host-{number}", 500, 4000) for number in range(6)]):
            sys.stdout.write(f"six hosts are up after {time.monotonic() - begin_s:.3f} s\n")
        return 0
    sys.stderr.write("usage: python -m kvstore.netlab.lab clean|check\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
