"""`dsuf repro`: its last line, its files and its exit status, against a played server."""

from __future__ import annotations

import json
import re

import pytest

from dsuf.cli.app import run_command
from tests.support.chat_server import DONE, event, played_server

PAGE = "<!DOCTYPE html>\n<html><body><canvas></canvas><script>let a = 1</script></body></html>"
HEADLINE = re.compile(r"7 tokens at [\d,]+ tokens/s \(first token after \d+\.\d\d s\)")


@pytest.fixture
def server():
    with played_server() as played:
        played.gap_s = 0.002
        played.pieces = [event("```html\n"), event(PAGE), event("\n```"), event(finish="stop", usage=7), DONE]
        yield played


def test_the_answer_is_printed_and_the_last_line_is_the_published_one(server, capsys):
    assert run_command(["repro", "tetris", "--url", server.url]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"```html\n{PAGE}\n```")
    assert HEADLINE.fullmatch(out.splitlines()[-1])
    assert "published, 4 GB300" in err
    assert re.search(r"tokens/s +\S+ +1,700 to 1,770 +1,980 to 2,170", err)


def test_quiet_leaves_only_the_headline(server, capsys):
    assert run_command(["repro", "tetris", "--url", server.url, "--quiet"]) == 0
    assert HEADLINE.fullmatch(capsys.readouterr().out.strip())


def test_the_body_on_the_wire_is_the_published_request(server):
    run_command(["repro", "tetris", "--url", server.url, "--quiet"])
    assert json.loads(server.requests[0][2]) == {
        "model": "deepseek-v4.1-flash",
        "messages": [
            {"role": "user", "content": "implement the tetris game. output HTML code directly - no explanation."}
        ],
        "thinking": {"type": "disabled"},
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_save_writes_the_page_without_its_fence(server, tmp_path):
    target = tmp_path / "tetris.html"
    assert run_command(["repro", "tetris", "--url", server.url, "--quiet", "--save", str(target), "--check"]) == 0
    assert target.read_text() == PAGE + "\n"


def test_check_fails_on_noise(server, capsys):
    server.pieces = [event("noise"), event(finish="length", usage=7), DONE]
    assert run_command(["repro", "tetris", "--url", server.url, "--quiet", "--check"]) == 1
    out, err = capsys.readouterr()
    assert "The page does not pass: the answer is one HTML document" in err
    assert HEADLINE.fullmatch(out.strip())


def test_several_runs_report_ranges_and_a_bench_object(server, tmp_path, capsys):
    target = tmp_path / "a.json"
    assert run_command(["repro", "tetris", "--url", server.url, "--quiet", "--runs", "3", "--output", str(target)]) == 0
    written = json.loads(target.read_text())
    assert written["kind"] == "repro.tetris"
    assert len(written["samples"]) == 3
    assert written["metrics"]["min_tokens_per_s"] <= written["metrics"]["tokens_per_s"]
    assert "run 3 of 3" in capsys.readouterr().err


def test_a_missed_threshold_ends_with_1(server):
    flags = ["repro", "tetris", "--url", server.url, "--quiet", "--fail-below", "tokens_per_s=1e12"]
    assert run_command(flags) == 1


@pytest.mark.parametrize(
    ("flags", "status"),
    [
        (["repro", "nope"], 2),
        (["repro", "tetris", "--runs", "0"], 2),
        (["repro", "tetris", "--url", "nonsense"], 2),
        (["repro", "tetris", "--url", "http://127.0.0.1:9"], 3),
        (["repro"], 2),
    ],
)
def test_exit_statuses(flags, status):
    assert run_command(flags) == status


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["mix", "--check"], "--check is for recipes that ask for a page; mix measures"),
        (["mix", "--open"], "--open is for"),
        (["h200", "--url", "http://x"], "--url is not for h200"),
        (["h200", "--verify", "3"], "--verify is not for h200"),
        (["tetris", "--open", "--save", "x.html"], "--save is not for --open"),
        (["tetris", "--open", "--runs", "3"], "--runs is not for --open"),
        (["tetris", "--save", "/absent/x.html"], "--save /absent/x.html cannot be written"),
        (["tetris", "--url", "http://127.0.0.1:9", "--gpus", "0"], "--gpus would be flags of a server that is started"),
        (["mix", "--url", "http://127.0.0.1:9", "--ckpt", "noise"], "--ckpt would be flags of a server"),
    ],
)
def test_a_flag_that_would_have_no_effect_is_refused(capsys, flags, complaint):
    assert run_command(["repro", *flags]) == 2
    assert complaint in capsys.readouterr().err


class TestStepsOfARecipe:
    @pytest.fixture
    def asked(self, monkeypatch):
        from dsuf.cli.bench import decode

        calls = []

        def played(**flags):
            calls.append(flags)

        played.__signature__ = decode.decode.__signature__
        monkeypatch.setattr(decode, "decode", played)
        return calls

    def test_every_run_is_measured_with_its_own_flags(self, asked, tmp_path):
        assert run_command(["repro", "h200", "--output", str(tmp_path / "x.json")]) == 0
        assert len(asked) >= 10 and all(flags["config"] == "h200x1" for flags in asked)
        plain, drafted = asked[:2]
        assert plain["draft"] == "off" and drafted["verify"] == "5" and drafted["inject_accept"] == 0.82
        assert plain["output"] == tmp_path / "x-rows1-1k.json" and plain["label"] == "h200 rows1-1k"
        assert len({flags["output"] for flags in asked}) == len(asked)

    @pytest.mark.parametrize(("flags", "repeat"), [([], 3), (["--runs", "5"], 5)])
    def test_each_is_repeated_as_the_recipe_says_or_as_often_as_asked(self, asked, flags, repeat):
        assert run_command(["repro", "h200", *flags]) == 0
        assert {flags["repeat"] for flags in asked} == {repeat}

    def test_a_page_is_not_asked_for(self, asked, capsys):
        assert run_command(["repro", "h200", "--check"]) == 2
        assert "recipes that ask for a page" in capsys.readouterr().err and not asked
