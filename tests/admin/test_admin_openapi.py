"""The OpenAPI document against a real store: no 5xx, no undocumented response, and an example for every field."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator
from functools import cache
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from admin_client import WAIT_S, AdminHttp
from hypothesis import HealthCheck, Phase, given, seed, settings

from certificates import SERVER_NAME, make_certificates
from kvclient import CacheSpec, KVClient
from kvstore.core.errors import Internal
from kvstore.embedded.cluster import LocalCluster, NodeSpec

EXAMPLES = 5
"""Each generated request costs about 10 ms, and there are about 30 operations."""
SPEC = CacheSpec(model="m", block_tokens=16, layers=2, layer_block_bytes=4096)
NODE = "host-1"
"""Name of the node in the examples of the document."""


def document(http: AdminHttp) -> Any:
    """The server's OpenAPI document. Schemathesis is imported here: an import costs each test process a second."""
    import schemathesis

    return schemathesis.openapi.from_url(f"http://{http.address}/v1/openapi.json")


@cache
def checks() -> list[Any]:
    """The checks of each response."""
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_headers_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    return [
        not_a_server_error,
        status_code_conformance,
        content_type_conformance,
        response_headers_conformance,
        response_schema_conformance,
    ]


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminHttp]:
    node = NodeSpec(NODE, dram_bytes=16 << 20, nvme_bytes=32 << 20, settings=(("compute_cap", "10GB"),))
    with LocalCluster([node], tmp_path_factory.mktemp("store")) as cluster:
        address = cluster.start_admin().address
        with KVClient.connect(cluster.metadata_address, SPEC, node=cluster.node(NODE).local_socket) as client:
            keys = list(client.keys(np.arange(64, dtype=np.uint32)))
            assert client.store(keys, np.zeros((4, SPEC.block_bytes), np.uint8), wait_visible=True).held_blocks == 4
            assert client.hints.keep("chat", keys)
            yield AdminHttp(address)


def test_openapi_generated_requests_get_documented_responses(http: AdminHttp) -> None:
    schema = document(http)
    tried = 0
    for result in schema.get_all_operations():
        operation = result.ok()

        @seed(20_26)
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def hold(case: Any) -> None:
            nonlocal tried
            tried += 1
            case.call_and_validate(checks=checks())

        hold()
    assert tried > 75


@pytest.mark.parametrize(
    "path",
    [
        "/v1/cluster",
        "/v1/nodes",
        "/v1/overview",
        "/v1/activity",
        "/v1/volumes",
        "/v1/namespaces",
        "/v1/rules",
        "/v1/tenants",
        "/v1/decisions",
        "/v1/loads/slow",
    ],
)
def test_openapi_responses_match_document(http: AdminHttp, path: str) -> None:
    """Requests with names that exist in the store, which generated requests rarely use."""
    schema = document(http)
    answer = schema[path]["GET"].Case().call_and_validate(checks=checks())
    assert answer.status_code == 200


def test_openapi_requests_with_known_names_match_document(http: AdminHttp) -> None:
    schema = document(http)
    namespace = {"namespace_id": SPEC.namespace.hex()}
    node, volume = {"node_id": NODE}, {"node_id": NODE, "name": "nvme0"}
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("GET", "/v1/nodes/{node_id}", {"path_parameters": node}),
        ("GET", "/v1/nodes/{node_id}/config", {"path_parameters": node}),
        ("GET", "/v1/nodes/{node_id}/traffic-cap", {"path_parameters": node}),
        (
            "PUT",
            "/v1/nodes/{node_id}/traffic-cap",
            {"path_parameters": node, "body": {"bytes_per_s": 9}, "headers": {"If-Match": "*"}},
        ),
        ("POST", "/v1/nodes/{node_id}/drain", {"path_parameters": node, "body": {"move": False}}),
        ("POST", "/v1/nodes/{node_id}/undrain", {"path_parameters": node}),
        ("POST", "/v1/nodes/{node_id}/anti-entropy", {"path_parameters": node}),
        ("GET", "/v1/volumes/{node_id}/{name}", {"path_parameters": volume}),
        ("POST", "/v1/volumes/{node_id}/{name}/evict", {"path_parameters": volume, "body": {"to_percent": 50}}),
        ("POST", "/v1/volumes/{node_id}/{name}/check", {"path_parameters": volume, "body": {"bytes_per_s": 10**9}}),
        ("GET", "/v1/volumes/{node_id}/{name}/check", {"path_parameters": volume}),
        ("DELETE", "/v1/volumes/{node_id}/{name}/check", {"path_parameters": volume}),
        ("GET", "/v1/namespaces/{namespace_id}", {"path_parameters": namespace}),
        ("GET", "/v1/namespaces/{namespace_id}/usage", {"path_parameters": namespace}),
        ("POST", "/v1/blocks/lookup", {"body": {**namespace, "tokens": list(range(200))}}),
        ("GET", "/v1/path-policy", {}),
        ("PUT", "/v1/path-policy", {"body": {"policy": "split"}, "headers": {"If-Match": "*"}}),
        ("POST", "/v1/namespaces/{namespace_id}/evict", {"path_parameters": namespace, "body": {"tiers": ["dram"]}}),
        ("POST", "/v1/namespaces/{namespace_id}/hints", {"path_parameters": namespace, "body": {"session": "chat"}}),
        ("POST", "/v1/namespaces/{namespace_id}/weights-epoch", {"path_parameters": namespace, "body": {"weights_epoch": "2"}}),
        ("POST", "/v1/namespaces/{namespace_id}/invalidate", {"path_parameters": namespace}),
        ("GET", "/v1/tenants/quota", {"query": {"tenant": "m"}}),
        ("PUT", "/v1/tenants/quota", {"query": {"tenant": "m"}, "body": {"nvme_bytes": 9}, "headers": {"If-Match": "*"}}),
        ("DELETE", "/v1/tenants/quota", {"query": {"tenant": "m"}, "headers": {"If-Match": "*"}}),
        ("GET", "/v1/namespaces/{namespace_id}/rule", {"path_parameters": namespace}),
        (
            "PUT",
            "/v1/namespaces/{namespace_id}/rule",
            {"path_parameters": namespace, "body": {"kept": False}, "headers": {"If-Match": "*"}},
        ),
        ("GET", "/v1/index", {}),
        ("POST", "/v1/index/rebuild", {"headers": {"If-Match": '"other"'}}),
    ]
    for method, path, given_ in asked:
        answer = schema[path][method].Case(**given_).call_and_validate(checks=checks())
        expected = 412 if path.endswith("rebuild") else 202 if (method, path[-6:]) == ("POST", "/check") else 200
        assert answer.status_code == expected, (path, answer.content)


@pytest.mark.parametrize(
    "path",
    ["/v1/cluster/", "/v1/nodes//", "/v1/blocks/", "/v1/volumes/host-1", "/v1/volumes/a/b/c", "/v1", "/healthz/", "//", "/%2e"],
)
def test_unknown_path_gets_documented_404_without_redirect(http: AdminHttp, path: str) -> None:
    answer = http.ask("GET", path)
    assert answer.status == 404, answer.raw
    assert answer.headers["content-type"] == "application/problem+json"
    assert "location" not in answer.headers
    assert answer.json["kind"] == "not_found"
    document = http.get("/v1/openapi.json")
    assert all("404" in operation["responses"] for found in document["paths"].values() for operation in found.values())


@pytest.mark.parametrize(
    "request_",
    [
        b"nonsense\r\n\r\n",
        b"GET /v1/nodes HTTP/x.y\r\nhost: 127.0.0.1\r\n\r\n",
        b"GET /v1/nodes HTTP/1.1\r\nhost 127.0.0.1\r\n\r\n",
        b"GET /v1/nodes HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/blocks/lookup HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # a TLS client hello
    ],
)
def test_malformed_http_gets_problem_response(http: AdminHttp, request_: bytes) -> None:
    host, _, port = http.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        connection.sendall(request_)
        answer = HTTPResponse(connection)
        answer.begin()
        body = json.loads(answer.read())
        assert connection.recv(1) == b"", "the connection ends"
    assert (answer.status, body["status"], body["kind"]) == (400, 400, "invalid_argument")
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["x-request-id"] == body["request_id"] != ""
    assert http.get("/healthz") == {"status": "ok"}


def test_connection_upgrade_is_ignored(http: AdminHttp) -> None:
    answer = http.ask("GET", "/v1/nodes", connection="upgrade", upgrade="websocket", sec_websocket_version="13")
    assert answer.status == 200
    assert answer.json["items"]


def test_openapi_fields_have_examples(http: AdminHttp) -> None:
    document = http.get("/v1/openapi.json")
    schemas = document["components"]["schemas"]
    without = [
        f"{name}.{field}"
        for name, schema in schemas.items()
        for field, shape in schema.get("properties", {}).items()
        if not has_example(shape)
    ]
    assert without == []
    undescribed = [
        f"{method} {path}"
        for path, found in document["paths"].items()
        for method, operation in found.items()
        if not (operation.get("summary") and operation.get("description"))
    ]
    assert undescribed == []


def test_openapi_fields_and_parameters_are_described(http: AdminHttp) -> None:
    document = http.get("/v1/openapi.json")
    fields = [
        f"{name}.{field}"
        for name, schema in document["components"]["schemas"].items()
        for field, shape in schema.get("properties", {}).items()
        if not shape.get("description")
    ]
    assert fields == []
    parameters = [
        f"{method} {path} {parameter['name']}"
        for path, found in document["paths"].items()
        for method, operation in found.items()
        for parameter in operation.get("parameters", [])
        if not parameter.get("description")
    ]
    assert parameters == []


def has_example(shape: dict[str, Any]) -> bool:
    """Whether a field has examples or refers to a schema."""
    return any(mark in json.dumps(shape) for mark in ('"examples": [', '"$ref"'))


def test_remote_request_over_tls_requires_token(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "pki")
    tokens = tmp_path / "tokens"
    tokens.write_text("read bob readers-token-2-x\n")
    cluster = LocalCluster([], tmp_path / "store")  # only the admin server is started
    settings = {"listen": "0.0.0.0:0", "tokens_file": str(tokens), "tls.cert": str(made.cert), "tls.key": str(made.key)}
    try:
        admin = cluster.start_admin(*settings.items())
        port = int(admin.address.rpartition(":")[2])
        trusting = ssl.create_default_context(cafile=str(made.ca))
        by_name = {"sni_hostname": SERVER_NAME}  # the certificate must have this name, not the address
        with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=trusting, timeout=30) as client:
            for headers, status in (({}, 401), ({"authorization": "Bearer readers-token-2-x"}, 200)):
                headers = {"host": f"{SERVER_NAME}:{port}", **headers}
                assert client.get("/metrics", headers=headers, extensions=by_name).status_code == status
        assert "readers-token" not in admin.log_path.read_text()
        cluster.stop("admin")
        with pytest.raises(Internal, match="requires tokens"):
            cluster.start_admin(("listen", "0.0.0.0:0"), ("allow_insecure_remote", "true"))
    finally:
        cluster.close()
