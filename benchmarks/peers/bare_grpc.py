"""The limit of a lookup over gRPC: the same request and an answer of the same size, without an index.

A grpc.aio server process, as the metadata server is one, whose handler returns a constant.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from types import TracebackType
from typing import Self

from kvstore.rpc.grpc_io_mode import wait_in_callers_threads

if __name__ == "__main__":
    wait_in_callers_threads()  # as the metadata server's process does, before anything imports gRPC

import grpc.aio

from kvproto.v1 import metadata_pb2, metadata_pb2_grpc


class _Constant(metadata_pb2_grpc.MetadataServicer):
    def __init__(self, answer: metadata_pb2.LookupResponse) -> None:
        self._answer = answer

    async def Lookup(self, request: object, context: object) -> metadata_pb2.LookupResponse:  # noqa: N802, ARG002 (gRPC's)
        return self._answer


async def serve(answer: bytes) -> None:
    """Run the server process: print the port and answer until stopped."""
    server = grpc.aio.server()
    metadata_pb2_grpc.add_MetadataServicer_to_server(_Constant(metadata_pb2.LookupResponse.FromString(answer)), server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


class BareGrpc:
    """A running server; a context manager that ends it.

    Args:
        answer: answer to every lookup.
    """

    def __init__(self, answer: metadata_pb2.LookupResponse) -> None:
        command = [sys.executable, __file__, answer.SerializeToString().hex()]
        self._server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._server.stdout is not None
        self.address = f"127.0.0.1:{int(self._server.stdout.readline())}"

    def close(self) -> None:
        """Stop the server process."""
        self._server.terminate()
        self._server.wait(timeout=10)
        assert self._server.stdout is not None
        self._server.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


if __name__ == "__main__":
    asyncio.run(serve(bytes.fromhex(sys.argv[1])))
