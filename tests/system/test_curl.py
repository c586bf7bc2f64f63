"""What people paste into a terminal: curl, streaming and not, for every protocol."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.support.calls import HI
from tests.support.serving import running_server, says

pytestmark = pytest.mark.system

TEXT = "Hello 👋🏽, naïve world."
OFF = {"thinking": {"type": "disabled"}}
CALLS = {
    "/v1/chat/completions": {"model": "deepseek-flash", "messages": HI, **OFF},
    "/v1/completions": {"model": "deepseek-flash", "prompt": "hi", "max_tokens": 99},
    "/v1/responses": {"model": "deepseek-flash", "input": "hi", "reasoning": {"effort": "none"}},
    "/v1/messages": {"model": "deepseek-flash", "messages": HI, "max_tokens": 99, **OFF},
}


def curl(*arguments):
    command = ["curl", "-sS", "--max-time", "20", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("stream", [False, True])
def test_curl_gets_the_answer(path, stream):
    with running_server(says(TEXT)) as server:
        body = json.dumps({**CALLS[path], "stream": stream})
        told = curl("-N", server.url + path, "-H", "content-type: application/json", "-d", body)
    if not stream:
        assert TEXT in told and isinstance(json.loads(told), dict)
    else:
        assert told.endswith("\n\n") and ("[DONE]" in told) == path.endswith("completions")


def test_curl_sees_the_status_and_headers():
    with running_server(says(TEXT)) as server:
        told = curl("-i", server.url + "/v1/chat/completions", "-d", "{")
        assert told.startswith("HTTP/1.1 400") and "x-request-id: req-" in told and '{"error":' in told
        assert curl("-I", server.url + "/readyz").startswith("HTTP/1.1 200")
