"""Names and buckets of /metrics, and /load."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dsuf.engine.messages import Status
from dsuf.server.options import ServerOptions
from tests.support.calls import call
from tests.support.peer import Script
from tests.support.serving import encode, in_steps, running_server, says, wait_until

CHAT = "/v1/chat/completions"
HI = {"model": "deepseek-chat", "messages": [{"role": "user", "content": "hi"}]}

# What `vllm bench serve` 0.33 and the dashboards in circulation look for (serving.md 7.1).
VLLM = [
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
    "prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total", "request_success_total",
    "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
    "request_time_per_output_token_seconds_bucket", "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket", "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket", "request_prompt_tokens_bucket", "request_generation_tokens_bucket",
    "admission_rejections_total", "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total", "spec_decode_num_accepted_tokens_per_pos_total",
]  # fmt: skip
OURS = [
    "step_seconds_bucket", "accept_length_bucket", "kv_reuse_tokens_total", "stream_stalls_total", "waiting_tokens",
    "parser_invalid_tool_json_total",
]  # fmt: skip


def names_of(text):
    """Sample names; parsing proves that the exposition is well formed and that no family comes twice."""
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    return {sample.name for family in families for sample in family.samples}


def after_some_traffic(metrics_names):
    script = Script(in_steps(encode("one two three four five six seven"), 3), cached_tokens=2)
    options = ServerOptions(metrics_names=metrics_names, drain_delay_s=0)
    with running_server(lambda request: script, options=options) as server:
        httpx.post(server.url + CHAT, json=HI)
        httpx.post(server.url + CHAT, json={**HI, "temperature": 9})
        server.request_end(2)
        return names_of(httpx.get(server.url + "/metrics").text)


@pytest.mark.parametrize("metrics_names", ["dsuf", "vllm", "both"])
def test_names_are_ours_or_those_of_vllm_or_both(metrics_names):
    names = after_some_traffic(metrics_names)
    assert {f"vllm:{name}" for name in VLLM} <= names or metrics_names == "dsuf"
    assert {f"dsuf_{name}" for name in VLLM} <= names or metrics_names == "vllm"
    assert {f"dsuf_{name}" for name in OURS} <= names
    shared = {name.partition("_")[2] for name in names if name.startswith("dsuf_")} & set(VLLM)
    assert not shared or metrics_names != "vllm"
    assert metrics_names != "dsuf" or not any(name.startswith("vllm:") for name in names)


def test_buckets_begin_below_our_speeds_and_end_where_patience_does():
    with running_server(says("x")) as server:
        text = httpx.get(server.url + "/metrics").text
    edges = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith("_bucket") and sample.labels["le"] != "+Inf":
                edges.setdefault(family.name, []).append(float(sample.labels["le"]))
    assert min(edges["dsuf_inter_token_latency_seconds"]) == 0.0002
    assert min(edges["dsuf_step_seconds"]) == 0.001
    assert max(edges["dsuf_time_to_first_token_seconds"]) == 60
    assert edges["dsuf_accept_length"] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_steps_of_a_running_stream_are_counted_before_it_ends():
    with (
        running_server(says("one two three four five six seven eight", size=1, step_s=0.1)) as server,
        httpx.stream("POST", server.url + CHAT, json={**HI, "stream": True}) as stream,
    ):

        def steps():
            text = httpx.get(server.url + "/metrics").text
            line = next(line for line in text.splitlines() if line.startswith("dsuf_step_seconds_count"))
            return float(line.rpartition(" ")[2])

        wait_until(lambda: steps() > 0)
        assert not server.log()
        stream.read()
        server.request_end()
        assert steps() == 8


FUNCTION = {"name": "weather", "parameters": {"type": "object"}}
ASKS = {
    "/v1/chat/completions": {"messages": HI["messages"], "tools": [{"type": "function", "function": FUNCTION}]},
    "/v1/responses": {"input": "hi", "tools": [{"type": "function", **FUNCTION}]},
    "/v1/messages": {
        "messages": HI["messages"], "max_tokens": 999,
        "tools": [{"name": "weather", "input_schema": {"type": "object"}}],
    },
}  # fmt: skip


@pytest.mark.parametrize("path", ASKS)
@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_whose_arguments_are_no_json_are_counted(path, stream):
    bare = call("weather", city="Zürich").replace('string="true"', 'string="false"')
    good = call("weather", city='a "partial_json": "arguments": {')
    with running_server(says(f"I look.\n\n{good}")) as server:
        httpx.post(server.url + path, json={"model": "deepseek-chat", "stream": stream, **ASKS[path]})
        assert server.request_end()["finish_reason"] == "tool_calls"
        assert value_of(server, "dsuf_parser_invalid_tool_json_total") == 0
    with running_server(says(f"I look.\n\n{bare}")) as server:
        httpx.post(server.url + path, json={"model": "deepseek-chat", "stream": stream, **ASKS[path]})
        assert server.request_end()["finish_reason"] == "tool_calls"
        assert value_of(server, "dsuf_parser_invalid_tool_json_total") == 1


def value_of(server, name):
    families = text_string_to_metric_families(httpx.get(server.url + "/metrics").text)
    (sample,) = [sample for family in families for sample in family.samples if sample.name == name]
    return sample.value


def test_load_is_what_a_router_needs_and_returns_to_zero():
    with running_server(lambda request: Script(in_steps(encode("a b c"), 1), hangs=True)) as server:
        with httpx.stream("POST", server.url + CHAT, json={**HI, "stream": True}):
            wait_until(lambda: httpx.get(server.url + "/load").json()["running"] == 1)
            status = Status(True, waiting_tokens=9_000, context_tokens=3_000, max_context=1_000, max_sequences=4)
            server.peer.send(status)
            wait_until(lambda: httpx.get(server.url + "/load").json()["prefill_tokens"] == 9_000)
            load = httpx.get(server.url + "/load").json()
            assert (load["state"], load["server_load"], load["waiting"], load["cache_usage"]) == ("ready", 1, 0, 0.75)
            assert load["wait_s"] is None and load["prefill_tokens_per_s"] is None
            metrics = httpx.get(server.url + "/metrics").text
            assert 'dsuf_kv_cache_usage_perc{model_name="deepseek-v4.1-flash"} 0.75' in metrics
        wait_until(lambda: httpx.get(server.url + "/load").json()["server_load"] == 0)


def test_load_needs_the_key():
    with running_server(says("x"), options=ServerOptions(api_keys=("k",), drain_delay_s=0)) as server:
        assert httpx.get(server.url + "/load").status_code == 401
        assert httpx.get(server.url + "/load", headers={"x-api-key": "k"}).status_code == 200
