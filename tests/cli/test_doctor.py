"""`dsuf doctor`: a sound machine, and each thing that can be wrong with its fix."""

from __future__ import annotations

import dataclasses

import pytest

from dsuf.cli import doctor, machine
from dsuf.cli.app import run_command
from dsuf.cli.machine import Gpu, Gpus
from dsuf.config import Environment


@pytest.fixture
def environment(tmp_path):
    return Environment(cache_dir=tmp_path / "cache", runtime_dir=tmp_path / "run")


def finding(environment, word):
    return next(found for found in doctor.examine(environment) if word in found.what)


def test_this_machine_is_usable(environ, capsys):
    assert run_command(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("checks, all usable")


def test_every_failure_has_a_fix_and_ends_with_3(environ, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "SUPPORTED_PYTHON", ((2, 6), (3, 0)))
    assert run_command(["doctor"]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("FAIL  Python 3")
    assert lines[1] == "      fix: use Python 3.11, 3.12 or 3.13"
    assert lines[-1].endswith("1 to mend")


def test_missing_packages_are_named_and_nothing_that_needs_them_is_tried(environment, monkeypatch):
    monkeypatch.setattr(doctor, "_installed", lambda name: name not in ("msgspec", "rich"))
    last = list(doctor.examine(environment))[-1]
    assert (last.mark, last.what) == ("FAIL", "packages missing: msgspec, rich")
    assert last.fix == "pip install msgspec rich"


def test_extras_are_not_missed(environment, monkeypatch):
    monkeypatch.setattr(doctor, "_installed", lambda name: name not in ("pytest", "torch"))
    assert finding(environment, "all packages").mark == "ok"


def test_a_cache_folder_without_room_fails(environment, monkeypatch):
    monkeypatch.setattr(doctor, "CACHE_NEEDED", 10**18)
    found = finding(environment, "cache folder")
    assert found.mark == "FAIL"
    assert "DSUF_CACHE" in found.fix


def test_a_runtime_folder_open_to_others_fails(environment):
    environment.runtime_dir.mkdir()
    environment.runtime_dir.chmod(0o777)
    found = finding(environment, "runtime folder")
    assert found.mark == "FAIL"
    assert "mode 0777" in found.what


def test_little_memory_and_one_core_are_notes(environment, monkeypatch):
    monkeypatch.setattr(machine, "memory_bytes", lambda: (2**30, 2**29))
    monkeypatch.setattr(machine, "cpu_cores", lambda: 1)
    assert finding(environment, "memory 1.1 GB").mark == "note"
    assert finding(environment, "1 core usable").mark == "note"


def test_more_blas_threads_than_cores_are_a_note(environment):
    crowded = dataclasses.replace(environment, blas_threads="4096")
    assert finding(crowded, "threads: 4096").mark == "note"
    assert finding(environment, "threads: one a core").mark == "ok"


def test_a_gpu_is_shown_with_what_this_build_does_with_it(environment, monkeypatch):
    gpus = Gpus((Gpu(0, "NVIDIA H200", "sm_90", 150 * 10**9),), driver="13.0")
    monkeypatch.setattr(machine, "find_gpus", lambda: gpus)
    found = finding(environment, "H200")
    assert found.mark == "note"
    assert "no GPU backend" in found.fix


def test_a_misspelt_variable_is_a_note(environment):
    found = finding(dataclasses.replace(environment, unknown=("DSUF_CASHE",)), "DSUF_CASHE")
    assert found.mark == "note"
