"""The real store on the hosts of a lab: daemons and engines in their namespaces, blocks over the storage links."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from store_engine import BLOCKS, SPEC

from kvstore.embedded.cluster import DaemonHost, LocalCluster, NodeSpec
from kvstore.netlab.bed import METADATA_HOST, LabBed
from kvstore.netlab.lab import LabHost, NetLab
from kvstore.netlab.traffic import LabNic

ENGINE = str(Path(__file__).with_name("store_engine.py"))
MIB = 1 << 20


def node(host: LabHost, role: str, nvme_bytes: int = 0) -> NodeSpec:
    """A node on a host: control over the compute network, blocks over the storage network."""
    place = DaemonHost(host.compute_ip, host.popen)
    settings = (("data_listen", f"{host.storage_ip}:0"),)
    return NodeSpec(host.name, (role,), 64 * MIB, nvme_bytes, place=place, settings=settings)


def engine(host: LabHost, cluster: LocalCluster, what: str, *more: str) -> dict[str, int]:
    answer: dict[str, int] = json.loads(
        host.run([sys.executable, ENGINE, what, cluster.metadata_address, cluster.node(host.name).local_socket, *more])
    )
    return answer


def test_blocks_travel_over_the_storage_links(make_lab: Callable[..., NetLab], tmp_path: Path) -> None:
    lab = make_lab(*LabBed(snic_mbit=400, cnic_mbit=1000, storage_mbit=1000).hosts())
    prefill, decode, storage = (lab.host(name) for name in ("prefill-0", "decode-0", "storage-0"))
    nodes = [node(prefill, "prefill"), node(decode, "decode"), node(storage, "storage", nvme_bytes=64 * MIB)]
    metadata = lab.host(METADATA_HOST)
    with LocalCluster(nodes, tmp_path, metadata_host=DaemonHost(metadata.compute_ip, metadata.popen)) as cluster:
        assert engine(storage, cluster, "put") == {"stored": BLOCKS}
        before = lab.sample()
        assert engine(prefill, cluster, "get") == {"hits": BLOCKS, "wrong": 0}
        after = lab.sample()
        moved = {nic: after[nic].rx_bytes - before[nic].rx_bytes for nic in after}
        size = BLOCKS * SPEC.block_bytes
        assert size < moved[LabNic("prefill-0", "storage")] < 1.05 * size
        assert moved[LabNic("prefill-0", "compute")] < size / 10
        assert moved[LabNic("decode-0", "storage")] < size / 10
        # with its storage link cut, a host has what it has and misses the rest
        decode.cut("storage")
        assert engine(decode, cluster, "get", "1") == {"hits": 0, "wrong": 0}
        assert engine(prefill, cluster, "get") == {"hits": BLOCKS, "wrong": 0}
