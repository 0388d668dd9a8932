"""Clover's own two paths: fill a template's holes, and decide questions on a document (docs/forms.md)."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from clover.runtime.forms.fill import decision_forms, decision_prompt
from clover.runtime.forms.template import Form, parse_template
from clover.runtime.server.chunks import usage_json
from clover.runtime.server.fields import Fields
from clover.runtime.server.generation import Choice, Usage
from clover.runtime.server.parts import new_id
from clover.runtime.server.request import Ask, SharedFields, named, shared_fields, thinking_flag
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
    shared = shared_fields(f, service, "max_tokens", stop=None)
    template, messages = f.need("template"), f.need("messages")
    thinking = thinking_flag(f)
    form = parse_template(template)
    return FormRequest(_ask(f, service, shared, form, messages, thinking), shared.model, "form", "values")


def parse_decide(body: Any, service: Service) -> FormRequest:
    """Raises RequestError or ApiError for the first field that can't be honoured."""
    f = Fields(body)
    shared = shared_fields(f, service, "max_tokens", stop=None)
    document, questions = f.need("document"), f.need("questions")
    if not isinstance(document, str) or _broken(document):
        raise f.refuse("document", "must be a text of valid Unicode.")
    f.only(
        "together", True, why="questions of a request are decided together; send one alone to have it decided alone."
    )
    ((names, form),) = decision_forms(questions, together=True)
    messages = [{"role": "user", "content": decision_prompt(document, names)}]
    ask = _ask(f, service, shared, form, messages, None, "document")
    return FormRequest(ask, shared.model, "decision", "answers")


def _ask(
    f: Fields,
    service: Service,
    shared: SharedFields,
    form: Form,
    messages: Any,
    thinking: bool | None,
    field: str = "messages",
) -> Ask:
    """Takes the fields left that both paths share, and refuses the rest."""
    f.only("stream", False, why="a form's reply comes whole.")
    f.labels(*LABELS)
    f.close()
    # the tokenizer calls every text the prompt; and what is wrong in a decision's message comes from its questions
    names = {"prompt": form.field}
    if field == "document":
        names |= {"messages": form.field, "messages[0].content": form.field}
    with named(names):
        ask = service.form_ask(messages, form, shared.given, shared.limit_name, Tools(), thinking, field)
    return replace(ask, timeout=shared.timeout, use_cache=shared.use_cache)


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
