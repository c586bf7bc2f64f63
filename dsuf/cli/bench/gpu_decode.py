"""The measured part of `bench decode --config`: steps of random weights on GPUs, over a context of random pages.

A sample is one repeat of `steps` decode steps through the backend, as the engine drives it, and the same steps as
graphs back to back, where the device alone decides. The floor follows from the distinct experts that the device counted
in these steps. Router biases are set to zero: then the mean of distinct experts must be within 10 % of what rows that
choose evenly would hit. With several GPUs the ceiling is that of all together: the floor of a step in which each byte
of the weights is read once, by one of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsuf.cli.bench.floor import StepShape, expected_distinct_experts, step_floor
from dsuf.errors import CheckFailed, ConfigError
from dsuf.spec import Spec

if TYPE_CHECKING:
    import numpy as np

    from dsuf.engine.engine import Engine
    from dsuf.engine.gpu.backend import GpuBackend
    from dsuf.engine.gpu.device import Device
    from dsuf.engine.gpu.measure import StepRun
    from dsuf.engine.options import EngineOptions

CEILING_BYTES, CEILING_BLOCKS, SM_COUNT = 4 << 30, (4, 8, 16), 132  # blocks an SM
DENSE_BF16_GFLOPS = 989e3  # peak of the unit; decode steps are held against bytes
EVEN = 0.10  # how far counted distinct experts may be from those of even choices
BUDGET = 1 << 20


@dataclass(frozen=True)
class StepPlan:
    """What is measured."""

    batch: int
    context: int
    draft: bool
    verify: int | None  # None: by confidence
    accept: float | None  # injected conditional acceptance
    steps: int
    profile: bool
    twins: bool  # the same step without graphs, and without dependent launch


@dataclass(frozen=True)
class Described:
    """A config in a checkpoint's place."""

    spec: Spec
    config: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What a bench object is made from."""

    gpu: dict[str, str | int]
    samples: list[dict[str, float]]
    ceilings: dict[str, float]
    floor: dict[str, float]
    kernels: dict[str, tuple[int, float]]  # launches and microseconds a step
    ledger: dict[str, int]


def options_for(engine: EngineOptions, plan: StepPlan) -> EngineOptions:
    """Room for the batch at its context, and no more. Raises ConfigError where no GPU is named."""
    from dataclasses import replace

    if not engine.gpus:
        raise ConfigError("--config makes the weights on a GPU: give --gpus 1.")
    if len(engine.gpus) > 1 and (plan.profile or plan.twins):
        raise ConfigError("--profile and --twins launch kernels one by one, where ranks would wait: give --gpus 1.")
    room = plan.context + (plan.steps + 8) * 64
    return replace(
        engine, ckpt=Path(), max_context=room, max_sequences=plan.batch, cache_tokens=plan.batch * (room + 128)
    )


def measure(config: dict[str, Any], engine: EngineOptions, plan: StepPlan, repeat: int, warmup: int) -> Outcome:
    """Fill the weights, put sequences at the context, run warm-up and repeats."""
    from dsuf.engine.gpu.backend import GpuBackend
    from dsuf.engine.gpu.measure import StepRun
    from dsuf.engine.gpu.open import opened

    spec = Spec.from_config(config)
    with opened(engine, spec) as devices:
        backend = GpuBackend(engine, None, devices, synthetic=config)
        backend.load(lambda what, share: None)
        even_router(backend)
        run = StepRun(
            backend, batch=plan.batch, context=plan.context, budget=BUDGET, draft=plan.draft, verify=plan.verify
        )
        recorded = None
        if plan.accept is not None:
            recorded = run.record((plan.steps + 2) * 6 * (repeat + warmup))
            run.inject(recorded, plan.accept)
        samples, shapes = [], []
        for number in range(warmup + repeat):
            sample, shape = _sample(run, backend, plan)
            if number >= warmup:
                samples.append(sample)
                shapes.append(shape)
        if recorded is not None:
            _check_text(run, recorded)
        ceilings = ceilings_of(devices)
        floor = step_floor(Described(spec, config), _mean(shapes), ceilings)
        for sample in samples:
            sample["time_over_floor"] = sample["step_ms"] * 1e3 / floor["us"]
        kernels = run.profile() if plan.profile else {}
        gpu = named(devices)
        ledger = backend.ledger()
    _check_even(spec, floor["distinct_experts"], _mean(shapes).rows)
    return Outcome(gpu, samples, ceilings, floor, kernels, ledger)


def even_router(backend: GpuBackend) -> None:
    """No bias in the routers: a random one makes some experts popular with every row, which a trained one prevents."""
    for machine in backend.machines:
        for blocks, experts in (
            (machine.model.weights.layers, machine.spec.n_routed_experts),
            (machine.model.weights.stages, machine.spec.dspark_n_routed_experts),
        ):
            for block in blocks:
                machine.device.zero(block.gate_bias, 8 * experts)


def _sample(run: StepRun, backend: GpuBackend, plan: StepPlan) -> tuple[dict[str, float], StepShape]:
    before, emitted = backend.counts(), sum(len(s.emitted) for s in run.sequences)
    times = run.steps(plan.steps)
    backend.finish()
    after, now = backend.counts(), sum(len(s.emitted) for s in run.sequences)
    steps = after.steps - before.steps
    step_s = statistics.median(times)
    accepted = (now - emitted) / steps / plan.batch
    device_s = run.graph_time(plan.steps)
    sample = {
        "step_ms": step_s * 1e3,
        "device_step_ms": device_s * 1e3,
        "host_share": (step_s - device_s) / step_s,
        "accept_length": accepted,
        "decode_tokens_per_s": accepted * plan.batch / step_s,
    }
    if plan.twins:
        sample["launches_step_ms"] = run.launched_time(max(plan.steps // 4, 2)) * 1e3
        sample["not_dependent_step_ms"] = run.graph_time(plan.steps, dependent=False) * 1e3
    shape = StepShape(
        rows=(after.rows - before.rows) / steps,
        slots=(after.slots - before.slots) / steps,
        experts=(after.experts - before.experts) / steps,
        drafter_experts=(after.drafter_experts - before.drafter_experts) / steps,
    )
    return sample, shape


def _mean(shapes: list[StepShape]) -> StepShape:
    return StepShape(
        *(statistics.mean(getattr(s, name) for s in shapes) for name in ("rows", "slots", "experts", "drafter_experts"))
    )


def ceilings_of(devices: Sequence[Device]) -> dict[str, float]:
    """What a step is held against: the first device's, times as many as there are."""
    one = {"read_gb_per_s": read_ceiling(devices[0]), "bf16_gflops": DENSE_BF16_GFLOPS}
    return {name: len(devices) * rate for name, rate in one.items()}


def named(devices: Sequence[Device]) -> dict[str, str | int]:
    """The `gpu` of a bench object."""
    first = devices[0]
    several = {"count": len(devices)} if len(devices) > 1 else {}
    return {"name": first.name, "chip": first.chip, "memory": first.memory()[1], **several}


def card_of(engine: Engine) -> dict[str, str | int] | None:
    """The `gpu` of a bench object about a checkpoint's engine; None on the CPU."""
    return named([machine.device for machine in engine.backend.machines]) if engine.limits.backend == "gpu" else None


def read_ceiling(device: Device) -> float:
    """GB/s of a kernel that only reads, the best of a few grids, over 4 GiB that do not fit the L2."""
    from dsuf.kernels.ceiling import PIECE

    pieces = CEILING_BYTES // PIECE
    source, out, best = device.allocate(pieces * PIECE, "bench"), device.allocate(4096, "bench"), float("inf")
    device.zero(source, pieces * PIECE)
    for blocks in CEILING_BLOCKS:
        for _ in range(3):
            first = device.record(timing=True)
            for _ in range(2):
                grid = (SM_COUNT * blocks, 1)
                device.launch("ceiling.read", source, pieces, out, grid=grid, dependent=False)
            last = device.record(timing=True)
            last.wait()
            best = min(best, last.since(first) / 2)
    return pieces * PIECE / best / 1e9


def _check_text(run: StepRun, recorded: np.ndarray) -> None:
    """Drafts, wherever they come from, change no token."""
    for sequence, tokens in zip(run.sequences, recorded.tolist(), strict=True):
        said = sequence.emitted[: len(tokens)]
        wrong = next((i for i, (a, b) in enumerate(zip(said, tokens, strict=False)) if a != b), None)
        if wrong is not None:
            raise CheckFailed(
                f"with drafts token {wrong} of {sequence.id} is {said[wrong]}, without drafts it was {tokens[wrong]}: "
                "rows of a step depend on one another."
            )


def _check_even(spec: Spec, counted: float, rows: float) -> None:
    even = expected_distinct_experts(spec.n_routed_experts, spec.num_experts_per_tok, rows)
    if abs(counted - even) > EVEN * even:
        raise CheckFailed(
            f"{counted:.1f} distinct experts a layer were counted, rows that choose evenly hit {even:.1f}: more than "
            f"{EVEN:.0%} apart, so these steps say nothing about a real router's."
        )


def profile_lines(outcome: Outcome) -> list[str]:
    """The profile as a table: launches, microseconds and share of a step by kernel."""
    total = sum(us for _, us in outcome.kernels.values())
    lines = [f"{'kernel':34}{'launches':>9}{'us':>10}{'share':>8}"]
    for name, (count, us) in sorted(outcome.kernels.items(), key=lambda item: -item[1][1]):
        lines.append(f"{name:34}{count:>9}{us:>10.1f}{us / total:>8.1%}")
    return [*lines, f"{'all kernels one by one':34}{'':>9}{total:>10.1f}"]
