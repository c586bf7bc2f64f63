"""docs/measurements.md is what its script makes of docs/results, and the script reads what benches write."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measurements", DOCS / "measurements.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_file_is_up_to_date(script: ModuleType):
    text = (DOCS / "measurements.md").read_text(encoding="utf-8")
    assert text == script.document(DOCS / "results"), "run python3 docs/measurements.py"


def test_kernel_cases_become_lines_with_floor_and_peers(script: ModuleType, tmp_path: Path):
    case = {"bytes": 42_000_000, "floor_us": 9.0, "error": 1.6e-3}
    metrics = {"wq_b_r6_us": 12.0, "min_wq_b_r6_us": 11.9, "max_wq_b_r6_us": 12.5, "wq_b_r6_peer_torch_us": 14.25}
    metrics |= {"scores_r6_us": 60.0, "min_scores_r6_us": 60.0, "max_scores_r6_us": 60.0}
    scores = {"bytes": 60_000_000, "floor_us": 50.0, "floor_of": "operations", "error": 1e-7}
    cases = {"wq_b_r6": case, "bad_r6": {"problem": "x"}, "scores_r6": scores}
    result = {"kind": "kernels", "date": "2026-11-29T18:00:00", "gpu": {"name": "a card"}, "metrics": metrics,
              "ceilings": {"read_gb_per_s": 4666.4}, "params": {"cases": cases}}  # fmt: skip
    (tmp_path / "k.json").write_text(json.dumps(result))
    text = script.document(tmp_path)
    assert "| wq_b_r6 | 12 | 11.9 .. 12.5 | 42 | 3,500 | 9 | 1.33 | 1.6e-03 | torch 14.25 |" in text
    assert "| scores_r6 | 60 | 60 .. 60 | 60 | 1,000 | 50 (operations) | 1.20 |" in text
    assert "| bad_r6 | wrong: x |" in text and "read_gb_per_s 4,666" in text


def test_other_results_are_a_line_a_metric(script: ModuleType, tmp_path: Path):
    metrics = {"step_ms": 3.30456, "min_step_ms": 3.1, "max_step_ms": 3.5, "std_step_ms": 0.1, "copy": {"gb_per_s": 55}}
    (tmp_path / "d.json").write_text(json.dumps({"kind": "decode", "date": "2026-11-29", "metrics": metrics}))
    text = script.document(tmp_path)
    assert "| step_ms | 3.305 | 3.1 .. 3.5 |" in text and "| copy.gb_per_s | 55 |" in text and "std_" not in text


def test_a_profiled_step_becomes_a_line_a_kernel(script: ModuleType, tmp_path: Path):
    kernels = {"seam": {"launches": 90, "us": 500.0}, "head": {"launches": 1, "us": 1500.0}}
    result = {"kind": "decode", "date": "2026-11-29", "metrics": {"step_ms": 3}, "floor": {"us": 1800.0},
              "params": {"kernels": kernels}}  # fmt: skip
    (tmp_path / "d.json").write_text(json.dumps(result))
    text = script.document(tmp_path)
    assert "| head | 1 | 1,500 | 75.0% |\n| seam | 90 | 500 | 25.0% |" in text
    assert "floor of the step 1,800 us | | 2,000 |" in text
