"""Health, readiness and metrics: what load balancers and scrapers see."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dsuf.engine.messages import Failed, Status
from dsuf.errors import CheckpointError
from tests.support.peer import Script
from tests.support.serving import encode, running_server, says, wait_until

HI = {"model": "deepseek-chat", "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


def test_states_from_starting_to_ready():
    with running_server(says("x"), engine_ready=False) as server:
        server.peer.send(Status(ready=False, loading="weights", loaded=0.43))
        wait_until(lambda: server.service.link.status.loading)
        for path in ("/readyz", "/health", "/v1/readyz"):
            answer = httpx.get(server.url + path)
            assert answer.status_code == 503
            assert answer.json() == {"status": "starting", "reason": "the engine is starting: weights, 43%"}
        assert httpx.get(server.url + "/livez").status_code == 200
        assert httpx.get(server.url + "/v1/models").status_code == 200
        refused = httpx.post(server.url + CHAT, json=HI)
        assert refused.status_code == 503 and refused.json()["error"]["type"] == "server_error"
        assert 1 <= int(refused.headers["retry-after"]) <= 10
        server.peer.send(Status(ready=True))
        wait_until(lambda: httpx.get(server.url + "/readyz").status_code == 200)
        assert httpx.post(server.url + CHAT, json=HI).status_code == 200


def test_an_engine_that_cannot_load_ends_the_server_with_its_error():
    with running_server(says("x"), engine_ready=False) as server:
        server.peer.send(Failed("CheckpointError", "shard 3 is truncated", 3))
        server.peer.die()
        wait_until(lambda: server.service.link.state == "gone")
    assert isinstance(server.result, CheckpointError) and server.result.exit_code == 3
    assert "shard 3 is truncated" in str(server.result)


def test_a_server_can_be_stopped_while_it_starts():
    with running_server(says("x"), engine_ready=False) as server:
        assert httpx.get(server.url + "/readyz").status_code == 503
    assert server.result == 0 and not server.log("engine_gone")


def test_an_engine_that_is_stopped_with_its_server_while_it_starts_is_no_failure(monkeypatch):
    with running_server(says("x"), engine_ready=False) as server:
        log = type(server.service).log

        def draining_from_now_on(service, line):  # as when one signal reaches both processes
            service.draining = True
            log(service, line)

        monkeypatch.setattr(type(server.service), "log", draining_from_now_on)
        server.peer.die()
        wait_until(lambda: server.log("engine_gone"))
    assert server.result == 0


def test_version():
    with running_server(says("x")) as server:
        assert set(httpx.get(server.url + "/version").json()) == {"version"}


def samples(server):
    """name, labels without model_name -> value; parsing proves that the exposition is well formed."""
    text = httpx.get(server.url + "/metrics").text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            found[sample.name, *sorted(labels.items())] = sample.value
            assert sample.name.startswith("dsuf_") and sample.labels["model_name"] == "deepseek-v4.1-flash"
    return found


def test_metrics_count_what_happened():
    ids = encode("one two three four five six seven")
    assert len(ids) == 7
    script = Script([ids[:1], ids[1:4], ids[4:5], ids[5:]], cached_tokens=2)
    with running_server(lambda request: script) as server:
        before = samples(server)
        assert before["dsuf_num_requests_running",] == before["dsuf_generation_tokens_total",] == 0
        for _ in range(2):
            httpx.post(server.url + CHAT, json={**HI, "stream": True})
        httpx.post(server.url + CHAT, json={**HI, "temperature": 9})
        server.request_end(3)
        after = samples(server)
    assert after["dsuf_num_requests_running",] == after["dsuf_num_requests_waiting",] == 0
    assert after["dsuf_request_success_total", ("finished_reason", "stop")] == 2
    assert after["dsuf_prompt_tokens_total",] == 10
    assert after["dsuf_prefix_cache_hits_total",] == 4
    assert after["dsuf_generation_tokens_total",] == 2 * 8  # with the EOS
    assert after["dsuf_spec_decode_num_drafts_total",] == 6
    assert after["dsuf_spec_decode_num_draft_tokens_total",] == 30
    assert after["dsuf_spec_decode_num_accepted_tokens_total",] == 2 * (2 + 0 + 1)
    assert after["dsuf_spec_decode_num_accepted_tokens_per_pos_total", ("position", "0")] == 4
    assert after["dsuf_spec_decode_num_accepted_tokens_per_pos_total", ("position", "1")] == 2
    assert after["dsuf_accept_length_bucket", ("le", "1.0")] == 2
    assert after["dsuf_accept_length_bucket", ("le", "3.0")] == 6
    assert after["dsuf_accept_length_count",] == 6 and after["dsuf_accept_length_sum",] == 12
    assert after["dsuf_time_to_first_token_seconds_count",] == 2
    assert after["dsuf_step_seconds_count",] == 2 * 4
    assert after["dsuf_e2e_request_latency_seconds_count",] == 2
    assert after["dsuf_admission_rejections_total", ("status", "400")] == 1
    smallest = min(float(key[1][1]) for key in after if key[0] == "dsuf_inter_token_latency_seconds_bucket")
    assert smallest == pytest.approx(0.0002)


def test_gauges_follow_a_request():
    with (
        running_server(lambda request: Script([[5]], queue_s=0.2, prefill_s=0.2)) as server,
        httpx.stream("POST", server.url + CHAT, json={**HI, "stream": True}) as stream,
    ):
        assert samples(server)["dsuf_num_requests_waiting",] == 1
        wait_until(lambda: samples(server)["dsuf_num_requests_running",] == 1)
        stream.read()
        server.request_end()
        assert samples(server)["dsuf_num_requests_running",] == 0
