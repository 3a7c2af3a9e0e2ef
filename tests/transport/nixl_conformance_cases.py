"""The transport suite over NIXL: with UCX's TCP the server pushes, with CMA the reader pulls.

``test_nixl.py`` runs this file in a separate process.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from kvstore.observe.counters import Counters
from kvstore.testing.transport_suite import TransportSuite
from kvstore.transport.contract import BlockPeer, BlockProvider
from kvstore.transport.nixl.agent import NixlAgent, NixlOptions
from kvstore.transport.nixl.peer import NixlPeer
from kvstore.transport.nixl.responder import NixlResponder
from kvstore.transport.tcp.server import TcpServer
from kvstore.transport.tickets import TicketAuthority


class _Nixl(TransportSuite):
    options = NixlOptions()

    counters: Counters
    serving: NixlAgent
    reading: NixlAgent

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def ports(cls) -> Iterator[None]:
        """Make one agent per side for all tests, because creating an agent is slow."""
        cls.counters = Counters()
        cls.serving = NixlAgent(cls.options, name="serving", counters=cls.counters)
        cls.reading = NixlAgent(cls.options, name="reading", counters=cls.counters)
        yield
        cls.reading.close()
        cls.serving.close()

    @pytest.fixture(autouse=True)
    def nothing_over_tcp(self, ports: None) -> Iterator[None]:
        """Check that NIXL moved every payload byte."""
        yield
        counted = self.counters.snapshot()
        assert not counted.get("transport_nixl_fallbacks_total"), "NIXL failed and TCP was used"
        received = counted.get("transport_nixl_bytes_received_total", 0)
        assert received == counted.get("transport_peer_bytes_received_total", 0)

    def serve(self, provider: BlockProvider, authority: TicketAuthority | None = None) -> TcpServer:
        server = TcpServer(provider, authority=authority, counters=self.counters, one_sided=partial(NixlResponder, self.serving))
        server.start()
        return server

    def connect(self, served: TcpServer, ticket: bytes = b"") -> BlockPeer:
        return NixlPeer(served.address, self.reading, ticket=ticket, counters=self.counters)


class TestUcxTcp(_Nixl):
    options = NixlOptions(transports="tcp", bounce_bytes=256 << 20)


class TestCma(_Nixl):
    options = NixlOptions(mode="pull", bounce_bytes=256 << 20)
