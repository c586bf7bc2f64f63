"""Bodies drawn from the server's own description, bodies of clients with one thing spoiled in half of them, and bodies
that no client would send: every answer is whole and in its protocol's form, as the description allows it, none a 5xx.

The bodies here are the same in every run, so that a change fails by its own fault only. The long run draws others each
time: `python -m tests.support.fuzz`.
"""

from __future__ import annotations

from collections import Counter

import httpx
import pytest

from dsuf.server.openapi import description
from dsuf.server.routes import routes
from tests.support.bodies import PATHS
from tests.support.fuzz import OPERATIONS, answered, send, send_described, send_wild
from tests.support.raw_http import send_raw
from tests.support.serving import running_server, says, wait_until

EXAMPLES, WILD, CONNECTIONS = 12, 150, 150


@pytest.fixture(scope="module")
def shared():
    with running_server(says("because</think>Hello 👋🏽, naïve world. 中文")) as running:
        yield running
        assert running.service.admission.open == 0


@pytest.fixture
def server(shared):
    """The shared server; its log is this test's alone."""
    shared.forget()
    yield shared
    shared.forget()


def test_the_description_names_every_path_that_is_not_a_page():
    described = {path.removeprefix("/v1") for path in description()["paths"]}
    served = {route.path.replace(":path", "") for route in routes()}
    assert served - described == {"/demo", "/metrics", "/openapi.json"}
    assert described <= served


def test_the_description_is_served(server):
    assert httpx.get(server.url + "/openapi.json").json() == description()


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: f"{one[1]} {one[0]} {one[2].name}")
def test_whatever_is_sent_is_answered_as_described(server, operation):
    send_described(server, operation, EXAMPLES, seed=1)
    assert not server.log("fault")


@pytest.mark.parametrize("path", PATHS)
def test_what_clients_send_is_answered_whole_or_refused_in_form(path):
    with running_server(answered) as server, httpx.Client() as client:
        statuses = Counter(send(server, client, path, seed, spoiled=0.5) for seed in range(120))
        wait_until(lambda: server.service.admission.open == 0)
        assert not server.peer.running and not server.service.link.calls
    assert statuses[200] > 40 and statuses[400] > 20, statuses


@pytest.mark.parametrize("path", PATHS)
def test_what_no_client_would_send_is_answered_whole_or_refused_in_form(path):
    with running_server(answered) as server, httpx.Client() as client:
        statuses = Counter(send_wild(server, client, path, seed) for seed in range(WILD))
        wait_until(lambda: server.service.admission.open == 0)
        assert not server.peer.running and not server.service.link.calls
    assert statuses[200] > 5 and statuses[400] > 50, statuses


def test_bytes_that_are_nearly_http_are_answered_or_hung_up_on():
    with running_server(answered) as server:
        seen = Counter(send_raw(server.port, seed) for seed in range(CONNECTIONS))
        wait_until(lambda: server.service.admission.open == 0 and not server.service.link.calls)
        assert not server.peer.running
        assert httpx.get(server.url + "/readyz").status_code == 200
    assert seen["200"] and seen["400"] and seen["404"] and seen["405"], seen
