"""Namespaces as this node knows them: an id, a block shape, and the spec where somebody has shown it."""

from __future__ import annotations

import threading

from kvstore.core.errors import CapacityExceeded, Conflict, NotFound
from kvstore.core.limits import MAX_NAMESPACES
from kvstore.core.spec import CacheSpec
from kvstore.core.types import BlockShape, NamespaceId


class Domain:
    """One namespace. There is one object a namespace and node, so that ``is`` compares them."""

    __slots__ = ("namespace", "shape", "spec")

    def __init__(self, namespace: NamespaceId, shape: BlockShape, spec: CacheSpec | None) -> None:
        self.namespace = namespace
        self.shape = shape
        self.spec = spec


class Domains:
    """All namespaces of a node. Thread-safe; bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[NamespaceId, Domain] = {}

    def of_spec(self, spec: CacheSpec) -> Domain:
        """The domain of a spec."""
        domain = self.of_shape(spec.namespace, spec.shape)
        domain.spec = spec
        return domain

    def of_shape(self, namespace: NamespaceId, shape: BlockShape) -> Domain:
        """The domain of a namespace whose spec is not known here (a recovered volume, a peer's write).

        Raises:
            Conflict: the namespace is known with another shape.
            CapacityExceeded: too many namespaces.
        """
        with self._lock:
            domain = self._known.get(namespace)
            if domain is None:
                if len(self._known) >= MAX_NAMESPACES:
                    raise CapacityExceeded("this node knows too many namespaces", limit=MAX_NAMESPACES)
                domain = self._known[namespace] = Domain(namespace, shape, None)
            elif domain.shape != shape:
                raise Conflict("this namespace has blocks of another shape", known=domain.shape, given=shape)
            return domain

    def find(self, namespace: NamespaceId) -> Domain | None:
        """A namespace already known, or None."""
        return self._known.get(namespace)

    def get(self, namespace: NamespaceId) -> Domain:
        """A namespace already known.

        Raises:
            NotFound: it is not.
        """
        domain = self._known.get(namespace)
        if domain is None:
            raise NotFound("this node does not know the namespace", namespace=namespace.hex())
        return domain
