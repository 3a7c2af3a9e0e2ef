"""Owners of namespaces: checks for calls whose token is confined to one tenant (``kvstore.rpc.auth.interceptor``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvproto.v1.common_pb2 import CacheSpec
from kvproto.v1.metadata_pb2 import ListNamespacesResponse, NamespaceInfo
from kvstore.core import limits
from kvstore.core.errors import CapacityExceeded, NotFound, PermissionDenied
from kvstore.core.spec import CacheSpec as Spec
from kvstore.core.types import NamespaceId
from kvstore.index.contract import PrefixIndex
from kvstore.rpc.auth.interceptor import require_tenant, tenant
from kvstore.rpc.codec import check_id, spec_to_proto


class NamespaceOwners:
    """The tenant of each namespace of an index. Call ``register`` on the index thread, the other methods on the event loop."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._owners: dict[bytes, str] = {}  # never changes: a namespace id is the digest of its spec

    async def check(self, namespace_id: bytes) -> None:
        """Check that the caller may use a namespace.

        Raises:
            InvalidArgument: the id has a wrong length.
            NotFound: the namespace is not registered, so its tenant is unknown: register it, then call again.
            PermissionDenied: the namespace belongs to another tenant.
        """
        if tenant() is None:
            return
        owner = self._owners.get(check_id(namespace_id, "namespace_id"))
        if owner is None:
            spec = self._index.spec_of(NamespaceId(namespace_id))
            if spec is None:
                await self._index.refresh()  # another server may have registered it a moment ago
                spec = self._index.spec_of(NamespaceId(namespace_id))
            if spec is None:
                raise NotFound("unknown namespace: register it", namespace=namespace_id.hex())
            owner = self._owners[namespace_id] = CacheSpec.FromString(spec).tenant
        require_tenant(owner)

    async def check_all(self, namespace_ids: Sequence[bytes]) -> None:
        """Check that the caller may use all of these namespaces.

        Raises:
            PermissionDenied: a namespace belongs to another tenant, or the list is empty, which selects all namespaces.
        """
        if tenant() is not None and not namespace_ids:
            raise PermissionDenied("a tenant must name the namespaces that it follows", tenant=tenant())
        for one in namespace_ids:
            await self.check(one)

    def register(self, spec: Spec) -> None:
        """Store a namespace in the index.

        Raises:
            CapacityExceeded: the tenant has too many namespaces, or the index has.
        """
        if self._index.spec_of(spec.namespace) is not None:
            return
        known = self._index.namespaces()
        # parse only new specs, and drop namespaces that a recreated index does not have
        before = self._owners
        owners: dict[bytes, str] = {
            one: before[one] if one in before else CacheSpec.FromString(encoded).tenant for one, encoded in known
        }
        if spec.tenant and sum(owner == spec.tenant for owner in owners.values()) >= limits.MAX_NAMESPACES_OF_TENANT:
            raise CapacityExceeded(
                "too many namespaces of this tenant", tenant=spec.tenant, limit=limits.MAX_NAMESPACES_OF_TENANT
            )
        self._owners = owners
        self._index.put_namespace(spec.namespace, spec_to_proto(spec).SerializeToString(deterministic=True))


class NamespaceList:
    """The namespaces of an index as a response. Belongs to the thread for long reads: there may be 100,000."""

    def __init__(self) -> None:
        self._infos: dict[NamespaceId, NamespaceInfo] = {}  # never change, so each spec is parsed once

    def listed(self, known: Iterable[tuple[NamespaceId, bytes]], only: str | None) -> ListNamespacesResponse:
        """Return the known namespaces of one tenant; None: all."""
        before = self._infos
        self._infos = {
            one: before[one] if one in before else NamespaceInfo(namespace_id=one, spec=CacheSpec.FromString(encoded))
            for one, encoded in known
        }
        found = [info for info in self._infos.values() if only is None or info.spec.tenant == only]
        return ListNamespacesResponse(namespaces=found)
