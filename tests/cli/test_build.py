"""`dsuf build` without a GPU."""

from __future__ import annotations

import json

from dsuf.cli import app
from dsuf.kernels.launch import read_folder

ONLY = ["--only", "experts.plan/tiny", "--jobs", "1"]


def test_builds_writes_a_folder_and_is_cached_the_second_time(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DSUF_CACHE", str(tmp_path / "cache"))
    assert app.run_command(["build", "--sm", "sm_90a", *ONLY, "--out", str(tmp_path / "out")]) == 0
    table = capsys.readouterr().out
    assert "experts.plan/tiny/r8" in table and "1 kernels, 0 from the cache" in table
    (cubin,) = read_folder(tmp_path / "out", "sm_90a")
    assert cubin.name == "experts.plan/tiny/r8" and cubin.code[:4] == b"\x7fELF"
    monkeypatch.setenv("DSUF_SM", "sm_90a")
    assert app.run_command(["build", *ONLY, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["cached"] for row in result["kernels"]] == [True] and result["seconds"] < 2


def test_wrong_chips_and_names_end_with_2(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DSUF_CACHE", str(tmp_path))
    assert app.run_command(["build", "--sm", "sm_80"]) == 2
    assert "sm_103a" in capsys.readouterr().err
    assert app.run_command(["build", "--only", "nothing"]) == 2
