"""Commands that query and change a running store: the same answers as the REST API, as text and as JSON."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc
import numpy as np
import pytest
from click.testing import CliRunner, Result

from kvclient import CacheSpec, KVClient
from kvproto.v1 import admin_pb2 as pb
from kvproto.v1 import admin_pb2_grpc, common_pb2, metadata_pb2, metadata_pb2_grpc
from kvstore.cli.app import root
from kvstore.cli.commands.store.blocks import chain_of
from kvstore.cli.support.output import clean
from kvstore.cli.top.stats import LoadDurations
from kvstore.core.types import Tier
from kvstore.embedded.cluster import LocalCluster, NodeSpec
from nursery import cli
from support.wait import wait_until

WAIT_S = 60.0
SPEC = CacheSpec(model="seen", block_tokens=16, layers=4, layer_block_bytes=4096)
BLOCKS = 12
TOKENS = list(range(BLOCKS * SPEC.block_tokens))
NAMESPACE = SPEC.namespace.hex()
ESCAPE = "\x1b"
HOSTILE = "\x1b]0;owned\x07\x1b[31mevil\r\n\u202e\x9b2J"


@dataclass
class Store:
    """Start node ``a`` with a volume and blocks of an engine, and node ``b`` with DRAM only."""

    cluster: LocalCluster
    rest: str
    engine: KVClient

    def fill(self) -> list[bytes]:
        keys = list(self.engine.keys(np.asarray(TOKENS, np.uint32)))
        data = np.ones((BLOCKS, SPEC.block_bytes), np.uint8)
        assert self.engine.store(keys, data, wait_visible=True, durable=True).held_blocks == BLOCKS
        out = np.zeros_like(data)
        assert self.engine.load(self.engine.lookup(keys), out).hit_blocks == BLOCKS
        tiers = {Tier.DRAM, Tier.NVME}
        wait_until(lambda: {run.tier for run in self.engine.lookup(keys).runs} == tiers, "both replicas are published")
        return keys

    def run(self, *arguments: str, give: str = "", code: int = 0) -> Result:
        """Run the command in this process, without a terminal."""
        done = CliRunner().invoke(root, [*arguments, "--metadata", self.cluster.metadata_address], input=give)
        assert done.exit_code == code, (arguments, done.output, done.exception)
        return done

    def json(self, *arguments: str, give: str = "") -> Any:
        return json.loads(self.run(*arguments, "-o", "json", give=give).stdout)

    def get(self, path: str, body: Any = None) -> Any:
        """Query the REST API."""
        request = urllib.request.Request(f"http://{self.rest}/v1{path}", None if body is None else json.dumps(body).encode())
        request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return json.loads(answer.read())


@contextmanager
def started(folder: Path) -> Iterator[Store]:
    specs = [
        NodeSpec("a", dram_bytes=32 << 20, nvme_bytes=32 << 20),
        NodeSpec("b", ("decode",), dram_bytes=32 << 20, settings=(("hint_share", 0), ("read_ahead", 0))),
    ]
    with LocalCluster(specs, folder) as cluster:
        rest = cluster.start_admin().address
        with KVClient.connect(cluster.metadata_address, SPEC, node=cluster.node("a").local_socket) as engine:
            made = Store(cluster, rest, engine)
            made.fill()
            yield made


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with started(tmp_path_factory.mktemp("store")) as made:
        yield made


@pytest.fixture
def own_store(tmp_path: Path) -> Iterator[Store]:
    """A store for one test, which may break it."""
    with started(tmp_path) as made:
        yield made


_SIZE = ("COLUMNS", "LINES")
"""Variables that would hide the size of the terminal."""


class Terminal:
    """Command that runs on a new terminal."""

    def __init__(self, *arguments: str, columns: int = 140) -> None:
        self.master, self.slave = pty.openpty()
        termios.tcsetwinsize(self.slave, (30, columns))
        self.attributes = termios.tcgetattr(self.slave)
        self.shown = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvstore.cli", *arguments],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            start_new_session=True,
            env={**{name: value for name, value in os.environ.items() if name not in _SIZE}, "TERM": "xterm-256color"},
        )

    def until(self, pattern: str) -> str:
        """Wait for new output that matches, and return the output up to it."""
        end_s = time.monotonic() + WAIT_S
        fresh = ""
        while not re.search(pattern, fresh):
            assert time.monotonic() < end_s, (pattern, self.shown[-2000:])
            fresh += self._read(0.2)
        return fresh

    def press(self, text: str) -> None:
        os.write(self.master, text.encode())

    def end(self) -> int:
        """Wait for the exit and return the exit code. ``shown`` has the whole output."""
        end_s = time.monotonic() + WAIT_S
        while self.process.poll() is None:
            assert time.monotonic() < end_s, self.shown[-2000:]
            self._read(0.05)
        while self._read(0.0):
            pass
        return self.process.returncode

    def _read(self, wait_s: float) -> str:
        if not select.select([self.master], [], [], wait_s)[0]:
            return ""
        found = os.read(self.master, 65_536).decode(errors="replace")
        self.shown += found
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
        os.close(self.master)
        os.close(self.slave)


def steady(found: Any) -> Any:
    """Remove fields that change with time."""
    if isinstance(found, dict):
        moving = ("heartbeat_age_s", "ago_s", "uptime_s", "expires_in_s")
        return {name: steady(value) for name, value in found.items() if name not in moving}
    return [steady(one) for one in found] if isinstance(found, list) else found


def test_json_equals_rest_answer(store: Store) -> None:
    plan(store)
    keys = [key.hex() for key in store.engine.keys(np.asarray(TOKENS, np.uint32))]
    longer = [*TOKENS, *range(10_000, 10_000 + SPEC.block_tokens)]
    looked_up = store.get("/blocks/lookup", {"namespace_id": NAMESPACE, "tokens": longer})
    assert (looked_up["hit_blocks"], looked_up["blocks"]) == (BLOCKS, BLOCKS + 1)
    assert store.json("blocks", "lookup", NAMESPACE, *map(str, longer)) == looked_up
    assert store.json("blocks", "lookup", NAMESPACE[:8], give=json.dumps(longer)) == looked_up
    by_key = store.json("blocks", "lookup", NAMESPACE, "--file", "-", give="\n".join(keys).upper())
    assert by_key["hit_blocks"] == BLOCKS
    for command, path in (
        (("nodes", "show", "a"), "/nodes/a"),
        (("namespaces", "show", NAMESPACE[:6]), f"/namespaces/{NAMESPACE}"),
        (("namespaces", "usage", NAMESPACE), f"/namespaces/{NAMESPACE}/usage"),
        (("blocks", "show", keys[3]), f"/blocks/{keys[3]}"),
        (("loads",), "/loads/slow"),
        (("policy",), "/path-policy"),
    ):
        assert steady(store.json(*command)) == steady(store.get(path)), command
    for listing in ("nodes", "volumes", "namespaces"):
        page = store.get(f"/{listing}")
        assert page["items"]
        assert steady(store.json(listing)["items"]) == steady(page["items"])
    planned = store.json("plans", "--decisions", "1")
    assert steady(planned["live"]) == steady(store.get("/plans")["items"])
    assert steady(planned["decisions"]) == steady(store.get("/decisions?limit=1")["items"])
    status = store.json("status")
    assert [node["id"] for node in status["nodes"]] == ["a", "b"]
    assert status["namespaces"][0]["id"] == NAMESPACE


def plan(store: Store) -> None:
    """Create a plan in progress and its decision."""
    wanted = metadata_pb2.PlanLoadRequest(
        operation_id=bytes(16),
        prefill_node="a",
        decode_node="b",
        blocks=64,
        block_bytes=1 << 20,
        block_tokens=16,
        budget_ms=60_000,
    )
    with grpc.insecure_channel(store.cluster.metadata_address) as channel:
        metadata_pb2_grpc.MetadataStub(channel).PlanLoad(wanted, timeout=WAIT_S)


LISTINGS = {
    "nodes": r"^a +active +prefill +- +\S+/32.0MiB +\S+/32.0MiB ",
    "volumes": r"^a/nvme0 +nvme +\S+ +32.0MiB ",
    "namespaces": rf"^{NAMESPACE} +seen ",
    f"namespaces usage {NAMESPACE}": rf"^a/nvme0 +a +nvme +{BLOCKS} ",
    f"blocks lookup {NAMESPACE} {' '.join(map(str, TOKENS))}": rf"^0-{BLOCKS - 1} +hit +held +a/",
    "plans": r"^\d+ +live +split +a +b +64 +64.0MiB .* left",
    "loads": rf"^\S+ +\S+ +a +\S+ +{BLOCKS}/{BLOCKS} +(fast: |\d+ % of the time )",
    "nodes show a": r"^I/O +a/dram: memfd; a/nvme0: ",
    "nodes show b": r"^hints +off \(node.hint_share = 0\)\nread ahead +off ",
    "status": r"^node a: alive, at 127\.",
}


@pytest.mark.parametrize("command", LISTINGS, ids=lambda command: " ".join(command.split()[:2]))
def test_output_without_terminal_is_plain_lines(store: Store, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan(store)
    store.fill()
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = store.run(*command.split()).stdout
    assert re.search(LISTINGS[command], shown, re.MULTILINE), shown
    assert ESCAPE not in shown
    assert "…" not in shown


def test_output_pipe_and_terminal(store: Store) -> None:
    command = ("nodes", "--metadata", store.cluster.metadata_address)
    piped = subprocess.run([*cli(), *command], capture_output=True, text=True, timeout=WAIT_S, check=True)
    heading, *lines = piped.stdout.splitlines()
    assert heading.split() == ["NODE", "STATE", "ROLES", "HBM", "DRAM", "NVME", "STORAGE", "COMPUTE", "QUEUE", "BOOT", "DRAIN"]
    assert [line.split()[0] for line in lines] == ["a", "b"]
    assert all(len(line.split()) == len(heading.split()) for line in lines)
    with Terminal(*command) as terminal:
        assert terminal.end() == 0
        assert ESCAPE + "[1m" in terminal.shown, "the heading stands out"
        assert re.search(r"\ba +active", terminal.shown)


def test_evict_not_confirmed_changes_nothing(store: Store) -> None:
    store.fill()
    refused = store.run("volumes", "evict", "a/dram", "--to", "0", code=3)
    assert "--yes" in refused.stderr
    for command in ("evict", "invalidate"):
        store.run("namespaces", command, NAMESPACE, code=3)
    store.run("namespaces", "bump-weights", NAMESPACE, "next", code=3)
    assert store.get("/volumes/a/dram")["blocks"] == BLOCKS
    address = ("--metadata", store.cluster.metadata_address)
    with Terminal("volumes", "evict", "a/dram", "--to", "0", *address) as terminal:
        terminal.until(r"down to 0 % of its capacity\? \[y/N\]")
        terminal.press("n\n")
        assert terminal.end() == 3
    assert store.get("/volumes/a/dram")["blocks"] == BLOCKS
    with Terminal("namespaces", "evict", NAMESPACE[:6], "--tier", "nvme", *address) as terminal:
        terminal.until(r"Evict all blocks of .* from nvme, at every node\? \[y/N\]")
        terminal.press("y\n")
        assert terminal.end() == 0
        assert f"{BLOCKS} copies of blocks evicted" in terminal.shown
    assert store.get("/volumes/a/nvme0")["blocks"] == 0


def test_table_long_name_is_cut(store: Store) -> None:
    long = CacheSpec(model="m" * 300, weights_epoch="w" * 512, block_tokens=16, layers=1, layer_block_bytes=512, tenant="t" * 300)
    with KVClient.connect(store.cluster.metadata_address, long):
        done = store.run("namespaces")
    assert long.namespace.hex() in done.stdout
    assert max(map(len, done.stdout.splitlines())) < 300
    assert store.json("namespaces", "show", long.namespace.hex())["spec"]["weights_epoch"] == "w" * 512


def test_change_commands_take_effect(store: Store) -> None:
    store.fill()
    evicted = []

    def emptied() -> bool:  # the client returns the leases of its load some milliseconds later
        done = store.json("volumes", "evict", "a/dram", "--to", "0", "--yes")
        evicted.append(done["evicted_blocks"])
        return bool(done["used_bytes"] == 0)

    wait_until(emptied, "no lease holds the blocks")
    assert sum(evicted) == BLOCKS
    dropped = store.json("namespaces", "invalidate", NAMESPACE, "--yes")
    assert (dropped["complete"], dropped["evicted_blocks"]) == (True, BLOCKS)
    assert store.get("/volumes/a/nvme0")["blocks"] == 0
    made = store.json("namespaces", "bump-weights", NAMESPACE, "next", "--keep")
    assert made["invalidated"] is None
    assert store.get(f"/namespaces/{made['namespace_id']}")["spec"]["weights_epoch"] == "next"
    store.run("namespaces", "bump-weights", NAMESPACE, SPEC.weights_epoch, "--keep", code=3)
    assert store.run("policy", "set", "prefill_only", "--if-match", "split").stdout == "prefill_only (configured: split)\n"
    assert "expected" in store.run("policy", "set", "round_robin", "--if-match", "split", code=3).stderr
    assert store.json("policy", "set", "split") == {"policy": "split", "configured": "split"}


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("nodes show nobody", 3),
        ("volumes --node nobody", 3),
        ("volumes evict a/none --to 1 --yes", 3),
        ("volumes evict a --to 1 --yes", 2),
        ("volumes evict a/dram --to 101 --yes", 2),
        (f"namespaces show {'0' * 32}", 3),
        ("nodes drain nope", 3),
        ("nodes undrain nope", 3),
        ("nodes remove nope", 3),
        ("nodes remove a", 3),
        ("namespaces show 12", 3),
        ("blocks show xyz", 2),
        (f"blocks lookup {NAMESPACE} 1 nonsense", 2),
        (f"blocks lookup {NAMESPACE}", 2),
        (f"blocks lookup {'0' * 32} 1", 3),
        ("policy set oracle", 2),
        ("policy set split --if-match never", 2),
        ("top --interval 1ms", 2),
        ("nodes-o json show a", 2),
    ],
)
def test_exit_codes(store: Store, command: str, code: int) -> None:
    assert store.run(*command.split(), code=code).stderr.splitlines()[-1].startswith("Error: ")


def test_metadata_unreachable_fails(store: Store) -> None:
    done = CliRunner().invoke(root, ["nodes", "--metadata", "127.0.0.1:1", "--set", "client.deadline=300ms"])
    assert done.exit_code == 1
    assert "cannot reach the metadata server at 127.0.0.1:1: connection refused" in done.stderr
    assert "kvstore up" not in done.stderr, "another address was named"


def test_top_once(store: Store) -> None:
    with ThreadPoolExecutor(1) as pool:
        shown = pool.submit(store.json, "top", "--interval", "1s")
        loads = 0
        while not shown.done():
            store.fill()
            loads += 1
            time.sleep(0.02)
        found = shown.result()
    assert found["hit_ratio"] == 1.0
    assert 0 < found["loads"]["dram"]["per_s"] <= loads / found["seconds"]
    assert found["loads"]["dram"]["mean_s"] > 0
    a, b = found["nodes"]
    assert (a["node_id"], a["state"], b["loads"]["per_s"]) == ("a", "active", 0)
    assert a["loaded_bytes_per_s"]["dram"] > 0
    assert a["fill"]["dram"]["capacity_bytes"] == 32 << 20
    assert a["loopback"] == ["compute"], "the only link that is reported, as there is no separate storage network"
    plain = store.run("top", "--interval", "500ms").stdout
    assert re.search(r"^links +compute in \S+  compute out \S+  loopback: with other programs$", plain, re.MULTILINE)
    assert ESCAPE not in plain
    assert re.search(r"^a +active ", plain, re.MULTILINE)


@pytest.mark.parametrize("end", ["q", "ctrl-c"])
def test_top_on_terminal_restores_it(store: Store, end: str) -> None:
    with Terminal("top", "--interval", "500ms", "--metadata", store.cluster.metadata_address) as terminal:
        terminal.until(r"now: name")
        assert terminal.shown.startswith(ESCAPE + "[?1049h")
        assert termios.tcgetattr(terminal.slave) != terminal.attributes
        if end == "q":
            terminal.press("b")
            terminal.until(r"now: bytes")
            terminal.press("l")
            frame = terminal.until(r"now: loads")
            assert re.search(r"\r\n(\x1b\[K)*a +active", frame)
            termios.tcsetwinsize(terminal.slave, (6, 30))
            terminal.process.send_signal(signal.SIGWINCH)
            terminal.press("x")
            small = terminal.until(r"q quit[^\x1b]{0,24}\x1b")
            assert all(
                len(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line)) <= 30
                for line in small.rpartition(ESCAPE + "[H")[2].split("\r\n")
            )
            terminal.press("q")
        else:
            terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == 0
        assert terminal.shown.endswith(ESCAPE + "[?25h" + ESCAPE + "[?1049l")
        assert termios.tcgetattr(terminal.slave) == terminal.attributes


def test_completion_offers_names(store: Store) -> None:
    def completed(words: str) -> list[str]:
        done = subprocess.run(
            cli(),
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
            env={
                **os.environ,
                "_KVSTORE_COMPLETE": "zsh_complete",
                "COMP_WORDS": words,
                "COMP_CWORD": str(len(words.split(" ")) - 1),
            },
        )
        return done.stdout.split()

    address = store.cluster.metadata_address
    assert completed(f"kvstore nodes show --metadata {address} ")[1::3] == ["a", "b"]
    assert completed("kvstore nodes show --metadata 127.0.0.1:1 ") == []
    for shell in ("bash", "zsh", "fish"):
        assert "_KVSTORE_COMPLETE" in CliRunner().invoke(root, ["completion", shell]).stdout


class Liar(metadata_pb2_grpc.MetadataServicer, admin_pb2_grpc.MetadataAdminServicer):
    """Metadata server whose names all contain terminal control sequences."""

    def ListNodes(self, request: Any, context: Any) -> metadata_pb2.ListNodesResponse:  # noqa: N802
        volume = common_pb2.VolumeInfo(volume_id=HOSTILE, tier=common_pb2.TIER_DRAM, capacity_bytes=1)
        usage = metadata_pb2.VolumeUsage(volume_id=HOSTILE, read_only=HOSTILE)
        info = common_pb2.NodeInfo(
            node_id=HOSTILE, boot_id=bytes(16), roles=[HOSTILE], control_address="127.0.0.1:1", volumes=[volume], mounts=[HOSTILE]
        )
        return metadata_pb2.ListNodesResponse(nodes=[metadata_pb2.NodeStatus(node=info, usages=[usage], heartbeat_age_ms=9)])

    def GetStats(self, request: Any, context: Any) -> metadata_pb2.GetStatsResponse:  # noqa: N802
        return metadata_pb2.GetStatsResponse(counters={HOSTILE: 1})

    def DescribeServer(self, request: Any, context: Any) -> pb.DescribeServerResponse:  # noqa: N802
        return pb.DescribeServerResponse(version=HOSTILE, index_epoch=bytes(16), path_policy=HOSTILE)

    def DescribeShards(self, request: Any, context: Any) -> pb.DescribeShardsResponse:  # noqa: N802
        server = pb.IndexServer(address=HOSTILE, primary=True, version=HOSTILE, eviction_policy=HOSTILE)
        metadata_server = pb.MetadataServerInfo(server_id=HOSTILE, address=HOSTILE, version=HOSTILE, roles=[HOSTILE])
        return pb.DescribeShardsResponse(servers=[server], metadata_servers=[metadata_server])

    def DescribePlanning(self, request: Any, context: Any) -> pb.DescribePlanningResponse:  # noqa: N802
        live = pb.LivePlan(policy=HOSTILE, prefill_node=HOSTILE, decode_node=HOSTILE)
        decision = pb.PlanDecision(policy=HOSTILE, excluded=[HOSTILE])
        return pb.DescribePlanningResponse(path_policy=HOSTILE, configured_policy=HOSTILE, live=[live], decisions=[decision])

    def DescribeNamespaces(self, request: Any, context: Any) -> pb.DescribeNamespacesResponse:  # noqa: N802
        spec = common_pb2.CacheSpec(model=HOSTILE, weights_epoch=HOSTILE, tenant=HOSTILE, dtype=HOSTILE)
        return pb.DescribeNamespacesResponse(namespaces=[pb.NamespaceDescription(namespace_id=bytes(16), spec=spec)])


@pytest.fixture
def liar() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4))
    metadata_pb2_grpc.add_MetadataServicer_to_server(Liar(), server)
    admin_pb2_grpc.add_MetadataAdminServicer_to_server(Liar(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def harmless(shown: str) -> bool:
    return not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", shown)


def test_names_with_control_sequences_are_escaped(liar: str) -> None:
    told = 0
    for command in (
        "status",
        "status --detail",
        "nodes",
        "volumes",
        "namespaces",
        "namespaces show 0000",
        "plans",
        "policy",
        "loads",
        "top --interval 500ms",
    ):
        for form in ((), ("-o", "json"), ("-o", "yaml")):
            done = CliRunner().invoke(root, [*command.split(), "--metadata", liar, *form])
            assert done.exit_code == 0, (command, done.output, done.exception)
            assert harmless(done.stdout), command
            assert harmless(done.stderr), command
            told += "evil" in done.output
    assert told > 20, "nothing was left out for it"
    with Terminal("namespaces", "--metadata", liar, columns=600) as terminal:
        assert terminal.end() == 0
        assert "evil" in terminal.shown
        assert harmless(re.sub(r"\x1b\[[0-9;]*m|\r", "", terminal.shown)), "the table's own colours apart"
        assert ESCAPE + "[31m" not in terminal.shown


def test_top_latency_figures() -> None:
    times = LoadDurations(100, 1.0, {0.001: 60, 0.01: 39, float("inf"): 1})
    assert [times.quantile(part) for part in (0.5, 0.6, 0.99, 1.0)] == [0.001, 0.001, 0.01, float("inf")]
    assert LoadDurations().quantile(0.5) is None


@pytest.mark.parametrize(
    ("text", "keys", "tokens"),
    [
        ("1 2,3", None, [1, 2, 3]),
        ("[1, 2]\n", None, [1, 2]),
        (f'["{"AB" * 16}"]', ["ab" * 16], None),
        ("1" * 32, ["1" * 32], None),
        (str(2**32 - 1), None, [2**32 - 1]),
    ],
)
def test_parse_ids_formats(text: str, keys: Sequence[str] | None, tokens: Sequence[int] | None) -> None:
    assert chain_of(text) == (keys, tokens)


def test_clean_escapes_unprintable_characters() -> None:
    assert clean("plain näme") == "plain näme"
    assert clean("\x1b[31m\n\u202e\udc80") == "\\x1b[31m\\n\\u202e\\udc80"


def test_change_node_unreachable_is_reported(own_store: Store) -> None:
    own_store.cluster.kill("b")
    end_s = time.monotonic() + WAIT_S
    while own_store.get("/cluster")["nodes_silent"] == 0:
        assert time.monotonic() < end_s
        time.sleep(0.05)
    done = own_store.run("namespaces", "invalidate", NAMESPACE, "--yes", code=4)
    assert "without node b: the node does not report to the metadata server (unavailable)" in done.stderr
    assert re.search(r"^b +silent:", own_store.run("nodes").stdout, re.MULTILINE)
