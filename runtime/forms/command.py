"""`clover fill` and `clover decide`: the verbs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from clover.runtime.clover import Clover
from clover.runtime.errors import CloverError
from clover.runtime.forms.fill import Decision, FilledForm
from clover.runtime.run_command import read_prompt


def fill_command(
    bundle: Path,
    prompt: str,
    template: str | None,
    schema: Path | None,
    thinking: bool | None,
    options: Mapping[str, Any],
    load: Mapping[str, Any],
) -> dict[str, Any]:
    """Fills a template, or a form made of a JSON schema. Raises CloverError."""
    if (template is None) == (schema is None):
        raise CloverError("give --template or --schema, and not both.")
    response_format = None
    if schema is not None:
        try:
            response_format = {"type": "json_schema", "json_schema": {"schema": json.loads(_read(schema, "--schema"))}}
        except (ValueError, RecursionError) as error:
            raise CloverError(f"--schema {schema} is not JSON ({error}); correct the file.") from None
    message = _read(Path("-"), "prompt") if prompt == "-" else prompt
    with Clover.load(bundle, **load) as engine:
        messages = [{"role": "user", "content": message}]
        filled = engine.fill(
            messages, template, response_format=response_format, enable_thinking=thinking, **_given(options)
        )
    return {"value": filled.value, **_form_json(filled)}


def decide_command(
    bundle: Path,
    document: Path,
    questions: Sequence[str],
    together: bool,
    options: Mapping[str, Any],
    load: Mapping[str, Any],
) -> tuple[dict[str, Any], Table]:
    """The answers as JSON and as a table. Raises CloverError."""
    asked = parse_questions(questions)
    text = _read(document, "--document")
    with Clover.load(bundle, **load) as engine:
        decision = engine.decide(text, asked, together=together, **_given(options))
    return _decision_json(decision), _table(decision)


def parse_questions(given: Sequence[str]) -> dict[str, list[Any]]:
    """`name=true|false` each; a choice that is JSON (true, 50, "12", null) is that value, any other is a text.

    Raises CloverError naming the question that is wrong.
    """
    asked: dict[str, list[Any]] = {}
    for question in given:
        name, sign, choices = question.rpartition("=")
        if not sign or not name or "|" not in choices:
            raise CloverError(f"--question {question!r} is not a name and its choices; write it as name=true|false.")
        if name in asked:
            raise CloverError(f"--question {name!r} is given twice; remove one.")
        asked[name] = [_value(c) for c in choices.split("|")]
    return asked


def _value(text: str) -> Any:
    def no_number(_: str) -> Any:
        raise ValueError

    try:
        return json.loads(text, parse_constant=no_number)
    except (ValueError, RecursionError):
        return text


def _read(path: Path, what: str) -> str:
    try:
        return read_prompt(sys.stdin) if str(path) == "-" else path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CloverError(f"{what} {path} is not UTF-8 text ({error.reason}); convert it first.") from None


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in options.items() if v is not None}


def _form_json(form: FilledForm) -> dict[str, Any]:
    return {
        "text": form.text,
        "values": dict(form.values),
        "confidences": {k: round(v, 6) for k, v in form.confidences.items()},
        "tokens": list(form.tokens),
        "steps": form.steps,
        "blocks": form.blocks,
        "seconds": form.seconds,
    }


def _decision_json(decision: Decision) -> dict[str, Any]:
    return {
        "answers": dict(decision.answers),
        "confidences": {k: round(v, 6) for k, v in decision.confidences.items()},
        "steps": decision.steps,
        "forms": [_form_json(form) for form in decision.forms],
    }


def _table(decision: Decision) -> Table:
    table = Table("question", "answer", "confidence", box=None)
    for name, answer in decision.answers.items():
        shown = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
        table.add_row(name, shown, f"{decision.confidences[name]:.3f}")
    return table
