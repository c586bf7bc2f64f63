"""RDMA between agents in two QEMU guests: see `agents.py`."""

from __future__ import annotations

import pytest

from tests.system.rdma import agents, inside
from tests.system.rdma.guests import GuestRun, run_guests

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> GuestRun:
    _, reader = run_guests("agents", 2, tmp_path_factory.mktemp("agents"), timeout_s=240)
    return reader


@pytest.mark.parametrize("check", inside.names(agents))
def test_between_agents(reader: GuestRun, check: str) -> None:
    outcome = reader.expect(check)
    print(f"{outcome.seconds:.2f} s", *outcome.notes, sep="\n  ")
