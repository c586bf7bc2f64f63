"""Times `dsuf serve` on a GPU from its start to its ready line, with built kernels and the built-in checkpoint.

    here    dsuf build --sm sm_90a --out .kernels
    there   python3 tests/gpu/bench_start.py .kernels OUT.json

Needs what `dsuf serve` needs. Starts the server REPEATS times, each with one answered call, and reads the phases that
the engine tells on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

REPEATS = 4
ROOT = Path(__file__).parents[2]
START = "import sys; from dsuf.cli.app import main; sys.argv[0] = 'dsuf'; main()"
LINE = re.compile(r"^(GPU \d+ \(.*\) with \d+ kernels|loaded .*?) in ([\d.]+) s: (.*)$", re.MULTILINE)
PHASE = re.compile(r"([A-Za-z ,]+?) ([\d.]+) s(?:, |$)")


def served(kernels: Path, folder: Path) -> dict[str, Any]:
    """Seconds to the ready line, of the phases, and of one call of 20 tokens."""
    runtime = folder / "runtime"
    runtime.mkdir(mode=0o700, exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "DSUF_KERNELS": str(kernels.resolve()),
        "DSUF_CACHE": str(folder / "cache"),
        "XDG_RUNTIME_DIR": str(runtime),
    }
    command = [sys.executable, "-c", START, "serve", "--gpus", "1", "--port", "0", "--drain-delay", "0"]
    errors = folder / "stderr"
    begun = time.perf_counter()
    with errors.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
        try:
            line = process.stdout.readline()
            ready = time.perf_counter() - begun
            address = re.search(r"http://\S+", line)
            if address is None:
                raise RuntimeError(f"no ready line: {line!r}\n{errors.read_text()[-2000:]}")
            answered = call(address[0])
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
    phases = {}
    for _, seconds, parts in LINE.findall(errors.read_text()):
        phases |= {name.strip(): float(spent) for name, spent in PHASE.findall(parts)}
        phases["engine"] = phases.get("engine", 0.0) + float(seconds)
    name = re.search(r"^GPU \d+ \((.*?)\) with", errors.read_text(), re.MULTILINE)
    return {"ready_s": ready, "first_call_s": answered, "phases_s": phases, "gpu": name[1] if name else None}


def call(address: str) -> float:
    """Seconds of one chat call of 20 tokens."""
    model = json.load(urllib.request.urlopen(f"{address}/v1/models", timeout=10))["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 20}
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    begun = time.perf_counter()
    reply = json.load(urllib.request.urlopen(request, timeout=30))
    assert reply["usage"]["completion_tokens"] == 20, reply
    return time.perf_counter() - begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cubins", type=Path)
    parser.add_argument("output", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        starts = [served(given.cubins, Path(folder)) for _ in range(REPEATS)]
    for start in starts:
        print(json.dumps(start), flush=True)
    later = starts[1:]  # the first one unpacks the checkpoint
    metrics = {
        "first_ready_s": starts[0]["ready_s"],
        "ready_s": statistics.median(start["ready_s"] for start in later),
        "first_call_s": statistics.median(start["first_call_s"] for start in later),
        "phases_s": later[-1]["phases_s"],
    }
    bench = {
        "schema": "dsuf.bench/1", "kind": "start", "label": "dsuf serve to its ready line, built kernels, toy",
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), "backend": "gpu",
        "gpu": {"name": starts[0]["gpu"], "count": 1}, "params": {"repeats": REPEATS},
        "metrics": metrics, "samples": starts,
    }  # fmt: skip
    given.output.write_text(json.dumps(bench, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
