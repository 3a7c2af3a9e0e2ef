"""Faults of real processes are named by ``kvstore status`` with a health code, and kept by ``kvstore history``."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from click.testing import CliRunner

from conftest import Store
from kvstore.cli.app import root
from kvstore.cli.commands.store.status import EXIT_DEGRADED
from kvstore.embedded.cluster import NodeSpec
from support.wait import wait_until

MakeStore = Callable[..., Store]


def ask(store: Store, *command: str) -> tuple[int, str]:
    done = CliRunner().invoke(root, [*command, "--metadata", store.cluster.metadata_address])
    return done.exit_code, done.output


def codes(store: Store) -> list[tuple[str, str | None]]:
    code, output = ask(store, "status", "-o", "json")
    found: dict[str, Any] = json.loads(output)
    assert code == (EXIT_DEGRADED if found["findings"] else 0)
    return [(one["code"], one["subject"]) for one in found["findings"]]


def test_health_names_hung_and_ended_nodes(make_store: MakeStore) -> None:
    store = make_store(NodeSpec("a", dram_bytes=8 << 20), NodeSpec("b", dram_bytes=8 << 20))
    wait_until(lambda: not codes(store), "nothing is wrong")
    assert ask(store, "status")[1].splitlines()[0] == "HEALTH_OK"
    process = store.cluster.node("a").process
    os.kill(process.pid, signal.SIGSTOP)
    try:
        wait_until(lambda: codes(store) == [("NODE_HUNG", "a")], "the hung node is named")
    finally:
        os.kill(process.pid, signal.SIGCONT)
    wait_until(lambda: not codes(store), "it reports again")
    store.cluster.kill("b")
    wait_until(lambda: codes(store) == [("NODE_DOWN", "b")], "the ended node is named")
    code, output = ask(store, "status", "--detail")
    assert code == EXIT_DEGRADED
    assert output.splitlines()[0] == "HEALTH_ERR  1 error"
    assert "action:  Start the node again on its host" in output
    store.cluster.kill("metadata")
    code, output = ask(store, "status")
    assert (code, output.splitlines()[0]) == (1, "HEALTH_ERR  METADATA_UNREACHABLE")
    store.cluster.start_metadata()
    wait_until(lambda: ask(store, "status")[0] in (0, EXIT_DEGRADED), "the server is back")
    wait_until(lambda: ("NODE_DOWN", "b") in codes(store), "the server knows the ended node again")
    events = json.loads(ask(store, "history", "-o", "json")[1])["items"]
    told = [(one["kind"], one["code"], one["subject"]) for one in events if one["code"] in {"NODE_HUNG", "NODE_DOWN"}]
    assert told[:3] == [
        ("finding_raised", "NODE_HUNG", "a"),
        ("finding_cleared", "NODE_HUNG", "a"),
        ("finding_raised", "NODE_DOWN", "b"),
    ]
    assert [one["kind"] for one in events].count("metadata_started") == 2
    assert "NODE_DOWN Node b has not reported" in ask(store, "history", "--since", "1h")[1]


def test_health_order_is_recorded_as_event(make_store: MakeStore) -> None:
    store = make_store(NodeSpec("a", dram_bytes=8 << 20))
    rest = store.cluster.start_admin().address
    code, output = ask(store, "tenants", "set", "team-a", "--dram", "1GiB", "--yes")
    assert code == 0, output

    def orders() -> list[str]:
        with urllib.request.urlopen(f"http://{rest}/v1/cluster-events?limit=500", timeout=30) as answer:
            return [one["text"] for one in json.loads(answer.read())["items"] if one["kind"] == "order"]

    wait_until(lambda: any("Quota of the tenant set" in text for text in orders()), "the order is an event")


@contextmanager
def slowed(process_id: int) -> Iterator[None]:
    """Inside, a process runs only a small part of the time."""
    stopping = threading.Event()

    def slow() -> None:
        while not stopping.is_set():
            os.kill(process_id, signal.SIGSTOP)
            stopping.wait(0.4)
            os.kill(process_id, signal.SIGCONT)
            stopping.wait(0.05)

    with ThreadPoolExecutor(1) as pool:
        task = pool.submit(slow)
        try:
            yield
        finally:
            stopping.set()
            task.result()


def test_health_names_a_slow_node(make_store: MakeStore) -> None:
    nodes = [NodeSpec("fast", dram_bytes=8 << 20), NodeSpec("slow", dram_bytes=8 << 20)]
    store = make_store(*nodes, arguments=["--set", "observe.slow_load=100ms"])
    reader, writer = store.engine("fast"), store.engine("slow")
    assert writer.store("prompt", 8, wait_visible=True).held_blocks == 8

    def load() -> None:
        reader.load("prompt", 8)
        store.empty_dram("fast")

    with slowed(store.cluster.node("slow").process.pid):
        wait_until(lambda: ("NODE_SLOW", "slow") in codes(store), lambda: ask(store, "status")[1], step=load)
        loads = ask(store, "loads")[1]
    assert ("NODE_SLOW", "fast") not in codes(store)
    assert "of the time reading from node slow" in loads
    assert "Node slow or the network to it is slow: check its CPU" in loads
