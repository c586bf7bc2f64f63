"""A public load tester, installed by pip once a machine, in an environment of its own."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from dsuf.text.tokenizer import v41_tokenizer_json

VERSION = "0.13.0"
INSTALL_S, RUN_S = 1500, 240


def installed() -> Path:
    """Its program, installed on first use (1.2 GB in the user's cache folder)."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsuf-tests"
    folder = base / f"aiperf-{VERSION}-{sys.version_info[0]}.{sys.version_info[1]}"
    base.mkdir(parents=True, exist_ok=True)
    with (base / "aiperf.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=INSTALL_S)
            pip = [folder / "bin" / "pip", "install", "-q", f"aiperf=={VERSION}"]
            done = subprocess.run(pip, capture_output=True, text=True, timeout=INSTALL_S)
            assert done.returncode == 0, done.stderr[-3000:]
            (folder / "ready").touch()
    return folder / "bin" / "aiperf"


def run_aiperf(url: str, folder: Path, *flags: str) -> tuple[dict, dict]:
    """Load a server; its two reports: what the clients saw, and what it read from /metrics."""
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_bytes(v41_tokenizer_json())
    (tokenizer / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tokenizer / "config.json").write_text('{"model_type": "llama"}')  # it only asks which class reads the file
    done = subprocess.run(
        [
            installed(), "profile", "--url", url, "--tokenizer", tokenizer, "--ui", "none",
            "--artifact-dir", folder / "out", *flags,
        ],
        cwd=folder, env={**os.environ, "HOME": str(folder)}, capture_output=True, text=True, timeout=RUN_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    names = "profile_export_aiperf.json", "server_metrics_export.json"
    clients, server = (json.loads((folder / "out" / name).read_text()) for name in names)
    return clients, server
