"""Whose a namespace is, as its spec says, for calls that are confined to a tenant (``kvstore.rpc.auth.interceptor``)."""

from __future__ import annotations

from collections.abc import Sequence

from kvproto.v1.common_pb2 import CacheSpec
from kvstore.core import limits
from kvstore.core.errors import CapacityExceeded, NotFound, PermissionDenied
from kvstore.core.spec import CacheSpec as Spec
from kvstore.core.types import NamespaceId
from kvstore.index.contract import PrefixIndex
from kvstore.rpc.auth.interceptor import require_tenant, tenant
from kvstore.rpc.codec import check_id, spec_to_proto


class NamespaceOwners:
    """The namespaces of one index. ``register`` is for the thread that changes it, the rest for the server's loop."""

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
            spec = self._index.spec_of(NamespaceId(namespace_id))
            if spec is None:
                raise NotFound("nobody has registered this namespace", namespace=namespace_id.hex())
            owner = self._owners[namespace_id] = CacheSpec.FromString(spec).tenant
        require_tenant(owner)

    def register(self, spec: Spec) -> None:
        """Remembers a namespace in the index.

        Raises:
            CapacityExceeded: there are too many, of its tenant or of all.
        """
        if self._index.spec_of(spec.namespace) is not None:
            return
        known = self._index.namespaces()
        # only what is new is parsed, and what is no more is dropped: an index that was made anew begins without
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

    def check_all(self, namespace_ids: Sequence[bytes]) -> None:
        """As ``check``; a tenant that names none would see those of all.

        Raises:
            PermissionDenied: likewise.
        """
        if tenant() is not None and not namespace_ids:
            raise PermissionDenied("a tenant names the namespaces that it wants to follow", tenant=tenant())
        for one in namespace_ids:
            self.check(one)
