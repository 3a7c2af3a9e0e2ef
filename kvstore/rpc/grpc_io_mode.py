"""Which of gRPC's two ways to wait for sockets works for us.

gRPC reads a socket either in the thread that waits for the answer, or in threads of its own that hand over to it (the *event
engine*, its default). A unary call over loopback takes 17 context switches in the second way at both ends and 10 in the first,
and a quarter to a third less time, which a store that answers in fractions of a millisecond feels in everything that it does.

It is for servers alone. In the first way a client's connection is made only while some thread waits in a call, and calls that
fail at once never wait: clients that called a node again and again while it was killed and started took 3.5 to 8.5 s to reach
it, sometimes far longer, where they take a moment in the second way.

gRPC takes the choice from an environment variable, once, when it is first imported. So it must be made before that, and it holds
for all that uses gRPC in this process. Whoever has set ``GRPC_EXPERIMENTS`` (to nothing: gRPC's own default) has chosen already.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module, metadata
from typing import Final

VARIABLE: Final = "GRPC_EXPERIMENTS"
_CALLERS_THREADS: Final = "-event_engine_client,-event_engine_listener"
_FIRST_UNKNOWN: Final = (1, 86)
"""The first version of gRPC that nobody has tried this with; one that has dropped the choice would complain about its name."""


def wait_in_callers_threads() -> bool:
    """Makes the choice, and imports gRPC. The environment is left as it was: it is nothing for child processes to inherit.

    Returns:
        False where nothing was changed: gRPC was imported before, somebody has chosen, or this version is not known to have it.
    """
    if "grpc" in sys.modules or VARIABLE in os.environ or not _known_version():
        return False
    os.environ[VARIABLE] = _CALLERS_THREADS
    try:
        import_module("grpc")
    finally:
        del os.environ[VARIABLE]
    return True


def _known_version() -> bool:
    try:
        numbers = metadata.version("grpcio").split(".")[:2]
        return tuple(int(number) for number in numbers) < _FIRST_UNKNOWN
    except (metadata.PackageNotFoundError, ValueError):
        return False
