"""Whose a namespace is, as its spec says, for calls that are confined to a tenant (``kvstore.rpc.access``)."""

from __future__ import annotations

from collections.abc import Sequence

from kvproto.v1.common_pb2 import CacheSpec
from kvstore.core.errors import NotFound, PermissionDenied
from kvstore.index.contract import PrefixIndex
from kvstore.rpc.access import confine, tenant
from kvstore.rpc.codec import check_id


class Tenants:
    """The namespaces of one index. On the server's loop."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._owners: dict[bytes, str] = {}  # a namespace is its spec, so that this never changes; as many as the index has

    def check(self, namespace_id: bytes) -> None:
        """Refuses a namespace that is not the caller's.

        Raises:
            InvalidArgument: the id has another length.
            NotFound: nobody has registered it, so that it cannot be told; register it, and ask again.
            PermissionDenied: it is another tenant's.
        """
        if tenant() is None:
            return
        owner = self._owners.get(check_id(namespace_id, "namespace_id"))
        if owner is None:
            self._owners = {known: CacheSpec.FromString(spec).tenant for known, spec in self._index.namespaces()}
            owner = self._owners.get(namespace_id)
        if owner is None:
            raise NotFound("nobody has registered this namespace", namespace=namespace_id.hex())
        confine(owner)

    def check_all(self, namespace_ids: Sequence[bytes]) -> None:
        """As ``check``; a tenant that names none would see those of all.

        Raises:
            PermissionDenied: likewise.
        """
        if tenant() is not None and not namespace_ids:
            raise PermissionDenied("a tenant names the namespaces that it wants to follow", tenant=tenant())
        for one in namespace_ids:
            self.check(one)
