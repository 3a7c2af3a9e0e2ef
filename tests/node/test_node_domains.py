"""Namespaces of a node: one object each, and a limit per tenant so that other tenants have space."""

from __future__ import annotations

import pytest

from kvstore.core.errors import CapacityExceeded
from kvstore.core.spec import CacheSpec
from kvstore.node.state import namespaces as namespace
from kvstore.node.state.namespaces import NamespaceRegistry

MOST = 3


def spec(tenant: str, salt: int) -> CacheSpec:
    return CacheSpec(model="m", block_tokens=16, layers=1, layer_block_bytes=64, tenant=tenant, salt=bytes([salt]))


def test_namespaces_tenant_limit_ignores_recovered_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace, "MAX_NAMESPACES_OF_TENANT", MOST)
    namespaces = NamespaceRegistry()
    for salt in range(MOST):
        assert namespaces.of_spec(spec("acme", salt)) is namespaces.of_spec(spec("acme", salt))
    with pytest.raises(CapacityExceeded):
        namespaces.of_spec(spec("acme", MOST))
    assert namespaces.find(spec("acme", MOST).namespace) is None
    for salt in range(2 * MOST):
        namespaces.of_spec(spec("", salt))
    assert namespaces.of_spec(spec("other", 0)).spec == spec("other", 0)
    found = namespaces.of_shape(spec("acme", 9).namespace, spec("acme", 9).shape)  # found on a volume at start
    assert namespaces.of_spec(spec("acme", 9)) is found, "blocks that are there have their tenant, however many it has"
    assert found.account is namespaces.of_spec(spec("acme", 0)).account
