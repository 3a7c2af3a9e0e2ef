"""The three hosts of docs/how-to/three-hosts.md on three loopback addresses of this machine.

The page's own blocks make the tokens, the configuration and the environment files; the how-to's commands make the certificates;
the units of deploy/systemd say how each daemon is started. Addresses, ports, folders and sizes alone are others. Each host has
separate folders, so that one can have a wrong token, a wrong certificate or a full disk.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from unittest import mock

import yaml
from click.testing import CliRunner, Result
from deployed import SYSTEMD, unit
from docs_site.markdown import fences
from prometheus_client.parser import text_string_to_metric_families

from certificates import CertificateFiles, make_certificates
from kvclient import CacheSpec, ClientOptions, KVClient
from kvstore.cli.app import root
from kvstore.embedded.children import DaemonLaunchers
from kvstore.embedded.temp_dirs import TempDir
from support.ports import free_ports
from support.wait import wait_until

REPOSITORY: Final = Path(__file__).resolve().parents[2]
PAGE: Final = REPOSITORY / "docs" / "how-to" / "three-hosts.md"
ALERTS: Final = REPOSITORY / "deploy" / "prometheus" / "alerts.yml"
HOSTS: Final = (1, 2, 3)
METADATA_HOST: Final = 1
WAIT_S: Final = 30.0
POLL_S: Final = 0.05
PORTS: Final = ("7400", "7401", "7410", "7411", "7470", "7480")
"""Ports that the page, or a default, names."""
SIZES: Final = {'dram = "1GiB"': 'dram = "96MiB"', ":10GiB": ":192MiB"}
"""Sizes of the page, and those of this machine."""
SPEC: Final = CacheSpec(model="three-hosts", block_tokens=16, layers=4, layer_block_bytes=16 << 10)


@dataclass
class Daemon:
    """A running daemon of one host."""

    process: subprocess.Popen[bytes]
    log: Path


class Host:
    """One host: its folders, with the files of the page in them."""

    def __init__(self, number: int, folder: Path, run: Path) -> None:
        self.number = number
        self.name = f"host-{number}"
        self.address = f"127.0.0.{number}"
        self.etc = folder / self.name / "etc"
        self.data = folder / self.name / "data"
        self.run = run / str(number)
        self.logs = folder / self.name
        for path in (self.etc / "tls", self.data, self.run):
            path.mkdir(parents=True)

    @property
    def local_socket(self) -> str:
        """Where engines of this host find its node."""
        return f"unix:{self.run / self.name}.sock"

    @property
    def config(self) -> Path:
        """The host's ``/etc/kvstore/kvstore.toml``."""
        return self.etc / "kvstore.toml"


class ThreeHosts:
    """A context manager: starts everything as the page says, ends it with the block.

    Args:
        folder: for all files; its own.
        disks: folders outside ``folder``, by host: ``/var/lib/kvstore`` there.
    """

    def __init__(self, folder: Path, disks: Mapping[int, Path] | None = None) -> None:
        self._disks = dict(disks or {})
        self._run = TempDir("kvs-", Path("/tmp"))  # unix socket paths are short
        self._desk = folder / "desk"
        self.files: CertificateFiles = make_certificates(self._desk)
        self._ports = dict(zip(PORTS, map(str, free_ports(len(PORTS), [f"127.0.0.{number}" for number in HOSTS])), strict=True))
        self.hosts = {number: Host(number, folder, self._run.path) for number in HOSTS}
        self.daemons: dict[str, Daemon] = {}
        self._prepare()
        for host in self.hosts.values():
            self.install(host)

    # ---------------------------------------------------------------- as on the page
    def _prepare(self) -> None:
        """Run the steps of the page that one administrator does on one machine."""
        for fence in fences(PAGE.read_text(encoding="utf-8")):
            if fence.language == "toml":
                (self._desk / fence.title).write_text(fence.text)
            elif fence.language == "sh" and not fence.title:
                subprocess.run(["bash", "-euo", "pipefail", "-c", fence.text], cwd=self._desk, check=True, timeout=WAIT_S)

    def install(self, host: Host) -> None:
        """Copy to a host the files that the page copies there."""
        for path in (*self._desk.glob("*.token"), self._desk / "tokens"):
            shutil.copy(path, host.etc)
        for path in (self.files.ca, self.files.cert, self.files.key):
            shutil.copy(path, host.etc / "tls")
        host.config.write_text(self._here(host, (self._desk / "kvstore.toml").read_text()))
        for name in ("metadata", "admin"):
            shutil.copy(self._desk / f"{name}.env", host.etc)
        (host.etc / "node.env").write_text(self._here(host, (self._desk / f"{host.name}.env").read_text()))

    def _here(self, host: Host, text: str) -> str:
        """A text of the page or of a unit, with this machine's addresses, ports, folders and sizes."""
        text = re.sub(r"\b10\.0\.0\.(\d)\b", r"127.0.0.\1", text)
        text = re.sub(r"(?<=:)(7\d{3})\b", lambda found: self._ports[found[0]], text)
        folders = {
            "/etc/kvstore": host.etc,
            "/var/lib/kvstore": self._disks.get(host.number, host.data),
            "/run/kvstore": host.run,
        }
        for there, here in folders.items():
            text = text.replace(there, str(here))
        for theirs, ours in SIZES.items():
            text = text.replace(theirs, ours)
        return text

    # ---------------------------------------------------------------- life
    def __enter__(self) -> Self:
        try:
            self.start("metadata")
            for number in HOSTS:
                self.start(f"host-{number}")
            self.start("admin")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all daemons."""
        for daemon in self.daemons.values():
            daemon.process.send_signal(signal.SIGCONT)
            daemon.process.kill()
        for daemon in self.daemons.values():
            daemon.process.wait(WAIT_S)
        self._run.close()

    def start(self, name: str, *, wait: bool = True) -> None:
        """Starts ``metadata``, ``admin`` or the node of a host, as its unit does; ``wait``: until it serves."""
        section = name if name in {"metadata", "admin"} else "node"
        host = self.hosts[METADATA_HOST if section != "node" else int(name[-1])]
        settings = unit(SYSTEMD / f"kvstore-{section}.service")
        (command,) = settings["Service.ExecStart"]
        environment = dict(part.split("=", 1) for line in settings["Service.Environment"] for part in shlex.split(line))
        environment |= dict(line.split("=", 1) for line in (host.etc / f"{section}.env").read_text().splitlines())
        environment = {  # Python's own would keep the daemon from the nursery (tests/nursery.py)
            key: self._here(host, value) for key, value in environment.items() if not key.startswith("PYTHON")
        }
        ready = host.run / f"{name}.ready"
        ready.unlink(missing_ok=True)
        arguments = [sys.executable, "-m", "kvstore.cli", *shlex.split(command)[1:], "--config", str(host.config)]
        arguments += ["--set", f"{section}.ready_file={ready}"]
        log = host.logs / f"{name}.log"
        with log.open("ab") as out, mock.patch.dict(os.environ, environment):
            process = DaemonLaunchers.launcher(arguments, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        self.daemons[name] = Daemon(process, log)
        if not wait:
            return

        def serves() -> bool:
            assert process.poll() is None, f"{name} ended:\n{self.log_tail(name)}"
            return ready.exists()

        wait_until(serves, lambda: f"{name} serves\n{self.log_tail(name)}", WAIT_S, poll_s=POLL_S)

    def stop(self, name: str, signal_number: signal.Signals = signal.SIGTERM) -> None:
        """End a daemon and wait for its exit."""
        process = self.daemons[name].process
        process.send_signal(signal_number)
        process.wait(WAIT_S)

    def signal(self, name: str, signal_number: signal.Signals) -> None:
        """Send a signal without waiting."""
        self.daemons[name].process.send_signal(signal_number)

    # ---------------------------------------------------------------- looking
    @property
    def metadata_address(self) -> str:
        """The form that engines are configured with."""
        return f"127.0.0.{METADATA_HOST}:{self._ports['7400']}"

    def log_since(self, name: str, at: int = 0) -> str:
        """Log lines of a daemon after an offset in bytes."""
        with self.daemons[name].log.open("rb") as log:
            log.seek(at)
            return log.read().decode(errors="replace")

    def log_size(self, name: str) -> int:
        """Bytes of a log."""
        return self.daemons[name].log.stat().st_size

    def log_tail(self, name: str, lines: int = 30) -> str:
        """The end of a log."""
        return "\n".join(self.log_since(name).splitlines()[-lines:])

    def cli(self, *arguments: str) -> Result:
        """A command as alice gives it on the metadata server's host: ``[client]`` of the page's configuration."""
        return CliRunner().invoke(root, [*arguments, "--config", str(self.hosts[METADATA_HOST].config)])

    def admin(self, path: str) -> tuple[int, Any]:
        """Answer of the admin server to alice: status and JSON."""
        token = (self._desk / "alice.token").read_text().strip()
        url = f"http://127.0.0.1:{self._ports['7470']}{path}"
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, headers={"authorization": f"Bearer {token}"}), timeout=WAIT_S
            ) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as refused:
            return refused.code, json.load(refused)

    def alert(self, name: str, daemon: str, **labels: str) -> float:
        """The largest value that a daemon shows of the first metric in an alert rule's expression; NaN: it shows none.

        Args:
            name: of the rule in deploy/prometheus/alerts.yml.
            daemon: whose ``/metrics`` are read.
            labels: that the series must have, besides those that the rule asks for.
        """
        rules = {rule["alert"]: rule["expr"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]}
        found = re.search(r"\b(kvstore_\w+)(?:\{([^}]*)\})?", rules[name])
        assert found is not None, rules[name]
        wanted = re.findall(r'(\w+)(=~|=)"([^"]*)"', found[2] or "")
        try:
            with urllib.request.urlopen(f"http://{self._metrics_address(daemon)}/metrics", timeout=WAIT_S) as answer:
                text = answer.read().decode()
        except OSError:  # it is not there
            return math.nan
        values = [
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == found[1]
            and all(re.fullmatch(value, sample.labels.get(label, "")) for label, _, value in wanted)
            and labels.items() <= sample.labels.items()
        ]
        return max(values, default=math.nan)

    def _metrics_address(self, name: str) -> str:
        """Address of the page's ``METRICS_LISTEN`` on this machine."""
        if name == "metadata":
            return f"{self.hosts[METADATA_HOST].address}:{self._ports['7401']}"
        return f"{self.hosts[int(name[-1])].address}:{self._ports['7480']}"

    def metrics_targets(self) -> list[str]:
        """Addresses that the Prometheus of the page asks, on this machine."""
        config = yaml.safe_load(self._here(self.hosts[METADATA_HOST], (self._desk / "prometheus.yml").read_text()))
        return [target for job in config["scrape_configs"] for entry in job["static_configs"] for target in entry["targets"]]

    def connect(self, host: int | None) -> KVClient:
        """An engine's client as the page has it: on a host with a node, or without one."""
        return KVClient.connect(
            self.metadata_address,
            SPEC,
            node=None if host is None else self.hosts[host].local_socket,
            tls=self.files.client(),
            options=ClientOptions(token_file=self._desk / "engines.token", client_name=f"engine-{host}"),
        )
