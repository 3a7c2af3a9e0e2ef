"""The decode side of a handoff: wait for a prompt in the arena of this host, and take it into the engine's memory."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Self, cast

import grpc
import numpy as np

from kvclient.call.arguments import check_seconds
from kvclient.call.context import ClientContext
from kvclient.call.execution import CallScope
from kvclient.load.sink import BlockSink, spans
from kvclient.memory.buffers import as_block_buffer
from kvclient.nodes.local_session import Session, is_session_lost, new_operation_id
from kvclient.options import VERIFY_CHOICES, Verify
from kvclient.results import PATH_LOCAL, LoadResult
from kvproto.v1 import node_pb2
from kvstore.core.buffers import BlockBuffer
from kvstore.core.chain import ChainSlice
from kvstore.core.errors import CapacityExceeded, Internal, InvalidArgument, KVStoreError, LeaseLost, Unavailable
from kvstore.core.types import Outcome, Tier
from kvstore.observe.metric_definitions import client as client_metrics
from kvstore.rpc.client import ChannelBroken, start_call
from kvstore.rpc.codec import unpack_u64
from kvstore.rpc.errors import FailedCall, from_rpc_error

_log = logging.getLogger(__name__)

_ANSWER_S = 0.5
"""Seconds in which the node must report the blocks that arrived, after its wait."""
_GRACE_S = _ANSWER_S + 0.5
"""Seconds between the deadline and the end of the last piece of work."""
_FIRST_PAUSE_S, _MOST_PAUSE_S = 0.05, 0.5
"""Pauses between attempts while the node is at its limit of waits."""
_COPY_THREADS = 2


class PromptReceiver:
    """A prompt that is being sent to the arena of this host. Thread-safe. A context manager that cancels.

    Space in the decode buffer is reserved at the beginning. ``wait`` until the prompt is complete, then ``take`` it into the
    engine's memory.
    """

    def __init__(self, context: ClientContext, chain: ChainSlice, scope: CallScope, transfer_id: str = "") -> None:
        self._context = context
        self._chain = chain
        self._transfer_id = transfer_id
        self._scope = scope
        scope.cancellable = True
        self._sink = BlockSink(len(chain), context.shape.layers)
        self._sink.outcomes[:] = Outcome.UNAVAILABLE
        self._offsets = np.zeros(len(chain), np.uint64)
        self._checksums: dict[int, bytes] = {}
        self._session: Session | None = None
        self._lock = threading.Lock()
        """Held while blocks are copied, so that neither their leases nor the session end before the copies."""
        self._lease_ids: list[int] = []
        self._lease_end_s = 0.0
        self._future: Future[None] | None = None

    def begin(self, future: Future[None]) -> None:
        """Keep the future of ``run``. For the client."""
        self._future = future

    def run(self) -> None:
        """Wait for the node's answers. For the client, in a thread. Raises nothing: failures are left in outcomes."""
        try:
            self._receive()
        except KVStoreError as error:
            self._sink.record_error(error)
        except Exception as error:  # noqa: BLE001  # the edge to the engine: ``wait`` and ``cancel`` would raise it there
            self._context.incidents.counters.add(client_metrics.BUGS)
            _log.exception("wait for a prompt failed unexpectedly: its blocks are missing")
            self._sink.record_error(Internal("unexpected failure in the client", error=repr(error)))

    def _receive(self) -> None:
        """Receive the prompt. If the node has too many waits, as with many ranks per host, try again until the deadline."""
        pause_s, pause = _FIRST_PAUSE_S, threading.Condition()
        while True:
            try:
                self._await_prompt()
            except CapacityExceeded as error:
                if self._scope.left_s() <= pause_s:
                    raise
                message = "prompt awaited later: the node has too many waits"
                self._context.incidents.report(client_metrics.PROMPT_WAITS_REFUSED, message, error)
            else:
                return
            self._release()
            with pause:
                self._scope.wait(pause, pause_s)
            if self._scope.ended:
                raise self._scope.error()
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)

    def _await_prompt(self) -> None:
        local = self._context.local
        if local is None:
            raise Unavailable("no node on this host")
        session = local.session()
        if session is None:
            raise local.unavailable()
        session.acquire()
        self._session = session
        left_s = max(0.001, self._scope.left_s())
        request = node_pb2.AwaitPromptRequest(
            session_id=session.session_id,
            operation_id=new_operation_id(),
            keys=self._chain.packed,
            want_checksums=True,
            wait_ms=max(1, int(left_s * 1000)),
            transfer_id=self._transfer_id,
        )
        began_s = self._context.clock.now_s()
        try:
            # More time than the wait itself: the node reports the blocks that arrived even if others did not.
            call = start_call(session.stub.AwaitPrompt, request, timeout=left_s + _ANSWER_S)
        except ChannelBroken as error:
            local.lost(session, error)
            raise
        except ValueError as error:  # the channel was closed
            ended = LeaseLost("the session ended before the wait for the prompt began")
            local.lost(session, ended)
            raise ended from error
        try:
            with self._scope.on_cancel(call.cancel), session.server.waiting(call.cancel):
                for progress in call:
                    self._record(progress, session, began_s)
        except grpc.RpcError as failed:
            if self._scope.ended:  # ended by the client: not a failure of the session
                raise self._scope.error() from None
            why = from_rpc_error(cast("FailedCall", failed))
            if is_session_lost(why):
                local.lost(session, why)
            raise why from None

    def _record(self, progress: node_pb2.LoadProgress, session: Session, began_s: float) -> None:
        shape, count = self._context.shape, len(self._chain)
        if progress.lease_id:  # later messages without blocks have no lease
            self._lease_ids.append(progress.lease_id)
            self._lease_end_s = began_s + progress.granted_ms / 1000 + session.lease_s - self._context.options.lease_margin_s
        for run in progress.runs:
            if run.count == 0 or run.start + run.count > count:
                raise Internal("the node answered for blocks that were not requested", start=run.start, count=run.count)
            span = slice(run.start, run.start + run.count)
            if int(run.outcome) != Outcome.HIT:
                self._sink.outcomes[span] = int(run.outcome)
                continue
            offsets = unpack_u64(run.offsets, "offsets", run.count)
            if int(offsets.max()) + shape.block_bytes > session.arena.size:
                raise Internal("the node answered with blocks outside its arena")
            sums = unpack_u64(run.checksums, "checksums", run.count * shape.layers)
            self._offsets[span] = offsets
            row = shape.layers
            for at in range(run.count):
                self._checksums[run.start + at] = sums[at * row : (at + 1) * row].tobytes()
            self._sink.outcomes[span] = Outcome.HIT  # after all checks: one that fails ends the wait, and ``take`` copies hits

    @property
    def done(self) -> bool:
        """Whether the wait has ended, with or without the prompt."""
        return self._future is not None and self._future.done()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the prompt. True: all of it has arrived.

            complete = prompt.wait(5.0)

        Args:
            timeout_s: maximum wait; None: until the deadline given to ``await_prompt``.

        Raises:
            InvalidArgument: ``timeout_s`` is not a number of seconds.
        """
        left_s = self._scope.left_s() + _GRACE_S
        if timeout_s is not None:
            left_s = min(left_s, check_seconds("timeout_s", timeout_s, zero=True))
        assert self._future is not None
        try:
            self._future.result(left_s)
        except (TimeoutError, CancelledError):
            return False
        return bool((self._sink.outcomes == Outcome.HIT).all())

    def take(self, buffer: object, *, skip: int = 0, stop: int | None = None, verify: Verify = "auto") -> LoadResult:
        """Copy the blocks that arrived into the engine's memory, and end their lease. Once, after ``wait``.

            result = prompt.take(buffer)

        Args:
            buffer: space for the blocks ``[skip, stop)``; see ``as_block_buffer``.
            skip: number of leading blocks that the engine has already; they are not copied.
            stop: position after the last block to copy; None: all.
            verify: when checksums are compared after the copy; see ``kvclient.options.Verify``.

        Raises:
            InvalidArgument: a buffer that does not fit, or bounds that are not within the blocks.
        """
        end = len(self._chain) if stop is None else stop
        if not (isinstance(skip, int) and isinstance(end, int) and 0 <= skip <= end <= len(self._chain)):
            raise InvalidArgument("skip and stop must be within the blocks", skip=skip, stop=stop, blocks=len(self._chain))
        if verify not in VERIFY_CHOICES:
            raise InvalidArgument("unknown choice", verify=verify, choices=VERIFY_CHOICES)
        blocks = as_block_buffer(buffer, self._context.shape, end - skip, spec=self._context.spec)
        if not self.done:
            self._end_wait()
        with self._lock:
            return self._take(blocks, skip, end, verify=verify)

    def _take(self, blocks: BlockBuffer, skip: int, stop: int, *, verify: Verify) -> LoadResult:
        sink, session = self._sink, self._session
        arrived = sink.outcomes == Outcome.HIT
        if session is None and arrived.any():  # nothing can be copied any more
            sink.record_error(Unavailable("the prompt was cancelled or taken before"))
            sink.outcomes = np.where(arrived, np.uint8(Outcome.UNAVAILABLE), sink.outcomes)  # an earlier result has the old array
        try:
            positions = np.flatnonzero(sink.outcomes[skip:stop] == Outcome.HIT) + skip
            if session is not None and len(positions):
                for first, last in spans(positions):
                    self._copy(session, blocks, first, last, skip, verify=session.verifies_copies(verify))
                good = positions[sink.outcomes[positions] == Outcome.HIT]
                if self._context.clock.now_s() > self._lease_end_s:
                    self._context.incidents.report(
                        client_metrics.LEASE_EXPIRED_BLOCKS,
                        "dropped blocks of a prompt that was taken after its lease",
                        amount=len(good),
                    )
                    sink.outcomes[good] = Outcome.UNAVAILABLE
                else:
                    sink.record(good, Outcome.HIT, int(Tier.DRAM), session.node_id, PATH_LOCAL)
        finally:
            self._release()
        result = sink.result(self._context.shape.block_bytes)
        result.seconds = self._scope.elapsed_s()
        self._context.incidents.counters.add(client_metrics.PROMPTS)
        self._context.incidents.counters.add(client_metrics.PROMPT_BLOCKS, result.count(Outcome.HIT))
        return result

    def _copy(self, session: Session, blocks: BlockBuffer, start: int, stop: int, skip: int, *, verify: bool) -> None:
        layers = self._context.shape.layers
        expected = None
        if verify:
            sums = np.frombuffer(b"".join(self._checksums[at] for at in range(start, stop)), np.uint64)
            expected = sums.reshape(stop - start, layers)
        good = session.arena.copy_out(self._offsets[start:stop], blocks, start - skip, 0, layers, _COPY_THREADS, expected)
        self._sink.outcomes[start + np.flatnonzero(~good)] = Outcome.CORRUPT

    def cancel(self) -> None:
        """Cancel the wait and release the space.

        Example: ``prompt.cancel()``
        """
        self._end_wait()
        with self._lock:
            self._release()

    def _end_wait(self) -> None:
        """Cancel the wait and return when it has ended. A wait whose thread has not begun never begins."""
        self._scope.cancel()
        if self._future is None:
            return
        if self._future.cancel():
            self._sink.record_error(self._scope.error())
        else:
            self._future.result()  # bounded: the call was cancelled

    def _release(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            if self._lease_ids:
                session.releaser.release(self._lease_ids, urgent=True)
                self._lease_ids = []
            session.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._session is not None or not self.done:
            self.cancel()
