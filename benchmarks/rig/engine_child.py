"""A vLLM engine in a child process, controlled by one JSON line per command, for benchmarks that compare engines.

The parent starts one child per contestant and lets only one of them work at a time. All output of vLLM goes to stderr.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from unittest import mock

from kvstore.testing.connector.offload_files import OffloadFiles

HERE = Path(__file__).resolve()
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Size of a Llama with random weights, large enough that computing a token costs more than the engine's overhead.

    A token has ``layers * 2 * kv_heads * head_dim * 4`` bytes of KV in float32.
    """

    layers: int = 8
    hidden: int = 512
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64

    @property
    def kv_bytes(self) -> int:
        """KV bytes per token."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 4


class EngineChild:
    """Parent side of an engine in a child process, as a context manager. Its end removes what vLLM's offloading left behind.

    Args:
        model: folder of the model.
        transfer: vLLM's ``kv_transfer_config``; None: no connector.
        log: file of the child's output.
        engine: further arguments of vLLM's ``LLM``.
    """

    def __init__(self, model: Path, transfer: Mapping[str, Any] | None, log: Path, **engine: object) -> None:
        given = json.dumps({"model": str(model), "transfer": transfer, "engine": engine})
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(HERE.parent.parent), *sys.path)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "0",  # the same core and number of threads with and without a connector
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
        }
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE), given], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, env=environment
            )
        self._log = log
        self._files = OffloadFiles()
        self._has_answered = False

    def ask(self, what: str, **how: object) -> dict[str, Any]:
        """Send one command and return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": what, **how}).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine process exited:\n{self._log.read_text(errors='replace')[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        if not self._has_answered:  # it may end without notice later
            self._files.note(self._process.pid)
            self._has_answered = True
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._files.note(self._process.pid)
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._files.remove()


class _Engine:
    """Child side: the engine that executes the commands."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = given["transfer"]
        more = {"kv_transfer_config": KVTransferConfig(**transfer)} if transfer is not None else {}
        self._llm = LLM(
            model=given["model"],
            dtype="float32",
            enforce_eager=True,
            seed=0,
            enable_prefix_caching=True,
            **more,
            **given["engine"],
        )
        self._engine = self._llm.llm_engine
        self._numbers = iter(range(1 << 62))
        self._connectors: dict[str, tuple[Any, Any]] = {"none": (None, None)}
        """The scheduler's and the worker's connector."""
        self._verdicts: Any = None
        """Those of our connector, which may be switched off."""
        self._in_connector_s = 0.0
        self._inside = False
        if transfer is not None:
            self._open_connectors()
            self._watch_connector()

    def prompt(self, tokens: Sequence[int], max_tokens: int = 1) -> dict[str, Any]:
        """Run one request alone.

        Returns:
            Seconds until its last token, those among them before its last step began, its cached tokens, and its answer.
        """
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        step, step_start = self._engine.step, 0.0

        def timed_step() -> Any:  # noqa: ANN401  # what vLLM returns
            nonlocal step_start
            step_start = time.perf_counter()
            return step()

        self._engine.step = timed_step
        start = time.perf_counter()
        (answer,) = self._llm.generate([{"prompt_token_ids": list(tokens)}], params, use_tqdm=False)
        taken = time.perf_counter() - start
        self._engine.step = step
        said = list(answer.outputs[0].token_ids)
        return {"seconds": taken, "waited_s": step_start - start, "cached": answer.num_cached_tokens, "tokens": said}

    def decode(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
        """Decode several requests together.

        Returns:
            Mean seconds per step in which all requests decode (``seconds``), and of the connector's calls in it (``inside``).
        """
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        for prompt in prompts:
            self._engine.add_request(f"r{next(self._numbers)}", {"prompt_token_ids": list(prompt)}, params)
        started, steps, began = 0, 0, 0.0
        while True:
            outputs = self._engine.step()
            if any(output.finished for output in outputs):
                break
            if began:
                steps += 1
            else:
                started = max(started, len(outputs))
                if started == len(prompts):
                    self._in_connector_s = 0.0
                    began = time.perf_counter()
        seconds, inside = ((taken / (steps + 1)) for taken in (time.perf_counter() - began, self._in_connector_s))
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return {"seconds": seconds, "inside": inside, "steps": steps + 1}

    def connector(self, *, which: Literal["own", "idle", "none"]) -> dict[str, Any]:
        """Replace the engine's connector by one that does nothing, or detach it, or attach it again.

        Without a connector, vLLM steps like an engine started without one.
        """
        from vllm.distributed.kv_transfer import (
            ensure_kv_transfer_initialized,
            ensure_kv_transfer_shutdown,
            get_kv_transfer_group,
            has_kv_transfer_group,
        )
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        self.forget()
        core = self._engine.engine_core.engine_core
        if has_kv_transfer_group():
            with mock.patch.object(get_kv_transfer_group(), "shutdown"):  # vLLM forgets the worker's connector, which stays open
                ensure_kv_transfer_shutdown()
        core.scheduler.connector, worker = self._connectors[which]
        if worker is not None:
            with mock.patch.object(KVConnectorFactory, "create_connector", return_value=worker):
                ensure_kv_transfer_initialized(core.vllm_config, core.scheduler.kv_cache_config)
        return {}

    def verdicts(self, *, on: bool) -> dict[str, Any]:
        """Switch our connector between its verdicts and loading all found blocks."""
        side = self._connectors["own"][0].scheduler_side
        self._verdicts = side.verdicts or self._verdicts
        side.use_verdicts(self._verdicts if on else None)
        return {}

    def _open_connectors(self) -> None:
        """Remember the engine's own connector, and make one that does nothing."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

        from rig.idle_connector import IdleConnector

        core = self._engine.engine_core.engine_core
        self._connectors["own"] = core.scheduler.connector, get_kv_transfer_group()
        scheduler, worker = (
            IdleConnector(core.vllm_config, role, core.scheduler.kv_cache_config)
            for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER)
        )
        self._connectors["idle"] = scheduler, worker

    def _watch_connector(self) -> None:
        """Sum the time that vLLM's thread spends in the connector."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        for connector in (self._engine.engine_core.engine_core.scheduler.connector, get_kv_transfer_group()):
            for name, _ in inspect.getmembers(type(connector), inspect.isfunction):
                if not name.startswith("_"):
                    setattr(connector, name, self._timed(getattr(connector, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def timed(*given: Any, **named: Any) -> Any:  # noqa: ANN401  # any signature that vLLM uses
            if self._inside:  # nested call: the outer call measures it
                return call(*given, **named)
            self._inside, began = True, time.perf_counter()
            try:
                return call(*given, **named)
            finally:
                self._inside = False
                self._in_connector_s += time.perf_counter() - began

        return timed

    def close(self) -> None:
        """Shut down the engine's own connector, which then releases host memory."""
        for connector in self._connectors.get("own", ()):
            connector.shutdown()

    def forget(self) -> dict[str, Any]:
        """Wait for all stores and reset the engine's prefix cache."""
        while self._engine.engine_core.engine_core.scheduler.has_requests():
            self._engine.step()
        end = time.monotonic() + 20
        while not self._llm.reset_prefix_cache():
            if time.monotonic() > end:
                raise RuntimeError("the prefix cache was not reset within 20 s: pages are still in use")
            self._engine.step()
        return {}


def make_model(folder: Path, size: ModelSize, longest: int) -> Path:
    """Create the model in a child process, so that the parent does not load torch."""
    program = (
        "import sys,json; from pathlib import Path; from kvstore.testing.tiny_models import *;"
        "make_model(Path(sys.argv[1]), TinyModel(max_tokens=int(sys.argv[3]), **json.loads(sys.argv[2])))"
    )
    subprocess.run([sys.executable, "-c", program, str(folder), json.dumps(asdict(size)), str(longest)], check=True)
    return folder


def main() -> None:
    """Run the child: execute commands from stdin until it closes."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = _Engine(json.loads(sys.argv[1]))
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(engine, command.pop("do"))(**command)
        answers.write(json.dumps(answer) + "\n")
    try:
        engine.close()
    finally:
        os._exit(0)  # vLLM's own shutdown would add seconds


if __name__ == "__main__":
    main()
