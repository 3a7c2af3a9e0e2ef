"""Load generator in a separate process: sends HTTP requests at a fixed rate, independent of the answers (open loop).

Each request has a due time and queues if all connections are busy. Its latency counts from the due time. Connections are reused.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Self

CONNECTIONS = 16
ANSWER_S = 10.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: method, path, and body (JSON, or empty)."""

    method: str
    path: str
    body: str = ""

    def packed(self, address: str) -> bytes:
        """Encode the request for the wire."""
        content = self.body.encode()
        lines = [f"{self.method} {self.path} HTTP/1.1", f"host: {address}", f"content-length: {len(content)}"]
        return "\r\n".join([*lines, "content-type: application/json", "", ""]).encode() + content


@dataclass(slots=True)
class Outcome:
    """Results of the requests of one measurement."""

    seconds: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    statuses: dict[str, int] = field(default_factory=dict)
    """Number of answers by status, and of failed requests by reason."""

    @property
    def failed(self) -> int:
        """Requests that were not answered with 200."""
        return sum(count for status, count in self.statuses.items() if status != "200")


class RestLoad:
    """The load generator's process, as a context manager that stops it.

    Args:
        address: the server's ``host:port``.
        requests: requests to send, in rotation.
        rate: requests per second.
    """

    def __init__(self, address: str, requests: Sequence[Asked], rate: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, address, str(rate)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid
        self._tell(json.dumps([asdict(one) for one in requests]))

    def begin(self) -> None:
        """Start sending requests."""
        self._tell("")

    def end(self) -> Outcome:
        """Stop sending, and wait for outstanding answers."""
        self._tell("")
        assert self._process.stdout is not None
        return Outcome(**json.loads(self._process.stdout.readline()))

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.terminate()
        self._process.communicate()


class _Child:
    """Run the load generator inside the process."""

    def __init__(self, address: str, rate: float) -> None:
        self._address, self._rate = address, rate
        self._due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        self._outcome = Outcome()

    async def run(self) -> None:
        """Read lines from the parent: one starts a measurement, the next one stops it, until the input closes."""
        lines = asyncio.StreamReader(limit=1 << 22)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        requests = [Asked(**one).packed(self._address) for one in json.loads(await lines.readline())]
        async with asyncio.TaskGroup() as workers:
            working = [workers.create_task(self._work()) for _ in range(CONNECTIONS)]
            while await lines.readline():
                self._outcome, began_s = Outcome(), time.perf_counter()
                asking = asyncio.create_task(self._ask(requests))
                await lines.readline()
                asking.cancel()
                self._outcome.seconds = time.perf_counter() - began_s
                await self._due.join()
                print(json.dumps(asdict(self._outcome)), flush=True)
            for worker in working:
                worker.cancel()

    async def _ask(self, requests: Sequence[bytes]) -> None:
        due_s, number = time.perf_counter(), 0
        while True:
            self._due.put_nowait((due_s, requests[number % len(requests)]))
            due_s, number = due_s + 1 / self._rate, number + 1
            await asyncio.sleep(due_s - time.perf_counter())

    async def _work(self) -> None:
        host, _, port = self._address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        while True:
            due_s, request = await self._due.get()
            try:
                async with asyncio.timeout(ANSWER_S):
                    writer.write(request)
                    head = await reader.readuntil(b"\r\n\r\n")
                    await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0]))
                came = head.split(b" ", 2)[1].decode()
            except (OSError, EOFError, TimeoutError, ValueError) as failed:
                came = type(failed).__name__
                writer.close()
                reader, writer = await asyncio.open_connection(host, int(port))
            self._outcome.statuses[came] = self._outcome.statuses.get(came, 0) + 1
            self._outcome.latencies_s.append(time.perf_counter() - due_s)
            self._due.task_done()


if __name__ == "__main__":
    asyncio.run(_Child(sys.argv[1], float(sys.argv[2])).run())
