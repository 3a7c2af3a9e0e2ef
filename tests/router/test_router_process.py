"""The router as a process: its command line, its shutdown, and its errors at start."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from tempfile import TemporaryFile

from monitored import scraped, selectors, targets

from kvstore.embedded.children import DaemonLaunchers
from kvstore.lab.fake_engine import FakeEngine
from kvstore.lab.router_process import RouterProcess


async def test_router_process_serves_and_stops(tmp_path: Path) -> None:
    async with FakeEngine("e0") as engine:
        arguments = ["--engine", f"{engine.url}/v1@node-a", "--policy", "least_loaded", "--metadata", "none"]
        router = await asyncio.to_thread(RouterProcess(arguments, tmp_path).__enter__)
        content = json.dumps({"model": "m", "prompt": "a b"}).encode()
        request = urllib.request.Request(f"{router.url}/completions", content, {"content-type": "application/json"})

        def ask() -> bytes:
            with urllib.request.urlopen(request, timeout=20) as answer:
                answered: bytes = answer.read()
                return answered

        assert b"e0 saw 2" in await asyncio.to_thread(ask)

        def send_nonsense() -> bytes:
            host, _, port = router.address.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=20) as connection:
                connection.sendall(b"nonsense\r\n\r\n")
                return b"".join(iter(lambda: connection.recv(4_096), b""))

        head, _, body = (await asyncio.to_thread(send_nonsense)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["error"]["code"] == "invalid_argument"
        assert await asyncio.to_thread(router.stop) == 0
        log = router.log_path.read_text()
        assert "engine healthy: " in log
        assert "(models=m)" in log
        assert "Traceback" not in log
        assert "httpx" not in log  # httpx would log every health check


async def test_router_panels_have_series_in_a_scrape(tmp_path: Path) -> None:
    async with FakeEngine("e0") as engine:
        arguments = ["--engine", f"{engine.url}/v1@node-a", "--policy", "least_loaded", "--metadata", "none"]
        router = await asyncio.to_thread(RouterProcess(arguments, tmp_path).__enter__)
        shown = await asyncio.to_thread(scraped, router.address)
        assert await asyncio.to_thread(router.stop) == 0
    asked = [one for row, _, target in targets() if row.startswith("Router") for one in selectors(target["expr"])]
    assert len(asked) > 5
    assert [one for one in asked if not any(one.takes(series.name, series.labels) for series in shown)] == []


def kvstore(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvstore.cli", "router", *arguments]
    with TemporaryFile() as out, TemporaryFile() as errors:
        code = DaemonLaunchers.launcher(command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors).wait(60)
        said = [os.pread(file.fileno(), 1 << 20, 0).decode() for file in (out, errors)]
    return subprocess.CompletedProcess(command, code, *said)


def test_router_help_shows_examples() -> None:
    shown = kvstore("--help").stdout
    assert "kvstore router --engine http://127.0.0.1:8001,http://127.0.0.1:8002" in shown
    assert "[NAME=]URL[@NODE]" in shown


def test_router_invalid_settings_fail_with_one_line() -> None:
    for arguments, said in (
        ((), "a router requires engines"),
        (("--engine", "http://h:1", "--metadata", "none"), "requires a metadata server"),
        (("--engine", "nonsense"), "http://host:port"),
        (("--prefill", "http://p:1"), "all plain, or some prefill and some decode"),
        (("--engine", "http://h:1", "--listen", "0.0.0.0:1"), "requires TLS; set router.tls"),
    ):
        done = kvstore(*arguments)
        assert done.returncode != 0
        assert said in done.stderr
        assert "Traceback" not in done.stderr
