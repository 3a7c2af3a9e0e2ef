"""A test bed of P prefill, D decode and some storage hosts: the hosts of its lab, and its theoretical bound. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvstore.core.errors import InvalidArgument
from kvstore.dualpath.pd_ratio import Bed, RatioVerdict, judge
from kvstore.netlab.lab import HostSpec

METADATA_HOST = "metadata"
_BYTES_PER_MBIT = 125_000.0


@dataclass(frozen=True, slots=True)
class LabBed:
    """Sizes of a bed. Hosts are named ``prefill-0``, ``decode-0``, ``storage-0`` and so on; ``metadata`` has unlimited links.

    Attributes:
        prefill: P.
        decode: D.
        storage: number of storage hosts; together they should send more than P + D can receive.
        snic_mbit: storage NIC of each prefill and decode host.
        cnic_mbit: compute NIC of each host.
        storage_mbit: storage NIC of each storage host.
        dram_bytes_per_s: memory bandwidth of a host for the bound; infinite to ignore it.

    Raises:
        InvalidArgument: a role without hosts, or an impossible rate.
    """

    prefill: int = 1
    decode: int = 1
    storage: int = 1
    snic_mbit: float = 500.0
    cnic_mbit: float = 4000.0
    storage_mbit: float = 4000.0
    dram_bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        if min(self.prefill, self.decode, self.storage) < 1:
            raise InvalidArgument("prefill, decode and storage must be at least 1")
        self.hosts()

    def hosts(self) -> tuple[HostSpec, ...]:
        """For ``NetLab``."""
        return (
            HostSpec(METADATA_HOST),
            *(HostSpec(name, self.snic_mbit, self.cnic_mbit) for name in (*self.prefill_hosts, *self.decode_hosts)),
            *(HostSpec(name, self.storage_mbit, self.cnic_mbit) for name in self.storage_hosts),
        )

    @property
    def prefill_hosts(self) -> tuple[str, ...]:
        """Names of the prefill hosts."""
        return tuple(f"prefill-{number}" for number in range(self.prefill))

    @property
    def decode_hosts(self) -> tuple[str, ...]:
        """Names of the decode hosts."""
        return tuple(f"decode-{number}" for number in range(self.decode))

    @property
    def storage_hosts(self) -> tuple[str, ...]:
        """Names of the storage hosts."""
        return tuple(f"storage-{number}" for number in range(self.storage))

    def verdict(self) -> RatioVerdict:
        """Whether all storage links can be full, by equation 9."""
        cnic, snic = self.cnic_mbit * _BYTES_PER_MBIT, self.snic_mbit * _BYTES_PER_MBIT
        return judge(Bed(self.prefill, self.decode, 1, cnic, snic, self.dram_bytes_per_s))

    @property
    def storage_bound(self) -> bool:
        """Whether the storage hosts can fill the storage links of all others."""
        return self.storage * self.storage_mbit >= (self.prefill + self.decode) * self.snic_mbit

    @property
    def busy_mbit(self) -> float:
        """Traffic on all links with every storage link full: each byte is read once and goes once between prefill and decode."""
        return 2 * (self.prefill + self.decode) * self.snic_mbit

    def describe(self) -> str:
        """The bed for people, the bound included."""
        lines = [
            f"{self.prefill} prefill, {self.decode} decode and {self.storage} storage hosts, Mbit/s each way: "
            f"SNIC {self.snic_mbit:g}, CNIC {self.cnic_mbit:g}, storage hosts {self.storage_mbit:g}; "
            f"about {self.busy_mbit / 1000:.1f} Gbit/s over all links when all are busy",
            self.verdict().sentence,
        ]
        if not self.storage_bound:
            lines.append("The storage hosts together are slower than the storage links they feed: the gain will be smaller.")
        return "\n".join(lines)
