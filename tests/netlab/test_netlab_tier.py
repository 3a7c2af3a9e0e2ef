"""Loads of vLLM's secondary tier are planned: chunks in storage arrive over this host's storage link and an idle host's."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tier_engine import CHUNKS, SPEC

from kvstore.embedded.cluster import DaemonHost, LocalCluster, NodeSpec
from kvstore.netlab.bed import METADATA_HOST, LabBed
from kvstore.netlab.lab import LabHost, NetLab
from kvstore.netlab.traffic import LabNic

ENGINE = str(Path(__file__).with_name("tier_engine.py"))
MIB = 1 << 20
SIZE = CHUNKS * SPEC.block_bytes
BED = LabBed(snic_mbit=300, cnic_mbit=1500, storage_mbit=1500)


def node(host: LabHost, role: str, nvme_bytes: int = 0) -> NodeSpec:
    """A node on a host that keeps nothing of what passes through it, except in storage."""
    settings = {"storage_listen": f"{host.storage_ip}:0", "load_window": str(4 * MIB)}
    if not nvme_bytes:
        rate = {"storage_bandwidth": str(int(BED.snic_mbit * 125_000)), "compute_bandwidth": str(int(BED.cnic_mbit * 125_000))}
        settings |= {"cache_loads": "false", "prefill_buffer": str(SIZE), "decode_buffer": str(SIZE), **rate}
    place = DaemonHost(host.compute_ip, host.popen)
    return NodeSpec(host.name, (role,), 3 * SIZE, nvme_bytes, settings=tuple(settings.items()), place=place)


def run(host: LabHost, cluster: LocalCluster, what: str, argument: str) -> Any:
    """Run the engine on a host and return what it prints."""
    argv = [sys.executable, ENGINE, what, cluster.metadata_address, cluster.node(host.name).local_socket, argument]
    return json.loads(host.run(argv))


def test_tier_loads_use_both_storage_links(make_lab: Callable[..., NetLab], tmp_path: Path) -> None:
    lab = make_lab(*BED.hosts())
    prefill, decode, storage = (lab.host(name) for name in ("prefill-0", "decode-0", "storage-0"))
    metadata = lab.host(METADATA_HOST)
    nodes = [node(prefill, "prefill"), node(decode, "decode"), node(storage, "storage", nvme_bytes=4 * SIZE)]
    with LocalCluster(nodes, tmp_path, metadata_host=DaemonHost(metadata.compute_ip, metadata.popen)) as cluster:
        stored = run(storage, cluster, "put", cluster.node("storage-0").address)
        assert stored == {"chain": CHUNKS, "heads": CHUNKS}
        whole = {"held": CHUNKS, "arrived": CHUNKS, "wrong": 0}
        alone = run(prefill, cluster, "get", "prefill_only")
        assert alone == {kind: {**whole, "prefill": SIZE} for kind in stored}
        before = lab.sample()
        both = run(prefill, cluster, "get", "split")
        after = lab.sample()
    for told in both.values():
        assert told == {**whole, "prefill": told["prefill"], "relay": SIZE - told["prefill"]}
        assert SIZE / 4 < told["prefill"] < SIZE * 3 / 4
    for host in ("prefill-0", "decode-0"):
        nic = LabNic(host, "storage")
        assert SIZE / 2 < after[nic].rx_bytes - before[nic].rx_bytes < SIZE * 3 / 2
