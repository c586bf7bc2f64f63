"""RDMA between two QEMU guests, by Soft-RoCE: see `two_guests.py`."""

from __future__ import annotations

import pytest

from tests.system.rdma import inside, two_guests
from tests.system.rdma.guests import GuestRun, run_guests

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> GuestRun:
    _, reader = run_guests("two_guests", 2, tmp_path_factory.mktemp("two_guests"), timeout_s=240)
    return reader


@pytest.mark.parametrize("check", inside.names(two_guests))
def test_between_two_guests(reader: GuestRun, check: str) -> None:
    outcome = reader.expect(check)
    print(f"{outcome.seconds:.2f} s", *outcome.notes, sep="\n  ")
