"""One channel to several metadata servers: each call goes to a server that answers.

Theory of operation.

1. ``addresses``: the setting, a list of addresses or a DNS name, as one type. ``resolver`` turns names into addresses.
2. ``selection``: a pure state machine that chooses the server of the next call from refusals, timeouts and answers.
3. ``rpc_rules``: for each RPC, whether a call may be repeated, and whether all callers must use the same server.
4. ``servers``: runs the state machine: probes, name resolution, log lines, counters.
5. ``channel`` and ``aio_channel``: a ``grpc.Channel`` and a ``grpc.aio.Channel`` over the servers.

A single IP address or unix socket is served by an ordinary channel, without any of this.
"""
