"""RDMA between servers in two QEMU guests: see `servers.py`."""

from __future__ import annotations

import pytest

from tests.system.rdma import inside, servers
from tests.system.rdma.guests import GuestRun, run_guests

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> GuestRun:
    _, reader = run_guests("servers", 2, tmp_path_factory.mktemp("servers"), memory_mb=1024, timeout_s=400)
    return reader


@pytest.mark.parametrize("check", inside.names(servers))
def test_between_servers(reader: GuestRun, check: str) -> None:
    outcome = reader.expect(check)
    print(f"{outcome.seconds:.2f} s", *outcome.notes, sep="\n  ")
