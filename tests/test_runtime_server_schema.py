"""The server does what docs/openapi.yaml says, for requests that Schemathesis makes up from it: right ones and wrong ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import engine_support
import pytest
from serve_support import RunningServer, nano, nano_session

from clover.runtime.clover import Clover

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

import yaml  # noqa: E402  (Schemathesis brings it)
from hypothesis import HealthCheck, settings  # noqa: E402
from schemathesis import checks  # noqa: E402
from schemathesis.specs.openapi import checks as openapi_checks  # noqa: E402

NAME = "nano"
CHECKS = [
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_headers_conformance,
    openapi_checks.response_schema_conformance,
    openapi_checks.negative_data_rejection,
]


def specification() -> dict[str, Any]:
    """docs/openapi.yaml, narrowed to the model that is here and to requests that take no minutes."""
    text = (engine_support.REPOSITORY / "docs" / "openapi.yaml").read_text(encoding="utf-8")
    specification: dict[str, Any] = yaml.safe_load(text)
    schemas = specification["components"]["schemas"]
    schemas["Model"]["enum"] = [NAME]
    schemas["Template"]["pattern"] = r"\A([a-z ]{0,4}\{\{[a-z]{1,3}:([1-9]|int|number|[ab]\|c)\}\}; ){1,2}\Z"
    schemas["BlockSize"] = {"enum": [8, 16, 32, 64, None]}
    return specification


schema = schemathesis.openapi.from_dict(specification())
schema.config.max_stream_events = 10_000  # streams are read to their end


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    alone = nano()
    engine = Clover(alone.bundle, nano_session(2, max_context=64), alone.tokenizer, alone.template)
    with RunningServer(engine, slots=2, cache_mb=8, model_name=(NAME,)) as running:
        yield running


@schema.parametrize()  # type: ignore[untyped-decorator]
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_replies_and_refusals_are_as_specified(case: Any, server: RunningServer) -> None:
    if case.meta.generation.mode.is_positive:
        honour_dependencies(case.body)
    # of a form's text only simple ones are made up, so a "wrong" one may be right
    held_to = [c for c in CHECKS if case.path != "/v1/fill" or c is not openapi_checks.negative_data_rejection]
    response = case.call_and_validate(base_url=server.url, checks=held_to)
    if response.headers.get("content-type", [""])[0].startswith("text/event-stream"):
        check_stream(case.path, response.text)


def honour_dependencies(body: Any) -> None:
    """Takes out what a request may not say without something else, which the schema does not express, and what takes long."""
    if not isinstance(body, dict):
        return
    if body.get("n"):
        body["n"] = min(body["n"], 2)
    if not body.get("stream"):
        for name in ("stream_options", "stream_denoise"):
            body.pop(name, None)
    if not body.get("logprobs"):
        body.pop("top_logprobs", None)
    for name in ("best_of", "max_completion_tokens", "timeout"):  # a timeout in good time is another test's
        body.pop(name, None)


def check_stream(path: str, text: str) -> None:
    """Events are JSON, and the last is the dialect's end."""
    events = [event for event in text.split("\n\n") if event and not event.startswith(":")]
    data = [event.rpartition("data: ")[2] for event in events]
    if path in ("/v1/chat/completions", "/v1/completions"):
        assert data.pop() == "[DONE]"
        assert all(json.loads(item)["object"] for item in data)
    else:
        kinds = [json.loads(item)["type"] for item in data]
        assert kinds[-1] in ("message_stop", "response.completed", "response.incomplete"), kinds


def test_every_route_is_specified_and_every_specified_path_is_there(server: RunningServer) -> None:
    from clover.runtime.server.app import create_app

    app: Any = create_app(server.service)
    while not hasattr(app, "routes"):
        app = app._app
    routes = {(route.path.replace(":path", ""), method.lower()) for route in app.routes for method in route.methods}
    specified = {(path, method) for path, item in specification()["paths"].items() for method in item}
    assert {route for route in routes if route[1] != "head"} == specified
