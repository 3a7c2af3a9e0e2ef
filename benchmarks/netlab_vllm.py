"""Measure time to first token of a vLLM prefill engine and a vLLM decode engine, over both storage links against one.

Real vLLM engines, servers and clients run on emulated hosts: network namespaces with a storage link and a compute link each. Each
question is a context in storage plus a new tail; no engine cache and no other host's memory contains any of it. The prefill
engine loads the context by its policy, computes the tail and hands the prompt over. The measurement ends with the decode engine's
answer of one token. All policies must produce the same tokens.

Links are slow enough to be the bottleneck instead of the CPU. Computing this small model is faster than loading over these links,
so the figures do not compare loading with computing.

On two further beds one engine answers alone: by the connector, and by vLLM's own offloading with the store as its secondary tier.
The other host runs only a node: its storage link is that of an idle host. Requires root, iproute2 and vLLM.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import grpc

import harness
from harness import Figure, Options, Reference, Target
from kvproto.v1 import common_pb2, node_pb2, node_pb2_grpc
from kvstore.embedded.cluster import DaemonHost, LocalCluster, NodeSpec
from kvstore.lab.engine_bed import EngineBed, ServedEngine, ServeSpec, store_transfer, tier_transfer, token_ids_of
from kvstore.netlab import netns
from kvstore.netlab.bed import METADATA_HOST, LabBed
from kvstore.netlab.lab import NetLab, available
from kvstore.testing.tiny_models import TinyModel, make_model

MIB = 1 << 20
BLOCK = 32
MODEL = TinyModel(layers=8, heads=8, kv_heads=8)
KV_BYTES = MODEL.layers * 2 * MODEL.kv_heads * MODEL.head_dim * 4
"""KV bytes per token."""
PREFILL, DECODE, STORAGE = "prefill-0", "decode-0", "storage-0"
POLICIES = ("prefill_only", "split", "shorter_queue")
_BUSY = (
    "kv_offload_tiering_active_cascade_jobs",
    "kv_offload_tiering_active_promotion_jobs",
    "kv_offload_cpu_cache_write_usage_perc",
    "kv_offload_cpu_cache_read_usage_perc",
)
"""Gauges of vLLM that are 0 while its offloading is idle."""
_CHECK_S, _QUIET_CHECKS = 0.05, 4
_CALL_S = 60.0


@dataclass(slots=True)
class Answer:
    """Measurement of one question.

    Attributes:
        seconds: time to first token.
        load_seconds: the part of it that loaded the prefix.
        handoff_seconds: duration of the handoff, which overlaps with the load.
        bytes: bytes of the prefix by path.
        token: the first token.
    """

    seconds: float
    load_seconds: float
    handoff_seconds: float
    bytes: dict[str, int]
    token: int


@dataclass
class Bed:
    """Hosts, servers and engines that prefill and decode, as a context manager."""

    links: LabBed
    context_tokens: int
    load_mode: str
    layer_group: int
    folder: Path
    _stack: ExitStack = field(default_factory=ExitStack)
    _engine_hosts: ClassVar[tuple[str, ...]] = (PREFILL, DECODE)

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def _build(self) -> None:
        self.lab = self._stack.enter_context(NetLab(self.links.hosts()))
        metadata = self.lab.host(METADATA_HOST)
        fd = self._stack.enter_context((netns.NETNS_DIR / metadata.namespace).open("rb")).fileno()
        # requests come from the metadata server's host, whose links are idle
        self._asking = self._stack.enter_context(ThreadPoolExecutor(4, initializer=netns.enter, initargs=(fd,)))
        place = DaemonHost(metadata.compute_ip, metadata.popen)
        self.cluster = self._stack.enter_context(LocalCluster(self._nodes(), self.folder / "store", metadata_host=place))
        self.engines = self._stack.enter_context(EngineBed(self.folder / "engines"))
        model = make_model(self.folder / "model", MODEL)
        started = [self.engines.begin(self._engine(name, model, core)) for core, name in enumerate(self._engine_hosts)]
        for engine in started:
            self._asking.submit(self.engines.await_healthy, engine).result()

    def _nodes(self) -> list[NodeSpec]:
        prompt = (self.context_tokens + 512) * KV_BYTES
        links = self.links
        rates = {
            "storage_bandwidth": str(int(links.snic_mbit * 125_000)),
            "compute_bandwidth": str(int(links.cnic_mbit * 125_000)),
        }
        passing = {"cache_loads": "false", "prefill_buffer": str(prompt), "decode_buffer": str(prompt), **rates}
        contexts = int(6 * prompt) + 64 * MIB
        return [
            self._node(STORAGE, "storage", 2 * prompt, contexts, {}),
            self._node(PREFILL, "prefill", 3 * prompt, 0, passing),
            self._node(DECODE, "decode", 3 * prompt, 0, passing),
        ]

    def _node(self, name: str, role: str, dram: int, nvme: int, settings: dict[str, str]) -> NodeSpec:
        host = self.lab.host(name)
        more = {"storage_listen": f"{host.storage_ip}:0", "load_window": str(4 * MIB), **settings}
        return NodeSpec(
            name,
            (role,),
            dram,
            nvme,
            write_back_to=None if nvme else STORAGE,
            settings=tuple(more.items()),
            place=DaemonHost(host.compute_ip, host.popen),
        )

    def _engine(self, name: str, model: Path, core: int) -> ServeSpec:
        return self._spec(name, model, core, self._transfer(name))

    def _transfer(self, name: str) -> dict[str, Any]:
        role = {PREFILL: "kv_producer", DECODE: "kv_consumer"}[name]
        options: dict[str, Any] = {"prompt_deadline_s": 60.0, "load_deadline_s": 60.0, "handoff_deadline_s": 60.0}
        if name == PREFILL:
            options |= {"load_mode": self.load_mode, "path_layer_group": self.layer_group}
        return store_transfer(self.cluster.metadata_address, self.cluster.node(name).local_socket, role=role, **options)

    def _spec(self, name: str, model: Path, core: int, store: dict[str, Any]) -> ServeSpec:
        host = self.lab.host(name)
        return ServeSpec(
            name,
            model,
            store=store,
            core=core,
            kv_cache_bytes=(self.context_tokens + 1024) * KV_BYTES,
            block_tokens=BLOCK,
            max_tokens=self.context_tokens + 512,
            arguments=("--max-num-batched-tokens", str(self.context_tokens + 512)),
            environment={"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"},
            host=host.compute_ip,
            launcher=host.popen,
        )

    # ---- questions ----
    def ask(self, prompt: Sequence[int], policy: str) -> Answer:
        """Send one question through both engines with empty caches."""
        engines = [self.engines.engine(name) for name in (PREFILL, DECODE)]
        for engine in engines:
            self._asking.submit(engine.reset_prefix_cache).result()
        prefill, decode = engines
        before = self._counts(prefill)
        transfer = uuid.uuid4().hex
        prefill_params = {"do_remote_decode": True, "transfer_id": transfer, "decode_node": DECODE, "path_policy": policy}
        decode_params = {"do_remote_prefill": True, "transfer_id": transfer}
        began_s = time.perf_counter()
        first = self._asking.submit(prefill.complete, prompt, 1, kv_transfer_params=prefill_params)
        second = self._asking.submit(decode.complete, prompt, 1, kv_transfer_params=decode_params)
        (token,) = token_ids_of(second.result())
        seconds = time.perf_counter() - began_s
        if token_ids_of(first.result()) != [token]:
            sys.exit("WRONG TOKEN: the two engines do not agree")
        grown = {name: value - before.get(name, 0) for name, value in self._counts(prefill).items()}
        return Answer(seconds, grown.get("load_seconds", 0), grown.get("handoff_seconds", 0), bytes_by_path(grown), token)

    def _counts(self, engine: ServedEngine) -> dict[str, float]:
        found: dict[str, float] = self._asking.submit(engine.metrics).result()
        return {name.removeprefix("vllm:kvstore_").removesuffix("_total"): value for name, value in found.items()}

    def settle(self) -> None:
        """Wait until all computed blocks are in storage, and evict them everywhere else."""
        self._asking.submit(self._settle).result()

    def _settle(self) -> None:
        for name in (PREFILL, DECODE, STORAGE):
            with grpc.insecure_channel(self.cluster.node(name).address) as channel:
                node = node_pb2_grpc.NodeStub(channel)
                if not node.Flush(node_pb2.FlushRequest(timeout_ms=int(_CALL_S * 1000)), timeout=_CALL_S + 1).complete:
                    sys.exit(f"node {name} does not store the computed blocks")
                node.Evict(node_pb2.EvictRequest(operation_id=bytes(16), tier=common_pb2.TIER_DRAM), timeout=_CALL_S)


class ConnectorBed(Bed):
    """Hosts, servers and one engine with the connector. It prefills and decodes itself."""

    _engine_hosts = (PREFILL,)

    def _transfer(self, name: str) -> dict[str, Any]:
        return store_transfer(
            self.cluster.metadata_address,
            self.cluster.node(name).local_socket,
            load_deadline_s=60.0,
            read_ahead_requests=0,
            pinned_share=1.0,  # a prompt fills most of this engine's cache
            weights_epoch_file=self._epoch_file(),
        )

    def _epoch_file(self) -> str:
        """A file with an epoch of the same name after each reset, so that the contexts are found again."""
        path = self.folder / "weights-epoch"
        path.write_text("bench")
        return str(path)

    def ask(self, prompt: Sequence[int], policy: str) -> Answer:
        """Send one question to the engine with empty caches."""
        engine = self.engines.engine(PREFILL)
        self._empty(engine)
        before = self._counts(engine)
        began_s = time.perf_counter()
        answer = self._asking.submit(engine.complete, prompt, 1, kv_transfer_params={"path_policy": policy}).result()
        seconds = time.perf_counter() - began_s
        self._await_stores(engine)
        grown = {name: value - before.get(name, 0) for name, value in self._counts(engine).items()}
        return Answer(seconds, self._load_seconds(grown), 0.0, bytes_by_path(grown), token_ids_of(answer)[0])

    def _empty(self, engine: ServedEngine) -> None:
        self._asking.submit(engine.reset_prefix_cache).result()

    def _await_stores(self, engine: ServedEngine) -> None:
        """Wait until a reset of the engine's cache disturbs no store. The connector finishes its stores without it."""

    def _load_seconds(self, grown: Mapping[str, float]) -> float:
        return grown.get("load_seconds", 0)


class TierBed(ConnectorBed):
    """Hosts, servers and one engine with the store as the secondary tier of vLLM's offloading."""

    def _transfer(self, name: str) -> dict[str, Any]:
        return tier_transfer(
            self.cluster.metadata_address,
            self.cluster.node(name).local_socket,
            (self.context_tokens + 1024) * KV_BYTES,
            load_deadline_s=60.0,
            weights_epoch_file=self._epoch_file(),
        )

    def _empty(self, engine: ServedEngine) -> None:
        self._asking.submit(partial(engine.reset_prefix_cache, connector=True)).result()

    def _load_seconds(self, grown: Mapping[str, float]) -> float:
        return grown.get("kv_offload_tiering_read_time", 0)

    def _await_stores(self, engine: ServedEngine) -> None:
        """Wait until no pages are copied or stored, because a reset would fail."""
        end_s = time.monotonic() + _CALL_S
        quiet = 0
        while quiet < _QUIET_CHECKS:
            if time.monotonic() > end_s:
                sys.exit("the engine does not end its stores")
            counts = self._counts(engine)
            busy = any(counts.get(name, 0) for name in _BUSY)
            quiet = 0 if busy else quiet + 1
            time.sleep(_CHECK_S)

    def _counts(self, engine: ServedEngine) -> dict[str, float]:
        found = super()._counts(engine)
        return {name.removeprefix("vllm:").removeprefix("tier_"): value for name, value in found.items()}


def bytes_by_path(counts: Mapping[str, float]) -> dict[str, int]:
    """Return the loaded bytes by path."""
    return {path: int(counts.get(f"load_{path}_path_bytes", 0)) for path in ("local", "prefill", "decode", "relay")}


@dataclass(frozen=True)
class Series:
    """The figures of one kind of bed."""

    bed: type[Bed]
    name: str
    title: str
    policies: tuple[str, ...]
    most: float
    """Target of ``split``: most time, relative to one link."""


SERIES = {
    "pd": Series(Bed, "netlab_vllm_ttft", "vLLM prefill and decode", POLICIES, 0.75),
    "connector": Series(ConnectorBed, "netlab_vllm_connector_ttft", "vLLM with the connector, without roles", POLICIES[:2], 0.6),
    "tier": Series(TierBed, "netlab_vllm_tier_ttft", "vLLM with the secondary tier", POLICIES[:2], 0.6),
}


def measure(options: Options, folder: Path, series: Series) -> None:
    """Compute and store the contexts once. Each round then sends one question per context with each policy.

    Args:
        options: of the benchmark.
        folder: for logs and data.
        series: what to measure.
    """
    extra = options.extra
    tokens = options.pick(full=2016, quick=1024, smoke=512)
    links = LabBed(1, 1, 1, extra.snic_mbit, extra.snic_mbit * 5, extra.snic_mbit * 5)
    print(links.describe(), flush=True)
    dice = random.Random(options.seed)
    contexts = [dice.choices(range(32, 127), k=tokens) for _ in range(2)]
    answers: dict[str, list[Answer]] = {policy: [] for policy in POLICIES}
    first_tokens: dict[int, int] = {}
    policies = series.policies
    with series.bed(links, tokens, extra.load_mode, extra.layer_group, folder) as bed:
        for context in contexts:
            bed.ask(context + dice.choices(range(32, 127), k=BLOCK), "prefill_only")
        bed.settle()
        turn = 0

        def question(policy: str) -> float:
            nonlocal turn
            round_number = turn // len(policies)
            turn += 1
            tail = random.Random(round_number).choices(range(32, 127), k=3 * BLOCK)
            answer = bed.ask(contexts[round_number % 2] + tail, policy)
            if first_tokens.setdefault(round_number, answer.token) != answer.token:
                sys.exit("WRONG TOKEN: the policies do not agree")
            answers[policy].append(answer)
            loaded = sum(answer.bytes.values())
            if loaded < tokens // BLOCK * BLOCK * KV_BYTES:
                sys.exit(f"only {loaded} bytes of the context were loaded: {answer}")
            bed.settle()
            return answer.seconds

        samples = harness.interleave({policy: partial(question, policy) for policy in policies}, options.repetitions)
    shared: dict[str, Any] = {
        "bed": "1P1D",
        "snic_mbit": links.snic_mbit,
        "cnic_mbit": links.cnic_mbit,
        "context_tokens": tokens,
        **({"load_mode": extra.load_mode, "layer_group": extra.layer_group} if series.bed is Bed else {}),
    }
    _keep_figures(options, series, shared, samples, answers)


def _keep_figures(
    options: Options,
    series: Series,
    shared: dict[str, Any],
    samples: Mapping[str, Sequence[float]],
    answers: Mapping[str, Sequence[Answer]],
) -> None:
    """Record the figure of each policy.

    Args:
        options: of the benchmark.
        series: the measured times.
        shared: parameters of all figures.
        samples: by policy: times to first token.
        answers: by policy: answers, also those of warm-up rounds before ``samples``.
    """
    policies = series.policies
    for policy in policies:
        measured = answers[policy][-len(samples[policy]) :]
        share = statistics.median(one.load_seconds / one.seconds for one in measured)
        handed = statistics.median(one.handoff_seconds for one in measured)
        over = {path: statistics.median(one.bytes[path] for one in measured) / 1e6 for path in measured[0].bytes}
        options.keep(
            Figure(
                series.name,
                f"{series.title} on emulated hosts: time to first token",
                shared | {"policy": policy},
                "s",
                True,
            ),
            samples[policy],
            peer=None if policy == policies[0] else Reference(policies[0], samples[policies[0]]),
            target=Target("peer", series.most) if policy == "split" else None,
            transport="tcp over shaped veth links",
            verified=True,
            notes=f"share of loading {share:.2f}; "
            + (f"handoff {handed:.2f} s, overlapping; " if handed else "")
            + "MB by path "
            + ", ".join(f"{path} {size:.1f}" for path, size in over.items() if size),
        )


def main() -> None:
    """Run the chosen measurements."""

    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--snic-mbit", type=float, default=200.0, help="rate of each storage link (default 200); compute: 5x")
        parser.add_argument("--load-mode", default="layerwise", help="mode of the prefill engine (default layerwise)")
        parser.add_argument("--beds", nargs="+", choices=SERIES, default=list(SERIES), help="beds (default all)")
        parser.add_argument("--layer-group", type=int, default=0, help="layers read together (default 0: whole blocks)")

    options = harness.options("netlab_vllm", __doc__, arguments=arguments)
    if (reason := available()) is not None:
        sys.exit(f"SKIPPED: {reason}")
    with tempfile.TemporaryDirectory(prefix="kvstore-netlab-vllm-", dir=options.scratch) as folder:
        for bed in options.extra.beds:
            measure(options, Path(folder) / bed, SERIES[bed])


if __name__ == "__main__":
    main()
