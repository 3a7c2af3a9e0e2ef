"""``kvstore`` as a fork of a nursery (see ``nursery.py``): ``nursery_command.py FOLDER ARGUMENTS...`` in 20 ms of a core.

Its inputs, outputs, environment, folder, signals and exit code are those of the child. Uses the standard library alone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

DAEMONS = ("metadata", "node", "router", "admin")


def main(folder: str, *arguments: str) -> int:
    kind = arguments[0] if arguments and arguments[0] in DAEMONS else "command"
    asked = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
        connection.connect(f"{folder}/{kind}")
        socket.send_fds(connection, [json.dumps(asked).encode()], [0, 1, 2])
        said = connection.recv(16)
    except (FileNotFoundError, ConnectionRefusedError):
        said = b""
    if not said.isdigit():  # no such nursery, or its imports could differ in this environment
        os.execv(sys.executable, [sys.executable, "-m", "kvstore.cli", *arguments])
    pid = int(said)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGWINCH):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    for fd in (0, 1, 2):
        os.close(fd)  # the child's end is the end of its output
    said = connection.recv(16)
    code = int(said) if said else -signal.SIGKILL
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:]))
