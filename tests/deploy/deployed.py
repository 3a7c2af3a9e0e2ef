"""The daemons that the files of deploy/ start: environments, arguments, addresses, and the resolved configuration."""

from __future__ import annotations

import functools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from kvstore.cli.app import root
from kvstore.cli.support.build_config import admin_config, metadata_config, node_config, router_config
from kvstore.cli.support.host_settings import settle
from kvstore.config.model import Config
from kvstore.config.sources import ENVIRONMENT_PREFIX, Setting, load_config
from kvstore.rpc.address import stays_on_host

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy"
CHART = DEPLOY / "helm" / "kvstore"
COMPOSE = DEPLOY / "compose" / "compose.yaml"
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
SYSTEMD = DEPLOY / "systemd"
DAEMONS = ("metadata", "node", "router", "admin")
NOT_SETTINGS = {f"{ENVIRONMENT_PREFIX}DATA_DIR", f"{ENVIRONMENT_PREFIX}CONFIG"}
"""Our environment variables without two underscores. Any other such variable is an error."""


@dataclass(frozen=True)
class Daemon:
    """A daemon that a file starts."""

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    """Environment of the process, including the image's."""
    health: tuple[str, ...] = ()
    """Arguments of the health check."""
    folders: tuple[str, ...] = ()
    """Writable folders."""
    secrets: tuple[str, ...] = ()
    """Read-only files and folders."""
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        """Resolve the configuration. Raises the errors of the command line."""
        return resolve(self.arguments, self.environment)

    @property
    def valkey_servers(self) -> tuple[str, ...]:
        """Of a metadata server: addresses of the Valkey servers that hold its index."""
        return metadata_config(self.config).valkey_servers

    @property
    def grace_ms(self) -> int:
        """Time that the daemon has to stop."""
        settled, _ = settle(self.config, {})
        return int(getattr(settled, self.arguments[0]).stop_grace_ms)

    @property
    def listens(self) -> dict[str, int]:
        """Ports, by setting."""
        section = getattr(self.config, self.arguments[0])
        named = ("listen", "data_listen", "storage_listen", "metrics_listen")
        addresses = {name: getattr(section, name, None) for name in named}
        return {name: int(address.rpartition(":")[2]) for name, address in addresses.items() if address not in {None, "none"}}


def resolve(arguments: Sequence[str], environment: Mapping[str, str]) -> Config:
    """Resolve the configuration of a ``kvstore`` command with the code of the command line and the daemons' checks.

    Raises:
        click.UsageError, KVStoreError: a command, flag, setting or value that does not exist or is invalid.
    """
    for name in environment:
        if name.startswith(ENVIRONMENT_PREFIX) and "__" not in name and name not in NOT_SETTINGS:
            raise click.UsageError(f"no setting has the name {name}: two underscores nest")
    command, flags = parse(arguments)
    config, _ = load_config(None, environment, flags, default_files=())
    checks: dict[str, Callable[[Config], object]] = {
        "metadata": metadata_config,
        "node": node_config,
        "router": router_config,
        "admin": admin_config,
    }
    if command in checks:
        checks[command](config)
    return config


def parse(arguments: Sequence[str]) -> tuple[str, list[Setting]]:
    """Parse ``kvstore ARGUMENTS`` without running it. Returns the command and the settings of its flags.

    Raises:
        click.UsageError: the command or flag does not exist.
    """
    contexts: list[click.Context] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(click.Command, "invoke", lambda _, context: contexts.append(context))
        root.main(list(arguments), prog_name="kvstore", standalone_mode=False)
    [*_, command] = contexts  # of the groups, then of the command
    names = [str(context.info_name) for context in contexts[1:]]
    return " ".join(names), command.meta.get("kvstore.settings", [])


# ---------------------------------------------------------------- the image
@dataclass(frozen=True)
class Image:
    """The last stage of the Dockerfile, and the files that all stages copy."""

    instructions: tuple[tuple[str, str], ...]

    def last(self, name: str) -> str:
        return self.all(name)[-1]

    def all(self, name: str) -> list[str]:
        return [rest for instruction, rest in self.instructions if instruction == name]

    @property
    def environment(self) -> dict[str, str]:
        return dict(part.split("=", 1) for line in self.all("ENV") for part in shlex.split(line))


def image() -> tuple[Image, Image]:
    """The whole Dockerfile, and its last stage."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    lines = [line for line in re.sub(r"\\\n\s*", " ", text).splitlines() if line.strip()]
    found = [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines)]
    last = max(number for number, (name, _) in enumerate(found) if name == "FROM")
    return Image(tuple(found)), Image(tuple(found[last:]))


# ---------------------------------------------------------------- what contradicts itself
def problems(daemon: Daemon) -> list[str]:
    """Contradictions in the start of one daemon."""
    config = daemon.config
    found = []
    if daemon.health[:2] != ("health", daemon.arguments[0]) or parse(daemon.health)[0] != "health":
        found.append(f"it is asked {daemon.health}")
    if daemon.arguments[0] == "node":
        addresses = (config.node.listen, config.node.data_listen, config.node.storage_listen)
        remote = any(address and not stays_on_host(address) for address in addresses)
        if remote and not config.node.allow_insecure_remote and config.node.tls.cert is None:
            found.append("it refuses to listen")
        if not stays_on_host(config.node.metrics_listen) and not (
            config.node.allow_insecure_remote or config.node.allow_insecure_metrics
        ):
            found.append("it refuses to show metrics")
        if "0.0.0.0" in config.node.listen and not config.node.advertise_host:
            found.append("others would be told 0.0.0.0")
        if config.node.storage_listen and not config.node.storage_advertise_host and "0.0.0.0" in config.node.storage_listen:
            found.append("others would be told 0.0.0.0 in the storage network")
    if daemon.folders:
        needed = {"metadata": [config.data_dir], "router": [], "admin": []}.get(
            daemon.arguments[0], [config.node.run_dir, *(volume.path for volume in config.node.nvme)]
        )
        found += [f"nothing is mounted at {place}" for place in needed if not _within(place, daemon.folders)]
        secret = {
            "admin": [config.admin.tokens_file, config.admin.tls.cert, config.admin.tls.key],
            "metadata": [config.metadata.valkey_password_file, config.metadata.valkey_ca],
        }.get(daemon.arguments[0], [])
        found += [f"nothing is mounted at {place}" for place in secret if place and not _within(place, daemon.secrets)]
    if daemon.arguments[0] == "admin" and config.admin.tokens_file is None:
        found.append("whoever reaches it may do everything")
    return found


def _within(place: Path | None, folders: tuple[str, ...]) -> bool:
    return place is not None and any(place.is_relative_to(folder) for folder in folders)


# ---------------------------------------------------------------- compose
class _ComposeLoader(yaml.SafeLoader):
    """Also reads ``!override``: the value replaces that of the other file, instead of being added to it."""


class _Override(list[Any]):
    """A list that replaces another."""


_ComposeLoader.add_constructor("!override", lambda loader, node: _Override(loader.construct_sequence(node, deep=True)))  # type: ignore[no-untyped-call]


def compose(variables: Mapping[str, str] | None = None, file: Path = COMPOSE, added: Path | None = None) -> dict[str, Any]:
    """A compose file with its variables replaced by ``variables`` or their defaults, like compose does.

    Args:
        variables: values of variables.
        file: the file.
        added: a second file that is merged into the first one, as by ``docker compose -f FILE -f ADDED``.
    """

    def replaced(match: re.Match[str]) -> str:
        return (variables or {}).get(match[1], match[2])

    text = re.sub(r"\$\{([A-Z_]+):-([^}]*)\}", replaced, file.read_text())
    assert "${" not in text
    document: dict[str, Any] = yaml.load(text, _ComposeLoader)
    if added is None:
        return document
    addition = compose(variables, added)
    for name, service in addition["services"].items():
        base = service.pop("extends", None)
        if base is not None:
            assert base["file"] == file.name
            addition["services"][name] = _merged(document["services"][base["service"]], service)
    merged: dict[str, Any] = _merged(document, addition)
    return merged


def _merged(first: Any, second: Any) -> Any:
    """Merge two values of compose files: mappings by key, lists by their items; other values are replaced."""
    if isinstance(second, _Override):
        return list(second)
    if isinstance(first, dict) and isinstance(second, dict):
        return first | {key: _merged(first[key], value) if key in first else value for key, value in second.items()}
    if isinstance(first, list) and isinstance(second, list):
        return [*first, *(item for item in second if item not in first)]
    return second


def compose_daemons(
    variables: Mapping[str, str] | None = None, file: Path = COMPOSE, added: Path | None = None
) -> dict[str, Daemon]:
    """Services that run our image."""
    _, last = image()
    defaults = {name: last.environment[name] for name in last.environment if name.startswith(ENVIRONMENT_PREFIX)}
    entry = json.loads(last.last("ENTRYPOINT"))
    assert entry == ["/usr/bin/tini", "--", "kvstore"]
    check = re.fullmatch(r".*CMD (\[.*\])", last.last("HEALTHCHECK"))
    assert check is not None
    found = {}
    for name, service in compose(variables, file, added)["services"].items():
        if not service["image"].startswith("kvstore:"):
            continue
        health = service["healthcheck"]["test"][1:] if "healthcheck" in service else json.loads(check[1])
        assert health[0] == "kvstore"
        mounts = [_mount(volume) for volume in service.get("volumes", [])]
        mounted = [target for target, read_only in mounts if not read_only]
        secrets = [target for target, read_only in mounts if read_only]
        found[name] = Daemon(
            name,
            tuple(service["command"]),
            defaults | service["environment"],
            tuple(health[1:]),
            (*mounted, *(place.split(":")[0] for place in service["tmpfs"])),
            (*secrets, *(f"/run/secrets/{secret}" for secret in service.get("secrets", []))),
            service,
        )
    return found


def _mount(volume: str | Mapping[str, Any]) -> tuple[str, bool]:
    """Path in the container of one volume, and whether it is read-only."""
    if isinstance(volume, str):
        return volume.split(":")[1], volume.endswith(":ro")
    return volume["target"], volume.get("read_only", False)


# ---------------------------------------------------------------- systemd
def unit(path: Path) -> dict[str, list[str]]:
    """Values of a unit file by ``Section.Key``, in their order."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in path.read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(f"{section}.{key}", []).append(value)
    return found


def environment_file(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Variables that an environment file sets, and those that it shows in comments."""
    lines = path.read_text().splitlines()
    live = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    shown = dict(line[2:].split("=", 1) for line in lines if re.match(rf"# {ENVIRONMENT_PREFIX}\w+=", line))
    return live, shown


def systemd_daemon(name: str) -> Daemon:
    """``kvstore-NAME.service`` with the environment file beside it."""
    settings = unit(SYSTEMD / f"kvstore-{name}.service")
    environment = dict(part.split("=", 1) for line in settings.get("Service.Environment", []) for part in shlex.split(line))
    (file,) = settings["Service.EnvironmentFile"]
    live, _ = environment_file(SYSTEMD / Path(file).name)
    (start,) = settings["Service.ExecStart"]
    binary, *arguments = shlex.split(start)
    assert binary == "/opt/kvstore/bin/kvstore"
    return Daemon(name, tuple(arguments), environment | live, ("health", name))


# ---------------------------------------------------------------- the chart
HELM = Path(sys.executable).with_name("helm")
EXAMPLES = sorted(path.stem for path in (CHART / "examples").glob("*.yaml"))


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(HELM), *arguments], capture_output=True, text=True, timeout=60, check=False)


@functools.cache
def rendered(example: str, *arguments: str) -> list[dict[str, Any]]:
    """Render the chart with an example's values. The result is cached: do not change it."""
    values = str(CHART / "examples" / f"{example}.yaml")
    done = helm("template", "kv", str(CHART), "--namespace", "store", "--values", values, *arguments)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.load_all(done.stdout, yaml.CSafeLoader) if document]


def pods(documents: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Manifests that start pods."""
    return [document for document in documents if "template" in document.get("spec", {})]


def chart_daemon(workload: Mapping[str, Any]) -> Daemon:
    """The daemon of a workload, with invented values for fields that Kubernetes fills in."""
    _, last = image()
    spec = workload["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    made_up = {"spec.nodeName": "host-1", "status.podIP": "10.244.0.7"}
    environment = {name: value for name, value in last.environment.items() if name.startswith(ENVIRONMENT_PREFIX)}
    for variable in container["env"]:
        source = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        environment[variable["name"]] = variable["value"] if source is None else made_up[source]
    probe = container["readinessProbe"]
    health = probe["exec"]["command"][1:] if "exec" in probe else ["health", container["name"]]
    mounts = container["volumeMounts"]
    folders, secrets = (
        tuple(mount["mountPath"] for mount in mounts if bool(mount.get("readOnly")) is read_only) for read_only in (False, True)
    )
    return Daemon(workload["metadata"]["name"], tuple(container["args"]), environment, tuple(health), folders, secrets, container)
