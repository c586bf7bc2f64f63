"""The measured part of `bench prefill --config`: prompts of random ids over random weights on GPUs.

The floor of a length adds to the products of its rows (floor.prefill_floor) what attention and the indexer must
multiply. `families` holds the same apart, for the table that a profile gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsuf.cli.bench.floor import prefill_floor
from dsuf.cli.bench.gpu_decode import Described, named, read_ceiling
from dsuf.errors import ConfigError
from dsuf.spec import Spec

if TYPE_CHECKING:
    from dsuf.engine.options import EngineOptions

CHUNK = 4096  # rows of a pass
PROFILED = 65536  # tokens of the profiled prompt at most
FAMILIES = {
    "experts": ("grouped.",),
    "dense products": ("dense.",),
    "attention": ("chunk.attend", "attend"),
    "indexer": ("chunk.scores", "chunk.select", "index.", "select"),
    "streams": ("chunk.seam", "chunk.mix", "chunk.coefficients", "embed"),
}


@dataclass(frozen=True)
class Outcome:
    """What a bench object is made from."""

    gpu: dict[str, str | int]
    samples: list[dict[str, float]]
    ceilings: dict[str, float]
    floors: dict[int, dict[str, float]]
    kernels: dict[str, tuple[int, float]]  # launches and microseconds of the profiled prompt
    families: dict[str, dict[str, float]]
    memory: dict[str, int]  # of all GPUs together


def options_for(engine: EngineOptions, lengths: tuple[int, ...]) -> EngineOptions:
    """Room for the longest prompt, and no more. Raises ConfigError where no GPU is named."""
    from dataclasses import replace

    if not engine.gpus:
        raise ConfigError("--config makes the weights on a GPU: give --gpus 1.")
    room = max(lengths) + 256
    return replace(
        engine, ckpt=Path(), max_context=min(room, 1 << 20), max_sequences=1, cache_tokens=room + 128,
        prefill_chunk=CHUNK,
    )  # fmt: skip


def measure(
    config: dict[str, Any], engine: EngineOptions, lengths: tuple[int, ...], repeat: int, warmup: int, *, profile: bool
) -> Outcome:
    """Fill the weights; a short prompt to warm up, then every length `repeat` times."""
    from dsuf.engine.gpu.backend import GpuBackend
    from dsuf.engine.gpu.measure_prefill import PromptRun
    from dsuf.engine.gpu.open import opened

    spec, most = Spec.from_config(config), engine.max_context - 1
    counts = {length: min(length, most) for length in lengths}
    with opened(engine, spec) as devices:
        device, count = devices[0], len(devices)
        free = [one.memory()[0] for one in devices]
        backend = GpuBackend(engine, None, devices, synthetic=config)
        backend.load(lambda what, share: None)
        run, samples = PromptRun(backend), []
        for _ in range(warmup):
            run.prompt(min(*counts.values(), 2 * CHUNK))
        for _ in range(repeat):
            times = {length: run.prompt(count) for length, count in counts.items()}
            samples.append(
                {f"prefill_{length}_s": took for length, took in times.items()}
                | {f"prefill_{length}_tokens_per_s": counts[length] / took for length, took in times.items()}
            )
        used = sum(before - one.memory()[0] for before, one in zip(free, devices, strict=True))
        planned = sum(one.ledger.planned for one in backend.machines)
        memory = {"planned": planned, "used": used, **backend.ledger()}
        ceilings = {"read_gb_per_s": count * read_ceiling(device), "bf16_gflops": count * run.product_flops() / 1e9}
        floors = {length: floor(spec, config, counts[length], ceilings) for length in lengths}
        profiled = min(max(counts.values()), PROFILED)
        kernels = run.profile(profiled) if profile else {}
        gpu = named(devices)
    for sample in samples:
        for length in lengths:
            sample[f"prefill_{length}_time_over_floor"] = sample[f"prefill_{length}_s"] * 1e6 / floors[length]["us"]
    families = by_family(kernels, floor(spec, config, profiled, ceilings)) if profile else {}
    return Outcome(gpu, samples, ceilings, floors, kernels, families, memory)


def floor(spec: Spec, config: dict[str, Any], length: int, ceilings: dict[str, float]) -> dict[str, float]:
    """prefill_floor of truncated prefill and, added, microseconds of attention and of index scores at the bf16 rate."""
    found = prefill_floor(Described(spec, config), length, "truncated", ceilings)
    rate = ceilings["bf16_gflops"] * 1e3  # operations a microsecond
    heads = 4 * spec.num_attention_heads * spec.head_dim
    attention = index = 0.0
    for role in spec.layers[: spec.decoder_start_layer]:
        keys = spec.sliding_window + (spec.index_topk if role.ratio else 0)
        attention += length * heads * keys / rate
        if role.is_index_source:
            index += length * (length / 2 / role.ratio) * 2 * spec.index_n_heads * spec.index_head_dim / rate
    experts = 6 * spec.hidden_size * spec.moe_intermediate_size * spec.num_experts_per_tok
    routed = spec.decoder_start_layer * length * experts / rate
    parts = {"experts": routed, "dense products": found["us"] - routed, "attention": attention, "indexer": index}
    return found | {"us": found["us"] + attention + index} | {f"{name}_us": us for name, us in parts.items()}


def by_family(kernels: dict[str, tuple[int, float]], limits: dict[str, float]) -> dict[str, dict[str, float]]:
    """Microseconds, share and, where there is one, floor of each family; what belongs to none is `other`."""
    total = sum(us for _, us in kernels.values())
    spent: dict[str, float] = dict.fromkeys([*FAMILIES, "other"], 0.0)
    for name, (_, us) in kernels.items():
        spent[next((f for f, starts in FAMILIES.items() if name.startswith(starts)), "other")] += us
    return {
        family: {"us": us, "share": us / total} | _over(us, limits.get(f"{family}_us"))
        for family, us in sorted(spent.items(), key=lambda item: -item[1])
    }


def _over(us: float, limit: float | None) -> dict[str, float]:
    return {"floor_us": limit, "time_over_floor": us / limit} if limit else {}


def profile_lines(outcome: Outcome) -> list[str]:
    """The profile by family as a table."""
    lines = [f"{'family':18}{'ms':>10}{'share':>8}{'floor ms':>10}{'over':>7}"]
    for name, row in outcome.families.items():
        end = f"{row['floor_us'] / 1e3:>10.1f}{row['time_over_floor']:>7.2f}" if "floor_us" in row else ""
        lines.append(f"{name:18}{row['us'] / 1e3:>10.1f}{row['share']:>8.1%}{end}")
    return lines
