"""A bed for timed engine runs: daemons and engines on the hosts of a lab, and the contexts of all agents in storage.

As in the paper, nothing is cached in DRAM: blocks leave a node's memory after their last use, so that all
context comes over storage links at every turn.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvstore.core.spec import CacheSpec
from kvstore.dualpath.scheduler import SchedulerLimits
from kvstore.embedded.cluster import DaemonHost, LocalCluster, NodeSpec
from kvstore.netlab.bed import METADATA_HOST, LabBed
from kvstore.netlab.lab import LabHost, NetLab
from kvstore.roofline.calibration import ALPHA_S, BETA_S
from kvstore.roofline.engine_model import EngineModel, PrefillChunk, Scale
from kvstore.roofline.hardware import gpu_named
from kvstore.roofline.models import model_named
from netlab.agents import Trajectory

MIB = 1 << 20
BENCHMARKS = Path(__file__).resolve().parent.parent
_ANSWER_S = 90.0
BYTES_PER_MBIT = 125_000.0
PREFILL_BUFFER, DECODE_BUFFER = 288 * MIB, 512 * MIB
"""Arena of a prefill and of a decode host, for blocks in transit. A dilation above 1 makes blocks larger and requires more."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The assumed engines of a bed. All of a host's GPUs are one engine.

    Attributes:
        model: by name.
        gpu: by name.
        gpus: of a host.
        snic_bytes_per_s: the real storage link of a host, of which the lab's is the emulation.
        dilation: factor by which times are longer than in reality.
        block_tokens: tokens of a block.
        layers_together: number of the model's layers that are one in the lab.
        in_flight: requests that a prefill engine serves at once: they hold its buffers.
        loads: number of requests that load at the same time, in order of arrival; the others wait, or are computed.
    """

    model: str = "qwen2.5-32b"
    gpu: str = "h200"
    gpus: int = 8
    snic_bytes_per_s: float = 12.5e9
    dilation: float = 1.0
    block_tokens: int = 128
    layers_together: int = 2
    in_flight: int = 4
    loads: int = 4

    def scale(self, bed: LabBed) -> Scale:
        """By which the lab's links are those of reality."""
        return Scale.for_link(self.snic_bytes_per_s, bed.snic_mbit * BYTES_PER_MBIT, self.dilation)

    def engine(self, bed: LabBed) -> EngineModel:
        """How long things take."""
        return EngineModel(model_named(self.model), gpu_named(self.gpu), self.gpus, self.gpus, self.scale(bed))

    def spec(self, bed: LabBed) -> CacheSpec:
        """The namespace: Layer blocks of scaled size."""
        engine = self.engine(bed)
        size = engine.model.layer_token_bytes * self.block_tokens * self.layers_together * engine.scale.bytes
        layers = math.ceil(engine.model.layers / self.layers_together)
        return CacheSpec(
            model=self.model, block_tokens=self.block_tokens, layers=layers, layer_block_bytes=max(64, round(size / 8) * 8)
        )


class EngineProcess:
    """An engine on a host, and the thread that reads its events."""

    def __init__(
        self, host: LabHost, argv: Sequence[str], log: Path, events: queue.SimpleQueue[tuple[str, dict[str, Any]]]
    ) -> None:
        self.name = host.name
        self._log = log
        self._events = events
        with log.open("ab") as stderr:
            self._process = host.popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, cwd=BENCHMARKS)
        self._reader = threading.Thread(target=self._read, name=f"read-{host.name}", daemon=True)
        self._reader.start()

    def tell(self, **command: object) -> None:
        """Sends a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait(_ANSWER_S)
        self._reader.join(_ANSWER_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # a command that it did not read any more
                pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._events.put((self.name, json.loads(line)))
        self._events.put((self.name, {"did": "died", "error": self._log.read_text(errors="replace")[-3000:]}))


class EngineBed:
    """A running bed. A context manager.

    Args:
        bed: hosts and rates.
        settings: the engines.
        made: the agents; whole blocks of their first contexts are stored before anything runs.
        seed: of all tokens.
        growth_blocks: space in storage for the blocks that runs add.
        scratch: folder for volumes; None: a temporary one.
    """

    def __init__(
        self,
        bed: LabBed,
        settings: EngineSettings,
        made: Sequence[Trajectory],
        *,
        seed: int = 1,
        growth_blocks: int = 4096,
        scratch: Path | None = None,
    ) -> None:
        self.bed = bed
        self.settings = settings
        self.spec = settings.spec(bed)
        self.engine = settings.engine(bed)
        self.contexts = [one.context for one in made]
        self._most_tokens = max(one.end for one in made)
        self.seed = seed
        self.limits = self._scheduler_limits(made)
        self._growth_blocks = growth_blocks
        self._scratch = scratch
        self._stack = ExitStack()
        self.lab = NetLab(bed.hosts())
        self.events: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
        self.engines: dict[str, EngineProcess] = {}
        self.router: EngineProcess
        """Calls the metadata server's scheduler if a run asks for it."""

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def tell_all(self, **command: object) -> list[dict[str, Any]]:
        """A command for all engines; waits for an answer of each. For times in which nothing else is under way."""
        for engine in self.engines.values():
            engine.tell(**command)
        return [self.next_event(_ANSWER_S)[1] for _ in self.engines]

    def next_event(self, timeout_s: float) -> tuple[str, dict[str, Any]]:
        """The next event of any engine: (host, event).

        Raises:
            queue.Empty: none in time.
            SystemExit: an engine failed or died.
        """
        name, event = self.events.get(timeout=timeout_s)
        if event["did"] in ("failed", "died"):
            sys.exit(f"the engine on {name} {event['did']}: {event['error']}")
        return name, event

    # ---------------------------------------------------------------- building
    def _build(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvstore-engines-", dir=self._scratch))
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self._stack.enter_context(self.lab)
        metadata = self.lab.host(METADATA_HOST)
        place = DaemonHost(metadata.compute_ip, metadata.popen)
        limits = {"alpha_tokens": str(self.limits.alpha_tokens), "beta_tokens": str(self.limits.beta_tokens)}
        self.cluster = self._stack.enter_context(
            LocalCluster(self._nodes(), self.folder, metadata_settings=tuple(limits.items()), metadata_host=place)
        )
        self._settings_path = self.folder / "engines.json"
        self._settings_path.write_text(json.dumps(self._engine_settings()), encoding="utf-8")
        self._store()
        for role, names in (("prefill", self.bed.prefill_hosts), ("decode", self.bed.decode_hosts)):
            for name in names:
                self.engines[name] = self._start(role, name)
        self.router = self._start("route", METADATA_HOST)
        for _ in (*self.engines, METADATA_HOST):
            self.next_event(_ANSWER_S)

    def _engine_settings(self) -> dict[str, object]:
        settings, scale = self.settings, self.engine.scale
        spec = self.spec
        return {
            "metadata": self.cluster.metadata_address,
            "spec": {
                "model": spec.model,
                "block_tokens": spec.block_tokens,
                "layers": spec.layers,
                "layer_block_bytes": spec.layer_block_bytes,
            },
            "seed": self.seed,
            "contexts": self.contexts,
            "in_flight": settings.in_flight,
            "loads": settings.loads,
            "most_blocks": self._most_blocks,
            "groups": {
                "prefill": dict.fromkeys(self.bed.prefill_hosts, 0),
                "decode": {name: int(self.engine.kv_space_bytes / self.engine.token_bytes) for name in self.bed.decode_hosts},
            },
            "engine": {
                "model": settings.model,
                "gpu": settings.gpu,
                "gpus": settings.gpus,
                "dilation": scale.dilation,
                "bytes": scale.bytes,
            },
        }

    @property
    def _most_blocks(self) -> int:
        return self._most_tokens // self.spec.block_tokens + 1

    def _argv(self, role: str, name: str) -> list[str]:
        node = "" if role == "route" else self.cluster.node(name).local_socket
        return [sys.executable, "-m", "netlab.engines", str(self._settings_path), role, node]

    def _start(self, role: str, name: str) -> EngineProcess:
        engine = EngineProcess(self.lab.host(name), self._argv(role, name), self.folder / f"engine-{name}.log", self.events)
        self._stack.callback(engine.close)
        return engine

    def _store(self) -> None:
        """On the storage host itself, then with its DRAM emptied by a restart."""
        name = self.bed.storage_hosts[0]
        storer = EngineProcess(self.lab.host(name), self._argv("store", name), self.folder / "store.log", self.events)
        try:
            self.stored_blocks = int(self.next_event(_ANSWER_S)[1]["blocks"])
        finally:
            storer.close()
        self.events.get(timeout=_ANSWER_S)  # its end
        self.cluster.stop(name)
        self.cluster.start_node(name)

    def _scheduler_limits(self, made: Sequence[Trajectory]) -> SchedulerLimits:
        """As the paper profiles them: tokens that a storage link reads in 3 s, and that an engine processes in 5 s."""
        read_rate = self.settings.snic_bytes_per_s / self.engine.model.token_bytes
        prompts = [(one.known(0), one.prompt(0)) for one in made]
        seconds = sum(self.engine.prefill_seconds((PrefillChunk(known, prompt - known),)) for known, prompt in prompts)
        computed = sum(prompt for _, prompt in prompts) / seconds * self.settings.dilation
        return SchedulerLimits(int(ALPHA_S * read_rate), int(BETA_S * computed))

    # ---------------------------------------------------------------- nodes
    def _nodes(self) -> list[NodeSpec]:
        slot = self.spec.block_bytes + 8192
        blocks = sum(context // self.spec.block_tokens for context in self.contexts) + self._growth_blocks
        shared = {"cache_loads": "false", "load_window": str(4 * MIB), "prefault": "false"}
        links = {
            "storage_bandwidth": str(int(self.bed.snic_mbit * BYTES_PER_MBIT)),
            "compute_bandwidth": str(int(self.bed.cnic_mbit * BYTES_PER_MBIT)),
        }
        nodes = [
            self._node(name, "storage", 256 * MIB, 0 if number else int(blocks * slot * 1.1) + 128 * MIB, None, shared)
            for number, name in enumerate(self.bed.storage_hosts)
        ]
        larger = max(1, round(self.settings.dilation))
        prefill_buffer, decode_buffer = PREFILL_BUFFER * larger, DECODE_BUFFER * larger
        prefill = {**shared, **links, "prefill_buffer": str(prefill_buffer)}
        nodes += [self._node(name, "prefill", prefill_buffer + 96 * MIB, 0, None, prefill) for name in self.bed.prefill_hosts]
        decode = {**shared, **links, "prefill_buffer": str(decode_buffer), "decode_buffer": str(decode_buffer)}
        storage = self.bed.storage_hosts[0]
        nodes += [self._node(name, "decode", decode_buffer + 256 * MIB, 0, storage, decode) for name in self.bed.decode_hosts]
        return nodes

    def _node(self, name: str, role: str, dram: int, nvme: int, behind: str | None, settings: Mapping[str, str]) -> NodeSpec:
        host = self.lab.host(name)
        more = {"storage_listen": f"{host.storage_ip}:0", **settings}
        place = DaemonHost(host.compute_ip, host.popen)
        return NodeSpec(name, (role,), dram, nvme, write_back_to=behind, settings=tuple(more.items()), place=place)
