"""Clover's own two paths: fill a template's holes, and decide questions on a document (docs/forms.md)."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from clover.runtime.errors import RequestError
from clover.runtime.forms.fill import decision_forms, decision_prompt
from clover.runtime.forms.template import Form, parse_template
from clover.runtime.server.chat import token_limit, usage_json
from clover.runtime.server.fields import Fields
from clover.runtime.server.generation import Choice, Usage
from clover.runtime.server.parts import new_id
from clover.runtime.server.request import Ask, decode_fields, renamed, thinking_flag, timeout_field
from clover.runtime.server.service import Service
from clover.runtime.server.tools import Tools

LABELS = ("user", "metadata")


@dataclass(frozen=True)
class FormRequest:
    """A checked request. `answers`: what the dialect calls the values."""

    ask: Ask
    model: str
    kind: str  # of the reply object
    answers: str


def parse_fill(body: Any, service: Service) -> FormRequest:
    """Raises RequestError or ApiError for the first field that can't be honoured."""
    f = Fields(body)
    model = service.check_model(f)
    template, messages = f.need("template"), f.need("messages")
    thinking = thinking_flag(f)
    form = parse_template(template)
    return FormRequest(_ask(f, service, form, messages, thinking, "messages"), model, "form", "values")


def parse_decide(body: Any, service: Service) -> FormRequest:
    """Raises RequestError or ApiError for the first field that can't be honoured."""
    f = Fields(body)
    model = service.check_model(f)
    document, questions = f.need("document"), f.need("questions")
    if not isinstance(document, str) or _broken(document):
        raise f.refuse("document", "must be a text of valid Unicode.")
    f.only(
        "together", True, why="questions of a request are decided together; send one alone to have it decided alone."
    )
    ((names, form),) = decision_forms(questions, together=True)
    messages = [{"role": "user", "content": decision_prompt(document, names)}]
    return FormRequest(_ask(f, service, form, messages, None, "document"), model, "decision", "answers")


def _ask(f: Fields, service: Service, form: Form, messages: Any, thinking: bool | None, field: str) -> Ask:
    """Takes the fields that both paths share."""
    given = decode_fields(f)
    limit_name, given["max_new_tokens"] = token_limit(f, "max_tokens")
    timeout = timeout_field(f, service.settings.request_timeout)
    use_cache = f.boolean("cache_prompt", True)
    f.only("stream", False, why="a form's reply comes whole.")
    f.labels(*LABELS)
    f.close()
    try:
        ask = service.form_ask(messages, form, given, limit_name, Tools(), thinking, field)
    except RequestError as error:
        # the tokenizer calls every text the prompt; and what is wrong in a decision's message comes from its questions
        names = {"prompt": form.field}
        if field == "document" and error.field.startswith("messages"):
            names[error.field] = form.field
        raise renamed(error, names) from None
    return replace(ask, timeout=timeout, use_cache=use_cache)


def _broken(text: str) -> bool:
    """Whether a text holds half of a surrogate pair, which JSON can spell."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def whole(request: FormRequest, choice: Choice, usage: Usage) -> dict[str, Any]:
    """The response object."""
    assert choice.end is not None and choice.end.form is not None
    return {
        "id": new_id("form-"),
        "object": request.kind,
        "created": int(time.time()),
        "model": request.model,
        "text": choice.parts.joined("text"),
        request.answers: dict(choice.end.form.values),
        "confidences": dict(choice.end.form.confidences),
        "usage": usage_json(usage),
    }
