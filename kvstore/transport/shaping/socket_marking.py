"""Marks sockets as KV traffic: a DSCP in every packet, and a low priority in this host's own queues.

Switches and NICs read the DSCP: RoCE fabrics map it to a traffic class, tc and CAKE to a band. The kernel's queues read
``SO_PRIORITY``, from which the priority of a VLAN is made as well. A network that ignores the mark carries the traffic unchanged.
"""

from __future__ import annotations

import socket

CS1 = 8
"""The default: a low-priority class that switches know without configuration. Common DSCP maps use only the upper three bits of
the DSCP, which are zero in LE (1). Networks that follow RFC 8622 may prefer 1."""
UNMARKED = 0
MAX_DSCP = 63
_BULK_PRIORITY = 2
"""``TC_PRIO_BULK``: the last band of the kernel's default queues. Priorities up to 6 need no privilege."""


def mark(sock: socket.socket, dscp: int) -> bool:
    """Mark all further packets of a socket. On a listener, the mark also applies to its answers to SYNs.

    Args:
        sock: a TCP socket.
        dscp: the mark; 0 leaves the socket as it is.

    Returns:
        False if the kernel refused a part of the mark. The socket still works.
    """
    if dscp == UNMARKED:
        return True
    six = sock.family == socket.AF_INET6
    level, option = (socket.IPPROTO_IPV6, socket.IPV6_TCLASS) if six else (socket.IPPROTO_IP, socket.IP_TOS)
    try:
        sock.setsockopt(level, option, dscp << 2)
        # after the TOS, from which the kernel would derive another priority
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, _BULK_PRIORITY)
    except OSError:
        return False
    return True
