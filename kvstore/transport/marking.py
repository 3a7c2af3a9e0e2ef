"""The mark that tells KV traffic from all other: DSCP in every packet, and a low priority in this host's own queues.

Switches and NICs read the DSCP (RoCE fabrics map it to a traffic class, tc and CAKE to a band); the kernel's queues read
``SO_PRIORITY``, which is also what a VLAN's priority is made of. A network that knows nothing of the mark carries it unharmed.
"""

from __future__ import annotations

import socket

CS1 = 8
"""The default: the low class that switches know without being told; common DSCP maps take its upper three bits, of which
LE (1) has none. Networks that follow RFC 8622 may want 1."""
UNMARKED = 0
MAX_DSCP = 63
_BULK_PRIORITY = 2
"""``TC_PRIO_BULK``: the last band of the kernel's default queues. Up to 6 needs no privilege."""


def mark(sock: socket.socket, dscp: int) -> bool:
    """Marks what a socket sends from now on; also what a listener answers SYNs with.

    Args:
        sock: a TCP socket.
        dscp: 0 leaves it as it is.

    Returns:
        False: the kernel refused a part of it; the socket is as good as before.
    """
    if dscp == UNMARKED:
        return True
    six = sock.family == socket.AF_INET6
    level, option = (socket.IPPROTO_IPV6, socket.IPV6_TCLASS) if six else (socket.IPPROTO_IP, socket.IP_TOS)
    try:
        sock.setsockopt(level, option, dscp << 2)
        # after the TOS, from which the kernel would derive a priority of its own
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, _BULK_PRIORITY)
    except OSError:
        return False
    return True
