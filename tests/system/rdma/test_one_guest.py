"""RDMA between two processes of a QEMU guest, by Soft-RoCE: see `one_guest.py`."""

from __future__ import annotations

import pytest

from tests.system.rdma import inside, one_guest
from tests.system.rdma.guests import GuestRun, run_guests

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory) -> GuestRun:
    [run] = run_guests("one_guest", 1, tmp_path_factory.mktemp("one_guest"), timeout_s=240)
    return run


@pytest.mark.parametrize("check", inside.names(one_guest))
def test_in_one_guest(guest: GuestRun, check: str) -> None:
    outcome = guest.expect(check)
    print(f"{outcome.seconds:.2f} s", *outcome.notes, sep="\n  ")
