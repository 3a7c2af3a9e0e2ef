"""List of the namespaces of a store, for a program that reads what another engine stored and needs its layout."""

from __future__ import annotations

from kvclient.call.arguments import check_seconds
from kvproto.v1 import metadata_pb2, metadata_pb2_grpc
from kvstore.core.spec import CacheSpec
from kvstore.process.tls import TlsConfig
from kvstore.rpc.auth.tokens import TokenSource
from kvstore.rpc.client import call
from kvstore.rpc.codec import spec_from_proto
from kvstore.rpc.failover.connect import connect_metadata


def list_namespaces(
    metadata: str, *, tls: TlsConfig | None = None, token: TokenSource | None = None, timeout_s: float = 5.0
) -> list[CacheSpec]:
    """Return all namespaces that a metadata server knows, in the order of their registration. They may be empty.

        specs = list_namespaces("127.0.0.1:7400")

    Args:
        metadata: address of the server, ``host:port``.
        tls: as for ``KVClient.connect``.
        token: presented to the server (``ClientOptions.shown_token``); a tenant sees only its own namespaces.
        timeout_s: bound of the call.

    Raises:
        InvalidArgument: a malformed address.
        KVStoreError: the server does not answer.
    """
    timeout_s = check_seconds("timeout_s", timeout_s)
    with connect_metadata(metadata, tls=tls, token=token) as channel:
        stub = metadata_pb2_grpc.MetadataStub(channel)
        answer = call(stub.ListNamespaces, metadata_pb2.ListNamespacesRequest(), timeout_s)
    return [spec_from_proto(info.spec) for info in answer.namespaces]
