"""RDMA by Soft-RoCE, in QEMU guests: every check of the modules beside this file is a test of its own.

one_guest     two processes of one guest        two_guests   transports of two guests
agents        agents of two guests              servers      `dsuf serve` in two guests
"""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.system.rdma import agents, inside, one_guest, servers, two_guests
from tests.system.rdma.guests import GuestRun, run_guests

pytestmark = pytest.mark.system

RUNS = {
    one_guest: {"guests": 1, "timeout_s": 240},
    two_guests: {"guests": 2, "timeout_s": 240},
    agents: {"guests": 2, "timeout_s": 240},
    servers: {"guests": 2, "timeout_s": 400, "memory_mb": 1024},
}
CHECKS = [(module, check) for module in RUNS for check in inside.names(module)]


def _name(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2]


class Runs:
    """What came of each module: its guests are started, once, when its first check is asked for."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders, self._started, self._done = folders, set[str](), dict[str, GuestRun]()

    def of(self, module: ModuleType) -> GuestRun:
        name, how = _name(module), dict(RUNS[module])
        if name not in self._started:
            self._started.add(name)
            self._done[name] = run_guests(name, how.pop("guests"), self._folders.mktemp(name), **how)[-1]  # the reader
        assert name in self._done, "the guests could not be started; the first check tells why"
        return self._done[name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory)


@pytest.mark.parametrize(("module", "check"), CHECKS, ids=[f"{_name(module)}-{check}" for module, check in CHECKS])
def test_in_guests(runs: Runs, module: ModuleType, check: str) -> None:
    outcome = runs.of(module).expect(check)
    print(f"{outcome.seconds:.2f} s", *outcome.notes, sep="\n  ")
