"""Filling a form with an engine: `Clover.fill` and `Clover.decide`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clover.runtime.decoder import DecodeCounts
from clover.runtime.errors import RequestError
from clover.runtime.forms.decoder import FormDecoder
from clover.runtime.forms.slots import Slot
from clover.runtime.forms.template import Form, Hole, json_choice, make_form
from clover.runtime.forms.vocabulary import Vocabulary
from clover.runtime.loop import StepTimes, decode
from clover.runtime.options import DecodeOptions
from clover.runtime.session import StepSession

MAX_QUESTIONS = 8
FORM_OPTIONS = ("threshold", "block_size", "coreset_top_p")


@dataclass(frozen=True)
class FilledForm:
    """A form that is filled. `value` is its result: the values by name, or a schema's JSON value.

    confidences: for each hole the product of the probabilities with which its parts were chosen, among what may stand
    there for choices and numbers.
    """

    text: str
    value: Any
    values: Mapping[str, Any]
    confidences: Mapping[str, float]
    tokens: tuple[int, ...]
    steps: int
    blocks: int
    seconds: float = field(compare=False)
    engine_seconds: float = field(compare=False)


def check_form_options(given: Mapping[str, Any]) -> None:
    """Raises RequestError naming an option that a form doesn't take."""
    for name, value in given.items():
        if value is not None and name not in FORM_OPTIONS:
            raise RequestError(name, f"{name} does not act on a form; forms take {', '.join(FORM_OPTIONS)}.")


def fill_form(
    session: StepSession,
    prompt: Sequence[int],
    form: Form,
    options: DecodeOptions,
    vocabulary: Vocabulary,
    *,
    mask_id: int,
    eos_ids: Sequence[int],
    vocab_size: int,
    on_event: Callable[[Any], None] | None = None,
) -> FilledForm:
    """Fills a form behind `prompt` in slot 0. Raises RequestError when the context can't hold both."""
    began, times = time.perf_counter(), StepTimes()
    room = session.max_context - len(prompt)
    decoder = FormDecoder(
        prompt, form, options, vocabulary, mask_id=mask_id, eos_ids=eos_ids, vocab_size=vocab_size, room=room
    )  # fmt: skip
    if decoder.longest > room:
        raise RequestError(
            form.field,
            f"{form.field} takes up to {decoder.longest} tokens and the context has room for {max(room, 0)} behind the prompt; "
            "shorten its text or its holes.",
        )
    session.reset(0)
    for event in decode(session, decoder, 0, times):
        if on_event:
            on_event(event)
    return _filled(form, decoder, decoder.counts, time.perf_counter() - began, times.session)


def _filled(form: Form, decoder: FormDecoder, counts: DecodeCounts, seconds: float, engine: float) -> FilledForm:
    slots: dict[str, Slot] = {slot.name: slot for slot in decoder.slots}
    values = {name: slot.value for name, slot in slots.items()}
    text = "".join(slots[p.name].text if isinstance(p, Hole) else p for p in form.parts)
    confidences = {name: slot.confidence for name, slot in slots.items()}
    tokens = tuple(decoder.tokens)
    return FilledForm(
        text, form.assemble(values), values, confidences, tokens, counts.steps, counts.blocks, seconds, engine
    )


@dataclass(frozen=True)
class Decision:
    """Answers by question, and how sure the model was of each. `forms`: one if all were decided together."""

    answers: Mapping[str, Any]
    confidences: Mapping[str, float]
    forms: tuple[FilledForm, ...]

    @property
    def steps(self) -> int:
        return sum(form.steps for form in self.forms)


def decision_forms(questions: Mapping[str, Sequence[Any]], together: bool) -> list[tuple[tuple[str, ...], Form]]:
    """Forms that answer questions, each with the questions it answers. Raises RequestError."""
    name = "questions"
    if not isinstance(questions, Mapping) or not questions:
        raise RequestError(name, f"{name} must map at least one question to its choices.")
    if len(questions) > MAX_QUESTIONS:
        raise RequestError(
            name, f"{name} has {len(questions)} questions; at most {MAX_QUESTIONS} are decided together."
        )
    holes: dict[str, list[str | Hole]] = {}
    for question, choices in questions.items():
        if not isinstance(question, str) or not question:
            raise RequestError(name, f"{name} holds {question!r}; a question is a text that is not empty.")
        if not isinstance(choices, Sequence) or isinstance(choices, str) or len(choices) < 2:
            raise RequestError(name, f"{name}: {question!r} needs a list of at least two choices.")
        try:
            holes[question] = json_choice(choices, name, question)
        except (TypeError, ValueError):
            raise RequestError(name, f"{name}: {question!r} has a choice that is no JSON value.") from None
    groups = [tuple(holes)] if together else [(q,) for q in holes]
    forms = []
    for group in groups:
        parts: list[str | Hole] = []
        for n, question in enumerate(group):
            parts += ["{" if n == 0 else ", ", json.dumps(question, ensure_ascii=False) + ": ", *holes[question]]
        forms.append((group, make_form([*parts, "}"], name)))
    return forms


def decision_prompt(document: str, questions: Sequence[str]) -> str:
    """What is asked of the model."""
    return f"Decide together: {', '.join(questions)}. {document}"
