"""A public load tester, installed by pip once a machine, in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from dsuf.text.tokenizer import v41_tokenizer_json
from tests.support.installed import installed_once, run

VERSION = "0.13.0"
INSTALL_S, RUN_S = 1500, 240


def installed() -> Path:
    """Its program (1.2 GB)."""

    def install(folder: Path) -> None:
        run([sys.executable, "-m", "venv", folder], timeout=INSTALL_S)
        run([folder / "bin" / "pip", "install", "-q", f"aiperf=={VERSION}"], timeout=INSTALL_S)

    python = "{}.{}".format(*sys.version_info)
    return installed_once(f"aiperf-{VERSION}-{python}", install) / "bin" / "aiperf"


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
