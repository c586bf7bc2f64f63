"""`dsuf build`: one real kernel through the cache, the table, and what a problem ends with."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import replace

import pytest

from dsuf.cli.app import run_command
from dsuf.kernels import build_all
from dsuf.kernels.build_all import Row
from dsuf.kernels.launch import read_folder


def played(monkeypatch, rows):
    monkeypatch.setattr(build_all, "selected", lambda chips: [(row.name, row.chip) for row in rows])

    def build_catalogue(work, cache, jobs, done):
        for row in rows:
            done(row)
        return {}

    monkeypatch.setattr(build_all, "build_catalogue", build_catalogue)


GOOD = Row("project.a/v41/r8", "sm_90a", 168, 4096, 0, 3.25, cached=False)
KEPT = Row("project.b/v41/r8", "sm_90a", 90, 0, 0, 2.0, cached=True)
BAD = Row("experts.c/v41/r8", "sm_90a", 255, 0, 96, 4.0, cached=False, problem="spills 48 + 48 bytes of registers")


def test_a_kernel_is_compiled_once_and_can_be_taken_along(environ, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("DSUF_CACHE", str(tmp_path / "cache"))
    name = min(name for name, chip in build_all.selected(["sm_90a"]) if "/small/" in name)
    monkeypatch.setattr(build_all, "selected", lambda chips: [(name, chip) for chip in chips])
    flags = ["build", "--sm", "sm_90a", "--out", str(tmp_path / "out")]
    assert run_command(flags) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 kernels: 1 compiled, 0 from the cache, 0 with a problem"
    (cubin,) = read_folder(tmp_path / "out", "sm_90a")
    assert cubin.name == name
    assert cubin.code.startswith(b"\x7fELF")
    assert run_command(flags) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 kernels: 0 compiled, 1 from the cache, 0 with a problem"


def test_the_table_has_registers_shared_memory_spills_and_seconds(environ, monkeypatch, capsys):
    played(monkeypatch, [KEPT, GOOD])
    assert run_command(["build"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["kernel", "chip", "registers", "shared", "B", "spills", "s"]
    assert lines[1].split() == ["project.a/v41/r8", "sm_90a", "168", "4,096", "0", "3.2"]
    assert lines[2].split() == ["project.b/v41/r8", "sm_90a", "90", "0", "0", "2.0", "cached"]


def test_chips_that_have_run_nothing_yet_are_named(environ, monkeypatch, capsys):
    played(monkeypatch, [GOOD, replace(KEPT, chip="sm_103a")])
    assert run_command(["build"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("sm_103a: compiled, but no such GPU has run")


def test_json_is_one_object_a_kernel(environ, monkeypatch, capsys):
    played(monkeypatch, [GOOD, KEPT])
    assert run_command(["build", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["name"], row["registers"], row["cached"]) for row in rows] == [
        ("project.a/v41/r8", 168, False),
        ("project.b/v41/r8", 90, True),
    ]


def test_a_spill_ends_with_1_and_names_the_kernel(environ, monkeypatch, capsys):
    played(monkeypatch, [GOOD, BAD])
    assert run_command(["build", "--sm", "sm_90a"]) == 1
    assert "experts.c/v41/r8 for sm_90a: spills 48 + 48" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "variable", "chips"), [(None, "sm_103a", ["sm_103a"]), ("sm_90a", "sm_103a", ["sm_90a"])]
)
def test_the_flag_wins_over_the_environment(environ, monkeypatch, flag, variable, chips):
    asked = []
    monkeypatch.setenv("DSUF_SM", variable)
    monkeypatch.setattr(build_all, "selected", lambda chips: asked.extend(chips) or [])
    monkeypatch.setattr(build_all, "build_catalogue", lambda *arguments: {})
    assert run_command(["build", *(["--sm", flag] if flag else [])]) == 0
    assert asked == chips


def test_an_unknown_chip_ends_with_2(capsys):
    assert run_command(["build", "--sm", "sm_90a,sm_42"]) == 2
    assert "'sm_42'; expected chips among sm_90a, sm_100a, sm_103a" in capsys.readouterr().err


def never_done(name, chips, cache):
    time.sleep(60)


def test_an_interrupt_does_not_wait_for_the_kernels_that_are_compiled(monkeypatch, tmp_path):
    monkeypatch.setattr(build_all, "_build_one", never_done)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 1.5)
    begin = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            build_all.build_catalogue([("project", "sm_90a"), ("route", "sm_90a")], tmp_path, 2, print)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - begin < 30
