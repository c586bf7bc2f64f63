"""The measured parts of `bench decode` and `bench prefill --config`, over a played GPU: what is told, what fails."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

from dsuf.cli.bench import gpu_decode, gpu_prefill
from dsuf.cli.bench.prefilling import prefill_floors
from dsuf.engine.options import EngineOptions
from dsuf.errors import CheckFailed, ConfigError
from dsuf.model.synthetic import load_config
from dsuf.spec import Spec

CONFIG = load_config("h200x1")
SPEC = Spec.from_config(CONFIG)


class Event:
    def __init__(self, at: float):
        self.at = at

    def wait(self) -> None:
        pass

    def since(self, earlier: Event) -> float:
        return self.at - earlier.at


class Device:
    """Reads a terabyte a second at 8 blocks an SM, less at others."""

    name, chip, now = "a card", "sm_90a", 0.0

    def __init__(self):
        self.zeroed = []

    def allocate(self, nbytes: int, what: str) -> int:
        return 4096

    def zero(self, address: int, nbytes: int) -> None:
        self.zeroed.append((address, nbytes))

    def memory(self) -> tuple[int, int]:
        return 10**9, 2 * 10**9

    def launch(self, name: str, source: int, pieces: int, out: int, *, grid, dependent) -> None:
        assert name == "ceiling.read" and dependent is False
        self.now += pieces * 32768 / (1e12 if grid[0] == 8 * 132 else 0.9e12)

    def record(self, *, timing: bool) -> Event:
        return Event(self.now)


class Backend:
    """Counts 6 rows and 32 distinct experts a layer a step."""

    def __init__(self, options, class_map, devices, *, synthetic):
        block = SimpleNamespace(gate_bias=77)
        weights = SimpleNamespace(layers=[block] * SPEC.num_hidden_layers, stages=[block] * 3)
        model, ledger = SimpleNamespace(weights=weights), SimpleNamespace(planned=5)
        self.machine = SimpleNamespace(spec=SPEC, model=model, device=devices[0], ledger=ledger)
        self.machines = [self.machine]
        self.steps = 0

    def load(self, progress) -> None:
        pass

    def finish(self) -> None:
        pass

    def counts(self):
        steps = self.steps
        return SimpleNamespace(
            steps=steps, rows=6 * steps, slots=5 * steps, experts=32 * 40 * steps, drafter_experts=21 * steps
        )

    def ledger(self) -> dict[str, int]:
        return {"weights": 1}


class Steps:
    """Each step emits three tokens of a recording, or of something else."""

    wrong = False

    def __init__(self, backend, *, batch, context, budget, draft, verify):
        self.backend, self.sequences = backend, [SimpleNamespace(id=f"run-{i}", emitted=[]) for i in range(batch)]

    def record(self, count: int) -> np.ndarray:
        return np.tile(np.arange(count, dtype=np.int32), (len(self.sequences), 1))

    def inject(self, recorded, keep) -> None:
        self.recorded = recorded

    def steps(self, count: int) -> list[float]:
        self.backend.steps += count
        for sequence in self.sequences:
            said = len(sequence.emitted)
            sequence.emitted += list(range(said + self.wrong, said + 3 * count + self.wrong))
        return [0.012] * count

    def graph_time(self, count: int, *, dependent: bool = True) -> float:
        return 0.0119 if dependent else 0.0125

    def launched_time(self, count: int) -> float:
        return 0.02

    def profile(self):
        return {"seam/v41": (90, 500.0), "head": (1, 1500.0)}


@pytest.fixture
def played(monkeypatch):
    import dsuf.engine.gpu.backend
    import dsuf.engine.gpu.measure
    import dsuf.engine.gpu.measure_prefill
    import dsuf.engine.gpu.open

    device = Device()
    monkeypatch.setattr(dsuf.engine.gpu.backend, "GpuBackend", Backend)
    monkeypatch.setattr(dsuf.engine.gpu.measure, "StepRun", Steps)
    monkeypatch.setattr(dsuf.engine.gpu.open, "opened", lambda options, spec: contextlib.nullcontext([device]))
    return device


def plan(**changes):
    given = {
        "batch": 1, "context": 1024, "draft": True, "verify": 5, "accept": 0.8, "steps": 4, "profile": True,
        "twins": True,
    }  # fmt: skip
    return gpu_decode.StepPlan(**given | changes)


def test_a_step_is_held_against_the_ceiling_of_the_run(played):
    found = gpu_decode.measure(CONFIG, EngineOptions("none", gpus=(0,)), plan(), repeat=2, warmup=1)
    assert found.ceilings["read_gb_per_s"] == pytest.approx(1000, rel=1e-6)
    assert found.floor["distinct_experts"] == 32 and found.floor["bytes"] == pytest.approx(35.4e9, rel=0.02)
    (first, second) = found.samples
    assert first["step_ms"] == pytest.approx(12) and first["accept_length"] == 3
    assert first["time_over_floor"] == pytest.approx(12e3 / found.floor["us"])
    assert first["launches_step_ms"] == 20 and second["host_share"] == pytest.approx(0.1 / 12)
    assert (77, 8 * SPEC.n_routed_experts) in played.zeroed  # no router has a bias
    assert gpu_decode.profile_lines(found)[1].split() == ["head", "1", "1500.0", "75.0%"]


def test_other_tokens_with_drafts_than_without_fail(played, monkeypatch):
    monkeypatch.setattr(Steps, "wrong", True)
    with pytest.raises(CheckFailed, match="token 0 of run-0 is 1, without drafts it was 0"):
        gpu_decode.measure(CONFIG, EngineOptions("none", gpus=(0,)), plan(), repeat=1, warmup=0)


def test_rows_that_choose_unevenly_fail(played, monkeypatch):
    monkeypatch.setattr(gpu_decode, "EVEN", 1e-6)
    with pytest.raises(CheckFailed, match=r"32\.0 distinct experts a layer were counted"):
        gpu_decode.measure(CONFIG, EngineOptions("none", gpus=(0,)), plan(), repeat=1, warmup=0)


def test_a_config_without_a_gpu_is_refused_and_room_is_made_for_the_batch():
    with pytest.raises(ConfigError, match="give --gpus 1"):
        gpu_decode.options_for(EngineOptions("none"), plan())
    options = gpu_decode.options_for(EngineOptions("none", gpus=(0,)), plan(batch=8))
    assert options.max_sequences == 8 and options.max_context > 1024 + 12 * 48
    assert options.cache_tokens >= 8 * options.max_context


def test_prefill_is_held_against_the_same_ceiling(played, monkeypatch):
    import dsuf.engine.gpu.measure_prefill

    run = SimpleNamespace(
        prompt=lambda count: count / 20_000, product_flops=lambda: 7e14, profile=lambda count: {"dense.fp8": (9, 5.0)}
    )
    monkeypatch.setattr(dsuf.engine.gpu.measure_prefill, "PromptRun", lambda backend: run)
    options = gpu_prefill.options_for(EngineOptions("none", gpus=(0,)), (8192,))
    found = gpu_prefill.measure(CONFIG, options, (8192,), repeat=2, warmup=1, profile=True)
    assert found.ceilings == {"read_gb_per_s": pytest.approx(1000, rel=1e-6), "bf16_gflops": 7e5}
    assert found.samples[0]["prefill_8192_tokens_per_s"] == pytest.approx(20_000)


@pytest.mark.parametrize("count", [1, 2])
def test_prompts_of_a_checkpoint_are_held_against_the_cards_that_read_them(count):
    checkpoint = gpu_decode.Described(SPEC, CONFIG)
    options, limits = EngineOptions("none", gpus=tuple(range(count))), SimpleNamespace(backend="gpu")
    backend = SimpleNamespace(machines=[SimpleNamespace(device=Device()) for _ in range(count)])
    engine = SimpleNamespace(options=options, limits=limits, backend=backend)
    ceilings, floors = prefill_floors(SimpleNamespace(engine=engine, checkpoint=checkpoint), (8192,))
    assert ceilings["read_gb_per_s"] == pytest.approx(1000 * count, rel=1e-6)
    of_config = gpu_prefill.floor(SPEC, CONFIG, 8192, ceilings)
    assert floors[8192]["us"] == pytest.approx(of_config["dense products_us"] + of_config["experts_us"])
    assert gpu_decode.card_of(engine) == {
        "name": "a card", "chip": "sm_90a", "memory": 2 * 10**9, **({"count": 2} if count == 2 else {})
    }  # fmt: skip


def test_the_cpu_is_no_card():
    assert gpu_decode.card_of(SimpleNamespace(limits=SimpleNamespace(backend="cpu"))) is None
