"""A public load tester, unchanged: what it reports is what the server did."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.aiperf import run_aiperf
from tests.support.serving import running_server, says, v41_text

pytestmark = pytest.mark.system

CALLS, AT_ONCE = 12, 3
FLAGS = {
    "--model": "deepseek-chat",
    "--request-count": CALLS,
    "--concurrency": AT_ONCE,
    "--synthetic-input-tokens-mean": 100,
    "--output-tokens-mean": 40,
}


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_its_counts_are_those_of_the_server(kind: str, tmp_path: Path) -> None:
    answer = says("Hello there, this is an answer of some words. " * 3, size=5, step_s=0.02)
    flags = [str(part) for pair in FLAGS.items() for part in pair]
    with running_server(answer, v41_text(context_limit=100_000)) as server:
        clients, metrics = run_aiperf(
            server.url, tmp_path, "--endpoint-type", kind, "--streaming", "--use-server-token-count", *flags
        )
        ends = server.log()
    assert len(ends) == CALLS and {line["status"] for line in ends} == {"ok"}
    assert clients["is_complete"] and clients["error_summary"] == []
    assert clients["completed_request_count"]["avg"] == CALLS
    made, read = (sum(line[f"{what}_tokens"] for line in ends) for what in ("completion", "prompt"))
    assert (clients["total_osl"]["avg"], clients["total_isl"]["avg"]) == (made, read)
    first, whole = clients["time_to_first_token"], clients["request_latency"]
    assert 0 < first["avg"] < whole["avg"] and clients["inter_token_latency"]["avg"] > 0
    assert metrics["metrics"]["dsuf_accept_length"]["type"] == "histogram"
