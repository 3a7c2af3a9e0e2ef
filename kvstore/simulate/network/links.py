"""Which links a transfer uses, and by how much: the byte accounting of both read paths.

========================  ==============================================================
storage read by node n    all storage, n's SNIC, n's DRAM twice (written, read again)
… handed to the engine    n is the prefill node: its CNIC out and in (a loopback copy);
                          else n's CNIC out, the prefill CNIC in
push to the decode node   prefill CNIC out, decode CNIC in, decode DRAM once
write-back of a prompt    decode DRAM once, SNIC out, all storage
write-back of an answer   decode CNIC out and in, DRAM twice, SNIC out, all storage
exchange of experts       CNIC out and in of the host
buffer to decode HBM      decode DRAM once, decode CNIC out and in
========================  ==============================================================
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.simulate.cluster import SimHost
from kvstore.simulate.network.fluid import Route, route


class PathLinks:
    """Numbers of the links of a cluster in one network."""

    def __init__(self, hosts: Sequence[SimHost], storage: float) -> None:
        self.capacities: list[float] = []
        self.storage = self._add(storage)
        self.snic = [self._add(host.snic) for host in hosts]
        self.snic_out = [self._add(host.snic) for host in hosts]
        self.dram = [self._add(host.dram) for host in hosts]
        self._out = [[self._add(host.cnic) for _ in range(host.cnics)] for host in hosts]
        self._in = [[self._add(host.cnic) for _ in range(host.cnics)] for host in hosts]
        self._routes: dict[tuple[object, ...], Route] = {}

    def read(self, reader: int, reader_engine: int, prefill: int, prefill_engine: int) -> Route:
        """Storage to the prefill engine through a host."""
        key = ("read", reader, reader_engine, prefill, prefill_engine)
        if key not in self._routes:
            out = self._cnic(self._out, reader, prefill_engine if reader == prefill else reader_engine)
            into = self._cnic(self._in, prefill, prefill_engine)
            self._routes[key] = route(
                (self.storage, 1.0), (self.snic[reader], 1.0), (self.dram[reader], 2.0), (out, 1.0), (into, 1.0)
            )
        return self._routes[key]

    def stage(self, reader: int) -> Route:
        """Storage to a host's buffer, and no further."""
        key = ("stage", reader)
        if key not in self._routes:
            self._routes[key] = route((self.storage, 1.0), (self.snic[reader], 1.0), (self.dram[reader], 1.0))
        return self._routes[key]

    def push(self, prefill: int, prefill_engine: int, decode: int, decode_engine: int) -> Route:
        """Prefill engine to the decode node's buffer."""
        key = ("push", prefill, prefill_engine, decode, decode_engine)
        if key not in self._routes:
            out, into = self._cnic(self._out, prefill, prefill_engine), self._cnic(self._in, decode, decode_engine)
            self._routes[key] = route((out, 1.0), (into, 1.0), (self.dram[decode], 1.0))
        return self._routes[key]

    def hand_over(self, decode: int, decode_engine: int) -> Route:
        """The decode node's buffer to its engine."""
        key = ("hand", decode, decode_engine)
        if key not in self._routes:
            out, into = self._cnic(self._out, decode, decode_engine), self._cnic(self._in, decode, decode_engine)
            self._routes[key] = route((self.dram[decode], 1.0), (out, 1.0), (into, 1.0))
        return self._routes[key]

    def write_back(self, decode: int, decode_engine: int, *, from_hbm: bool) -> Route:
        """The decode node's buffer, or HBM through that buffer, to storage. Storage links carry both directions at full rate."""
        key = ("write", decode, decode_engine, from_hbm)
        if key not in self._routes:
            uses = [(self.storage, 1.0), (self.snic_out[decode], 1.0), (self.dram[decode], 2.0 if from_hbm else 1.0)]
            if from_hbm:
                uses += [(self._cnic(links, decode, decode_engine), 1.0) for links in (self._out, self._in)]
            self._routes[key] = route(*uses)
        return self._routes[key]

    def exchange(self, host: int, engine: int) -> Route:
        """Tokens to experts on other hosts and back."""
        key = ("exchange", host, engine)
        if key not in self._routes:
            self._routes[key] = route((self._cnic(self._out, host, engine), 1.0), (self._cnic(self._in, host, engine), 1.0))
        return self._routes[key]

    def cnic_bytes(self, moved: Sequence[float], host: int) -> tuple[float, float]:
        """Bytes out of and into a host over its compute links."""
        return sum(moved[link] for link in self._out[host]), sum(moved[link] for link in self._in[host])

    def _add(self, capacity: float) -> int:
        self.capacities.append(capacity)
        return len(self.capacities) - 1

    @staticmethod
    def _cnic(links: list[list[int]], host: int, engine: int) -> int:
        return links[host][engine % len(links[host])]
