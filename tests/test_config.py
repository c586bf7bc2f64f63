"""Flags and environment: what passes, and what each absurd value is told."""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path

import pytest

from dsuf.config import (
    BenchOptions,
    SamplingFlags,
    Threshold,
    parse_gpus,
    parse_switch,
    parse_thresholds,
    parse_token_counts,
    parse_verify,
    private_folder,
    read_api_keys,
    read_environment,
)
from dsuf.errors import ConfigError, EnvironmentProblem


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.5),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_k", -1),
        ("seed", -1),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("max_tokens", 393_217),
    ],
)
def test_absurd_sampling_values_are_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=field.replace("_", "-")):
        SamplingFlags(**{field: value})


def test_sampling_bounds_themselves_are_allowed():
    SamplingFlags(temperature=0, top_p=1.0, top_k=0, seed=2**63 - 1, max_tokens=1)
    SamplingFlags(temperature=2.0, top_p=1e-6, max_tokens=393_216)


@pytest.mark.parametrize(("text", "expected"), [("4", 4), ("0", 0), ("0,1", (0, 1)), ("3,", (3,)), (" 2 , 0 ", (2, 0))])
def test_gpus_is_a_count_or_a_list(text, expected):
    assert parse_gpus(text) == expected


@pytest.mark.parametrize("text", ["", ",", "a", "-1", "1,,2", "0,0", "1.5", "²"])
def test_gpus_refuses_everything_else(text):
    with pytest.raises(ConfigError, match="--gpus"):
        parse_gpus(text)


def test_verify_is_a_number_or_auto():
    assert parse_verify("auto") == "auto"
    assert parse_verify("3") == 3
    with pytest.raises(ConfigError, match="--verify"):
        parse_verify("some")


def test_a_switch_is_on_or_off():
    assert parse_switch("--draft", "on") is True
    assert parse_switch("--draft", "off") is False
    with pytest.raises(ConfigError, match="--draft is 'yes'"):
        parse_switch("--draft", "yes")


def test_token_counts_take_k_and_m():
    assert parse_token_counts("512,8k,1m") == (512, 8192, 1048576)
    for text in ("", "0", "8kk", "k", "-1", "1,"):
        with pytest.raises(ConfigError, match="--tokens"):
            parse_token_counts(text)


def test_thresholds_name_a_metric_and_a_number():
    assert parse_thresholds(["a_per_s=40"], ["b_ms=1e3"]) == (
        Threshold("a_per_s", 40.0, True),
        Threshold("b_ms", 1000.0, False),
    )
    for text in ("a", "a=", "=1", "a=x", "a=nan"):
        with pytest.raises(ConfigError, match="--fail-below"):
            parse_thresholds([text], [])


def test_a_bench_needs_at_least_one_repeat():
    with pytest.raises(ConfigError, match="--repeat"):
        BenchOptions(repeat=0)


def test_the_cache_folder_follows_dsuf_cache_then_xdg_then_home():
    assert read_environment({"HOME": "/h", "DSUF_CACHE": "/c", "XDG_CACHE_HOME": "/x"}).cache_dir == Path("/c")
    assert read_environment({"HOME": "/h", "XDG_CACHE_HOME": "/x"}).cache_dir == Path("/x/dsuf")
    assert read_environment({"HOME": "/h"}).cache_dir == Path("/h/.cache/dsuf")


def test_the_runtime_folder_follows_xdg_then_the_temporary_folder():
    assert read_environment({"XDG_RUNTIME_DIR": "/run/user/7"}).runtime_dir == Path("/run/user/7/dsuf")
    assert read_environment({}).runtime_dir.name == f"dsuf-{os.getuid()}"


def test_an_empty_key_is_no_key_and_unknown_names_are_listed():
    found = read_environment({"DSUF_API_KEY": "", "DSUF_APIKEY": "x", "DSUF_CACHE": "/c"})
    assert found.api_key is None
    assert found.unknown == ("DSUF_APIKEY",)


def test_a_private_folder_is_made_with_mode_0700(tmp_path):
    folder = private_folder(tmp_path / "a" / "b")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_open_to_others_is_refused(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(EnvironmentProblem, match="mode 0700, it is mode 0755"):
        private_folder(tmp_path / "open")


def test_a_link_in_place_of_a_private_folder_is_refused(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(EnvironmentProblem, match="must be a folder of yours"):
        private_folder(tmp_path / "link")


class TestApiKeys:
    def read(self, tmp_path, text, given=(), environ=None):
        path = tmp_path / "keys"
        path.write_text(text)
        return read_api_keys(list(given), path, read_environment(environ or {}))

    def test_flags_stand_before_the_environment_and_a_file_beside_both(self, tmp_path):
        environ = {"DSUF_API_KEY": "e"}
        assert read_api_keys([], None, read_environment(environ)) == (("e",), {})
        assert read_api_keys(["a", "b"], None, read_environment(environ)) == (("a", "b"), {})
        assert self.read(tmp_path, "# ours\nalice k1\n\nk2\nalice k3\n", ["a"]) == (
            ("a", "k1", "k2", "k3"),
            {"k1": "alice", "k3": "alice"},
        )

    @pytest.mark.parametrize(("text", "told"), [("a b c", "line 1 has 3 words"), ("# none\n", "holds no key")])
    def test_a_file_that_makes_no_sense_is_told(self, tmp_path, text, told):
        with pytest.raises(ConfigError, match=told):
            self.read(tmp_path, text)

    def test_a_file_that_is_not_there_is_told(self, tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_api_keys([], tmp_path / "none", read_environment({}))
