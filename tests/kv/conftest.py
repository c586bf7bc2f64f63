import pytest

from dsuf.kv import directory, peers


@pytest.fixture(autouse=True)
def patience(request, monkeypatch):
    """A busy machine may need longer than calls have; tests of the deadlines themselves keep them."""
    if not request.module.__name__.endswith("test_directory"):
        monkeypatch.setattr(directory, "FIND_S", 1.5)
        monkeypatch.setattr(directory, "WRITE_S", 3.0)
        monkeypatch.setattr(peers, "CONNECT_S", 1.0)
        monkeypatch.setattr(peers, "ANSWER_S", 1.0)
