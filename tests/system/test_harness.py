"""The official harness, unchanged and headless, on a small repository."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.support.calls import call
from tests.support.harness import run_harness
from tests.support.peer import Script
from tests.support.served import Serve
from tests.support.serving import encode, in_steps, running_server, v41_text, v41_vocabulary

pytestmark = pytest.mark.system

CORPUS = tomllib.loads(
    (Path(__file__).parents[2] / "recipes" / "toy" / "corpus" / "harness.toml").read_text(encoding="utf-8")
)
TASK = "summarize this repo"
TITLE_TOKENS = 64
LOOK = f"I look.</think>\n\n{call('bash', command='ls && cat README.md', description='Look around')}"
SUMMARY = "A demo repository with one README. 👋"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "README.md").write_text("# A fish tank in Forth\n")
    subprocess.run(["git", "init", "-q", "."], cwd=folder, check=True)
    return folder


def spelled(ids: list[int]) -> str:
    return b"".join(v41_vocabulary().bytes_of[i] for i in ids).decode()


def test_it_calls_a_tool_and_goes_on_from_its_result(repository: Path, tmp_path: Path) -> None:
    def script(request):
        if request.max_tokens == TITLE_TOKENS:
            return Script(in_steps(encode("A small repository")))
        seen = "# A fish tank in Forth\n</tool_result>" in spelled(request.prompt_ids)
        return Script(in_steps(encode(f"Enough.</think>{SUMMARY}" if seen else LOOK), 5))

    with running_server(script, v41_text(context_limit=100_000)) as server:
        done = run_harness(server.url, TASK, repository, tmp_path / "home")
        requests, lines = server.peer.requests, server.log()
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == SUMMARY
    titles = [request for request in requests if request.max_tokens == TITLE_TOKENS]
    first, second = (request for request in requests if request.max_tokens != TITLE_TOKENS)
    assert len(titles) == 1
    # what was sampled comes back word for word, so caches of the first turn can serve the second
    prefix = [*first.prompt_ids, *encode(LOOK)]
    assert second.prompt_ids[: len(prefix)] == prefix
    assert {line["status"] for line in lines} == {"ok"} and len({line["session_id"] for line in lines}) == 1
    assert [line["finish_reason"] for line in lines].count("tool_calls") == 1


def ask_the_toy(task: str, repository: Path, tmp_path: Path) -> tuple[str, list[dict[str, object]]]:
    """What the harness prints when the built-in checkpoint serves it, and the server's lines."""
    server = Serve(tmp_path, "--ckpt", "toy")
    try:
        done = run_harness(server.url, task, repository, tmp_path / "home")
        lines = server.lines()
    finally:
        server.process.terminate()
        server.process.wait(10)
    assert done.returncode == 0, done.stderr
    assert all(line["status"] == "ok" for line in lines)
    return done.stdout.strip(), lines


def test_the_built_in_checkpoint_answers_it(repository: Path, tmp_path: Path) -> None:
    said, lines = ask_the_toy(TASK, repository, tmp_path)
    assert said == CORPUS["summary"]["answer"]
    assert len(lines) == 2


def test_the_built_in_checkpoint_calls_a_tool_and_goes_on_from_its_result(repository: Path, tmp_path: Path) -> None:
    listing = CORPUS["listing"]
    said, lines = ask_the_toy(listing["task"], repository, tmp_path)
    assert said == listing["done"]
    # the title, the call, and what follows its result, with the cache of the call
    assert sorted(line["finish_reason"] for line in lines) == ["stop", "stop", "tool_calls"]
    call = next(line for line in lines if line["finish_reason"] == "tool_calls")
    last = max(lines, key=lambda line: line["prompt_tokens"])
    assert last["prompt_tokens"] > call["prompt_tokens"] + call["completion_tokens"]
    assert last["cached_tokens"] >= call["prompt_tokens"]
