"""The `dsuf` command: one subcommand a file, errors as one clear message, exit codes 0 ok, 1 check, 2 usage, 3 machine;
128 and its number where a signal ends it.

Command modules import only what their flags need; NumPy, the engine and the server are imported inside the functions,
so that `dsuf --help` answers at once.
"""

from __future__ import annotations

import errno
import signal
import sys
from types import FrameType
from typing import Annotated

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
try:
    import typer

    from dsuf import __version__
    from dsuf.cli import build, doctor, drain, repro, run, serve, streams, synth
    from dsuf.cli.bench import compare, decode, kernels, kv, prefill
    from dsuf.cli.bench import serve as bench_serve
    from dsuf.errors import DsufError, EnvironmentProblem
except KeyboardInterrupt:
    raise SystemExit(INTERRUPTED) from None

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

app = typer.Typer(
    name="dsuf",
    help="Build, run, serve and benchmark DeepSeek-V4.1-Flash from Python.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"dsuf {__version__}")
        raise typer.Exit


@app.callback()
def _flags(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


for command in (run.run, serve.serve, repro.repro, synth.synth, doctor.doctor, build.build, drain.drain):
    app.command()(command)
bench = typer.Typer(help="Measure engine, kernels, caches or a server.", no_args_is_help=True, rich_markup_mode=None)
for command in (decode.decode, prefill.prefill, kernels.kernels, kv.kv, bench_serve.serve, compare.compare):
    bench.command()(command)
app.add_typer(bench, name="bench")


def main() -> None:
    """Run one command and end the process with its exit code."""
    signal.signal(signal.SIGTERM, _on_terminate)
    streams.mend()
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: list[str]) -> int:
    """Run `dsuf` with `arguments`; returns the exit code.

    Only DsufError is turned into a message, and a full disk; nobody hears of a reader that is gone (`| head`).
    """
    try:
        return _run(arguments)
    except BrokenPipeError:
        if not (descriptors := streams.unread()):
            raise
        streams.discard(descriptors)
        return streams.UNREAD


def _run(arguments: list[str]) -> int:
    try:
        try:
            app(arguments, prog_name="dsuf")
        finally:
            sys.stdout.flush()  # what cannot be written is told here, not while the interpreter ends
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError) and end.code == 1:
            raise end.__context__ from None  # Typer's answer to any broken pipe, also of a socket
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        print(f"dsuf: the output cannot be written: {error.strerror}.", file=sys.stderr)
        streams.discard([sys.stdout.fileno()])
        return EnvironmentProblem.exit_code
    except DsufError as error:
        print(f"dsuf: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _on_terminate(number: int, frame: FrameType | None) -> None:
    # unwinds like Ctrl-C, so that every `finally` runs: temporary files, child processes, sockets
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
