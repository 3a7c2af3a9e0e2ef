"""The addresses of metadata servers, as a setting has them: ``"a:7400,b:7400"`` or a DNS name of several servers."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Final, Self

from kvstore.core.errors import InvalidArgument
from kvstore.rpc.address import is_address, is_unix

MAX_SERVERS: Final = 16
"""Maximum number of metadata servers of one setting, and of addresses used of one DNS name."""
_DNS: Final = "dns:"


@dataclass(frozen=True, slots=True)
class MetadataAddresses:
    """One to 16 metadata servers. ``str`` of it is the setting again.

        MetadataAddresses.parse("10.0.0.1:7400,10.0.0.2:7400")
        MetadataAddresses.parse("dns:metadata.example:7400")

    Attributes:
        entries: addresses without prefix, in the order of the setting.
        names: those entries that are DNS names of any number of servers; the others are one server each.
    """

    entries: tuple[str, ...]
    names: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the addresses in a setting.

        An entry with the prefix ``dns:`` stands for all addresses of the name, and so does a host name that is the only entry. In
        a list, a host name without the prefix is one server.

        Raises:
            InvalidArgument: no entry, too many, one twice, or one that is not an address.
        """
        parts = [part.strip() for part in text.split(",")]
        if not all(parts):
            raise InvalidArgument('empty address in the list of metadata servers; expected "host:port,host:port"', metadata=text)
        if len(parts) > MAX_SERVERS:
            raise InvalidArgument("too many metadata servers; use at most 16, or a DNS name", got=len(parts), limit=MAX_SERVERS)
        entries = []
        names = set()
        for part in parts:
            entry = part.removeprefix(_DNS)
            if not is_address(entry):
                raise InvalidArgument(
                    'a metadata server must be "host:port", with its port (default: 7400), or "unix:/path"; separate several by'
                    " commas",
                    address=part,
                )
            if part.startswith(_DNS) and _is_literal(entry):
                raise InvalidArgument("dns: requires a host name; write the address without the prefix", address=part)
            if entry in entries:
                raise InvalidArgument("the list of metadata servers names an address twice; remove one", address=entry)
            if part.startswith(_DNS) or (len(parts) == 1 and not _is_literal(entry)):
                names.add(entry)
            entries.append(entry)
        return cls(tuple(entries), frozenset(names))

    @classmethod
    def of(cls, given: MetadataAddresses | str) -> MetadataAddresses:
        """Return ``given``, parsed if it is a setting.

        Raises:
            InvalidArgument: see ``parse``.
        """
        return given if isinstance(given, MetadataAddresses) else cls.parse(given)

    @property
    def only(self) -> str | None:
        """The address, if it is one server whose address is known without DNS; else None."""
        return self.entries[0] if len(self.entries) == 1 and not self.names else None

    def __str__(self) -> str:
        """Return the setting."""
        return ",".join(f"{_DNS}{entry}" if entry in self.names else entry for entry in self.entries)


def entries_of(address: str) -> tuple[str, ...]:
    """Return the addresses in a setting that names servers, or in the address of one server of any kind.

    Raises:
        InvalidArgument: see ``MetadataAddresses.parse``.
    """
    return (address,) if is_unix(address) else MetadataAddresses.parse(address).entries


def _is_literal(address: str) -> bool:
    """Whether the address needs no DNS: a unix socket, an IP address, or ``localhost``."""
    if is_unix(address):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
