"""Runs in a guest: the checks of one module in order, with what came of each as a line of JSON for the host.

A module of checks has functions named check_*, called with what its `prepare()` leads to and a list for notes. In the
first of two guests `owner()` of the module runs instead.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import time
import traceback
from contextlib import AbstractAsyncContextManager
from types import ModuleType
from typing import Any

PREFIX = "check_"
CHECK_S = 120.0


def names(module: ModuleType) -> list[str]:
    """The checks of a module, in the order in which they run."""
    return [name.removeprefix(PREFIX) for name in vars(module) if name.startswith(PREFIX)]


async def run(module: ModuleType, prepared: AbstractAsyncContextManager[Any], outcomes: str) -> int:
    """Exit code: 0 when all checks were good."""
    failed = 0
    async with prepared as given:
        for name in names(module):
            started_s, error, notes = time.monotonic(), "", []
            try:
                async with asyncio.timeout(CHECK_S):
                    await getattr(module, PREFIX + name)(given, notes)
            except Exception:
                error, failed = traceback.format_exc(), failed + 1
            seconds = round(time.monotonic() - started_s, 3)
            line = {"name": name, "seconds": seconds, "error": error, "notes": notes}
            print(f"{name}: {'failed' if error else 'good'} after {seconds} s", file=sys.stderr)
            with open(outcomes, "a") as file:
                file.write(json.dumps(line) + "\n")
    return 1 if failed else 0


def main() -> None:
    """`python -m tests.system.rdma.inside MODULE`."""
    index = os.environ["GUEST_INDEX"]
    module = importlib.import_module(f"tests.system.rdma.{sys.argv[1]}")
    if index == "0" and hasattr(module, "owner"):
        asyncio.run(module.owner())
    else:
        sys.exit(asyncio.run(run(module, module.prepare(), f"/mnt/outcomes.{index}")))


if __name__ == "__main__":
    main()
