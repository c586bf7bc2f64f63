"""Programs of others that the system tests run, installed once a machine under the user's cache folder."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any


def installed_once(name: str, install: Callable[[Path], None]) -> Path:
    """The folder `name` as `install` has filled it, now or earlier; others wait meanwhile."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsuf-tests"
    folder = base / name
    base.mkdir(parents=True, exist_ok=True)
    with (base / f"{name.partition('-')[0]}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            install(folder)
            (folder / "ready").touch()
    return folder


def run(command: list[Any], **how: Any) -> None:
    """Run an installer; a failure shows the end of what it said."""
    done = subprocess.run(command, capture_output=True, text=True, **how)
    assert done.returncode == 0, done.stderr[-3000:]
