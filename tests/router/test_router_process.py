"""The router as people start it: its command line, its end, what it says where it cannot begin."""

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

from kvstore.testing.children import Children
from kvstore.testing.fake_engine import FakeEngine
from kvstore.testing.router_process import RouterProcess


async def test_it_serves_and_ends_in_order(tmp_path: Path) -> None:
    async with FakeEngine("e0") as engine:
        arguments = ["--engine", f"{engine.url}/v1@node-a", "--policy", "least_loaded", "--metadata", "none"]
        router = await asyncio.to_thread(RouterProcess(arguments, tmp_path).__enter__)
        body = json.dumps({"model": "m", "prompt": "a b"}).encode()
        asked = urllib.request.Request(f"{router.url}/completions", body, {"content-type": "application/json"})

        def ask() -> bytes:
            with urllib.request.urlopen(asked, timeout=20) as answer:
                found: bytes = answer.read()
                return found

        assert b"e0 saw 2" in await asyncio.to_thread(ask)

        def ask_nonsense() -> bytes:
            host, _, port = router.address.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=20) as connection:
                connection.sendall(b"nonsense\r\n\r\n")
                return b"".join(iter(lambda: connection.recv(4_096), b""))

        head, _, said = (await asyncio.to_thread(ask_nonsense)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(said)["error"]["code"] == "invalid_argument"
        assert await asyncio.to_thread(router.stop) == 0
        log = router.log_path.read_text()
        assert "is in: m" in log
        assert "Traceback" not in log
        assert "httpx" not in log  # which would tell of each check of each engine


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
        code = Children.launcher(command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors).wait(60)
        said = [os.pread(file.fileno(), 1 << 20, 0).decode() for file in (out, errors)]
    return subprocess.CompletedProcess(command, code, *said)


def test_help_shows_how_to_begin() -> None:
    shown = kvstore("--help").stdout
    assert "kvstore router --engine http://127.0.0.1:8001,http://127.0.0.1:8002" in shown
    assert "[NAME=]URL[@NODE]" in shown


def test_what_cannot_work_is_said_in_one_line() -> None:
    for arguments, said in (
        ((), "a router takes engines"),
        (("--engine", "http://h:1", "--metadata", "none"), "takes a metadata server"),
        (("--engine", "nonsense"), "http://host:port"),
        (("--prefill", "http://p:1"), "all plain, or some prefill and some decode"),
        (("--engine", "http://h:1", "--listen", "0.0.0.0:1"), "without TLS"),
    ):
        done = kvstore(*arguments)
        assert done.returncode != 0
        assert said in done.stderr
        assert "Traceback" not in done.stderr
