"""Payload by one-sided transfers (NIXL over UCX: RDMA, shared host memory or plain TCP), beside the framed TCP connection.

``agent`` owns one of the process's NIXL agents, its registered memory and the fence against late bytes. ``address_table`` holds
the addresses of blocks, ``frames`` the messages of both sides, ``responder`` the serving side and ``peer`` the reading side.
"""
