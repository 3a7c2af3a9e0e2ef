"""Observability server: read-only plain HTTP, by default on loopback.

``/metrics`` is for Prometheus; the other paths return small JSON documents. Each request has a thread, with at most
``MOST_AT_ONCE`` at once, and ends within ``REQUEST_S``, even if its client reads slowly.
"""

from __future__ import annotations

import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import urlsplit

from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import CollectorRegistry

from kvstore.observe.counters import Counters
from kvstore.observe.exposition import StoreCollector, registry_of
from kvstore.observe.metric_definitions import common as common_metrics

log = logging.getLogger(__name__)

MOST_AT_ONCE: Final = 8
REQUEST_S: Final = 5.0
"""Time limit of one connection, from its start to its end."""
_NO_DESCRIPTORS_PAUSE_S: Final = 0.05
_STOP_POLL_S: Final = 0.05
"""Interval at which the server checks for a stop; the process waits up to this long at shutdown."""

Pages = Mapping[str, Callable[[], object]]
"""Path -> what makes its JSON document."""


class MetricsServer:
    """HTTP server of one registry. ``start`` and ``stop`` once each.

    Args:
        address: ``host:port``; port 0: any.
        registry: what ``/metrics`` shows.
        pages: further documents.
        counters: where refused requests are counted.

    Raises:
        ValueError: not an address.
        OSError: the address cannot be bound.
    """

    def __init__(self, address: str, registry: CollectorRegistry, pages: Pages, counters: Counters) -> None:
        host, port = split_address(address)
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._server = _Server(family, (host, port), registry, pages, counters)
        name = f"[{host}]" if ":" in host else host
        self.address = f"{name}:{self._server.server_address[1]}"
        """Host and port, as bound."""
        serving = partial(self._server.serve_forever, _STOP_POLL_S)
        self._thread = threading.Thread(target=serving, name="kvstore-metrics", daemon=True)

    def start(self) -> None:
        """Start the thread that serves."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the server. Requests in progress are left to their threads, which end with the process."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(REQUEST_S)


def serve(address: str, collector: StoreCollector, pages: Pages, counters: Counters) -> MetricsServer | None:
    """Start to serve a collector's documents. None: the server cannot start; the process works without it."""
    try:
        server = MetricsServer(address, registry_of(collector), pages, counters)
    except (OSError, ValueError) as error:
        log.warning("metrics are not served at %s: %s", address, error)
        return None
    server.start()
    log.info("metrics at http://%s/metrics", server.address)
    return server


def split_address(address: str) -> tuple[str, int]:
    """``host:port`` apart, brackets of IPv6 removed.

    Raises:
        ValueError: it is none.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"an address must look like 127.0.0.1:7401, not {address}")
    return host.strip("[]"), int(port)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = MOST_AT_ONCE

    def __init__(
        self, family: int, address: tuple[str, int], registry: CollectorRegistry, pages: Pages, counters: Counters
    ) -> None:
        self.address_family = family
        self.registry = registry
        self.pages = pages
        self._counters = counters
        self._free_slots = threading.BoundedSemaphore(MOST_AT_ONCE)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # without the reverse look-up of the host's name that the base class does: it may take seconds
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:  # no descriptors are left, perhaps for long: the base class tries again at once
            time.sleep(_NO_DESCRIPTORS_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        if not self._free_slots.acquire(blocking=False):
            self._counters.add(common_metrics.METRICS_SCRAPES_REFUSED)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free_slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        deadline = threading.Timer(REQUEST_S, _shut, (request,))
        deadline.daemon = True
        try:
            deadline.start()
            super().process_request_thread(request, client_address)
        except RuntimeError:  # no more threads
            self._counters.add(common_metrics.METRICS_SCRAPES_REFUSED)
            self.shutdown_request(request)
        finally:
            deadline.cancel()
            self._free_slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401, ARG002
        log.debug("request for metrics failed: %r", sys.exception())  # the client has disconnected, or is too slow


def _shut(request: socket.socket) -> None:
    """End a connection, so that its thread fails in its next read or write."""
    with suppress(OSError):  # it has ended
        request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "kvstore"
    sys_version = ""
    timeout = REQUEST_S

    def do_GET(self) -> None:  # the base class's
        path = urlsplit(self.path).path
        if path == "/metrics":
            encode, kind = choose_encoder(self.headers.get("Accept", ""))
            self._answer(HTTPStatus.OK, encode(self.server.registry), kind)
        elif path in self.server.pages:
            self._answer(HTTPStatus.OK, _json(self.server.pages[path]()), "application/json")
        elif path == "/":
            self._answer(HTTPStatus.OK, _json({"pages": ["/metrics", *self.server.pages]}), "application/json")
        else:
            self._answer(HTTPStatus.NOT_FOUND, _json({"error": "no such page", "pages": ["/metrics", *self.server.pages]}))

    def _answer(self, status: HTTPStatus, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002, ARG002
        return  # Prometheus asks every few seconds


def _json(value: object) -> bytes:
    return json.dumps(value, indent=1).encode() + b"\n"
