"""What a step, an update and a weight sync cost: presets from roofline arithmetic, or numbers.

Decoding is bound by memory: each step reads the weights once and every K/V entry once. Time of one engine step with V
tokens computed and C K/V entries read, on `tp` GPUs of bandwidth W (bytes/s) and F flops:

    base        = 2 P / (tp W e_w) + launch + 2 layers * allreduce * [tp > 1]
    per_token   = 2 P / (tp F e_f)
    per_context = kv / (tp W e_w)         kv = 2 (K and V) * layers * kv_heads * head_dim * 2 bytes
    per_prefill = 2 P / (tp F e_f)        (attention's quadratic part is left out: at 2k prompt tokens some 5 %)

P parameters in bfloat16. The terms are added, not maximised: a small overestimate where compute and memory overlap, in
exchange for steps whose time can be summed in closed form. Training with activation checkpointing and a pass for the
old log-probs costs 6 P + 2 P + 2 P flops a token at `e_t` of the peak, plus a fixed part for optimiser and start. A
sync moves 2 P bytes at `SYNC` bytes/s into each worker, plus a second for pausing. K/V gets what is left of 90 % of the
memory after the weights and 4 GB of activations per GPU.

Efficiencies: e_w = 0.7 of the peak bandwidth and e_f = 0.5 of the peak flops in generation are what well-tuned engines
reach (vLLM and SGLang at batch sizes of tens to hundreds); e_t = 0.35 is a usual model-flops utilisation of FSDP or
Megatron at these sizes. Peaks: NVIDIA's data sheets (dense bfloat16, no sparsity): H100 SXM 989 Tflop/s, 3.35 TB/s,
80 GB; H800 likewise; H200 989 Tflop/s, 4.8 TB/s, 141 GB; H20 148 Tflop/s, 4.0 TB/s, 96 GB. Model shapes: their
configurations on the hub (Qwen2.5-7B, Llama-3.1-8B, Qwen2.5-14B, Qwen2.5-32B, Qwen2.5-72B; 1.5b is Qwen2.5-1.5B).
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.engine.simulated import StepCost
from stretto.errors import StrettoError, nearest

BANDWIDTH_SHARE, FLOPS_SHARE, TRAIN_SHARE = 0.7, 0.5, 0.35
LAUNCH, ALLREDUCE = (
    1.0e-3,
    12e-6,
)  # seconds: a step's fixed host part; one all-reduce of a few tokens over NVLink
SYNC, SYNC_BASE = 20e9, 1.0  # bytes/s into one worker, seconds
TRAIN_BASE = 3.0  # seconds: optimiser step, start and end of the pipeline


@dataclass(frozen=True, slots=True)
class Gpu:
    """Peaks: flops (dense bfloat16), bytes/s, bytes."""

    flops: float
    bandwidth: float
    memory: float


@dataclass(frozen=True, slots=True)
class Shape:
    """What matters of a model."""

    parameters: float
    layers: int
    kv_heads: int
    head_dim: int = 128

    @property
    def kv_bytes(self) -> int:
        """Of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


GPUS = {
    "h100": Gpu(989e12, 3.35e12, 80e9),
    "h800": Gpu(989e12, 3.35e12, 80e9),
    "h200": Gpu(989e12, 4.8e12, 141e9),
    "h20": Gpu(148e12, 4.0e12, 96e9),
}
SHAPES = {
    "1.5b": Shape(1.54e9, 28, 2),
    "7b": Shape(7.62e9, 28, 4),
    "8b": Shape(8.03e9, 32, 8),
    "14b": Shape(14.77e9, 48, 8),
    "32b": Shape(32.76e9, 64, 8),
    "72b": Shape(72.7e9, 80, 8),
}
PRESETS = tuple(f"{shape}-{gpu}" for shape in SHAPES for gpu in GPUS)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds: of an engine step, of an update (fixed and per token), of taking new weights; K/V entries that fit."""

    step: StepCost
    train_base: float
    train_per_token: float
    sync: float
    kv_tokens: int | None


def preset(name: str, tp: int, trainer_gpus: int) -> Costs:
    """The costs of a model on a GPU, "7b-h100" for instance, with `tp` GPUs per worker.

    Raises StrettoError for an unknown name, and where the weights do not fit.
    """
    if name not in PRESETS:
        raise StrettoError(f'cost.preset = "{name}": no such preset; {nearest(name, PRESETS)}')
    model, _, device = name.rpartition("-")
    shape, gpu = SHAPES[model], GPUS[device]
    weights = 2 * shape.parameters
    room = tp * (0.9 * gpu.memory - 4e9) - weights
    if room <= 0:
        raise StrettoError(
            f'cost.preset = "{name}": {weights / 1e9:.0f} GB of weights do not fit into cluster.tp = {tp} GPUs of '
            f"{gpu.memory / 1e9:.0f} GB; use more"
        )
    bandwidth = tp * gpu.bandwidth * BANDWIDTH_SHARE
    compute = 2 * shape.parameters / (tp * gpu.flops * FLOPS_SHARE)
    return Costs(
        step=StepCost(
            base=weights / bandwidth + LAUNCH + (2 * shape.layers * ALLREDUCE if tp > 1 else 0.0),
            per_token=compute,
            per_context=shape.kv_bytes / bandwidth,
            per_prefill=compute,
        ),
        train_base=TRAIN_BASE,
        train_per_token=10 * shape.parameters / (trainer_gpus * gpu.flops * TRAIN_SHARE),
        sync=SYNC_BASE + weights / SYNC,
        kv_tokens=int(room / shape.kv_bytes),
    )
