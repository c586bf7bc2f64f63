"""A `dsuf serve` of one's own: started on a free port, awaited, and stopped again whatever happens."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsuf.cli.live import say
from dsuf.cli.options import DEFAULT_CKPT
from dsuf.errors import EnvironmentProblem, UsageError

READY_LINE = re.compile(r"ready on (http://\S+)")
STOP_WITHIN_S = 10.0
LOG_LINES_SHOWN = 15


def serve_flags(url: str | None, ckpt: str, gpus: str | None, draft: str, verify: str) -> list[str]:
    """Flags of `dsuf serve` for a server of one's own. Raises UsageError when `url` names another one beside them."""
    given = {"--ckpt": ckpt, "--draft": draft, "--verify": verify, **({"--gpus": gpus} if gpus else {})}
    usual = {"--ckpt": DEFAULT_CKPT, "--draft": "on", "--verify": "auto"}
    told = [flag for flag, value in given.items() if value != usual.get(flag)]
    if url and told:
        raise UsageError(
            f"{', '.join(told)} would be flags of a server that is started here, but --url names one that runs. "
            "Leave one of them out."
        )
    return [word for flag, value in given.items() for word in (flag, value)]


@contextmanager
def own_server(flags: list[str], say_every_s: float = 5.0) -> Iterator[str]:
    """Run `dsuf serve --port 0 FLAGS` and yield its address once /readyz answers 200.

    Raises what the server ended with (UsageError or EnvironmentProblem, with its last lines) when it does not come up.
    """
    command = [sys.executable, "-m", "dsuf.cli.app", "serve", "--port", "0", "--drain-delay", "0", *flags]
    with tempfile.TemporaryDirectory(prefix="dsuf-server-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as written:
            # a session of its own: Ctrl-C in the terminal reaches only us, and we stop the server in order
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=written, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            yield _wait_until_ready(process, log, say_every_s)
        finally:
            _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path, say_every_s: float) -> str:
    started = said = time.monotonic()
    while process.poll() is None:
        found = READY_LINE.search(_text_of(log))
        if found and _answers(found.group(1)):
            return found.group(1)
        now = time.monotonic()
        if now - said > say_every_s:
            said = now
            last = _last_line(log)
            say(f"waiting for the server: {now - started:.0f} s" + (f"; it said last: {last}" if last else ""))
        time.sleep(0.05)
    lines = "\n".join(_text_of(log).splitlines()[-LOG_LINES_SHOWN:])
    kind = UsageError if process.returncode == UsageError.exit_code else EnvironmentProblem
    raise kind(f"The server ended with exit status {process.returncode} before it was ready:\n{lines}")


def _text_of(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")


def _last_line(log: Path) -> str:
    lines = _text_of(log).splitlines()
    return lines[-1] if lines else ""


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/readyz", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):  # drain, at once, by force
        if process.poll() is None:
            process.send_signal(number)
            try:
                process.wait(STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                continue
    process.wait()
