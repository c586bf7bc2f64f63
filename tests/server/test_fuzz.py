"""Bodies drawn from the server's own description: every answer is one that the description allows, and none a 5xx."""

from __future__ import annotations

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
from tests.support.serving import running_server, says

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
