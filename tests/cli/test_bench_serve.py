"""`dsuf bench serve` against a scripted server: what it sends, when, and what it makes of the answers."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import statistics
from itertools import pairwise

import pytest

from dsuf.cli.app import run_command
from dsuf.cli.bench.serve_client import Record, Target
from dsuf.cli.bench.serve_data import WORDS, Shape, make_dataset
from dsuf.cli.bench.serve_load import Arrivals, MixRun
from dsuf.cli.bench.serve_report import load_metrics, mix_metrics, parse_goodput, percentile, spread
from dsuf.errors import ConfigError
from dsuf.server.options import ServerOptions
from tests.support.chat_server import DONE, event, played_server
from tests.support.peer import Script
from tests.support.serving import encode, in_steps, running_server, v41_text

# The top-level keys that `vllm bench serve` writes (serving.md 8.1, 8.3).
VLLM_KEYS = """date endpoint_type backend label model_id tokenizer_id num_prompts request_rate burstiness
max_concurrency duration completed failed total_input_tokens total_output_tokens request_throughput request_goodput
output_throughput total_token_throughput max_output_tokens_per_s max_concurrent_requests rtfx
spec_decode_acceptance_rate spec_decode_acceptance_length spec_decode_num_drafts spec_decode_draft_tokens
spec_decode_accepted_tokens spec_decode_per_position_acceptance_rates"""
VLLM_TIMES = [f"{one}_{what}_ms" for what in ("ttft", "tpot", "itl") for one in ("mean", "median", "std", "p99")]


def longest(request):
    """As many tokens as asked for, in steps of three after the first one."""
    ids = encode("word " * request.max_tokens)[: request.max_tokens]
    steps = [ids[:1], *in_steps(ids[1:], 3)]
    return Script(steps, reason="length", prefill_s=0.02, step_s=0.005, cached_tokens=2)


def run(tmp_path, server, *flags):
    output = tmp_path / "result.json"
    code = run_command(["bench", "serve", "--url", server.url, "--output", str(output), "--warmup", "0", *flags])
    assert code == 0
    twin = json.loads(output.with_suffix(".vllm.json").read_text())
    return json.loads(output.read_text()), twin


class TestRuns:
    def test_a_run_has_every_key_of_vllm_and_ours(self, tmp_path, capsys):
        with running_server(longest) as server:
            result, twin = run(tmp_path, server, "--num-prompts", "6", "--input-len", "40", "--output-len", "13")
        assert result["schema"] == "dsuf.bench/1" and result["kind"] == "serve"
        metrics = result["metrics"]
        assert (metrics["completed"], metrics["failed"], metrics["total_output_tokens"]) == (6, 0, 6 * 13)
        assert metrics["cache_hit_tokens"] == 6 * 2
        assert metrics["accept_length"] == 3.0
        assert metrics["spec_decode_acceptance_length"] == 3.0
        assert metrics["total_input_tokens"] == sum(len(r.prompt_ids) for r in server.peer.requests)
        assert all(40 <= len(r.prompt_ids) <= 46 and r.max_tokens == 13 and r.ignore_eos for r in server.peer.requests)
        for name in ("ttft", "tpot", "itl", "e2el"):
            for one in ("mean", "median", "std", "p50", "p90", "p95", "p99"):
                assert metrics[f"{one}_{name}_ms"] >= 0
        assert set(VLLM_KEYS.split()) <= set(twin) and set(VLLM_TIMES) <= set(twin)
        assert twin["request_rate"] == "inf" and twin["max_concurrency"] is None and twin["completed"] == 6
        assert twin["spec_decode_per_position_acceptance_rates"][:2] == [1.0, 1.0]
        assert not {"ttfts", "itls", "generated_texts"} & set(twin)
        out, err = capsys.readouterr()
        assert out.startswith("serve: ") and out.count("\n") == 1
        assert re.search(r"Successful requests: +\d+$", err, re.MULTILINE)

    def test_details_are_kept_on_request(self, tmp_path):
        with running_server(longest) as server:
            _, twin = run(tmp_path, server, "--num-prompts", "2", "--output-len", "4", "--save-detailed")
        assert twin["output_lens"] == [4, 4] and twin["errors"] == ["", ""]
        assert len(twin["itls"][0]) == 1 and twin["generated_texts"][0].startswith("word word")

    def test_a_closed_loop_never_has_more_calls_open(self, tmp_path):
        with running_server(longest) as server:
            flags = ["--num-prompts", "7", "--max-concurrency", "2", "--output-len", "4"]
            result, _ = run(tmp_path, server, *flags)
        assert result["metrics"]["max_concurrent_requests"] == 2
        assert result["metrics"]["p99_client_queue_time_ms"] > 0

    def test_turns_carry_the_answers_before_them(self, tmp_path):
        with running_server(longest) as server:
            flags = ["--dataset", "chat", "--turns", "3", "--num-prompts", "1", "--input-len", "5", "--output-len", "4"]
            result, _ = run(tmp_path, server, *flags)
            lengths = [len(request.prompt_ids) for request in server.peer.requests]
        assert result["metrics"]["completed"] == 3
        assert all(later > earlier + 5 + 4 for earlier, later in pairwise(lengths))
        first, second = (request.prompt_ids for request in server.peer.requests[:2])
        assert second[: len(first)] == first

    def test_the_tetris_request_is_the_published_one(self, tmp_path):
        with running_server(longest, v41_text(context_limit=300)) as server:
            run(tmp_path, server, "--dataset", "tetris", "--num-prompts", "1")
            (request,) = server.peer.requests
        assert not request.ignore_eos and request.prompt_ids[2:7] == encode("implement the tetris game")

    def test_repeats_and_thresholds(self, tmp_path, capsys):
        flags = ["--num-prompts", "2", "--output-len", "4", "--repeat", "2", "--ci-json", str(tmp_path / "ci")]
        with running_server(longest) as server:
            result, _ = run(tmp_path, server, *flags, "--fail-above", "failed=0")
            assert len(result["samples"]) == 2
            code = run_command(["bench", "serve", "--url", server.url, *flags, "--fail-below", "completed=3"])
        assert code == 1 and "completed is 2, below" in capsys.readouterr().err
        bigger = {row["name"] for row in json.loads((tmp_path / "ci" / "bigger.json").read_text())}
        smaller = {row["name"] for row in json.loads((tmp_path / "ci" / "smaller.json").read_text())}
        assert {"serve/output_throughput", "serve/accept_length"} <= bigger
        assert {"serve/p99_ttft_ms", "serve/median_itl_ms"} <= smaller

    def test_refused_calls_are_counted_and_the_others_measured(self, tmp_path, capsys):
        options = ServerOptions(max_queued_requests=1, drain_delay_s=0)

        def slow(request):
            return Script(in_steps(encode("a b c d"), 2), reason="length", queue_s=0.3)

        with running_server(slow, options=options) as server:
            result, _ = run(tmp_path, server, "--num-prompts", "4")
        assert result["metrics"]["completed"] >= 1 and result["metrics"]["failed"] >= 1
        assert "calls failed; the first: status 429" in capsys.readouterr().err

    def test_when_nothing_is_answered_it_ends_with_3(self, capsys):
        with running_server(longest, v41_text(context_limit=64)) as server:
            code = run_command(["bench", "serve", "--url", server.url, "--warmup", "0", "--input-len", "500"])
        assert code == 3 and "maximum context length" in capsys.readouterr().err

    def test_without_a_server_it_ends_with_3(self, capsys):
        assert run_command(["bench", "serve", "--url", "http://127.0.0.1:9"]) == 3
        assert "does not list a model" in capsys.readouterr().err


class TestMix:
    FLAGS = ("--mix-streams", "2", "--mix-alone", "0.3", "--mix-mixed", "0.8", "--mix-short-rate", "10")

    @staticmethod
    def script(request):
        """Long prompts hold a second up; streams go on and on."""
        prefill_s = 0.2 if len(request.prompt_ids) > 300 else 0.0
        return Script(in_steps(encode("word " * 2000), 2), reason="length", prefill_s=prefill_s, step_s=0.01)

    def test_streams_alone_and_beside_short_and_long_prompts(self, tmp_path, capsys):
        with running_server(self.script, v41_text(context_limit=8192)) as server:
            result, _ = run(tmp_path, server, "--dataset", "mix", *self.FLAGS, "--mix-long-len", "600")
            lengths = [len(request.prompt_ids) for request in server.peer.requests]
        metrics = result["metrics"]
        assert sum(length < 100 for length in lengths) == 2
        assert sum(200 <= length < 260 for length in lengths) >= 3 and sum(length > 600 for length in lengths) >= 2
        assert metrics["p50_alone_gap_ms"] >= 5 and metrics["p50_mixed_gap_ms"] >= 5
        assert metrics["short_completed"] >= 3 and metrics["long_completed"] >= 2
        assert metrics["p50_long_ttft_ms"] >= 200
        assert metrics["long_prompt_tokens_per_s"] > 0
        assert capsys.readouterr().out.startswith("mix: gap p50/p99 ")

    def test_gaps_are_those_of_one_step_and_silence_is_any(self):
        streams = [
            Record("stream", events=[0.0, 0.1, 0.4, 0.5], steps=[0, 1, 4, 5]),
            Record("stream", events=[0.0, 0.2], steps=[-1, -1]),
        ]
        long = Record("long", sent=0.0, events=[0.6], steps=[-1], prompt_tokens=700, output_tokens=1)
        metrics = mix_metrics(MixRun([*streams, long], began=-1.0, mixed=0.0, ended=0.7))
        assert metrics["mean_mixed_gap_ms"] == pytest.approx(400 / 3) and metrics["max_mixed_gap_ms"] == pytest.approx(
            200
        )
        assert metrics["max_mixed_silence_ms"] == pytest.approx(300) and metrics["mixed_gaps_of_more_steps"] == 1
        assert metrics["mixed_steps_per_s"] == pytest.approx(6 / 0.7)
        assert metrics["long_prompt_tokens_per_s"] == pytest.approx(1000)

    def test_times_to_first_token_are_of_answers_whose_first_token_shows(self):
        short = {"group": "short", "sent": 0.0, "output_tokens": 4}
        records = [
            Record(**short, events=[0.1, 0.2], steps=[0, 1], text="ab"),
            Record(**short, events=[0.5], steps=[3], text="b"),  # three tokens without text before it
            Record(**short, events=[0.8], steps=[-1]),  # no text at all
            Record(**short, events=[0.3], steps=[-1], text="a"),  # of a server that tells nothing
        ]
        metrics = mix_metrics(MixRun(records, began=-1.0, mixed=0.0, ended=1.0))
        assert metrics["mean_short_ttft_ms"] == pytest.approx(200) and metrics["short_late_texts"] == 2
        assert metrics["short_completed"] == 4

    def test_long_prompts_are_cut_to_the_servers_context(self, tmp_path, capsys):
        with running_server(self.script, v41_text(context_limit=700)) as server:
            result, _ = run(tmp_path, server, "--dataset", "mix", *self.FLAGS)
        assert result["params"]["mix_long_len"] == 700 - 64 - 1
        assert result["metrics"]["long_failed"] == 0
        assert "do not fit the server's context of 700" in capsys.readouterr().err

    def test_repro_runs_the_recipe_of_the_mix(self, tmp_path, monkeypatch, capsys):
        given = {}
        monkeypatch.setattr("dsuf.cli.bench.serve.serve", fake := _keep(given))
        assert run_command(["repro", "mix", "--url", "http://x", "--runs", "3"]) == 0
        assert given["dataset"] == "mix" and given["mix_long_len"] == 131_072 and given["repeat"] == 3
        assert run_command(["repro", "mix", "--check"]) == 2
        assert "--check is for recipes that ask for a page" in capsys.readouterr().err
        assert fake is not None


def _keep(given):
    from dsuf.cli.bench.serve import serve

    def keep(**flags):
        given.update(flags)

    keep.__signature__ = __import__("inspect").signature(serve)
    return keep


class TestClient:
    def one(self, played):
        target = Target(played.url, None)
        body = {"messages": []}
        return asyncio.run(target.send(body, Record("")))

    def test_times_and_counts_of_a_stream(self):
        with played_server() as played:
            played.pieces = [event("a"), event("b") + event("c"), event(finish="stop", usage=9), DONE]
            played.gap_s = 0.02
            record = self.one(played)
        assert record.error == "" and record.text == "abc" and record.output_tokens == 9
        assert len(record.events) == 3 and record.gaps_s[0] >= 0.01 > record.gaps_s[1]
        assert record.ttft_s > 0 and record.tpot_s == pytest.approx((record.events[2] - record.events[0]) / 8)

    def test_an_error_event_a_cut_and_a_bad_status_are_failures(self):
        with played_server() as played:
            played.pieces = [event("a"), b'data: {"error": {"message": "device fault"}}\n\n']
            assert self.one(played).error == "device fault"
            played.pieces = [b'data: {"choi', b"\n\n"]
            assert "not a stream" in self.one(played).error
            played.status, played.error = 429, "come later"
            assert "status 429" in self.one(played).error and "come later" in self.one(played).error
            played.status, played.pieces = 200, [DONE]
            assert self.one(played).error == "the answer is empty"

    def test_tokens_that_show_no_text_are_an_answer_which_comes_with_its_end(self):
        with played_server() as played:
            played.pieces, played.gap_s = [event(finish="length", usage=1), DONE], 0.02
            record = self.one(played)
        assert record.error == "" and record.output_tokens == 1 and len(record.events) == 1 and record.ttft_s >= 0.01

    def test_nobody_there(self):
        record = asyncio.run(Target("http://127.0.0.1:9", None).send({}, Record("")))
        assert record.error.startswith("cannot connect")


class TestData:
    def test_every_word_is_one_token(self):
        assert all(len(encode(f" {word}")) == 1 for word in WORDS)

    def test_one_seed_one_dataset(self):
        def made(seed):
            return make_dataset("random", 5, Shape(range_ratio=0.5), random.Random(seed), None, {})

        assert made(1) == made(1) != made(2)
        lengths = [len(one.turns[0][0].split()) for one in made(3)]
        assert all(256 <= length <= 768 for length in lengths) and len(set(lengths)) > 1

    def test_prefixes_are_shared(self):
        made = make_dataset("prefix", 6, Shape(prefix_len=50, prefixes=2), random.Random(0), None, {})
        starts = [tuple(one.turns[0][0].split()[:50]) for one in made]
        assert starts[0] == starts[2] == starts[4] != starts[1] == starts[3]
        assert len({one.turns[0][0] for one in made}) == 6

    def test_a_file_of_prompts_and_messages(self, tmp_path):
        path = tmp_path / "data.jsonl"
        rows = [
            {"prompt": "one", "max_tokens": 3, "body": {"x": 2}},
            {"messages": [{"role": "user", "content": "two"}]},
        ]
        path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
        made = make_dataset("jsonl", 3, Shape(output_len=7), random.Random(0), path, {"x": 1})
        bodies = [one.bodies().body(0) for one in made]
        assert [body["messages"][0]["content"] for body in bodies] == ["one", "two", "one"]
        assert [body["max_tokens"] for body in bodies] == [3, 7, 3]
        assert [body["x"] for body in bodies] == [2, 1, 2]

    @pytest.mark.parametrize("text", ["", "{}", '{"prompt": 5}', "nonsense", '{"prompt": "a", "messages": []}'])
    def test_files_that_do_not_fit_are_refused(self, tmp_path, text):
        path = tmp_path / "data.jsonl"
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"data\.jsonl"):
            make_dataset("jsonl", 1, Shape(), random.Random(0), path, {})


@pytest.mark.parametrize(
    "flags",
    [
        ["--dataset", "sharegpt"],
        ["--dataset", "jsonl"],
        ["--dataset-path", "x.jsonl"],
        ["--num-prompts", "0"],
        ["--request-rate", "0"],
        ["--request-rate", "nan"],
        ["--burstiness", "0"],
        ["--max-concurrency", "0"],
        ["--range-ratio", "2"],
        ["--goodput", "ttft"],
        ["--goodput", "speed:4"],
        ["--mix-long-len", "0"],
        ["--mix-alone", "-1"],
    ],
)
def test_wrong_flags_end_with_2_before_anything_is_sent(flags, capsys):
    assert run_command(["bench", "serve", "--url", "http://127.0.0.1:9", *flags]) == 2
    assert capsys.readouterr().err.startswith("dsuf: ")


class TestArrivals:
    @pytest.mark.parametrize("burstiness", [0.3, 1.0, 10.0])
    def test_gaps_have_the_rate_and_the_burstiness(self, burstiness):
        offsets = Arrivals(rate=5.0, burstiness=burstiness).offsets_s(20_000, random.Random(0))
        gaps = [later - earlier for earlier, later in pairwise(offsets)]
        assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.05)
        variation = statistics.pstdev(gaps) / statistics.fmean(gaps)
        assert variation == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)  # of a gamma distribution

    def test_an_infinite_rate_sends_all_at_once(self):
        assert Arrivals().offsets_s(3, random.Random(0)) == [0.0, 0.0, 0.0]


class TestNumbers:
    def test_percentiles_by_hand(self):
        assert [percentile([1, 2, 3, 4], p) for p in (0, 50, 90, 100)] == [1, 2.5, pytest.approx(3.7), 4]
        assert spread("x", []) == {f"{s}_x_ms": 0.0 for s in ("mean", "median", "std", "p50", "p90", "p95", "p99")}

    def test_a_run_by_hand(self):
        def record(sent, events, output, error=""):
            return Record("", 0.0, sent, events, 10, 4, output, "", error)

        records = [
            record(0.0, [0.1, 0.2, 0.4], 7),
            record(0.0, [0.3], 1),
            record(5.0, [5.5, 6.0], 3),
            record(0.0, [], 0, "gone"),
        ]
        metrics = load_metrics(records, 10.0, parse_goodput(["ttft:400 tpot:60"]))
        assert (metrics["completed"], metrics["failed"]) == (3, 1)
        assert (metrics["total_input_tokens"], metrics["total_output_tokens"]) == (30, 11)
        assert metrics["request_throughput"] == 0.3 and metrics["output_throughput"] == 1.1
        assert metrics["request_goodput"] == 0.2 and metrics["cache_hit_tokens"] == 12
        assert metrics["mean_ttft_ms"] == pytest.approx(300) and metrics["median_itl_ms"] == pytest.approx(200)
        assert metrics["mean_tpot_ms"] == pytest.approx((50 + 250) / 2)
        assert metrics["mean_e2el_ms"] == pytest.approx((400 + 300 + 1000) / 3)
        assert metrics["max_concurrent_requests"] == 2

    def test_goodput_may_be_written_in_one_or_several_flags(self):
        assert parse_goodput(["ttft:500", "tpot:2,e2el:9000"]) == {"ttft": 500, "tpot": 2, "e2el": 9000}
