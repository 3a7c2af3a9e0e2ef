"""Payload by one-sided transfers (NIXL over UCX: RDMA, shared host memory or plain TCP), beside the framed TCP connection.

``port`` owns this process's NIXL agent, its registered memory and the fence against late bytes; ``landing`` says where blocks
lie, as numbers; ``frames`` are what the two sides tell each other; ``serving`` and ``peer`` are the two sides.
"""
