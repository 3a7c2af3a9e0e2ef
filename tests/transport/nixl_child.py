"""Child process of ``nixl_fault_cases``: serves or reads test blocks by NIXL, and signals itself during a transfer.

Arguments: ``serve`` or ``read ADDRESS``, the agent's options as JSON, and the signal that the process sends to itself while a
transfer is under way. With a last argument ``later``, a server arms the signal on SIGUSR1, and a reader after a first read and a
line on its standard input. Prints the server's address and the progress.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from typing import Any

from kvstore.core.types import BlockShape
from kvstore.observe.counters import Counters
from kvstore.testing.memory_provider import MemoryProvider
from kvstore.testing.transport_suite import NAMESPACE, dense, read_of
from kvstore.transport.nixl.agent import NixlAgent, NixlOptions, NixlTransfer
from kvstore.transport.nixl.peer import NixlPeer
from kvstore.transport.nixl.responder import NixlResponder
from kvstore.transport.tcp.server import TcpServer

SHAPE = BlockShape(1, 16 << 10)
COUNT = 4096


class HarmedAgent(NixlAgent):
    """An agent that sends a signal to its own process once, while it polls a transfer."""

    harm = 0

    def _suffer(self) -> None:
        harm, HarmedAgent.harm = HarmedAgent.harm, 0
        if harm:
            os.kill(os.getpid(), harm)

    def start(self, *which: Any) -> NixlTransfer | None:
        transfer = super().start(*which)
        self._suffer()  # within a host, the transfer may be complete already, so that it is never polled
        return transfer

    def is_done(self, transfer: NixlTransfer) -> bool:
        self._suffer()
        return super().is_done(transfer)

    def progress(self, epoch: int) -> None:
        self._suffer()
        super().progress(epoch)


def main() -> None:
    """Run the child; see the module docstring for the arguments."""
    role, *where, options, harm, when = sys.argv[1:] if sys.argv[-1] == "later" else [*sys.argv[1:], ""]
    counters = Counters()
    port = HarmedAgent(NixlOptions(**json.loads(options)), name="child", counters=counters)
    port.open()

    def arm(*_: object) -> None:
        HarmedAgent.harm = int(harm)
        print("armed", flush=True)

    if role == "read":
        peer = NixlPeer(where[0], port, counters=counters)
        if when:
            peer.read(read_of(range(COUNT), 1), dense(COUNT, SHAPE))
            print("read", counters.get("transport_nixl_bytes_received_total"), flush=True)
            sys.stdin.readline()
        arm()
        peer.read(read_of(range(COUNT), 1), dense(COUNT, SHAPE))
        return
    if when:
        signal.signal(signal.SIGUSR1, arm)
    provider = MemoryProvider()
    provider.declare(NAMESPACE, SHAPE)
    provider.put(NAMESPACE, range(COUNT))
    server = TcpServer(provider, one_sided=partial(NixlResponder, port), counters=counters)
    server.start()
    if not when:  # before a client can connect
        HarmedAgent.harm = int(harm)
    print(server.address, flush=True)
    sys.stdin.readline()
    provider.settle()  # wait until all parts are released
    print("settled", counters.get("transport_nixl_bytes_sent_total"), flush=True)
    server.stop()
    port.close()


if __name__ == "__main__":
    main()
