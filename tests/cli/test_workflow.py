"""The commands of the example benchmark job, run as they stand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

WORKFLOW = Path(__file__).parents[2] / ".github" / "workflows" / "bench.yml"


@pytest.fixture(scope="module")
def steps():
    job = yaml.safe_load(WORKFLOW.read_text())["jobs"]["decode"]
    return {step["name"]: step["run"] for step in job["steps"] if "run" in step}


def test_the_jobs_commands_run_and_leave_what_its_later_steps_read(steps, environ, tmp_path):
    environ = {**environ, "PATH": f"{Path(sys.executable).parent}:{environ['PATH']}", "GITHUB_SHA": "abc123"}

    def run(name):
        # as the runner does: bash, ending at the first command that fails
        command = ["bash", "-e", "-o", "pipefail", "-c", steps[name]]
        done = subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{name}:\n{done.stdout}{done.stderr}"
        return done.stdout

    assert "all usable" in run("check the machine")
    last_lines = run("measure").splitlines()
    assert last_lines[0].startswith("decode: ")
    assert last_lines[1].startswith("prefill: 128 tokens in ")
    result = json.loads((tmp_path / "bench" / "decode.json").read_text())
    assert result["label"] == "abc123"
    assert result["backend"] == "cpu"
    assert result["gpu"] is None
    assert result["ceilings"]["read_gb_per_s"] > 0
    assert result["floor"]["bytes"] > 1e6
    assert result["metrics"]["time_over_floor"] > 1
    assert json.loads((tmp_path / "bench" / "decode-ci" / "bigger.json").read_text())

    assert run("compare with the run before") == ""
    run("keep this run")
    compared = run("compare with the run before")
    assert "decode: 0 better, 0 worse" in compared
    assert "prefill: 0 better, 0 worse" in compared


def test_the_install_step_is_the_readmes(steps):
    assert "python3 -m venv .venv" in steps["install"]
    assert ".venv/bin/pip install ." in steps["install"]
