"""Bodies drawn from the server's own description, and bodies of clients with one thing spoiled in half of them: every
answer is one that the description allows, whole and in its protocol's form, and none a 5xx. The long run is
`python -m tests.support.fuzz`.
"""

from __future__ import annotations

from collections import Counter

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from dsuf.server.openapi import description
from dsuf.server.routes import routes
from tests.support.bodies import PATHS
from tests.support.fuzz import answered, send
from tests.support.serving import running_server, says, wait_until

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
OPERATIONS = [
    (path, method, mode)
    for path, item in description()["paths"].items()
    for method, operation in item.items()
    for mode in (POSITIVE, NEGATIVE)
    if mode is POSITIVE or "requestBody" in operation
]
EXAMPLES = 12


@pytest.fixture(scope="module")
def server():
    with running_server(says("because</think>Hello 👋🏽, naïve world. 中文")) as running:
        yield running
        assert running.service.admission.open == 0


def test_the_description_names_every_path_that_is_not_a_page():
    described = {path.removeprefix("/v1") for path in description()["paths"]}
    served = {route.path.replace(":path", "") for route in routes()}
    assert served - described == {"/demo", "/metrics", "/openapi.json"}
    assert described <= served


def test_the_description_is_served(server):
    assert httpx.get(server.url + "/openapi.json").json() == description()


@pytest.mark.parametrize(("path", "method", "mode"), OPERATIONS)
def test_whatever_is_sent_is_answered_as_described(server, path, method, mode):
    operation = schemathesis.openapi.from_dict(description())[path][method]

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode))
    def answered(case):
        if mode is POSITIVE and isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = "deepseek-chat"  # else nearly all of them end at the name
        response = case.call(base_url=server.url, timeout=20)
        case.validate_response(response, checks=CHECKS)

    answered()
    assert not server.log("fault")


@pytest.mark.parametrize("path", PATHS)
def test_what_clients_send_is_answered_whole_or_refused_in_form(path):
    with running_server(answered) as server, httpx.Client() as client:
        statuses = Counter(send(server, client, path, seed, spoiled=0.5) for seed in range(120))
        wait_until(lambda: server.service.admission.open == 0)
        assert not server.peer.running and not server.service.link.calls
    assert statuses[200] > 40 and statuses[400] > 20, statuses
