import pytest

from dsuf.kv import directory


@pytest.fixture(autouse=True)
def patient_look_ups(request, monkeypatch):
    """A busy machine may need longer than a look-up has; tests of the deadline itself keep it."""
    if not request.module.__name__.endswith("test_directory"):
        monkeypatch.setattr(directory, "FIND_S", 1.0)
