"""Traffic of tests: run as a process on a host of a lab. The standard library alone; each line it prints is JSON."""

from __future__ import annotations

import json
import socket
import struct
import sys
import time

CHUNK = 1 << 20
TIMEOUT_S = 60.0


def say(value: object) -> None:
    print(json.dumps(value), flush=True)


def listen(ip: str) -> socket.socket:
    server = socket.create_server((ip, 0))
    server.settimeout(TIMEOUT_S)
    say(server.getsockname()[1])
    return server


def connect(ip: str, port: int, tos: int, timeout_s: float = TIMEOUT_S) -> socket.socket:
    made = socket.socket()
    made.settimeout(timeout_s)
    made.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)
    # fills queues as bulk traffic does: the kernel's own choice may be one that avoids to
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.connect((ip, port))
    return made


def sink(ip: str) -> None:
    """Takes one connection to its end; says how much came, and how long after its first bytes the last ones did."""
    connection, _ = listen(ip).accept()
    space = bytearray(CHUNK)
    total = connection.recv_into(space)
    first, begin_s = total, time.monotonic()
    while got := connection.recv_into(space):
        total += got
    # what came with the first read came before the clock started
    seconds = (time.monotonic() - begin_s) * total / max(1, total - first)
    say({"bytes": total, "seconds": seconds})


def send(ip: str, port: int, size: int, tos: int) -> None:
    """Send ``size`` bytes; 0: without end."""
    connection = connect(ip, port, tos)
    data = bytes(CHUNK)
    left = size or 1 << 62
    while left:
        left -= connection.send(data[: min(left, CHUNK)])
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)


def echo(ip: str) -> None:
    """Answers one connection's messages of 8 bytes."""
    connection, _ = listen(ip).accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while message := connection.recv(8, socket.MSG_WAITALL):
        connection.sendall(message)


def ping(ip: str, port: int, count: int, timeout_s: float) -> None:
    """Round trips of 8 bytes; says them in milliseconds, sorted. ``"timeout"`` when one takes too long."""
    times = []
    try:
        connection = connect(ip, port, 0, timeout_s)
        for number in range(count):
            begin_s = time.perf_counter()
            connection.sendall(struct.pack("<q", number))
            assert connection.recv(8, socket.MSG_WAITALL) == struct.pack("<q", number)
            times.append((time.perf_counter() - begin_s) * 1e3)
    except (TimeoutError, OSError) as error:
        say(type(error).__name__)
        return
    say(sorted(times))


def main(what: str, ip: str, *rest: str) -> None:
    if what == "sink":
        sink(ip)
    elif what == "send":
        send(ip, *map(int, rest))
    elif what == "echo":
        echo(ip)
    else:
        ping(ip, int(rest[0]), int(rest[1]), float(rest[2]))


if __name__ == "__main__":
    main(*sys.argv[1:])
