"""Replies that follow a JSON schema: a form whose holes the model fills (docs/forms.md), as a job like any other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from clover.runtime.decoder import DecodeEvent, StepEvent
from clover.runtime.errors import RequestError
from clover.runtime.forms.decoder import FormDecoder
from clover.runtime.forms.fill import FORM_OPTIONS, check_form_options
from clover.runtime.forms.schema import form_of_schema
from clover.runtime.forms.template import Form, Hole
from clover.runtime.options import make_options
from clover.runtime.scheduler.job import Job, Outcome
from clover.runtime.server.fields import Fields
from clover.runtime.server.generation import Broken, Ended, FormValues, Generation, Piece, Usage
from clover.runtime.text.stream_parser import ContentDelta

# values of other options that a form honours by itself: it is greedy
_NEUTRAL: dict[str, Any] = {
    "temperature": 0,
    "top_p": 1,
    "top_k": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logprobs": 0,
    "mode": "fill",
    "logit_bias": {},
    "stop": (),
}


def chat_form(f: Fields) -> Form | None:
    """The form of chat's `response_format`; None for free text. Raises RequestError."""
    outer = f.object("response_format")
    kind = outer.text("type") or "text"
    if kind == "json_schema":
        inner = outer.object("json_schema")
        outer.close()
        return _form(inner)
    if kind != "text":
        raise outer.refuse("type", f"is {kind[:40]!r}; it can be text or json_schema.")
    outer.close()
    return None


def response_form(text: Fields) -> Form | None:
    """The form of responses' `text.format`; None for free text. Raises RequestError."""
    inner = text.object("format")
    kind = inner.text("type") or "text"
    if kind == "json_schema":
        return _form(inner)
    if kind != "text":
        raise inner.refuse("type", f"is {kind[:40]!r}; it can be text or json_schema.")
    inner.close()
    return None


def _form(f: Fields) -> Form:
    f.text("name")
    f.text("description")
    f.boolean("strict")  # a form always is
    form = form_of_schema(f.need("schema"), f.path("schema"))
    f.close()
    return form


def form_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that act on a form. Raises RequestError for one that asks for something a form can't do."""
    make_options({}, {k: v for k, v in given.items() if k in ("seed", *_NEUTRAL)})  # False, say, is no temperature
    asked = {k: v for k, v in given.items() if k not in ("seed", "max_new_tokens") and v != _NEUTRAL.get(k)}
    check_form_options(asked)
    return {k: v for k, v in given.items() if k in FORM_OPTIONS}


def check_length(decoder: FormDecoder, form: Form, room: int, limit: int | None, limit_name: str) -> None:
    """Raises RequestError when a form can't be filled within the context or the request's limit."""
    if decoder.longest > room:
        raise RequestError(
            form.field, f"{form.field} takes up to {decoder.longest} tokens; the context has {max(room, 0)} left."
        )
    if limit is not None and decoder.longest > limit:
        raise RequestError(limit_name, f"{limit_name} is {limit}, and the form takes up to {decoder.longest} tokens.")


class FormSink:
    """Owns a form's job. Its text goes out when it is whole, its steps as they happen."""

    def __init__(self, generation: Generation, choice: int, decoder: FormDecoder, form: Form, *, steps: bool) -> None:
        self._generation, self._choice, self._decoder, self._form = generation, choice, decoder, form
        self._steps = steps
        self.job: Job | None = None

    def push(self, events: Sequence[DecodeEvent]) -> bool:
        """See Sink."""
        steps = [event for event in events if isinstance(event, StepEvent)] if self._steps else []
        if steps:
            self._generation.post(Piece(self._choice, (), (), steps))
        return False

    def finish(self, outcome: Outcome) -> None:
        """See Sink."""
        if outcome != "done":
            self._generation.post(Broken(outcome))
            return
        slots = {slot.name: slot for slot in self._decoder.slots}
        text = "".join(slots[part.name].text if isinstance(part, Hole) else part for part in self._form.parts)
        values = {name: slot.value for name, slot in slots.items()}
        confidences = {name: slot.confidence for name, slot in slots.items()}
        form = FormValues(self._form.assemble(values), values, confidences)
        self._generation.post(Piece(self._choice, [ContentDelta(text)], ()))
        counts = self._decoder.counts
        usage = Usage(
            prompt_tokens=counts.prompt_tokens,
            completion_tokens=len(self._decoder.tokens),
            cached_tokens=self.job.cached_tokens if self.job else 0,
            blocks=counts.blocks,
            steps=counts.steps,
        )
        self._generation.post(Ended(self._choice, "stop", None, usage, form))
