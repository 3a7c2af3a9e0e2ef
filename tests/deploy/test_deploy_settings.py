"""Every setting, flag, port, path and name in deploy/ exists, resolved by the code of the daemons."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import click
import pytest
import yaml
from deployed import (
    COMPOSE,
    DAEMONS,
    DEPLOY,
    EXAMPLES,
    HELM,
    REPOSITORY,
    SYSTEMD,
    chart_daemon,
    compose,
    compose_daemons,
    environment_file,
    helm,
    image,
    parse,
    pods,
    problems,
    rendered,
    resolve,
    systemd_daemon,
    unit,
)

from kvstore.core.errors import KVStoreError

needs_helm = pytest.mark.skipif(not HELM.exists(), reason="no helm beside this Python: scripts/fetch_helm.py")
READMES = (DEPLOY / "README.md", REPOSITORY / "README.md")


# ---------------------------------------------------------------- each kind of file
@pytest.mark.parametrize("name", sorted(compose_daemons()))
def test_compose_services_are_startable_daemons(name: str) -> None:
    daemon = compose_daemons()[name]
    assert problems(daemon) == []
    for published in daemon.about.get("ports", []):
        address, outside, inside = published.split(":")
        assert address == "127.0.0.1"
        assert outside == inside
        assert int(inside) in daemon.listens.values()


def test_compose_names_are_its_services() -> None:
    document, daemons = compose(), compose_daemons()
    reached = {name: {name} for name in daemons}
    for name, service in document["services"].items():
        networks = service["networks"]
        for network in networks if isinstance(networks, dict) else ():
            reached.setdefault(name, {name}).update((networks[network] or {}).get("aliases", []))
    for name, daemon in daemons.items():
        config = daemon.config
        if daemon.arguments[0] == "metadata":
            continue
        server, port = getattr(config, daemon.arguments[0]).metadata.split(":")
        assert int(port) == daemons[server].listens["listen"]
        if daemon.arguments[0] == "node":
            assert {config.node.advertise_host, config.node.storage_advertise_host} <= reached[name]
            assert config.node.node_id == name
            assert config.node.write_back_to in {None, *daemons}
        assert {secret.removeprefix("/run/secrets/") for secret in daemon.secrets} <= document.get("secrets", {}).keys()


def test_compose_prometheus_scrapes_metrics_ports() -> None:
    text = (COMPOSE.parent / "prometheus.yml").read_text()
    live = yaml.safe_load(text)
    optional = yaml.safe_load(text.replace("\n  # - job", "\n  - job").replace("\n  #   ", "\n    "))
    daemons = compose_daemons()
    jobs = {
        job["job_name"]: {target for each in job["static_configs"] for target in each["targets"]}
        for job in optional["scrape_configs"]
    }
    engines = jobs.pop("vllm")
    expected = {f"{name}:{daemon.listens.get('metrics_listen', daemon.listens['listen'])}" for name, daemon in daemons.items()}
    assert set().union(*jobs.values()) == expected
    assert {f"http://{engine}" for engine in engines} == set(daemons["router"].config.router.engines)
    assert {job["job_name"] for job in live["scrape_configs"]} == {"kvstore-metadata", "kvstore-node"}
    for service in compose()["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (COMPOSE.parent / source).is_file()
            else:
                assert source in compose()["volumes"]


@pytest.mark.parametrize("name", DAEMONS)
def test_units_are_startable_daemons(name: str) -> None:
    daemon = systemd_daemon(name)
    assert problems(daemon) == []
    live, shown = environment_file(SYSTEMD / f"{name}.env")
    resolve(daemon.arguments, {**daemon.environment, **shown})
    assert live
    settings = unit(SYSTEMD / f"kvstore-{name}.service")
    config = daemon.config
    state, runtime = settings.get("Service.StateDirectory", []), settings.get("Service.RuntimeDirectory", [])
    if name in {"metadata", "node"}:
        assert [Path("/var/lib") / folder for folder in state] == [config.data_dir]
    if name == "node":
        assert [Path("/run") / folder for folder in runtime] == [config.node.run_dir]
        assert all(volume.path.is_relative_to("/var/lib/kvstore") for volume in config.node.nvme)


@needs_helm
@pytest.mark.parametrize("example", EXAMPLES)
def test_chart_daemons_start_with_open_ports(example: str) -> None:
    documents = rendered(example)
    workloads = pods(documents)
    daemons = [chart_daemon(workload) for workload in workloads]
    assert {daemon.arguments[0] for daemon in daemons} >= {"metadata", "node"}
    servers = {
        f"{one['metadata']['name']}.store.svc:{port['port']}"
        for one in documents
        if one["kind"] == "Service"
        for port in one["spec"]["ports"]
    }
    policies = [one["spec"] for one in documents if one["kind"] == "NetworkPolicy"]
    for workload, daemon in zip(workloads, daemons, strict=True):
        assert problems(daemon) == []
        named = {port["name"]: port["containerPort"] for port in daemon.about["ports"]}
        assert set(named.values()) == set(daemon.listens.values())
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = daemon.about.get(kind, {})
            assert probe.get("grpc", {}).get("port", daemon.listens["listen"]) == daemon.listens["listen"]
            assert probe.get("httpGet", {}).get("port", "http") in {*named, "http"}
        labels = workload["spec"]["template"]["metadata"]["labels"]
        open_ports = {
            port["port"]
            for policy in policies
            if policy["podSelector"]["matchLabels"].items() <= labels.items()
            for rule in policy["ingress"]
            for port in rule.get("ports", [])
        }
        assert open_ports == set(daemon.listens.values())
        if daemon.arguments[0] != "metadata":
            assert getattr(daemon.config, daemon.arguments[0]).metadata in servers


def test_image_settings_exist() -> None:
    _, last = image()
    ours = {name: value for name, value in last.environment.items() if name.startswith("KVSTORE_")}
    config = resolve(["node"], ours)
    exposed = {int(port) for port in last.last("EXPOSE").split()}
    listened = {port for daemon in compose_daemons().values() for port in daemon.listens.values()}
    assert exposed == listened
    made = re.search(r"install --directory .*?0700 ([^&]+)", " ".join(last.all("RUN")))
    assert made is not None
    assert {str(config.data_dir), str(config.node.run_dir)} == set(made[1].split())


# ---------------------------------------------------------------- documentation
def _commands(path: Path) -> list[list[str]]:
    blocks = re.findall(r"```sh\n(.*?)```", path.read_text(), re.DOTALL)
    lines = [line for block in blocks for line in re.sub(r"\\\n\s*", " ", block).splitlines()]
    return [shlex.split(line, comments=True) for line in lines if "'" not in line or line.count("'") % 2 == 0]


def _of(program: str, path: Path) -> list[list[str]]:
    """Arguments of each call of a program, after any prefix (``docker compose exec``, ``sudo -u``)."""
    found = []
    for words in _commands(path):
        places = [number for number, word in enumerate(words) if word in {program, f"/opt/kvstore/bin/{program}"}]
        found += [words[number + 1 :] for number in places[-1:]]
    return found


@pytest.mark.parametrize("path", READMES, ids=["deploy", "root"])
def test_readme_commands_exist(path: Path) -> None:
    told = _of("kvstore", path) + [words[3:] for words in _of("docker", path) if words[:1] == ["run"]]
    assert told
    for words in told:
        words = words[: next((number for number, word in enumerate(words) if word in {"|", "&", ";", ">"}), len(words))]
        parse([word for word in words if word != "--help"])
    for name in re.findall(r"\bKVSTORE_[A-Z0-9]+__[A-Z0-9_]+", path.read_text()):
        assert _exists(name), name


def _exists(variable: str) -> bool:
    try:
        resolve(["status"], {variable: ""})
    except KVStoreError as error:
        return "unknown setting" not in str(error)
    return True


def test_readme_files_exist() -> None:
    text = READMES[0].read_text()
    for place in re.findall(r"(?<![\w/])deploy/[A-Za-z0-9_./-]*[A-Za-z0-9_]", text):
        assert (REPOSITORY / place).exists(), place
    for place in re.findall(r"\]\(([^):#]+)(?:#[^)]*)?\)", text):
        assert (DEPLOY / place).exists(), place
    for words in _of("docker", READMES[0]):
        for service in [word for word in words if word in {"prefill-1", "decode-1", "storage-1", "metadata", "router", "admin"}]:
            assert service in compose()["services"]


@needs_helm
def test_readme_helm_commands_work() -> None:
    told = [words for words in _of("helm", READMES[0]) if words[:1] in (["install"], ["upgrade"])]
    assert told
    for words in told:
        assert words[1:3] == ["kv", "deploy/helm/kvstore"]
        options = [str(REPOSITORY / word) if word.startswith("deploy/") else word for word in words[2:]]
        done = helm("template", "kv", *[word for word in options if word != "--create-namespace"])
        assert done.returncode == 0, (words, done.stderr)


# ---------------------------------------------------------------- wrong ones are found
@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["node"], {"KVSTORE_NODE__DRAMM": "1GiB"}),
        (["node"], {"KVSTORE_NODE_DRAM": "1GiB"}),
        (["node"], {"KVSTORE_NODE__DRAM": "plenty"}),
        (["node"], {"KVSTORE_NODE__NIXL": "auto"}),
        (["metadata"], {"KVSTORE_METADATA__LISTEN": "0.0.0.0:7400"}),
        (["admin"], {"KVSTORE_ADMIN__LISTEN": "0.0.0.0:7470", "KVSTORE_ADMIN__ALLOW_INSECURE_REMOTE": "true"}),
        (["node", "--port", "7410"], {}),
        (["node", "--set", "node.ram=1GiB"], {}),
        (["store"], {}),
        (["health", "nodes"], {}),
        (["router"], {"KVSTORE_ROUTER__ENGINES": "ftp://a"}),
    ],
)
def test_unknown_setting_is_found(arguments: list[str], environment: dict[str, str]) -> None:
    with pytest.raises((click.UsageError, KVStoreError)):
        resolve(arguments, environment)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"KVSTORE_NODE__ALLOW_INSECURE_REMOTE": "false"}, "refuses to listen"),
        ({"KVSTORE_NODE__ADVERTISE_HOST": ""}, "others would be told 0.0.0.0"),
        ({"KVSTORE_NODE__NVME": "/mnt/elsewhere:1GiB"}, "nothing is mounted at /mnt/elsewhere"),
        ({"KVSTORE_ADMIN__TOKENS_FILE": "/run/secrets/others"}, "nothing is mounted at /run/secrets/others"),
    ],
)
def test_contradiction_is_found(change: dict[str, str], problem: str) -> None:
    daemon = compose_daemons()["admin" if any("ADMIN" in name for name in change) else "storage-1"]
    assert any(problem in one for one in problems(replace(daemon, environment={**daemon.environment, **change})))
