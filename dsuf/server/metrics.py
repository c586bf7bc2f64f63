"""Prometheus metrics of one server: vLLM's stems under the prefix `dsuf_`, with buckets that fit tokens every 0.5 ms.

On request the metrics that vLLM has as well bear its prefix, or both, for the dashboards and bench clients that look
for it; its buckets start at 10 ms and would tell nothing here, so the buckets stay ours.

A `Distribution` takes many equal observations at once (a request ends with a histogram of accepted drafts) and costs
less than half a microsecond, because every step of every stream makes three.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from dsuf.engine.messages import Stats
from dsuf.server.admission import Admission

CONTENT_TYPE = CONTENT_TYPE_LATEST

PREFIX, VLLM_PREFIX = "dsuf_", "vllm:"
VLLM_STEMS = frozenset((
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries", "prefix_cache_hits",
    "prompt_tokens", "generation_tokens", "request_success", "time_to_first_token_seconds",
    "inter_token_latency_seconds", "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
    "request_prompt_tokens", "request_generation_tokens", "admission_rejections", "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos",
))  # fmt: skip
_LATENCY_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60)
_TOKEN_S = (0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
_STEP_S = (0.001, 0.002, 0.0025, 0.003, 0.0035, 0.004, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
_REQUEST_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
_TOKENS = (1, 10, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_048_576)
_ACCEPT = (1, 2, 3, 4, 5, 6, 7, 8)


class Distribution:
    """A Prometheus histogram with one label value, updated by bisection."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], model_name: str) -> None:
        self._name, self._text, self._bounds, self._model_name = name, text, bounds, model_name
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """The registry's interface: cumulative buckets."""
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        edges = [*map(str, map(float, self._bounds)), "+Inf"]
        family.add_metric([self._model_name], list(zip(edges, accumulate(self._counts), strict=True)), self._sum)
        yield family


class Metrics:
    """Everything that /metrics shows, in a registry of its own."""

    def __init__(self, model_name: str, admission: Admission, cache_usage: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        waiting = self._gauge("num_requests_waiting", "Requests whose prefill has not started.")
        waiting.set_function(lambda: admission.waiting)
        running = self._gauge("num_requests_running", "Requests in prefill or decode.")
        running.set_function(lambda: admission.running)
        tokens = self._gauge("waiting_tokens", "Prompt tokens of requests whose prefill has not started.")
        tokens.set_function(lambda: admission.waiting_tokens)
        self._gauge("kv_cache_usage_perc", "Share of the caches in use, 1 is full.").set_function(cache_usage)
        self._time_to_first_token = self._distribution(
            "time_to_first_token_seconds", "Request received to first token.", _LATENCY_S
        )
        self._inter_token = self._distribution(
            "inter_token_latency_seconds", "Gap between two steps of a stream over the tokens of the later.", _TOKEN_S
        )
        self._step = self._distribution("step_seconds", "Gap between two steps of a stream.", _STEP_S)
        self._accept_length = self._distribution("accept_length", "Tokens emitted by a decode step.", _ACCEPT)
        self._per_request = {
            "e2e_s": self._distribution("e2e_request_latency_seconds", "Request received to its end.", _REQUEST_S),
            "queue_s": self._distribution("request_queue_time_seconds", "Submitted to prefill start.", _LATENCY_S),
            "prefill_s": self._distribution("request_prefill_time_seconds", "Prefill to first token.", _LATENCY_S),
            "decode_s": self._distribution("request_decode_time_seconds", "First token to last token.", _REQUEST_S),
            "token_s": self._distribution(
                "request_time_per_output_token_seconds", "Decode time over decoded tokens.", _TOKEN_S
            ),
            "prompt": self._distribution("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS),
            "completion": self._distribution("request_generation_tokens", "Tokens made for a request.", _TOKENS),
        }
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of all requests.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens made for all requests.")
        self._prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in saved caches.")
        self._prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens taken from saved caches.")
        self._reuse = self._counter("kv_reuse_tokens", "Prompt tokens by where their caches came from.", "source")
        self._success = self._counter("request_success", "Requests that ended well.", "finished_reason")
        self._rejections = self._counter("admission_rejections", "Requests refused before the engine.", "status")
        self._disconnects = self._counter("client_disconnects", "Clients that went away.", "phase")
        self._stalls = self._counter("stream_stalls", "Times that a stream waited for its client.")
        self._invalid_tool_json = self._counter("parser_invalid_tool_json", "Tool calls whose arguments are no JSON.")
        self._drafts = self._counter("spec_decode_num_drafts", "Decode steps with a block of drafts.")
        self._drafted = self._counter("spec_decode_num_draft_tokens", "Drafted tokens.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
        self._accepted_at = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted drafts by place in the block.", "position"
        )

    def render(self, names: Literal["dsuf", "vllm", "both"] = "dsuf") -> bytes:
        """The text exposition format."""
        ours = generate_latest(self.registry)
        return ours if names == "dsuf" else _with_vllm_names(ours.decode(), names == "both").encode()

    def first_token(self, seconds: float) -> None:
        """A request got its first token `seconds` after it was received."""
        self._time_to_first_token.observe(seconds)

    def step(self, gap_s: float, tokens: int) -> None:
        """A stream got `tokens` more, `gap_s` after the ones before."""
        self._step.observe(gap_s)
        self._inter_token.observe(gap_s / tokens)

    def rejected(self, status: int) -> None:
        """A request was answered with an error before the engine saw it."""
        self._count(self._rejections, 1, str(status))

    def disconnected(self, phase: str) -> None:
        """A client went away while its request was in `phase`: queue, prefill or decode."""
        self._count(self._disconnects, 1, phase)

    def stalled(self) -> None:
        """A client has not read what was sent to it, so that its next tokens wait."""
        self._count(self._stalls, 1)

    def ended(self, finish_reason: str, e2e_s: float, invalid_tool_calls: int = 0) -> None:
        """A request ended well."""
        self._count(self._success, 1, finish_reason)
        self._count(self._invalid_tool_json, invalid_tool_calls)
        self._per_request["e2e_s"].observe(e2e_s)

    def engine_finished(self, stats: Stats, cache_source: str) -> None:
        """The engine's own account of a request, also of one that was cancelled."""
        per_request = self._per_request
        for name in ("queue_s", "prefill_s", "decode_s"):
            per_request[name].observe(getattr(stats, name))
        per_request["prompt"].observe(stats.prompt_tokens)
        per_request["completion"].observe(stats.completion_tokens)
        if stats.completion_tokens > 1:
            per_request["token_s"].observe(stats.decode_s / (stats.completion_tokens - 1))
        self._count(self._prompt_tokens, stats.prompt_tokens)
        self._count(self._generation_tokens, stats.completion_tokens)
        self._count(self._prefix_queries, stats.prompt_tokens)
        self._count(self._prefix_hits, stats.cached_tokens)
        self._count(self._reuse, stats.cached_tokens, cache_source)
        self._count(self._reuse, stats.prompt_tokens - stats.cached_tokens, "none")
        self._count_steps(stats)

    def _count_steps(self, stats: Stats) -> None:
        """`accepted_histogram[a]` decode steps accepted a drafts and emitted a + 1 tokens."""
        histogram = stats.accepted_histogram
        for accepted, steps in enumerate(histogram):
            if steps:
                self._accept_length.observe(accepted + 1, steps)
        if not stats.drafted_tokens:
            return
        self._count(self._drafts, sum(histogram))
        self._count(self._drafted, stats.drafted_tokens)
        self._count(self._accepted, sum(accepted * steps for accepted, steps in enumerate(histogram)))
        for position in range(len(histogram) - 1):
            self._count(self._accepted_at, sum(histogram[position + 1 :]), str(position))

    def _count(self, counter: Counter, amount: float, *labels: str) -> None:
        counter.labels(self._model_name, *labels).inc(amount)

    def _counter(self, stem: str, text: str, *labels: str) -> Counter:
        counter = Counter(f"dsuf_{stem}", text, ["model_name", *labels], registry=self.registry)
        if not labels:
            counter.labels(self._model_name)  # shown as 0 from the start
        return counter

    def _gauge(self, stem: str, text: str) -> Gauge:
        return Gauge(f"dsuf_{stem}", text, ["model_name"], registry=self.registry).labels(self._model_name)

    def _distribution(self, stem: str, text: str, bounds: Sequence[float]) -> Distribution:
        distribution = Distribution(f"dsuf_{stem}", text, bounds, self._model_name)
        self.registry.register(distribution)
        return distribution


def _with_vllm_names(text: str, keep_ours: bool) -> str:
    """Each family that vLLM has under its prefix: instead of ours, or after it."""
    families: list[list[str]] = []
    for line in text.splitlines(keepends=True):
        if line.startswith("# HELP "):
            families.append([])
        families[-1].append(line)
    lines: list[str] = []
    for family in families:
        name = family[0].split()[2]
        known = name.removeprefix(PREFIX).removesuffix("_total") in VLLM_STEMS
        if keep_ours or not known:
            lines += family
        if known:
            lines += [line.replace(PREFIX, VLLM_PREFIX, 1) for line in family]
    return "".join(lines)
