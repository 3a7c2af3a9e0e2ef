"""Files for several metadata servers: their index is in a Valkey Cluster, in compose, in Kubernetes and under systemd."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from deployed import (
    CHART,
    COMPOSE,
    HELM,
    REPOSITORY,
    SYSTEMD,
    Daemon,
    chart_daemon,
    compose,
    compose_daemons,
    environment_file,
    helm,
    pods,
    problems,
    rendered,
)
from page_session import valkey_programs

from kvclient import CacheSpec, KVClient
from kvstore.embedded.children import start
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from kvstore.embedded.ports import free_port
from kvstore.embedded.valkey import ValkeyServer, find_server
from support.ports import free_valkey_ports
from support.wait import wait_until

VALKEY_FILE = COMPOSE.with_name("valkey.yaml")
CONFIGURATION = SYSTEMD / "valkey"
SERVERS = [f"valkey-{number}" for number in range(1, 7)]
needs_helm = pytest.mark.skipif(not HELM.exists(), reason="no helm beside this Python: scripts/fetch_helm.py")
needs_server = pytest.mark.skipif(find_server() is None, reason="no valkey-server or redis-server on this machine")


# ---------------------------------------------------------------- compose
def test_compose_both_files_are_valid() -> None:
    compose_spec = pytest.importorskip("compose_spec", reason="requirements-deploy.txt is not installed")
    compose_spec.PyCompose.from_json(json.dumps(both()))


def both() -> dict[str, Any]:
    return compose(file=COMPOSE, added=VALKEY_FILE)


def test_compose_servers_have_minimal_rights() -> None:
    for name, service in both()["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        if not service["image"].startswith("kvstore:"):
            assert re.fullmatch(r"[a-z]+/[a-z]+:v?\d+\.\d+\.\d+", service["image"]), name


def test_compose_metadata_servers_share_the_index() -> None:
    daemons = compose_daemons(added=VALKEY_FILE)
    document = both()
    servers = {name: daemon for name, daemon in daemons.items() if daemon.arguments == ("metadata",)}
    assert sorted(servers) == ["metadata", "metadata-2"]
    folders = set()
    for name, daemon in servers.items():
        assert problems(daemon) == []
        assert {address.split(":")[0] for address in daemon.valkey_servers} <= {*SERVERS}
        assert "index" in document["services"][name]["networks"]
        folders |= {volume.split(":")[0] for volume in document["services"][name]["volumes"]}
    assert len(folders) == 2
    addresses = ",".join(f"{name}:{daemon.listens['listen']}" for name, daemon in sorted(servers.items()))
    for name, daemon in daemons.items():
        if name not in servers:
            assert problems(daemon) == []
            assert getattr(daemon.config, daemon.arguments[0]).metadata == addresses, name
            assert "index" not in document["services"][name]["networks"], name
    published = [port for service in document["services"].values() for port in service.get("ports", [])]
    assert len({port.rpartition(":")[0] for port in published}) == len(published)


def test_compose_cluster_is_made_of_all_servers() -> None:
    services = both()["services"]
    command = services["valkey-cluster"]["command"][-1]
    addresses = [services[name]["networks"]["index"]["ipv4_address"] for name in SERVERS]
    assert re.findall(r"([\d.]+):6379", command) == addresses
    assert set(services["valkey-cluster"]["depends_on"]) == {*SERVERS}
    assert {volume for name in SERVERS for volume in services[name]["volumes"]} == {f"{name}:/data" for name in SERVERS}


@needs_server
def test_compose_server_waits_before_a_restart(tmp_path: Path) -> None:
    """A replica has replaced it by then: it would copy the empty state."""
    shell, option, script, name, *options = (word.replace("$$", "$") for word in both()["services"]["valkey-1"]["command"])
    assert name == "valkey-server"
    programs, slept = tmp_path / "bin", tmp_path / "slept"
    programs.mkdir()
    (programs / name).symlink_to(str(find_server()))
    (programs / "sleep").write_text(f"#!/bin/sh\necho $1 > {slept}\n")
    (programs / "sleep").chmod(0o755)
    command = ["env", f"PATH={programs}:/usr/bin:/bin", shell, option, script, name, *options]
    settings = answered(command, tmp_path)
    assert settings["cluster-enabled"] == "yes"
    assert settings["maxmemory-policy"] == "noeviction"
    assert settings["save"] == ""
    assert not slept.exists()
    answered(command, tmp_path)
    timeout_ms = int(settings["cluster-node-timeout"])
    assert float(slept.read_text()) * 1000 >= 2 * timeout_ms


def answered(command: list[str], folder: Path) -> Mapping[str, str]:
    """Settings of a server that a command started."""
    port, bus = free_port(), free_port()  # by default the bus has a port 10,000 higher, which need not exist
    where = ["--port", str(port), "--cluster-port", str(bus), "--bind", "127.0.0.1"]
    with (folder / "log").open("wb") as log:
        process = start([*command, *where], stdout=log, stderr=log, cwd=folder)
    server = ValkeyServer(port, process)
    try:
        wait_until(lambda: _is_up(server), lambda: (folder / "log").read_text())
        found = server.call("CONFIG", "GET", "*")
        assert isinstance(found, list)
        words = [word.decode() for word in found]
        return dict(zip(words[::2], words[1::2], strict=True))
    finally:
        server.end()


def _is_up(server: ValkeyServer) -> bool:
    try:
        server.call("PING")
    except OSError:
        return False
    return True


# ---------------------------------------------------------------- Kubernetes
@needs_helm
def test_chart_servers_share_the_index() -> None:
    documents = rendered("valkey")
    (workload,) = (one for one in pods(documents) if one["metadata"]["name"].endswith("-metadata"))
    assert (workload["kind"], workload["spec"]["replicas"]) == ("Deployment", 3)
    assert workload["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    daemon = chart_daemon(workload)
    assert problems(daemon) == []
    metadata = daemon.config.metadata
    assert metadata.engine.startswith("valkeys://")
    assert (metadata.valkey_user, len(daemon.valkey_servers)) == ("kvstore", 3)
    (term,) = workload["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    labels = workload["spec"]["template"]["metadata"]["labels"]
    assert term["podAffinityTerm"]["labelSelector"]["matchLabels"].items() <= labels.items()
    (budget,) = (one for one in documents if one["kind"] == "PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] == 1
    services = {one["metadata"]["name"]: one["spec"].get("clusterIP") for one in documents if one["kind"] == "Service"}
    assert services["kv-kvstore-metadata-servers"] == "None"
    (node,) = (one for one in pods(documents) if one["kind"] == "DaemonSet")
    assert chart_daemon(node).config.node.metadata == "kv-kvstore-metadata-servers.store.svc:7400"


@needs_helm
@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ((), {"to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "index"}}}]}),
        (("--set", "networkPolicy.valkey=null"), {"ports": [{"port": 6379, "protocol": "TCP"}]}),
    ],
    ids=["peers", "ports"],
)
def test_chart_servers_may_reach_valkey(arguments: tuple[str, ...], rule: dict[str, Any]) -> None:
    policies = {one["metadata"]["name"]: one["spec"] for one in rendered("valkey", *arguments) if one["kind"] == "NetworkPolicy"}
    assert rule in policies["kv-kvstore-metadata"]["egress"]


@needs_helm
@pytest.mark.parametrize(
    ("values", "said"),
    [
        (["metadata.replicas=2"], "metadata.valkey.servers"),
        (["metadata.valkey.servers={valkey}"], "servers"),
        (["metadata.valkey.servers={valkey:6379}", "metadata.valkey.ownCa=true"], "ownCa"),
    ],
    ids=["replicas", "address", "ca"],
)
def test_chart_invalid_valkey_values_are_refused(values: list[str], said: str) -> None:
    arguments = [part for value in values for part in ("--set", value)]
    done = helm("template", "kv", str(CHART), "--values", str(CHART / "examples" / "plain.yaml"), *arguments)
    assert done.returncode != 0
    assert said in done.stderr


# ---------------------------------------------------------------- systemd
def test_systemd_metadata_server_starts_with_valkey() -> None:
    live, shown = environment_file(CONFIGURATION / "metadata.env")
    daemon = Daemon("metadata", ("metadata",), {"KVSTORE_DATA_DIR": "/var/lib/kvstore", **live, **shown}, ("health", "metadata"))
    assert problems(daemon) == []
    metadata = daemon.config.metadata
    assert len(daemon.valkey_servers) == 3
    assert metadata.tls.require_client_cert
    plain, _ = environment_file(SYSTEMD / "metadata.env")
    assert {name for name in plain if name not in live} == {"KVSTORE_METADATA__INDEX_SIZE"}


@needs_server
def test_systemd_server_configuration_is_accepted(tmp_path: Path) -> None:
    """Except TLS, which a server may be built without."""
    text = (CONFIGURATION / "valkey.conf").read_text()
    users = (CONFIGURATION / "users.acl").read_text()
    write_configuration(tmp_path)
    (tmp_path / "users.acl").write_text(users.replace("user default off", "user default on nopass ~* &* +@all"))
    settings = answered([str(find_server()), str(tmp_path / "valkey.conf")], tmp_path)
    assert (settings["cluster-node-timeout"], settings["cluster-require-full-coverage"]) == ("2000", "no")
    assert (settings["maxmemory-policy"], settings["appendonly"], settings["save"]) == ("noeviction", "no", "")
    (password,) = re.findall(r"user replica on >(\S+)", users)
    assert f"masterauth {password}" in text


def write_configuration(folder: Path) -> None:
    """Write the files of deploy/systemd/valkey without TLS and addresses."""
    text = (CONFIGURATION / "valkey.conf").read_text().replace("/etc/valkey/users.acl", str(folder / "users.acl"))
    kept = [line for line in text.splitlines() if not line.startswith(("tls-", "port ", "bind ", "#"))]
    (folder / "valkey.conf").write_text("\n".join(kept))
    (folder / "users.acl").write_text((CONFIGURATION / "users.acl").read_text())


@needs_server
@pytest.mark.skipif("valkey-cli" not in valkey_programs(), reason="no valkey-cli or redis-cli on this machine")
def test_systemd_files_and_page_command_form_a_cluster(tmp_path: Path) -> None:
    """Six servers with the files, joined by the command of the page. The user of users.acl suffices for metadata servers."""
    write_configuration(tmp_path)
    passwords = dict(re.findall(r"user (\w+) on >(\S+)", (tmp_path / "users.acl").read_text()))
    ports = free_valkey_ports(6)
    program, client = valkey_programs()["valkey-server"], valkey_programs()["valkey-cli"]
    with ExitStack() as stack:
        for port in ports:
            folder = tmp_path / str(port)
            folder.mkdir()
            options = [str(tmp_path / "valkey.conf"), "--port", str(port), "--bind", "127.0.0.1"]
            log = stack.enter_context((folder / "log").open("wb"))
            server = ValkeyServer(port, start([str(program), *options], stdout=log, stderr=log, cwd=folder))
            stack.callback(server.end)
            wait_until(lambda server=server: _is_up(server))  # type: ignore[misc]
        create = page_command(ports)
        ask = [str(client), "--user", "admin", "-p", str(ports[0])]
        environment = {**os.environ, "REDISCLI_AUTH": passwords["admin"], "VALKEYCLI_AUTH": passwords["admin"]}
        done = run([str(client), *create], environment)
        assert "All 16384 slots covered" in done, done
        wait_until(lambda: "cluster_state:ok" in run([*ask, "cluster", "info"], environment))
        wait_until(lambda: run([*ask, "cluster", "slots"], environment).count("127.0.0.1") == len(ports))
        password_file = tmp_path / "kvstore.password"
        password_file.write_text(passwords["kvstore"])
        settings = [
            ("engine", f"valkey://127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}"),
            ("valkey_user", "kvstore"),
            ("valkey_password_file", str(password_file)),
        ]
        cluster = stack.enter_context(LocalCluster([NodeSpec("n")], tmp_path / "store", settings, servers=2))
        spec = CacheSpec(model="deployed", block_tokens=16, layers=4, layer_block_bytes=1024)
        with KVClient.connect(cluster.metadata_address, spec, node=cluster.node("n").local_socket) as engine:
            keys = engine.keys(np.arange(64 * 16, dtype=np.uint32))
            engine.store(keys, np.ones((64, spec.block_bytes), np.uint8), wait_visible=True)
            assert engine.lookup(keys).hit_blocks == 64
            assert engine.load(keys, np.zeros((64, spec.block_bytes), np.uint8)).hit_blocks == 64
        limited = [str(client), "--user", "kvstore", "-p", str(ports[0])]
        environment |= {"REDISCLI_AUTH": passwords["kvstore"], "VALKEYCLI_AUTH": passwords["kvstore"]}
        for forbidden in ("flushall", "keys *", "config get *", "acl list", "get other", "cluster reset", "shutdown"):
            assert "NOPERM" in run([*limited, *forbidden.split()], environment), forbidden


def page_command(ports: list[int]) -> list[str]:
    """Arguments of the page's command that makes the cluster, for servers of this machine without TLS."""
    page = (REPOSITORY / "docs" / "how-to" / "several-metadata-servers.md").read_text()
    (line,) = re.findall(r"^valkey-cli (.* --cluster create .*)$", page, re.MULTILINE)
    line = line.replace("--askpass ", "").replace("--tls --cacert /etc/valkey/tls/ca.crt ", "")
    addresses = iter(ports)
    return re.sub(r"10\.0\.0\.\d:63\d\d", lambda _: f"127.0.0.1:{next(addresses)}", line).split()


def run(command: list[str], environment: dict[str, str]) -> str:
    """Output of a command."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


def test_systemd_valkey_unit_waits_for_its_replica() -> None:
    unit = (CONFIGURATION / "valkey@.service").read_text()
    configuration = (CONFIGURATION / "valkey.conf").read_text()
    (restart_s,) = re.findall(r"^RestartSec=(\d+)s$", unit, re.MULTILINE)
    (timeout_ms,) = re.findall(r"^cluster-node-timeout (\d+)$", configuration, re.MULTILINE)
    assert int(restart_s) * 1000 > 2 * int(timeout_ms)
    assert "WorkingDirectory=/var/lib/valkey-%i" in unit
    assert not re.search("^(dir|cluster-config-file) ", configuration, re.MULTILINE), "each server has its own folder"


def test_compose_prometheus_scrapes_the_second_server() -> None:
    (volume,) = yaml.safe_load(VALKEY_FILE.read_text().replace("!override", ""))["services"]["prometheus"]["volumes"]
    source, target, _ = volume.split(":")
    (entry,) = yaml.safe_load((COMPOSE.parent / source).read_text())
    jobs = yaml.safe_load((COMPOSE.parent / "prometheus.yml").read_text())["scrape_configs"]
    patterns = [pattern for job in jobs for each in job.get("file_sd_configs", []) for pattern in each["files"]]
    assert entry["targets"] == ["metadata-2:7401"]
    assert any(fnmatch(target, pattern) for pattern in patterns)
