"""`dsuf doctor`: a sound machine, and each thing that can be wrong with its fix."""

from __future__ import annotations

import dataclasses

import pytest

from dsuf.cli import doctor, machine
from dsuf.cli.app import run_command
from dsuf.cli.machine import Gpu, Gpus
from dsuf.config import Environment
from dsuf.model.synthetic import load_config, write_checkpoint


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


class TestGpus:
    @pytest.fixture
    def machine_with(self, monkeypatch):
        def there(name="NVIDIA H200", sm="sm_90", driver="13.0", count=1, apart=()):
            gpus = Gpus(tuple(Gpu(i, name, sm, 150 * 10**9) for i in range(count)), driver=driver, apart=apart)
            monkeypatch.setattr(machine, "find_gpus", lambda: gpus)

        return there

    def test_one_is_shown_with_its_driver_its_kernels_and_the_host_memory_for_tables(self, environment, machine_with):
        machine_with()
        assert finding(environment, "GPU 0: NVIDIA H200 (sm_90, 150 GB)").mark == "ok"
        assert finding(environment, "driver for CUDA 13.0").mark == "ok"
        kernels = finding(environment, "kernels for sm_90a are built")
        assert kernels.what.startswith("0 of ") and "dsuf build --sm sm_90a" in kernels.fix
        tables = finding(environment, "Engram tables")
        assert "203 GB" in tables.what and "to page-lock" in tables.what

    def test_an_old_driver_fails(self, environment, machine_with):
        machine_with(driver="12.4")
        found = finding(environment, "CUDA 12.4")
        assert found.mark == "FAIL" and "newer NVIDIA driver" in found.fix

    def test_a_gpu_without_kernels_is_a_note(self, environment, machine_with):
        machine_with("NVIDIA L4", "sm_89")
        found = finding(environment, "NVIDIA L4")
        assert found.mark == "note" and "compute capability 8.9" in found.what

    def test_a_chip_that_has_run_nothing_yet_is_a_note(self, environment, machine_with):
        machine_with("NVIDIA B200", "sm_100")
        found = finding(environment, "NVIDIA B200")
        assert found.mark == "note" and "kernels for sm_100a compile, no such GPU has run them yet" in found.what

    def test_several_are_told_whether_one_engine_can_run_over_them(self, environment, machine_with):
        machine_with()
        assert not any("each other's memory" in found.what for found in doctor.examine(environment))
        machine_with(count=4)
        assert finding(environment, "all 4 GPUs reach each other's memory").mark == "ok"
        machine_with(count=4, apart=((0, 2), (1, 2)))
        found = finding(environment, "do not reach each other's memory")
        assert found.mark == "note" and found.what.endswith(": 0 and 2, 1 and 2") and "--gpus" in found.fix

    def test_a_number_of_gpus_that_an_engine_refuses_is_said_beside_the_plan(self, environ, capsys):
        assert run_command(["doctor", "--ckpt", "v41-flash", "--ranks", "8"]) == 0
        text = capsys.readouterr().out
        assert "an engine would refuse to start: 8 GPUs cannot share this checkpoint" in text
        assert "Name 1, 2, 4 GPUs" in text and "v41-flash on 8 x " in text

    def test_a_checkpoint_without_kernels_has_no_plan_and_says_why(self, environ, capsys):
        assert run_command(["doctor", "--ckpt", "noise"]) == 0
        text = capsys.readouterr().out
        assert "noise on a GPU: no GPU kernels are made for this checkpoint's dimensions" in text
        assert "noise on 1 x" not in text

    def test_the_released_checkpoint_is_planned_by_rank_and_phase(self, environ, capsys):
        assert run_command(["doctor", "--ckpt", "v41-flash", "--ranks", "4"]) == 0
        text = capsys.readouterr().out
        assert "v41-flash on 4 x " in text and "(device-sharded)" in text
        assert "routed experts: 288.78 GB read, 72.19 GB a rank" in text
        assert run_command(["doctor", "--ckpt", "v41-flash"]) == 0
        assert "202.8 GB page-locked in the host" in capsys.readouterr().out

    def test_a_sparse_checkpoint_is_planned_like_its_config(self, environ, capsys, tmp_path):
        write_checkpoint(load_config("tiny"), tmp_path / "sparse", sparse=True)
        assert run_command(["doctor", "--ckpt", str(tmp_path / "sparse")]) == 0
        assert "routed experts: 0.00 GB read" in capsys.readouterr().out


def test_ranks_of_no_checkpoint_are_wrong_usage(capsys):
    assert run_command(["doctor", "--ranks", "4"]) == 2
    assert "name one with --ckpt" in capsys.readouterr().err


def test_the_built_in_checkpoint_can_be_asked_about(environ, capsys):
    assert run_command(["doctor", "--ckpt", "toy"]) == 0
    assert "toy on 1 x" in capsys.readouterr().out


def test_a_misspelt_variable_is_a_note(environment):
    found = finding(dataclasses.replace(environment, unknown=("DSUF_CASHE",)), "DSUF_CASHE")
    assert found.mark == "note"
