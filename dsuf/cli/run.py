"""`dsuf run`: answer a prompt, a chat, or a file of token ids in this process.

stdout carries the answer, or with --json one object; everything else goes to stderr.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from dsuf.cli import options
from dsuf.cli.bench.result import write_whole
from dsuf.cli.live import say
from dsuf.cli.session import Session, engine_options, open_session
from dsuf.config import SamplingFlags, check_output
from dsuf.errors import EngineGone, UsageError

if TYPE_CHECKING:
    from dsuf.engine.messages import Event, Finished, Request, Sampling, Tokens
    from dsuf.engine.sequence import Trace
    from dsuf.text.prompt import ChatText, Prompt


def run(
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="One user message.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Talk in turns; Ctrl-D ends.")] = False,
    tokens: Annotated[Path | None, typer.Option("--tokens", help="JSON file with a list of token ids.")] = None,
    ckpt: options.Ckpt = options.DEFAULT_CKPT,
    gpus: options.Gpus = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", help="Most tokens to emit. Default: the checkpoint's, else the context."),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    thinking: Annotated[bool, typer.Option("--thinking", help="Let the model reason before it answers.")] = False,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="0 is greedy; up to 2. Default: the checkpoint's, else 1.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option("--top-p", help="Nucleus, above 0 and up to 1. Default: the checkpoint's, else 1.")
    ] = None,
    top_k: Annotated[int, typer.Option("--top-k", help="Most likely tokens kept; 0 keeps all.")] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Key of the random numbers.")] = 0,
    draft: options.Draft = "on",
    verify: options.Verify = "auto",
    numerics: options.Numerics = None,
    prefill: options.Prefill = "truncated",
    max_context: options.MaxContext = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object with tokens, steps and times.")] = False,
    logits: Annotated[
        Path | None, typer.Option("--logits", help="Write the rows that chose each token (safetensors).")
    ] = None,
) -> None:
    """Answer a prompt in this process.

    Give one of PROMPT, --chat or --tokens.
    """
    if (prompt is not None) + chat + (tokens is not None) != 1:
        raise UsageError("Give one of PROMPT, --chat or --tokens FILE.")
    if chat and (as_json or logits):
        raise UsageError("--json and --logits describe one answer; they cannot be used with --chat.")
    if tokens and (system is not None or thinking):
        raise UsageError(
            "--system and --thinking are parts of a chat; token ids are taken as they are. Leave them out."
        )
    check_output("--logits", logits)
    sampling = SamplingFlags(temperature, top_p, top_k, seed, max_tokens)
    ids = read_ids(tokens) if tokens else None
    engine = engine_options(gpus, numerics, prefill, draft, verify, max_context)
    session = open_session(ckpt, engine)
    if ids is not None:
        answer(session, ids_request(session, ids, sampling), None, as_json, logits)
        return
    text = session.text()
    messages = [{"role": "system", "content": system}] if system is not None else []
    if chat:
        from dsuf.cli.chat import talk

        talk(session, text, messages, thinking, sampling)
        return
    asked = text_prompt(text, [*messages, {"role": "user", "content": prompt}], thinking, sampling)
    answer(session, asked.request("run"), (text, asked), as_json, logits)


def read_ids(path: Path) -> list[int]:
    """Token ids of a JSON file. Raises UsageError unless it is a list of at least one whole number."""
    try:
        ids = msgspec.json.decode(path.read_bytes(), type=list[int])
    except OSError as error:
        raise UsageError(f"--tokens {path} cannot be read: {error.strerror}.") from None
    except msgspec.DecodeError as error:
        raise UsageError(f"--tokens {path} is not a JSON list of token ids: {error}.") from None
    if not ids:
        raise UsageError(f"--tokens {path} is empty; expected at least one token id.")
    return ids


def ids_request(session: Session, ids: list[int], flags: SamplingFlags) -> Request:
    """The request for bare ids: flags first, then the checkpoint's generation_config.json."""
    from dsuf.engine.messages import Request, Sampling
    from dsuf.text.prompt import read_defaults

    given = read_defaults(session.checkpoint.generation)
    sampling = Sampling(
        temperature=_first(flags.temperature, given.temperature, 1.0),
        top_p=_first(flags.top_p, given.top_p, 1.0),
        top_k=flags.top_k,
        seed=flags.seed,
    )
    most = _first(flags.max_tokens, given.max_new_tokens, session.engine.limits.max_context)
    return Request(
        id="run", prompt_ids=ids, max_tokens=most, sampling=sampling, eos_ids=[session.checkpoint.spec.eos_token_id]
    )


def text_prompt(text: ChatText, messages: list[dict[str, Any]], thinking: bool, flags: SamplingFlags) -> Prompt:
    """Messages to ids and sampling. What a flag names is taken as it is, in thinking mode too."""
    body = {
        "model": text.names[0],
        "messages": messages,
        "thinking": {"type": "enabled" if thinking else "disabled"},
        "stream": True,
        "seed": flags.seed,
        "top_k": flags.top_k,
        **({"max_tokens": flags.max_tokens} if flags.max_tokens is not None else {}),
    }
    prompt = text.chat(body)
    sampling: Sampling = msgspec.structs.replace(
        prompt.sampling,
        temperature=_first(flags.temperature, prompt.sampling.temperature),
        top_p=_first(flags.top_p, prompt.sampling.top_p),
    )
    return dataclasses.replace(prompt, sampling=sampling)


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def answer(
    session: Session, request: Request, text: tuple[ChatText, Prompt] | None, as_json: bool, logits: Path | None
) -> None:
    """Generate and print: text or ids as they come, or one JSON object at the end."""
    from dsuf.cli.printer import IdPrinter, TextPrinter
    from dsuf.engine.sequence import Trace

    exact = session.engine.options.prefill == "exact"
    trace = Trace(keep_logits=logits is not None, keep_prompt_argmax=as_json and exact)
    printer = TextPrinter(*text, silent=as_json) if text else IdPrinter(silent=as_json)
    ids, finished = generate(session, request, trace, printer.tokens)
    printer.close(finished)
    if logits is not None:
        write_logits(logits, trace)
    if as_json:
        print(msgspec.json.encode(report(session, ids, finished, trace) | printer.fields()).decode())
    else:
        say(summary(finished))


def generate(
    session: Session,
    request: Request,
    trace: Trace,
    on_tokens: Callable[[Tokens], None],
    events: Iterator[Event] | None = None,
) -> tuple[list[int], Finished]:
    """Run one request to its end; `on_tokens` gets each Tokens event. `events` are the engine's, where they are made
    in another way than by its `generate`."""
    from dsuf.engine.messages import Finished, Tokens

    ids: list[int] = []
    for event in session.engine.generate(request, trace) if events is None else events:
        if isinstance(event, Tokens):
            ids += event.ids
            on_tokens(event)
        elif isinstance(event, Finished):
            if event.reason == "error":
                raise EngineGone(f"The engine failed: {event.message}")
            return ids, event
    raise EngineGone("The engine ended without finishing the request.")


def report(session: Session, ids: list[int], finished: Finished, trace: Trace) -> dict[str, Any]:
    """The object that --json prints; confidences are logits, times are seconds unless the name says otherwise."""
    stats = finished.stats
    return {
        "prompt_tokens": stats.prompt_tokens,
        "prompt_argmax": trace.prompt_argmax,
        "tokens": ids,
        "steps": trace.steps,
        "accept_length": stats.average_accept_length,
        "numerics": session.engine.options.numerics,
        "finish_reason": finished.reason,
        "timings": {
            "prefill_s": stats.prefill_s,
            "first_token_s": stats.ttft_s,
            "decode_s": stats.decode_s,
            "step_ms": stats.average_iteration_s * 1e3,
            "tokens_per_s": (stats.completion_tokens - 1) / stats.decode_s if stats.decode_s else 0.0,
        },
    }


def summary(finished: Finished) -> str:
    """One line about an answer: counts, speed, accepted length."""
    stats = finished.stats
    speed = (stats.completion_tokens - 1) / stats.decode_s if stats.decode_s else 0.0
    return (
        f"{stats.completion_tokens} tokens at {speed:,.0f} tokens/s (first token after {stats.ttft_s:.2f} s, "
        f"{stats.average_iteration_s * 1e3:.1f} ms a step, {stats.average_accept_length:.2f} tokens a step, "
        f"ended by {finished.reason})"
    )


def write_logits(path: Path, trace: Trace) -> None:
    """`logits` [emitted, vocab] float32; row i is the one from which token i was chosen."""
    import numpy as np
    from safetensors.numpy import save

    write_whole(path, save({"logits": np.stack(trace.logits).astype(np.float32)}))
