"""The compose file's cluster as plain processes on this machine, with the image's entry command and environment and the file's
arguments, ports and health checks. Host names and folders are replaced: each service has its own loopback address and folder.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml
from deployed import COMPOSE, Daemon, compose, compose_daemons, image

from kvclient import CacheSpec, KVClient
from kvstore.embedded import children
from nursery import cli

WAIT_S = 60.0
ASK_S = 0.3
SMALL = {"PREFILL_DRAM": "64MiB", "DECODE_DRAM": "64MiB", "STORAGE_DRAM": "64MiB", "STORAGE_NVME": "256MiB"}
"""Variables of the file."""
SPEC = CacheSpec(model="deployed", block_tokens=16, layers=4, layer_block_bytes=16 << 10)
BLOCKS = 64
TOKEN = "a-token-of-these-tests"


@dataclass
class Places:
    """Local addresses of the names in the file."""

    addresses: dict[str, str]
    root: Path

    def of(self, daemon: Daemon) -> dict[str, str]:
        """The environment of a service, with names and folders replaced."""
        found = {}
        for name, value in daemon.environment.items():
            own = self.addresses[f"{daemon.name}.storage" if name.endswith("STORAGE_LISTEN") else daemon.name]
            value = re.sub(r"^0\.0\.0\.0:", f"{own}:", value)
            if name.endswith(("METADATA", "ADVERTISE_HOST")):
                value = re.sub(r"^[a-z0-9.-]+(?=:|$)", lambda match: self.addresses[match[0]], value)
            found[name] = re.sub(r"/(var/lib|run)/", lambda match: f"{self.root / daemon.name}{match[0]}", value)
        return found


@dataclass
class Service:
    """A service of the file as a process."""

    daemon: Daemon
    environment: dict[str, str]
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def healthy(self) -> bool:
        """Run the file's health check."""
        return asked(self.daemon, self.environment)


def asked(daemon: Daemon, environment: dict[str, str]) -> bool:
    done = subprocess.run([*cli(), *daemon.health], env=environment, capture_output=True, timeout=WAIT_S, check=False)
    return done.returncode == 0


def started(daemon: Daemon, places: Places) -> Service:
    own = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
    environment = {**own, "GRPC_ENABLE_FORK_SUPPORT": "0", **places.of(daemon)}
    for folder in daemon.folders:
        if folder.startswith(("/var/lib/", "/run/")):
            (places.root / daemon.name / folder[1:]).mkdir(parents=True, exist_ok=True)
    for secret in daemon.secrets:
        file = places.root / daemon.name / secret[1:]
        file.parent.mkdir(parents=True)
        file.touch(0o600)
        file.write_text(f"read tests {TOKEN}\n")
    log = places.root / f"{daemon.name}.log"
    _, last = image()
    command = [*json.loads(last.last("ENTRYPOINT"))[2:], *daemon.arguments]
    assert command.pop(0) == "kvstore"
    with log.open("wb") as sink:
        process = children.start([*cli("metadata", "node"), *command], env=environment, stdout=sink, stderr=sink)
    return Service(daemon, environment, process, log)


def until_healthy(service: Service) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not service.healthy:
        assert service.process.poll() is None, service.log.read_text()
        assert time.monotonic() < deadline_s, service.log.read_text()
        time.sleep(ASK_S)  # each check is a process


@pytest.fixture
def cluster() -> Iterator[dict[str, Service]]:
    """All services of the file except the router, in the order of their dependencies."""
    daemons = {name: daemon for name, daemon in compose_daemons(SMALL).items() if daemon.arguments != ("router",)}
    net = f"127.{random.randrange(64, 255)}.{random.randrange(1, 255)}"  # another test may use the same ports
    names = [*daemons, *(f"{name}.storage" for name in daemons)]
    addresses = {name: f"{net}.{number}" for number, name in enumerate(names, 1)}
    services: dict[str, Service] = {}
    with ExitStack() as stack:
        # paths of unix sockets must be short
        places = Places(addresses, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-"))))
        waiting = dict(daemons)
        while waiting:
            ready = [one for one in waiting.values() if set(one.about.get("depends_on", {})) <= services.keys()]
            assert ready
            for daemon in ready:
                services[daemon.name] = service = started(waiting.pop(daemon.name), places)
                stack.enter_context(service.process)
                stack.callback(service.process.kill)
            for daemon in ready:
                until_healthy(services[daemon.name])
        yield services


def test_compose_decode_loads_what_prefill_stored(cluster: dict[str, Service]) -> None:
    metadata = cluster["metadata"].environment["KVSTORE_METADATA__LISTEN"]
    sockets = {
        name: f"unix:{service.environment['KVSTORE_NODE__RUN_DIR']}/{name}.sock"
        for name, service in cluster.items()
        if service.daemon.arguments == ("node",)
    }
    data = np.random.default_rng(7).integers(0, 255, (BLOCKS, SPEC.block_bytes), np.uint8)
    with KVClient.connect(metadata, SPEC, node=sockets["prefill-1"]) as prefill:
        keys = prefill.keys(np.arange(BLOCKS * SPEC.block_tokens, dtype=np.uint32))
        stored = prefill.store(keys, data, durable=True)
        assert (stored.bytes_stored, stored.durable) == (data.nbytes, True)
    with KVClient.connect(metadata, SPEC, node=sockets["decode-1"]) as decode:
        space = np.zeros_like(data)
        loaded = decode.load(keys, space)
        assert loaded.hit_blocks == BLOCKS
        assert np.array_equal(space, data)
        assert "decode-1" not in loaded.bytes_by_node

    jobs = yaml.safe_load((COMPOSE.parent / "prometheus.yml").read_text())["scrape_configs"]
    targets = [target for job in jobs for each in job["static_configs"] for target in each["targets"]]
    assert len(targets) == len(cluster) - 1, "an admin server's take a token"
    for target in targets:
        name, port = target.split(":")
        listen = cluster[name].environment[f"KVSTORE_{cluster[name].daemon.arguments[0].upper()}__METRICS_LISTEN"]
        assert listen.endswith(f":{port}")
        with urllib.request.urlopen(f"http://{listen}/metrics", timeout=WAIT_S) as answer:
            text = answer.read().decode()
        if name != "metadata":
            assert "kvstore_node_registered 1" in re.sub(r"\{[^}]*\}", "", text)

    address = cluster["admin"].environment["KVSTORE_ADMIN__LISTEN"]
    question = urllib.request.Request(f"http://{address}/v1/nodes", headers={"authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(question, timeout=WAIT_S) as answer:
        assert {one["node_id"] for one in json.load(answer)["items"] if one["alive"]} == sockets.keys()
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"http://{address}/v1/nodes", timeout=WAIT_S)

    cluster["metadata"].process.send_signal(signal.SIGSTOP)
    assert not cluster["admin"].healthy, "its metadata server does not answer"
    cluster["metadata"].process.send_signal(signal.SIGCONT)

    nodes = [service for name, service in cluster.items() if name != "metadata"]
    for service in [*nodes, cluster["metadata"]]:
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(WAIT_S) == 0, service.log.read_text()
    assert not nodes[0].healthy
    assert not cluster["metadata"].healthy


def test_compose_has_three_hosts() -> None:
    roles = {name: daemon.config.node.roles for name, daemon in compose_daemons().items() if daemon.arguments == ("node",)}
    assert roles == {"prefill-1": ("prefill",), "decode-1": ("decode",), "storage-1": ("storage",)}
    assert set(compose()["services"]) >= {"metadata", "router", "prometheus", "grafana", *roles}
