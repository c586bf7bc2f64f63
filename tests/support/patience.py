"""Deadlines of the cache tier for tests that are not about them: other tests may hold every core for a while."""

from dsuf.engine import kv_tier
from dsuf.kv import client, directory, peers, saves


def be_patient(monkeypatch):
    for module, name in (
        *((directory, "FIND_S"), (directory, "WRITE_S"), (peers, "CONNECT_S"), (peers, "ANSWER_S"), (peers, "LINK_S")),
        *((saves, "ALIAS_WAIT_S"), (client, "ALIAS_S"), (client, "LOOKUP_S"), (kv_tier, "WAIT_S")),
    ):
        monkeypatch.setattr(module, name, 5.0)
