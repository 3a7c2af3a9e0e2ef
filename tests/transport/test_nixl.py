"""The NIXL transport passes the transport suite and survives faults of its peers. Both run in separate processes.

NIXL's wheel contains C++ libraries with process-global symbols, among them protobuf, which crash a process that has also loaded
``grpc_tools``. The test process loads ``grpc_tools``; the store's processes never do.
"""

from __future__ import annotations

import importlib.util
import math
import queue
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from kvstore.config.node import NodeConfig
from kvstore.core.buffers import DenseBlocks
from kvstore.core.cancel_scope import CancelScope
from kvstore.core.errors import InvalidArgument
from kvstore.core.types import BlockShape
from kvstore.node.loads.nixl import NixlAgents
from kvstore.observe.counters import Counters
from kvstore.transport.contract import ReadRequest
from kvstore.transport.nixl.agent import NixlAgent, NixlOptions, Region, Slab
from kvstore.transport.nixl.peer import NixlStripedRead

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("cases", "which"),
    [
        ("nixl_conformance_cases.py", "TestUcxTcp"),
        pytest.param("nixl_conformance_cases.py", "TestCma", marks=pytest.mark.thorough),
        ("nixl_fault_cases.py", "killed or refused"),
        pytest.param("nixl_fault_cases.py", "not killed and not refused", marks=pytest.mark.thorough),
    ],
)
def test_nixl_cases_in_own_process_pass(cases: str, which: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("nixl_cu12") is None:
        pytest.skip("THE TRANSPORT NIXL WAS NOT TESTED: its wheel is not installed (make install)")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'cases'}", "-k", which]
    done = subprocess.run(
        [*command, str(HERE / cases)], cwd=HERE.parent.parent, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_read_into_callers_memory_is_never_direct() -> None:
    """Late bytes can arrive only in registered memory, and an engine's is not."""
    shape = BlockShape(2, 4096)
    buffer = DenseBlocks(np.zeros((4, 2, 4096), np.uint8))
    request = ReadRequest(bytes(16), [bytes(16)] * 4, 0, 2, 0, math.inf)

    def read(*regions: Region) -> NixlStripedRead:
        agent = NixlAgent(NixlOptions(mode="pull"), regions=regions)
        return NixlStripedRead(request, buffer, 1, verify=True, on_layers=None, agent=agent, max_unit_bytes=shape.block_bytes)

    assert read().registered is None
    assert read(Region(buffer.array.ctypes.data, buffer.array.nbytes)).registered is not None


def test_bounce_memory_wait_of_cancelled_read_ends() -> None:
    """Without an open agent there is no bounce memory, so a read waits for it."""
    scope, counters = CancelScope.after(60.0), Counters()
    agent, slabs = NixlAgent(NixlOptions(), counters=counters), queue.SimpleQueue[Slab | None]()
    waiting = threading.Thread(target=lambda: slabs.put(agent.acquire_slab(60.0, scope)))
    waiting.start()
    threading.Timer(0.1, scope.cancel).start()
    assert slabs.get(timeout=20.0) is None
    waiting.join()
    assert counters.get("transport_nixl_bounce_timeouts_total") == 0
    assert agent.acquire_slab(0.0) is None
    assert counters.get("transport_nixl_bounce_timeouts_total") == 1


def test_node_nixl_without_trusted_network_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="may read and write its memory and end it"):
        NixlAgents(NodeConfig(node_id="n1", run_dir=Path(), nixl="auto"), Region(1 << 20, 1 << 20), Counters()).open()


def test_node_on_loopback_nixl_beyond_host_is_refused() -> None:
    config = NodeConfig(node_id="n1", run_dir=Path(), nixl="auto", nixl_devices="eth0", nixl_trusted_network=True)
    with pytest.raises(InvalidArgument, match="beyond this host"):
        NixlAgents(config, Region(1 << 20, 1 << 20), Counters()).open()
