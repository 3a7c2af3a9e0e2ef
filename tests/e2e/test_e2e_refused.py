"""A node whose token is refused is shown as refused, with the reason, everywhere. A valid token ends that."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvstore.cli.app import root
from kvstore.cli.commands.store.status import EXIT_DEGRADED
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from support.wait import wait_until

WAIT_S = 30.0
TOKENS = {"operator": "operators-token-1", "node": "the-nodes-token-1", "engine": "an-engines-token-1"}
UNKNOWN = "a-token-of-nobodys"


def write(path: Path, text: str) -> Path:
    """Replace the file atomically, as an operator's tool does."""
    fresh = path.with_suffix(".new")
    fresh.touch(mode=0o600)
    fresh.write_text(text)
    fresh.replace(path)
    return path


@dataclass
class Store:
    cluster: LocalCluster
    folder: Path

    def command(self, *arguments: str, **settings: str) -> str:
        given = [part for name, value in settings.items() for part in ("--set", f"{name.replace('__', '.')}={value}")]
        done = CliRunner().invoke(root, [*arguments, *given])
        assert done.exit_code in {0, EXIT_DEGRADED}, done.output
        return done.output

    def ask(self, *arguments: str) -> str:
        token = self.folder / "operator"
        return self.command(*arguments, client__metadata=self.cluster.metadata_address, client__token_file=str(token))

    def node(self, node_id: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.ask("nodes", "show", node_id, "-o", "json"))
        return found

    def health(self, node_id: str) -> str:
        run_dir = Path(self.cluster.node(node_id).local_socket.removeprefix("unix:")).parent
        return self.command(
            "health",
            "node",
            node__node_id=node_id,
            node__run_dir=str(run_dir),
            node__metadata=self.cluster.metadata_address,
            node__token_file=str(self.folder / node_id),
        )

    def show_token(self, node_id: str, token: str) -> None:
        write(self.folder / node_id, token)

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://{self.cluster.node('metadata').metrics_address}/metrics") as answer:
            text: str = answer.read().decode()
        return text


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("refused")
    tokens = write(folder / "tokens", "\n".join(f"{role} some-{role} {token}" for role, token in TOKENS.items()))
    write(folder / "operator", TOKENS["operator"])
    nodes = []
    for name in ("a", "b"):
        shown = write(folder / name, TOKENS["node"])
        nodes.append(NodeSpec(name, dram_bytes=16 << 20, settings=(("token_file", str(shown)),)))
    with LocalCluster(nodes, folder / "data", metadata_settings=[("tokens_file", str(tokens))]) as cluster:
        made = Store(cluster, folder)
        wait_until(lambda: made.node("b")["alive"], "b reports")
        yield made


@pytest.mark.parametrize(
    ("token", "why"),
    [
        (UNKNOWN, "the token is not known to this server"),
        (
            TOKENS["engine"],
            "permission denied: 'heartbeat' requires the role node or operator; this token is 'some-engine' (engine)",
        ),
    ],
    ids=["unknown", "role too low"],
)
def test_node_token_refused_is_shown_until_replaced(store: Store, token: str, why: str) -> None:
    store.show_token("b", token)
    wait_until(lambda: store.node("b")["refused"] is not None, "b is shown as refused")
    found = store.node("b")
    assert (found["alive"], found["refused"]) == (False, why)
    assert found["unreached"] == f"the metadata server rejects the node: {why}"
    status = store.ask("status")
    assert f"NODE_REFUSED: Node b is refused by the metadata server: {why} (node.token_file)." in status
    assert "node b: refused" in status
    assert "node a: alive" in status
    assert [line.split()[1] for line in store.ask("nodes").splitlines() if line.startswith("b ")] == ["refused"]
    figures = store.metrics()
    assert 'kvstore_metadata_nodes{state="refused"} 1' in figures
    assert 'kvstore_metadata_nodes{state="silent"} 0' in figures
    assert 'kvstore_metadata_node_refused{node="b"} 1' in figures
    assert store.health("a") == "node: serves\n"
    health = store.health("b")
    assert health.startswith("node: serves this host only: ")
    assert str(store.folder / "b") in health or "requires the role" in health
    assert "peer=ipv4:127.0.0.1:" in store.cluster.node("metadata").log_tail(1_000)
    assert token not in store.cluster.node("metadata").log_tail(1_000) + store.cluster.node("b").log_tail(1_000) + status
    store.show_token("b", TOKENS["node"])
    wait_until(lambda: store.node("b")["alive"], "b reports again")
    assert store.node("b")["refused"] is None
    assert store.health("b") == "node: serves\n"


def test_health_node_reports_metadata_away(store: Store) -> None:
    address = store.cluster.metadata_address
    store.cluster.kill("metadata")
    try:
        expected = f"node: serves this host only: cannot reach the metadata server at {address}: connection refused\n"
        wait_until(lambda: store.health("a") == expected, "the node knows that it is not heard")
    finally:
        store.cluster.start_metadata()
