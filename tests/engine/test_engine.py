"""The engine over a scripted backend: what is refused, what is said, what is counted."""

import math

import pytest

from dsuf.engine.messages import Admitted, Finished, Request, Sampling, Status, Tokens
from dsuf.engine.options import EngineOptions
from dsuf.engine.sequence import Trace
from dsuf.errors import ConfigError, NotSupported, PromptError, UsageError
from tests.support.scripted import ScriptedBackend, VirtualClock, scripted_engine, token_at


def run(engine, *requests):
    """Submit all, step until idle; the events of each id."""
    for request in requests:
        engine.submit(request)
    said = {}
    while not engine.idle:
        for event in engine.step():
            said.setdefault(event.id, []).append(event)
    return said


def text(events):
    return [token for event in events if isinstance(event, Tokens) for token in event.ids]


def test_a_request_is_admitted_streamed_and_finished():
    said = run(scripted_engine(), request := Request("a", [5, 6, 7], 4))["a"]
    assert said[0] == Admitted("a", prompt_tokens=3, cached_tokens=0, source="none")
    assert text(said) == [token_at(request, i, 1000) for i in range(4)]
    assert isinstance(said[-1], Finished) and said[-1].reason == "length"


def test_an_eos_ends_the_text_and_is_said():
    backend = ScriptedBackend(tokens_a_step=lambda sequence: 6, script=lambda request, index: 10 + index)
    said = run(scripted_engine(backend), Request("a", [5], 50, eos_ids=[13]))["a"]
    assert text(said) == [10, 11, 12, 13]
    assert said[-1].reason == "stop" and said[-1].stats.completion_tokens == 4
    said = run(scripted_engine(backend), Request("a", [5], 9, eos_ids=[13], ignore_eos=True))["a"]
    assert text(said) == list(range(10, 19)) and said[-1].reason == "length"


def test_max_tokens_is_cut_to_the_room_in_the_context():
    engine = scripted_engine(ScriptedBackend(max_context=12, tokens_a_step=lambda sequence: 6))
    said = run(engine, Request("a", [5] * 8, 1000))["a"]
    assert len(text(said)) == 4 and said[-1].reason == "length"


def test_times_and_counts():
    clock = VirtualClock()
    backend = ScriptedBackend(tokens_a_step=lambda s: 3, chunk=4, chunk_s=1.0, step_s=0.25, sleep=clock.sleep)
    engine = scripted_engine(backend, clock, max_sequences=1)
    said = run(engine, Request("a", [5] * 8, 10), Request("b", [6] * 4, 1))
    stats = said["a"][-1].stats
    assert (stats.prompt_tokens, stats.completion_tokens, stats.iterations) == (8, 10, 3)
    assert stats.accepted_histogram == [0, 0, 3]
    assert (stats.queue_s, stats.prefill_s, stats.ttft_s, stats.decode_s) == (0.0, 2.0, 2.0, 0.75)
    assert stats.average_accept_length == 3.0 and stats.average_iteration_s == 0.25
    stats = said["b"][-1].stats
    assert (stats.queue_s, stats.prefill_s, stats.ttft_s, stats.decode_s, stats.iterations) == (2.75, 1.0, 3.75, 0, 0)
    assert stats.average_accept_length == 0.0


def test_running_streams_get_a_step_between_the_chunks_of_a_long_prompt():
    backend = ScriptedBackend(chunk=4)
    engine = scripted_engine(backend)
    engine.submit(Request("stream", [5], 100))
    engine.step()
    engine.step()
    engine.submit(Request("long", [6] * 40, 1))
    turns = []
    for _ in range(19):
        chunks = len(backend.chunks)
        said = [event.id for event in engine.step() if isinstance(event, Tokens)]
        turns.append((said, len(backend.chunks) - chunks))
    assert backend.chunks.count("long") == 10
    assert turns[:-1] == [([], 1), (["stream"], 0)] * 9 and turns[-1] == (["long"], 1)


def test_what_a_step_emits_does_not_wait_for_the_chunk_after_it():
    clock = VirtualClock()
    backend = ScriptedBackend(chunk=4, chunk_s=1.0, step_s=0.25, sleep=clock.sleep, ahead=2)
    engine = scripted_engine(backend, clock)
    engine.submit(Request("stream", [5], 100))
    engine.step()
    engine.submit(Request("long", [6] * 40, 1))
    said = []
    for _ in range(8):
        said += [clock.now for event in engine.step() if isinstance(event, Tokens) and event.id == "stream"]
    assert said == [1.25, 2.5, 3.75, 5.0]


def test_a_complete_prompt_says_its_first_token_before_others_use_up_the_chunk():
    clock = VirtualClock()
    backend = ScriptedBackend(chunk=4, chunk_s=1.0, step_s=0.25, sleep=clock.sleep)
    engine = scripted_engine(backend, clock, prefill_budget_s=3.5)
    engine.submit(Request("stream", [5] * 4, 100))
    engine.step()
    engine.submit(Request("short", [6] * 4, 1))
    engine.submit(Request("long", [7] * 400, 1))
    assert [event.id for event in engine.step() if isinstance(event, Tokens)] == ["short"] and clock.now == 2.0
    assert engine.step()[0] == Admitted("long", 400) and (clock.now, backend.batches) == (3.0, [])
    assert [event.id for event in engine.step() if isinstance(event, Tokens)] == ["stream"] and clock.now == 3.25


@pytest.mark.parametrize("steps_before", [0, 1, 2, 5])
def test_cancel_in_queue_prefill_and_decode_frees_the_sequence(steps_before):
    backend = ScriptedBackend(chunk=4)
    engine = scripted_engine(backend, max_sequences=1)
    if steps_before == 0:
        engine.submit(Request("other", [5] * 4, 2))
        engine.step()
    engine.submit(Request("a", [5] * 8, 100))
    events = [event for _ in range(steps_before) for event in engine.step()]
    engine.cancel("a")
    assert engine.status().waiting == 0 and "a" not in backend.live
    events += engine.step()
    said = [event for event in events if event.id == "a"]
    assert said[-1].reason == "cancelled" and sum(isinstance(event, Finished) for event in said) == 1
    while not engine.idle:
        engine.step()
    assert backend.live == {}
    engine.cancel("a")
    engine.cancel("never seen")
    assert engine.idle and engine.step() == []


def test_an_id_may_be_used_again_after_its_end_but_not_before():
    engine = scripted_engine()
    engine.submit(Request("a", [5], 2))
    with pytest.raises(UsageError, match="'a' is running already"):
        engine.submit(Request("a", [5], 2))
    engine.cancel("a")
    engine.submit(Request("a", [5], 2))
    events = [event for _ in range(4) for event in engine.step()]
    assert [type(event) for event in events] == [Finished, Admitted, Tokens, Tokens, Finished]


def test_logprobs_come_one_a_token_when_asked_for():
    said = run(scripted_engine(), Request("a", [5], 3, Sampling(logprobs=1)), Request("b", [5], 3))
    assert all(len(event.logprobs) == len(event.ids) for event in said["a"] if isinstance(event, Tokens))
    assert all(event.logprobs is None for event in said["b"] if isinstance(event, Tokens))


def test_generate_streams_one_request_and_closing_it_cancels():
    backend = ScriptedBackend()
    engine = scripted_engine(backend)
    trace = Trace()
    events = list(engine.generate(Request("a", [5], 4), trace=trace))
    assert isinstance(events[0], Admitted) and isinstance(events[-1], Finished)
    assert [step.emitted for step in trace.steps] == [event.ids for event in events[2:-1]]
    assert [step.position for step in trace.steps] == [1, 2, 3]
    for event in engine.generate(Request("b", [5], 100)):
        if isinstance(event, Tokens):
            break
    assert engine.idle and backend.live == {}
    engine.submit(Request("c", [5], 1))
    with pytest.raises(UsageError, match="idle"):
        next(engine.generate(Request("d", [5], 1)))


def test_a_fault_in_a_step_loses_no_request():
    engine = scripted_engine(ScriptedBackend(fail_at_step=2), max_sequences=2)
    for id in "abcd":
        engine.submit(Request(id, [5], 100))
    said = []
    with pytest.raises(RuntimeError, match="scripted fault"):
        while True:
            said += engine.step()
            if len(said) > 2:
                engine.cancel("d")  # its Finished is due in the step that fails
    said += engine.abort("the engine failed")
    ends = {event.id: event for event in said if isinstance(event, Finished)}
    assert sum(isinstance(event, Finished) for event in said) == 4
    assert {id: end.reason for id, end in ends.items()} == {"a": "error", "b": "error", "c": "error", "d": "cancelled"}
    assert ends["a"].message == "the engine failed" and ends["a"].stats.completion_tokens >= 1
    assert engine.idle and engine.status().running == 0


def test_status_counts_what_runs_and_waits():
    engine = scripted_engine(ScriptedBackend(chunk=4), max_sequences=1)
    assert engine.status() == Status(
        ready=True,
        max_context=4096,
        max_sequences=1,
        info={"backend": "scripted", "numerics": "qdq64", "prefill": "truncated", "caches_bytes": 0},
    )
    engine.submit(Request("a", [5] * 8, 10))
    engine.submit(Request("b", [5] * 3, 10))
    engine.step()
    status = engine.status()
    assert (status.running, status.waiting, status.waiting_tokens, status.context_tokens) == (1, 1, 4 + 3, 4)
    engine.step()
    engine.step()
    assert engine.status().rows == 1 and engine.status().context_tokens == 8 + 2


BAD = [
    (dict(prompt_ids=[]), PromptError, "prompt is empty"),
    (dict(prompt_ids=[5] * 64), PromptError, "64 tokens, the maximum context length is 64"),
    (dict(prompt_ids=[5, 1000]), PromptError, "token 1 is 1000, expected 0 to 999"),
    (dict(prompt_ids=[-1]), PromptError, "token 0 is -1"),
    (dict(max_tokens=0), UsageError, "max_tokens is 0"),
    (dict(min_tokens=11), UsageError, "min_tokens is 11"),
    (dict(min_tokens=-1), UsageError, "min_tokens is -1"),
    (dict(eos_ids=[1, 2000]), UsageError, "eos_ids token 1 is 2000"),
    (dict(verify=6), UsageError, "verify is 6, expected 0 to 5"),
    (dict(verify=-1), UsageError, "verify is -1"),
    (dict(sampling=Sampling(temperature=-0.1)), UsageError, "temperature is -0.1"),
    (dict(sampling=Sampling(temperature=math.nan)), UsageError, "temperature is nan"),
    (dict(sampling=Sampling(temperature=math.inf)), UsageError, "temperature is inf"),
    (dict(sampling=Sampling(temperature=1e9)), UsageError, "temperature"),
    (dict(sampling=Sampling(top_p=0.0)), UsageError, "top_p is 0.0"),
    (dict(sampling=Sampling(top_p=1.01)), UsageError, "top_p is 1.01"),
    (dict(sampling=Sampling(top_p=math.nan)), UsageError, "top_p is nan"),
    (dict(sampling=Sampling(top_k=-1)), UsageError, "top_k is -1"),
    (dict(sampling=Sampling(seed=-1)), UsageError, "seed is -1"),
    (dict(sampling=Sampling(seed=1 << 64)), UsageError, "seed"),
    (dict(sampling=Sampling(logprobs=21)), UsageError, "logprobs is 21"),
    (dict(constraint="{}"), NotSupported, "constraints"),
    (dict(priority=10), UsageError, "priority is 10"),
]


@pytest.mark.parametrize(("change", "error", "words"), BAD, ids=[words for _, _, words in BAD])
def test_what_cannot_run_is_refused_at_submit_and_leaves_nothing(change, error, words):
    engine = scripted_engine(ScriptedBackend(max_context=64))
    with pytest.raises(error, match=words):
        engine.submit(Request(**{"id": "a", "prompt_ids": [5], "max_tokens": 10, **change}))
    assert engine.idle


BAD_OPTIONS = [
    dict(numerics="fp4"),
    dict(prefill="half"),
    dict(verify=-1),
    dict(verify="always"),
    dict(verify=True),
    dict(verify_threshold=1.5),
    dict(max_context=1),
    dict(max_sequences=0),
    dict(prefill_chunk=0),
    dict(prefill_budget_s=math.nan),
]


@pytest.mark.parametrize("change", BAD_OPTIONS, ids=str)
def test_options_out_of_range_are_refused(change):
    with pytest.raises(ConfigError, match=rf"{next(iter(change))} is .*, expected"):
        EngineOptions(ckpt="x", **change)


def test_verify_beyond_the_checkpoints_block_is_refused_at_start():
    with pytest.raises(ConfigError, match="verify is 6, this checkpoint drafts 5"):
        scripted_engine(verify=6)
