"""A metadata server loses Valkey and keeps its callers: they go to another server. Valkey is on the storage network."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from netlab_hosts import HostThread
from store_engine import BLOCKS

from kvstore.embedded.cluster import DaemonHost, LocalCluster, NodeSpec
from kvstore.embedded.valkey import ServerHost, ValkeyServers, find_server
from kvstore.netlab.lab import HostSpec, LabHost, NetLab

pytestmark = pytest.mark.skipif(find_server() is None, reason="no valkey-server or redis-server here")

FOLDER = Path(__file__).parent
PORT = 7400
CUT_S, CALLS_S = 4.0, 5.5
MOST_S = 2.0
"""Bound of a lookup: it waits for a server that is cut off, and then asks another one."""
BACK_S = 3.0
"""A server answers again so soon after a cut. TCP alone would need up to ``CUT_S`` more, because its pauses double."""


def metadata_server(host: LabHost, engine: str, folder: Path, *nodes: NodeSpec) -> LocalCluster:
    settings = {
        "engine": engine,
        "listen": f"{host.compute_ip}:{PORT}",
        "metrics_listen": "none",
        "node_ttl": "2500ms",
        "lookup_shard": "200ms",  # the machine may be loaded, and there is one shard
    }
    return LocalCluster(nodes, folder, tuple(settings.items()), DaemonHost(host.compute_ip, host.popen))


def hits_at(host: LabHost, server: str) -> int:
    """Blocks that one server finds."""
    said = host.run([sys.executable, str(FOLDER / "lookup_caller.py"), server, "0"])
    return int(json.loads(said.splitlines()[0])["hits"])


def test_server_cut_off_from_valkey_callers_go_elsewhere(make_lab: Callable[..., NetLab], tmp_path: Path) -> None:
    lab = make_lab(*(HostSpec(name) for name in ("valkey", "m1", "m2", "node")))
    on, first, second, host = lab.hosts
    both = f"{first.compute_ip}:{PORT},{second.compute_ip}:{PORT}"
    place = DaemonHost(host.compute_ip, host.popen)
    node = NodeSpec("node", dram_bytes=64 << 20, place=place, settings=(("metadata", both),))
    with ExitStack() as stack:
        thread = stack.enter_context(HostThread(on))
        servers = [ServerHost(on.storage_ip, on.popen)]
        valkey = thread.run(lambda: ValkeyServers(tmp_path / "valkey", shards=1, hosts=servers))
        stack.callback(valkey.close)
        stack.enter_context(metadata_server(second, valkey.url, tmp_path / "second"))
        cluster = stack.enter_context(metadata_server(first, valkey.url, tmp_path / "first", node))
        local = cluster.node("node").local_socket
        assert b'"stored"' in host.run([sys.executable, str(FOLDER / "store_engine.py"), "put", both, local])
        for victim in (first, second):  # one of them is the server that the caller uses
            caller = host.popen([sys.executable, str(FOLDER / "lookup_caller.py"), both, str(CALLS_S)], stdout=subprocess.PIPE)
            assert caller.stdout is not None
            assert json.loads(caller.stdout.readline()) == {"hits": BLOCKS}
            time.sleep(0.5)
            victim.cut("storage")
            time.sleep(CUT_S)
            victim.restore("storage")
            restored_s = time.monotonic()
            out, _ = caller.communicate(timeout=60)
            found = json.loads(out)
            print(f"{victim.name} cut off: {found}")
            assert found["failed"] == 0
            assert found["fewest"] == BLOCKS
            assert found["slowest_ms"] < MOST_S * 1_000
            while (hits := hits_at(host, f"{victim.compute_ip}:{PORT}")) < BLOCKS:
                assert time.monotonic() < restored_s + BACK_S, f"{victim.name} finds {hits} of {BLOCKS} blocks"
