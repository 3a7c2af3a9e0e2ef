"""Seconds of prefill and decode steps of one engine: the slower of computing and reading memory, plus exchanges between GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.core.errors import InvalidArgument
from kvstore.recompute.prefill_estimate import pairs
from kvstore.roofline.calibration import StepTimes
from kvstore.roofline.hardware import HBM_USABLE, MBU, MFU_DENSE, MFU_EXPERT_PARALLEL, Gpu, exchange_seconds
from kvstore.roofline.models import Model


@dataclass(frozen=True, slots=True)
class Scale:
    """Time and bytes, scaled together, so that slow emulated links see the ratios of fast ones.

    A run with this scale takes ``dilation`` times as long and moves ``bytes`` times as many bytes; a link of real rate r must be
    emulated at r * bytes / dilation.
    """

    dilation: float = 1.0
    bytes: float = 1.0

    def __post_init__(self) -> None:
        if not (0 < self.dilation < math.inf and 0 < self.bytes < math.inf):
            raise InvalidArgument("dilation and bytes must be above zero and finite", dilation=self.dilation, bytes=self.bytes)

    @classmethod
    def for_link(cls, real_rate: float, emulated_rate: float, dilation: float = 1.0) -> Scale:
        """Return the scale that emulates a link of ``real_rate`` (bytes/s) at ``emulated_rate``."""
        if not (real_rate > 0 and emulated_rate > 0):
            raise InvalidArgument("rates must be above zero", real=real_rate, emulated=emulated_rate)
        return cls(dilation, emulated_rate * dilation / real_rate)

    def rate(self, real_rate: float) -> float:
        """Return the rate at which a link of ``real_rate`` is emulated."""
        return real_rate * self.bytes / self.dilation


REAL_SIZE = Scale()


class PrefillChunk(NamedTuple):
    """Tokens of one request in a forward batch."""

    cached: int
    """Context tokens before the new tokens, whose KV is loaded."""
    new: int
    """New tokens to compute."""


@dataclass(frozen=True, slots=True)
class EngineModel:
    """One engine: ``tensor_parallel`` GPUs that compute as one, in a group that shares the experts.

    Attributes:
        model: its model.
        gpu: its GPU.
        tensor_parallel: GPUs of this engine.
        group_gpus: GPUs over which experts are spread; the engine's own for dense models.
        scale: factor of all seconds and bytes that this object returns.
        measured: step times of a real engine, which replace the roofline in prefill.
    """

    model: Model
    gpu: Gpu
    tensor_parallel: int = 1
    group_gpus: int = 1
    scale: Scale = REAL_SIZE
    measured: StepTimes | None = None

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1 or self.group_gpus < self.tensor_parallel:
            raise InvalidArgument(
                "group_gpus must be at least tensor_parallel, and both at least 1",
                engine=self.tensor_parallel,
                group=self.group_gpus,
            )

    # ---- memory ----

    @property
    def weight_bytes_per_gpu(self) -> float:
        """Bytes of weights per GPU, not scaled."""
        model = self.model
        if not model.expert_parallel:
            return model.parameters * model.weight_bytes / self.tensor_parallel
        routed = model.parameters - model.shared_parameters
        return (model.shared_parameters / self.tensor_parallel + routed / self.group_gpus) * model.weight_bytes

    @property
    def kv_space_bytes(self) -> float:
        """HBM for KV beside the weights, scaled; 0 or negative: the model does not fit."""
        free = self.gpu.hbm_bytes * HBM_USABLE - self.weight_bytes_per_gpu
        return free * self.tensor_parallel * self.scale.bytes

    @property
    def token_bytes(self) -> float:
        """KV bytes per token, scaled."""
        return self.model.token_bytes * self.scale.bytes

    def layer_block_bytes(self, block_tokens: int) -> int:
        """Bytes per layer block, scaled; at least one."""
        return max(1, round(self.model.layer_token_bytes * block_tokens * self.scale.bytes))

    # ---- prefill ----

    @property
    def _prefill_flops_per_s(self) -> float:
        share = MFU_EXPERT_PARALLEL if self.model.expert_parallel else MFU_DENSE
        return share * self.gpu.peak_flops(self.model.weight_bytes) * self.tensor_parallel

    def prefill_seconds(self, batch: Iterable[PrefillChunk], group_tokens: float | None = None) -> float:
        """Return the seconds of one forward pass over all layers; 0 for an empty batch.

        Attention and shared weights run on the engine that holds the request. Routed experts run on all GPUs of the group, so
        their work is that of the group's mean. Exchanges between experts overlap with computation of the other half of the
        batch; only the rest counts.

        Args:
            batch: chunks of this engine.
            group_tokens: new tokens in the batches of all engines that share the experts; None: as many on each as on this one.
        """
        chunks = list(batch)
        tokens = sum(chunk.new for chunk in chunks)
        if not tokens:
            return 0.0
        if self.measured is not None:
            work = sum(pairs(chunk.cached, chunk.new) for chunk in chunks)
            times = self.measured
            return (times.fixed_s + times.token_s * tokens + times.pair_s * work) * self.scale.dilation
        model = self.model
        engines = self.group_gpus / self.tensor_parallel
        together = tokens * engines if group_tokens is None else group_tokens
        own = sum(model.own_flops(chunk.cached, chunk.new) for chunk in chunks)
        flops = own + model.routed_flops(together) / engines
        weights = self._weights_read_bytes(together)
        seconds = max(flops / self._prefill_flops_per_s, weights / self._memory_rate, model.layers * self._exchange_s)
        return seconds * self.scale.dilation

    def attention_seconds(self, chunk: PrefillChunk) -> float:
        """Return the seconds of attention over all layers: the unit of the compute quota of a batch."""
        if self.measured is not None:
            return self.measured.pair_s * pairs(chunk.cached, chunk.new) * self.scale.dilation
        return self.model.attention_flops(chunk.cached, chunk.new) / self._prefill_flops_per_s * self.scale.dilation

    # ---- decode ----

    @property
    def _memory_rate(self) -> float:
        return MBU * self.gpu.hbm_bandwidth * self.tensor_parallel

    @property
    def _exchange_s(self) -> float:
        return exchange_seconds(self.group_gpus) if self.model.expert_parallel else 0.0

    def _weights_read_bytes(self, group_tokens: float) -> float:
        """Weight bytes that a step reads on all GPUs of the engine: experts that no token chose are not read."""
        model = self.model
        if not model.expert_parallel:
            return model.parameters * model.weight_bytes
        untouched: float = (1 - model.experts_active / model.experts) ** group_tokens
        routed = (model.parameters - model.shared_parameters) / self.group_gpus * self.tensor_parallel
        return (model.shared_parameters + routed * (1 - untouched)) * model.weight_bytes

    def decode_bytes(self, sequences: float, context_tokens: float, group_sequences: float | None = None) -> float:
        """Return the HBM bytes that one decode step of this engine reads, not scaled; arguments as in ``decode_seconds``."""
        if sequences <= 0:
            return 0.0
        kv = self.model.layers * sequences * self.model.attention.read_bytes(int(context_tokens / sequences))
        return self._weights_read_bytes(sequences if group_sequences is None else group_sequences) + kv

    def prefill_bytes(self, batch: Iterable[PrefillChunk], group_tokens: float) -> float:
        """Return the HBM bytes that one forward pass of this engine reads at least, not scaled: weights and cached KV."""
        kv = sum(self.model.context_bytes(chunk.cached, chunk.new) for chunk in batch)
        return self._weights_read_bytes(group_tokens) + kv

    def decode_seconds(self, sequences: float, context_tokens: float, group_sequences: float | None = None) -> float:
        """Return the seconds of one decode step, which generates one token per sequence.

        Args:
            sequences: in this engine's batch.
            context_tokens: of all of them together.
            group_sequences: in the batches of all engines that share the experts; None: of this one alone.
        """
        if sequences <= 0:
            return 0.0
        model = self.model
        memory = self.decode_bytes(sequences, context_tokens, group_sequences) / self._memory_rate
        compute = model.linear_flops(sequences) / self._prefill_flops_per_s
        return (max(memory, compute) + model.layers * self._exchange_s) * self.scale.dilation
