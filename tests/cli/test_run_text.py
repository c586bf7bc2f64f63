"""`dsuf run` with text: streaming, --json, --system, --thinking, and a chat over a pipe."""

from __future__ import annotations

import io
import json
import os
import re
import signal

import pytest

from dsuf.cli import chat
from dsuf.cli.app import run_command
from dsuf.engine.engine import Engine


@pytest.fixture
def run(environ, brief_noise, capsys):
    def command(*flags):
        status = run_command(["run", "--ckpt", str(brief_noise), "--numerics", "exact32", *flags])
        out, err = capsys.readouterr()
        return status, out, err

    return command


def test_the_answer_is_on_stdout_and_the_speed_on_stderr(run):
    status, out, err = run("hello")
    assert status == 0
    assert out.strip()
    assert re.search(r"8 tokens at [\d,]+ tokens/s .* ended by length", err)
    assert "Defaults of this checkpoint where a request is silent: max_new_tokens 8." in err


def test_the_built_in_checkpoint_says_that_its_answers_are_noise(environ, capsys):
    assert run_command(["run", "hello", "--ckpt", "noise", "--max-tokens", "2"]) == 0
    assert capsys.readouterr().err.count("its answers are noise") == 1


def test_json_has_the_text_beside_the_tokens_and_nothing_else_on_stdout(run):
    plain = run("hello", "--seed", "3")[1]
    status, out, _ = run("hello", "--seed", "3", "--json")
    report = json.loads(out)
    assert status == 0
    assert report["text"] == plain.removesuffix("\n")
    assert len(report["tokens"]) == 8
    assert report["finish_reason"] == "length"


def test_a_system_message_and_thinking_change_the_prompt(run):
    def prompt_tokens(*flags):
        return json.loads(run("hello", "--json", "--max-tokens", "1", *flags)[1])["prompt_tokens"]

    plain = prompt_tokens()
    assert prompt_tokens("--system", "be brief") > plain
    assert prompt_tokens("--thinking") > plain


def test_what_a_flag_says_holds_with_thinking_too(run):
    def tokens(seed):
        flags = ("--thinking", "--temperature", "0", "--seed", seed, "--json", "--max-tokens", "3")
        return json.loads(run("hello", *flags)[1])["tokens"]

    assert tokens("1") == tokens("2")


def test_reasoning_is_told_apart_from_the_answer(run):
    report = json.loads(run("hello", "--thinking", "--json")[1])
    assert report["reasoning"]
    assert report["text"] == ""


def test_a_prompt_beyond_the_context_ends_with_2(run):
    status, out, err = run("hello " * 40, "--max-context", "32")
    assert (status, out) == (2, "")
    assert "maximum context length" in err


def test_a_chat_keeps_its_thread(run, monkeypatch, capsys):
    prompts = []
    text_prompt = chat.text_prompt

    def seen(text, messages, *rest):
        prompts.append(messages)
        return text_prompt(text, messages, *rest)

    monkeypatch.setattr(chat, "text_prompt", seen)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
    status, out, err = run("--chat", "--system", "be brief", "--max-tokens", "4")
    assert status == 0
    assert [message["role"] for message in prompts[1]] == ["system", "user", "assistant", "user"]
    assert [message["content"] for message in prompts[1] if message["role"] == "user"] == ["one", "two"]
    assert prompts[1][2]["content"].strip() in out
    assert err.count("4 tokens at") == 2


@pytest.mark.parametrize("steps", [1, 4])
def test_an_interrupt_breaks_off_one_answer_wherever_it_strikes(run, monkeypatch, steps):
    step, done = Engine.step, []

    def interrupted(engine):
        done.append(engine)
        if len(done) == steps:
            os.kill(os.getpid(), signal.SIGINT)
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\none\n"))
    status, out, err = run("--chat", "--max-tokens", "8", "--draft", "off")
    assert status == 0
    assert out.count("[broken off; this turn is forgotten]") == 1
    assert len(re.findall(r"^\d+ tokens at", err, re.MULTILINE)) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_ends_the_chat(run, monkeypatch):
    def interrupted(engine):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the second one was not heard")

    monkeypatch.setattr(Engine, "step", interrupted)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
    assert run("--chat")[0] == 130


def test_a_message_that_cannot_be_run_does_not_end_the_chat(run, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello " * 60 + "\nshort\n"))
    status, _, err = run("--chat", "--max-context", "40", "--max-tokens", "2")
    assert status == 0
    assert "maximum context length" in err
    assert "2 tokens at" in err
