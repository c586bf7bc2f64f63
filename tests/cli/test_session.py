"""Which backend a session gets where a GPU is there and nobody named one."""

from __future__ import annotations

import pytest

from dsuf.cli import machine, session
from dsuf.cli.machine import Gpu, Gpus
from dsuf.errors import ConfigError

FLAGS = {"prefill": "truncated", "draft": "on", "verify": "auto", "max_context": None}


@pytest.fixture
def an_h200(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "DEVICE_FILES", (tmp_path,))
    gpus = Gpus((Gpu(0, "NVIDIA H200", "sm_90", 150 * 10**9),), driver="13.0")
    monkeypatch.setattr(machine, "find_gpus", lambda: gpus)


def options(ckpt, gpus=None, numerics=None):
    return session.prepare(ckpt, session.engine_options(gpus, numerics, **FLAGS))


def test_the_built_in_checkpoint_runs_on_it(an_h200, environ):
    chosen = options("toy")
    assert chosen.gpus == (0,) and chosen.prefill_chunk > 64 and chosen.numerics == "bf16"


def test_as_many_gpus_as_can_share_the_checkpoint_are_used_and_it_is_said_where_some_are_not(
    an_h200, environ, monkeypatch, capsys
):
    gpus = tuple(Gpu(i, "NVIDIA H200", "sm_90", 150 * 10**9) for i in range(3))
    monkeypatch.setattr(machine, "find_gpus", lambda: Gpus(gpus, driver="13.0"))
    assert options("toy").gpus == (0, 1)
    assert "2 of 3 GPUs are used" in capsys.readouterr().err
    assert options("toy", gpus="3").gpus == (0, 1, 2)  # the engine refuses them, and says which numbers can


def test_a_checkpoint_without_kernels_runs_on_the_cpu_and_it_is_said(an_h200, environ, capsys):
    chosen = options("noise")
    assert chosen.gpus == () and chosen.prefill_chunk == 64 and chosen.numerics == "qdq64"
    assert "no kernels are made for the dimensions" in capsys.readouterr().err


def test_a_gpu_that_was_named_stays_named(an_h200, environ):
    assert options("noise", gpus="1").gpus == (0,)  # the engine then says what is missing


def test_numerics_of_the_cpu_choose_the_cpu(an_h200, environ):
    assert options("toy", numerics="exact32").gpus == ()
    chosen = options("toy", numerics="qdq64")
    assert chosen.gpus == () and chosen.numerics == "qdq64"
    assert options("toy", numerics="bf16").gpus == (0,)
    with pytest.raises(ConfigError, match=r"--numerics exact32 is one of the CPU backend.*--gpus 0"):
        options("toy", gpus="1", numerics="exact32")


def test_streams_wait_as_long_as_is_said_or_as_suits_the_backend(an_h200, environ):
    assert (options("toy").prefill_budget_s, options("noise").prefill_budget_s) == (0.12, 0.05)
    for ckpt in ("toy", "noise"):
        told = session.prepare(ckpt, session.engine_options(None, "qdq64", **FLAGS, prefill_budget_ms=80))
        assert told.prefill_budget_s == 0.08
    with pytest.raises(ConfigError, match="prefill_budget_s is"):
        session.engine_options(None, "qdq64", **FLAGS, prefill_budget_ms=-1)
