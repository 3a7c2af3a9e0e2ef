"""GPUs by their data sheets, and the share of these rates that engines reach.

The shares are constants of the whole model: none is tuned to a workload, a cluster or a published figure.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from kvstore.core.errors import NotFound

MFU_DENSE = 0.5
"""Share of peak that prefill of a dense model reaches. Large BF16 matrix products and FlashAttention on Hopper reach 0.6-0.75 of
the data sheet; norms, rotary embeddings, tensor-parallel reductions and ragged batches take the rest."""

MFU_EXPERT_PARALLEL = 0.15
"""Share of peak (FP8) that prefill of a mixture of experts spread over GPUs reaches. From DeepSeek's inference system overview
(2025): 73.7 thousand input tokens/s a node of eight H800, 56.3 % of them cached, are 4,030 computed tokens/s a GPU; times
2 * 37e9 FLOP a token that is 298 TFLOP/s of 1,979."""

MBU = 0.6
"""Share of HBM bandwidth that a whole decode step reaches. Single kernels reach 0.9 (FlashMLA: 3,000 of 3,350 GB/s), but a step
consists of many short kernels. With the latencies below it gives 18 tokens/s per user; the same overview says 20-22."""

HBM_USABLE = 0.9
"""Share of HBM for weights and KV: activations, graphs and communication buffers take the rest."""

EXCHANGE_S = MappingProxyType({8: 191e-6, 16: 313e-6, 32: 428e-6, 64: 487e-6, 128: 561e-6})
"""Seconds a mixture-of-experts layer spends in dispatch plus combine of 128 tokens per GPU, by GPUs in the group: DeepEP's
published low-latency figures on H800 with one 400 Gb/s NIC per GPU."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. FLOP/s are dense (no structured sparsity).

    Attributes:
        name: as named on the command line.
        bf16_flops: peak FLOP/s of 16-bit matrix products.
        fp8_flops: peak FLOP/s of 8-bit matrix products.
        hbm_bandwidth: bytes/s.
        hbm_bytes: capacity.
    """

    name: str
    bf16_flops: float
    fp8_flops: float
    hbm_bandwidth: float
    hbm_bytes: float

    def ridge(self, weight_bytes: float) -> float:
        """Return the FLOP per byte of HBM above which computing is slower than reading memory."""
        return self.peak_flops(weight_bytes) / self.hbm_bandwidth

    def peak_flops(self, weight_bytes: float) -> float:
        """Return the peak FLOP/s for weights of this many bytes per parameter."""
        return self.fp8_flops if weight_bytes <= 1 else self.bf16_flops


GPUS = MappingProxyType(
    {
        gpu.name: gpu
        for gpu in (
            Gpu("h100", 989e12, 1979e12, 3.35e12, 80e9),
            Gpu("h200", 989e12, 1979e12, 4.8e12, 141e9),
            Gpu("h20", 148e12, 296e12, 4.0e12, 96e9),
            Gpu("b200", 2250e12, 4500e12, 8.0e12, 180e9),
            Gpu("a100", 312e12, 312e12, 2.039e12, 80e9),  # without 8-bit floats: weights are widened, products run at 16 bit
            Gpu("l40s", 362e12, 733e12, 0.864e12, 48e9),
        )
    }
)


def gpu_named(name: str) -> Gpu:
    """Return a GPU of the catalog.

    Raises:
        NotFound: there is none of that name.
    """
    if name not in GPUS:
        raise NotFound(f"no GPU '{name}'; there are: {', '.join(GPUS)}")
    return GPUS[name]


def exchange_seconds(gpus: int) -> float:
    """Return the seconds of dispatch plus combine of one layer: the published figure of the next larger group of GPUs."""
    if gpus <= 1:
        return 0.0
    return next((seconds for size, seconds in EXCHANGE_S.items() if gpus <= size), EXCHANGE_S[128])
