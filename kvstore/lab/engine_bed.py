"""Real inference engines as served processes: OpenAI-compatible servers of vLLM on the CPU, for tests and benchmarks.

    with EngineBed(folder) as bed:
        engine = bed.start(ServeSpec("engine", model, store=store_transfer(cluster.metadata_address, node.local_socket)))
        engine.complete("Once upon a time", max_tokens=8)

Each engine is a separate process group and is killed as a whole, also if its parent is killed. Logs stay in the bed's folder. A
start costs some fifteen seconds of a core, so several are started at once and shared between tests.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvstore.core.errors import DeadlineExceeded, Internal, InvalidArgument, Unavailable
from kvstore.embedded.children import DaemonLaunchers, Launcher
from kvstore.embedded.ports import LOOPBACK, free_port

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 15.0
REQUEST_TIMEOUT_S = 120.0
_POLL_S = 0.1
_SHOWN_LINES = 40
_CONNECTORS = {False: ("KVStoreConnector", "connector"), True: ("KVStorePDConnector", "pd_connector")}
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # worker and scheduler share a process: 5 s and half a gigabyte less
    "VLLM_SERVER_DEV_MODE": "1",  # its cache can be reset
}
_KEEPER = 'read -r _; kill -KILL "-$0"'
"""A shell that kills an engine's processes when its input ends, which happens if the parent is killed."""


def store_transfer(
    metadata: str, node: str = "auto", *, role: str = "kv_both", policy: str = "recompute", **options: object
) -> dict[str, Any]:
    """Build the ``--kv-transfer-config`` of our connector. It loads all that it finds, unless ``load_choice`` says otherwise.

    Args:
        metadata: address of the metadata server.
        node: address of this engine's node; see ``HookOptions.node``.
        role: ``kv_both``, or ``kv_producer`` and ``kv_consumer`` of engines that prefill and decode.
        policy: vLLM's handling of a failed load.
        options: further options of the connector.
    """
    name, module = _CONNECTORS[role != "kv_both"]
    return {
        "kv_connector": name,
        "kv_connector_module_path": f"kvclient.engines.vllm.{module}",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"metadata": metadata, "node": node, "load_choice": "always", **options},
    }


def tier_transfer(
    metadata: str, node: str, host_bytes: int, *, offloading: Mapping[str, object] | None = None, **options: object
) -> dict[str, Any]:
    """Build the ``--kv-transfer-config`` of vLLM's own offloading with the store as its secondary tier.

    Args:
        metadata: address of the metadata server.
        node: address of this engine's node; see ``HookOptions.node``.
        host_bytes: vLLM's host memory.
        offloading: further options of vLLM's offloading.
        options: further options of the tier.
    """
    return {
        "kv_connector": "KVStoreOffloadingConnector",
        "kv_connector_module_path": "kvclient.engines.vllm.tier",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": host_bytes,
            "kvstore": {"metadata": metadata, "node": node, **options},
            **(offloading or {}),
        },
    }


@dataclass(frozen=True, slots=True)
class ServeSpec:
    """Configuration of one served engine.

    Attributes:
        name: name of its log.
        model: folder with the model.
        store: ``kv_transfer_config``; None: the engine alone.
        dtype: of weights and KV.
        core: CPU that computes; None: all.
        kv_cache_bytes: the engine's own KV cache.
        block_tokens: tokens per block.
        max_tokens: longest context.
        arguments: further arguments of ``vllm serve``.
        environment: further environment.
        served_name: name of the model in requests and namespaces.
        host: address that it listens on.
        launcher: starts the process; None: a plain child process.
    """

    name: str
    model: Path
    store: Mapping[str, Any] | None = None
    dtype: str = "float32"
    core: int | None = None
    kv_cache_bytes: int = 64 << 20
    block_tokens: int = 32
    max_tokens: int = 4_096
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    served_name: str = "tiny"
    host: str = LOOPBACK
    launcher: Launcher | None = None

    def command(self, port: int) -> list[str]:
        """The command line."""
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        if self.core is not None:
            command = ["taskset", "--cpu-list", str(self.core), *command]
        command += ["--host", self.host, "--port", str(port), "--model", str(self.model), "--served-model-name", self.served_name]
        command += ["--dtype", self.dtype, "--max-model-len", str(self.max_tokens), "--block-size", str(self.block_tokens)]
        command += ["--kv-cache-memory-bytes", str(self.kv_cache_bytes), "--enforce-eager", "--seed", "0"]
        if self.store is not None:
            command += ["--kv-transfer-config", json.dumps(self.store)]
        return [*command, *self.arguments]

    def variables(self) -> dict[str, str]:
        """The environment."""
        bind = {} if self.core is None else {"VLLM_CPU_OMP_THREADS_BIND": str(self.core)}
        return {**os.environ, **_QUIET, **bind, **self.environment}


class ServedEngine:
    """A served engine. Its requests raise ``Unavailable`` if it does not answer."""

    def __init__(self, spec: ServeSpec, port: int, process: subprocess.Popen[bytes], log_path: Path, log_start: int) -> None:
        self.spec = spec
        self.port = port
        self.process = process
        self.log_path = log_path
        self._log_start = log_start
        keeper = ["sh", "-c", _KEEPER, str(process.pid)]
        self._keeper = subprocess.Popen(keeper, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)

    @property
    def address(self) -> str:
        """``host:port``."""
        return f"{self.spec.host}:{self.port}"

    @property
    def url(self) -> str:
        """Base URL for OpenAI clients."""
        return f"http://{self.address}/v1"

    def log(self) -> str:
        """Log of this run."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def is_healthy(self) -> bool:
        """Whether the engine serves."""
        try:
            return self.call("GET", "/health", timeout_s=5.0)[0] == http.client.OK
        except Unavailable:
            return False

    def call(self, method: str, path: str, body: object = None, timeout_s: float = REQUEST_TIMEOUT_S) -> tuple[int, bytes]:
        """One HTTP request.

        Returns:
            Status and body of the answer.

        Raises:
            Unavailable: no answer, or none in time.
        """
        connection = http.client.HTTPConnection(self.spec.host, self.port, timeout=timeout_s)
        try:
            payload = None if body is None else json.dumps(body).encode()
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable("the engine does not answer", engine=self.spec.name, why=repr(error)) from error
        finally:
            connection.close()

    def complete(
        self, prompt: str | Sequence[int], max_tokens: int = 16, timeout_s: float = REQUEST_TIMEOUT_S, **fields: object
    ) -> dict[str, Any]:
        """A greedy completion.

        Args:
            prompt: text, or token ids.
            max_tokens: exactly how many are generated.
            timeout_s: how long to wait.
            fields: further fields of the request.

        Returns:
            The answer as parsed; ``token_ids_of`` finds the tokens in it.

        Raises:
            Unavailable: no answer.
            InvalidArgument: an answer other than 200.
        """
        body = {
            "model": self.spec.served_name,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }
        status, answer = self.call("POST", "/v1/completions", body, timeout_s)
        if status != http.client.OK:
            raise InvalidArgument("the engine refuses", status=status, answer=answer[:500].decode(errors="replace"))
        parsed: dict[str, Any] = json.loads(answer)
        return parsed

    def metrics(self) -> dict[str, float]:
        """Its Prometheus samples, those of one name added up."""
        totals: dict[str, float] = {}
        for line in self.call("GET", "/metrics")[1].decode().splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                totals[name] = totals.get(name, 0.0) + float(value)
        return totals

    def reset_prefix_cache(self, *, connector: bool = False) -> None:
        """Drop the engine's own cache.

        Args:
            connector: also what vLLM's offloading keeps in host memory.

        Raises:
            InvalidArgument: it does not, for requests are running.
        """
        status, answer = self.call("POST", f"/reset_prefix_cache{'?reset_external=true' * connector}")
        if status != http.client.OK:
            raise InvalidArgument("the engine does not reset its cache", status=status, answer=answer[:200].decode())

    def kill(self) -> None:
        """Kill all processes of the engine."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self._keeper.kill()
        self._keeper.communicate()
        self.process.wait(STOP_TIMEOUT_S)

    def pause(self) -> None:
        """Pause all its processes (SIGSTOP)."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let the processes of the engine continue."""
        os.killpg(self.process.pid, signal.SIGCONT)


def token_ids_of(answer: Mapping[str, Any]) -> list[int]:
    """The generated tokens of a completion's only choice."""
    return list(answer["choices"][0]["token_ids"])


class EngineBed:
    """Starts engines and surely ends them. A context manager.

    Args:
        folder: where logs go.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._engines: dict[str, ServedEngine] = {}

    def start(self, *specs: ServeSpec, timeout_s: float = START_TIMEOUT_S) -> ServedEngine:
        """Start engines, all at once, and wait until they serve.

        Returns:
            The first of them; ``engine`` finds the others.

        Raises:
            Internal: one ended at its start.
            DeadlineExceeded: one did not serve in time.
        """
        started = [self.begin(spec) for spec in specs]
        for engine in started:
            self.await_healthy(engine, timeout_s)
        return started[0]

    def begin(self, spec: ServeSpec) -> ServedEngine:
        """Start an engine without waiting for it.

        Raises:
            InvalidArgument: one of this name runs.
        """
        if spec.name in self._engines:
            raise InvalidArgument("an engine of this name runs", name=spec.name)
        self.folder.mkdir(parents=True, exist_ok=True)
        log_path = self.folder / f"{spec.name}.log"
        port = free_port(spec.host) if spec.launcher is None else _LAUNCHED_PORT
        with log_path.open("ab") as log:
            log_start = log.seek(0, os.SEEK_END)
            if spec.launcher is not None:
                variables = [f"{name}={value}" for name, value in spec.variables().items() if os.environ.get(name) != value]
                command = ["setsid", "env", *variables, *spec.command(port)]
                process = spec.launcher(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            else:
                process = DaemonLaunchers.engines(
                    spec.command(port), stdout=log, stderr=log, env=spec.variables(), new_session=True
                )
        engine = ServedEngine(spec, port, process, log_path, log_start)
        self._engines[spec.name] = engine
        return engine

    def await_healthy(self, engine: ServedEngine, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until an engine serves.

        Raises:
            Internal: it ended.
            DeadlineExceeded: it did not serve in time.
        """
        end_s = time.monotonic() + timeout_s
        while not engine.is_healthy():
            tail = "\n".join(engine.log().splitlines()[-_SHOWN_LINES:])
            if engine.process.poll() is not None:
                self.kill(engine.spec.name)
                raise Internal(f"engine {engine.spec.name} ended at start: {tail}")
            if time.monotonic() > end_s:
                self.kill(engine.spec.name)
                raise DeadlineExceeded(f"engine {engine.spec.name} does not serve after {timeout_s:.0f} s: {tail}")
            time.sleep(_POLL_S)

    def engine(self, name: str) -> ServedEngine:
        """A running one."""
        return self._engines[name]

    def __iter__(self) -> Iterator[ServedEngine]:
        return iter(list(self._engines.values()))

    def stop(self, name: str) -> None:
        """Stop an engine gracefully."""
        self._engines[name].process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._engines[name].process.wait(STOP_TIMEOUT_S)
        self.kill(name)

    def kill(self, name: str) -> None:
        """Kill an engine with all its processes."""
        self._engines.pop(name).kill()

    def close(self) -> None:
        """End all engines."""
        for engine in self:
            with contextlib.suppress(ProcessLookupError):
                engine.process.terminate()
        for engine in self:
            self.stop(engine.spec.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


_LAUNCHED_PORT = 8_000
"""Port of engines with a launcher: each is on a separate host."""
