"""`dsuf serve`: HTTP and text in this process, the engine in another; one line on stdout when it is ready."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsuf.cli import kv, options
from dsuf.cli.live import say
from dsuf.cli.session import engine_options, prepare, say_defaults
from dsuf.cli.streams import lasting
from dsuf.config import check_number, private_folder, read_api_keys, read_environment

if TYPE_CHECKING:
    from dsuf.engine.options import EngineOptions
    from dsuf.text.prompt import ChatText

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(
    ckpt: options.Ckpt = options.DEFAULT_CKPT,
    gpus: options.Gpus = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option("--served-model-name", help="A further model name; may be repeated.")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option("--api-key", help="Key that callers must send; may be repeated. Default: DSUF_API_KEY or none."),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="Further keys, one `KEY` or `NAME KEY` a line.")
    ] = None,
    max_context: options.MaxContext = None,
    strict_max_tokens: Annotated[
        bool, typer.Option("--strict-max-tokens", help="Refuse a max_tokens beyond the context instead of cutting it.")
    ] = False,
    draft: options.Draft = "on",
    verify: options.Verify = "auto",
    numerics: options.Numerics = None,
    prefill: options.Prefill = "truncated",
    prefill_budget: options.PrefillBudget = None,
    max_queued_requests: Annotated[
        int, typer.Option("--max-queued-requests", help="Requests that may wait; more are answered 429.")
    ] = 256,
    max_queued_tokens: Annotated[
        int | None, typer.Option("--max-queued-tokens", help="Prompt tokens that may wait. Default: 20 s of prefill.")
    ] = None,
    queue_timeout: Annotated[
        float, typer.Option("--queue-timeout", help="Seconds that a request may wait for its prefill.")
    ] = 600.0,
    stall_timeout: Annotated[
        float, typer.Option("--stall-timeout", help="Seconds after which a client that does not read is cut off.")
    ] = 60.0,
    engine_timeout: Annotated[
        float, typer.Option("--engine-timeout", help="Seconds without a word after which an engine hangs; 0: never.")
    ] = 120.0,
    drain_delay: Annotated[
        float, typer.Option("--drain-delay", help="Seconds after SIGTERM in which new calls get 503.")
    ] = 5.0,
    drain_timeout: Annotated[
        float, typer.Option("--drain-timeout", help="Seconds that running streams then have to end.")
    ] = 120.0,
    log_format: Annotated[
        str, typer.Option("--log-format", help="How request_end lines are written: json or text.")
    ] = "json",
    kv_host_bytes: kv.HostBytes = None,
    kv_listen: kv.Listen = None,
    kv_key_file: kv.KeyFile = None,
    kv_require_rdma: kv.RequireRdma = False,
    kv_transport: kv.Transport = "auto",
    kv_rdma_ports: kv.RdmaPorts = None,
    metrics_names: Annotated[
        str, typer.Option("--metrics-names", help="dsuf, vllm or both: prefixes of the names in /metrics.")
    ] = "dsuf",
) -> None:
    """Serve OpenAI's and Anthropic's protocols over HTTP.

    One line on stdout says when it is ready; everything else goes to stderr.
    """
    from dsuf.cli.engine_process import EngineProcess, serve_with_engine
    from dsuf.server.app import bind
    from dsuf.server.options import ServerOptions

    check_number("--port", port, 0, 65_535, whole=True)
    check_number("--engine-timeout", engine_timeout, 0, 86_400)
    engine = engine_options(gpus, numerics, prefill, draft, verify, max_context, prefill_budget_ms=prefill_budget)
    environment = read_environment()
    keys, names = read_api_keys(api_key or [], api_key_file, environment)
    flags = kv.KvFlags(kv_host_bytes, kv_listen, kv_key_file, kv_require_rdma, kv_transport, kv_rdma_ports)
    server = ServerOptions(
        api_keys=keys,
        key_names=names,
        max_queued_requests=max_queued_requests,
        max_queued_tokens=max_queued_tokens,
        queue_timeout_s=queue_timeout,
        stall_timeout_s=stall_timeout,
        drain_delay_s=drain_delay,
        drain_timeout_s=drain_timeout,
        log_format=log_format,
        metrics_names=metrics_names,
    )
    with bind(host, port) as sock:  # a port that is taken is told before anything is loaded
        engine = prepare(ckpt, engine)
        text = _open_text(engine, served_model_name or [], strict_max_tokens)
        if host not in LOOPBACK and not keys:
            say(f"note: {host} is reachable from other machines and no --api-key is set.")
        address = f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"
        with runtime_folder(environment.runtime_dir) as folder:
            kept = kv.agent_options(flags, engine, folder, environment)
            agent = kv.AgentProcess(kept) if kept is not None else None
            threading.Thread(target=text.encoder.load, daemon=True).start()  # while the engine loads
            kv_socket = kept.socket_path if kept is not None else None
            process = EngineProcess(folder / "engine.sock", engine, kv_socket, engine_timeout)
            ready_line = f"dsuf serves {ckpt}, ready on {address}"
            with lasting():
                code = serve_with_engine(process, text, server, sock, ready_line, agent)
    raise typer.Exit(code)


@contextmanager
def runtime_folder(base: Path) -> Iterator[Path]:
    """A 0700 folder of this server under the user's runtime folder; gone at the end."""
    folder = Path(tempfile.mkdtemp(prefix="serve-", dir=private_folder(base)))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _open_text(engine: EngineOptions, names: list[str], strict_max_tokens: bool) -> ChatText:
    from dsuf.model.checkpoint import Checkpoint
    from dsuf.text.prompt import ChatText

    with Checkpoint.open(engine.ckpt) as checkpoint:
        say_defaults(checkpoint)
        return ChatText.open(
            checkpoint.tokenizer_path,
            checkpoint.spec,
            context_limit=engine.max_context or checkpoint.spec.max_position_embeddings,
            generation=checkpoint.generation,
            served_names=names,
            strict_max_tokens=strict_max_tokens,
        )
