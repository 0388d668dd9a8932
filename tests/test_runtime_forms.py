"""Forms: answers are the model's, schemas are followed, bad forms are refused by name."""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Any

import pytest
from engine_support import NANO
from serve_support import nano

from clover.runtime.errors import RequestError
from clover.runtime.forms import decoder as form_decoder
from clover.runtime.forms.slots import open_slot
from clover.runtime.forms.template import Choice, Hole
from clover.runtime.forms.vocabulary import Vocabulary

sys.path.insert(0, str(NANO))
from data import held_out

MESSAGES = [{"role": "user", "content": "Parse the dispatch: Send UAV7 to Cedar, priority high."}]
DECISION = (
    '{"notice_in_time": {{in_time:true|false}}, "room_damaged": {{damaged:true|false}}, '
    '"keep_deposit": {{keep:true|false}}, "refund": {{refund:int}}}'
)


def test_a_form_answers_as_the_model_does() -> None:
    """On held-out decisions a form gives what free decoding gives, wherever that has the form's shape."""
    same = count = 0
    for question, _ in held_out("decide", 12):
        messages = [{"role": "user", "content": question}]
        free = nano().chat(messages)
        try:
            want = json.loads(free.text)
        except ValueError:
            continue
        form = nano().fill(messages, DECISION)
        assert json.loads(form.text).keys() == want.keys()
        count += 1
        same += json.loads(form.text) == want
        assert form.steps <= 6
    assert count >= 8 and same >= 0.8 * count


def test_candidates_are_enough_whatever_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids a hole needs are raised into the candidates: asking for the whole vocabulary changes nothing."""
    template = 'At {{n:int}}: {{level:low|lower|"x"}}, {{x:number}}; {{ok:true|false}}.'
    few = nano().fill(MESSAGES, template)
    monkeypatch.setattr(form_decoder, "OTHERS", 10_000)
    whole = nano().fill(MESSAGES, template)
    assert few == whole or all(abs(few.confidences[k] - whole.confidences[k]) < 1e-4 for k in few.confidences)
    assert few.values == whole.values


def test_long_forms_cross_blocks_and_prompts_cross_steps() -> None:
    template = " ".join(f"Item {n} is {{{{a{n}:low|normal|high}}}} and weighs {{{{w{n}:int}}}} kg," for n in range(12))
    long = [{"role": "user", "content": "Repeat: " + "Alder Birch " * 150}]
    filled = nano().fill(long, template, block_size=16)
    assert len(filled.values) == 24 and filled.blocks > 4
    assert all(filled.values[f"a{n}"] in ("low", "normal", "high") for n in range(12))


def test_decisions_are_made_together_or_alone() -> None:
    document = held_out("decide", 1)[0][0].split(". ", 1)[1]
    questions: dict[str, list[Any]] = {
        "notice_in_time": [True, False],
        "room_damaged": [True, False],
        "site": ["Elm", "Oak"],
    }
    together, alone = nano().decide(document, questions), nano().decide(document, questions, together=False)
    assert len(together.forms) == 1 and len(alone.forms) == 3
    assert together.answers.keys() == alone.answers.keys() == questions.keys()
    assert all(together.answers[q] in c and type(together.answers[q]) is type(c[0]) for q, c in questions.items())
    assert json.loads(together.forms[0].text) == dict(together.answers)
    assert together.steps <= alone.steps


# -- schemas --------------------------------------------------------------------------------------------------

SCHEMA: dict[str, Any] = {
    "type": "object",
    "title": "order",
    "properties": {
        "op": {"enum": ["dispatch", "assign"]},
        "mixed": {"enum": ["a", 1, None, True]},
        "site": {"type": "string", "minLength": 2, "maxLength": 6},
        "note": {"type": "string", "maxLength": 3},
        "urgent": {"type": "boolean"},
        "uav": {"type": "integer", "minimum": 1, "maximum": 40},
        "any": {"type": "integer"},
        "pair": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
        "inner": {"type": "object", "properties": {"x": {"type": "boolean"}, "v": {"const": [1, "é"]}, "n": {"type": "null"}}},
    },
    "required": ["op"],
    "additionalProperties": False,
}  # fmt: skip


def test_a_schema_is_followed() -> None:
    filled = nano().fill(
        MESSAGES, response_format={"type": "json_schema", "json_schema": {"name": "order", "schema": SCHEMA}}
    )
    value = json.loads(filled.text)
    assert value == filled.value and list(value) == list(SCHEMA["properties"])
    assert value["op"] in ("dispatch", "assign") and value["mixed"] in ("a", 1, None, True)
    assert 2 <= len(value["site"]) <= 6 and len(value["note"]) <= 3 and isinstance(value["urgent"], bool)
    assert 1 <= value["uav"] <= 40 and isinstance(value["any"], int) and len(value["pair"]) == 2
    assert value["inner"].keys() == {"x", "v", "n"} and value["inner"]["v"] == [1, "é"] and value["inner"]["n"] is None


def _property(inner: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"p": inner}}


@pytest.mark.parametrize(
    ("inner", "keyword"),
    [
        ({"type": "string"}, "maxLength"),
        ({"type": "string", "maxLength": 4, "pattern": "a+"}, "pattern"),
        ({"type": "string", "maxLength": 4, "format": "date"}, "format"),
        ({"type": "string", "maxLength": 4, "minLength": 5}, "minLength"),
        ({"type": "string", "maxLength": 0}, "maxLength"),
        ({"anyOf": [{"type": "null"}]}, "anyOf"),
        ({"$ref": "#/x"}, "$ref"),
        ({"type": ["string", "null"]}, "type"),
        ({"type": "integer", "minimum": 3}, "minimum"),
        ({"type": "integer", "minimum": 0, "maximum": 10**9}, "maximum"),
        ({"type": "integer", "multipleOf": 2}, "multipleOf"),
        ({"type": "number", "exclusiveMinimum": 2}, "exclusiveMinimum"),
        ({"type": "array", "items": {"type": "boolean"}}, "minItems"),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}, "maxItems"),
        ({"type": "array", "minItems": 1, "maxItems": 1, "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "properties": {}}, "properties"),
        ({"type": "object", "properties": {"a": {"type": "boolean"}}, "patternProperties": {}}, "patternProperties"),
        ({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["b"]}, "required"),
        ({"enum": []}, "enum"),
        ({"const": 1}, "nothing to fill"),
        (True, "JSON object"),
    ],
)
def test_what_a_form_cannot_express_is_refused_by_keyword(inner: Any, keyword: str) -> None:
    given_format = {"type": "json_schema", "json_schema": {"schema": _property(inner)}}
    with pytest.raises(RequestError, match=re.escape(keyword)) as refused:
        nano().fill(MESSAGES, response_format=given_format)
    assert refused.value.field.startswith("response_format") and "\n" not in str(refused.value)


# -- bad input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{a:0}}", "1 to 4096"),
        ("{{a:99999}}", "1 to 4096"),
        ("{{a:-1}}", "'-1'"),
        ("{{a:word}}", "'word'"),
        ("{{a}}", "{{a}}"),
        ("{{:3}}", "name ''"),
        ("{{a b:3}}", "name 'a b'"),
        ("{{名:3}}", "name '名'"),
        ("{{3:3}}", "begin with a letter"),
        ("no hole", "no holes"),
        ("", "no holes"),
        ("{{a:3} x", "close it"),
        ("{{a:3}} {{a:3}}", "two holes named 'a'"),
        ("{{a:3}}{{b:3}}", "touch"),
        ("{{a:x|x}}", "twice"),
        ("{{a:x|}}", "empty choice"),
        ("{{a:int}}0 m", "follows it"),
        ("{{a:int}}.5", "follows it"),
        ("{{a:low|lower}}er", "looks like"),
        ("{{a:x|x,y}}, z", "looks like"),
        ("{{a:2040}}", "context has room"),
        ("long " * 3000 + "{{a:1}}", "context has room"),
    ],
)
def test_a_bad_template_is_refused_in_a_sentence(template: str, told: str) -> None:
    with pytest.raises(RequestError, match=re.escape(told)) as refused:
        nano().fill(MESSAGES, template)
    assert refused.value.field == "template" and str(refused.value).endswith(".")


def test_choices_that_begin_alike_are_told_apart() -> None:
    """`low` is a prefix of `lower`: whichever the probabilities favour is taken, with its share of them."""
    tokenizer = nano().tokenizer
    assert tokenizer is not None
    vocabulary = Vocabulary(tokenizer, 768, ())
    texts = ("low", "lower", "lowest")
    spelled = [vocabulary.encode(t) for t in texts]
    assert spelled[1][: len(spelled[0])] == spelled[0]
    (end, *_) = vocabulary.encode(", x")
    for n, want in enumerate(texts):
        slot = open_slot(Hole("a", Choice(texts, texts)), "template", vocabulary, "", ", x", (2, 0))
        rows = [dict.fromkeys(range(768), math.log(0.001)) for _ in range(slot.width)]
        for at, token in enumerate((*spelled[n], end)[: slot.width]):
            rows[at][token] = math.log(0.7)
        assert slot.offer(rows) > 0.9
        assert slot.take(rows, 0.9, False) and slot.closed and slot.value == want
        assert 0.9 < slot.confidence <= 1.0 and slot.tokens == spelled[n]


def test_nine_questions_and_bad_choices_are_refused() -> None:
    for questions, told in (
        ({f"q{n}": [True, False] for n in range(9)}, "at most 8"),
        ({}, "at least one"),
        ({"q": [True]}, "two choices"),
        ({"q": "yes"}, "two choices"),
        ({"q": ["a", "a"]}, "twice"),
        ({"q": [1, object()]}, "JSON"),
        ({"": [1, 2]}, "not empty"),
    ):
        with pytest.raises(RequestError, match=told) as refused:
            nano().decide("A document.", questions)
        assert refused.value.field == "questions"


def test_options_that_do_not_act_are_refused() -> None:
    unused: dict[str, Any] = {"temperature": 0.5, "mode": "fill", "presence_penalty": 0.1, "max_new_tokens": 5, "x": 1}
    for name, value in unused.items():
        with pytest.raises(RequestError, match=name) as refused:
            nano().fill(MESSAGES, "{{a:1}}", **{name: value})
        assert refused.value.field == name
    both = {"template": "{{a:1}}", "response_format": {"type": "json_schema"}}
    neither_or_both: tuple[dict[str, Any], ...] = ({}, both)
    for arguments in neither_or_both:
        with pytest.raises(RequestError, match="template"):
            nano().fill(MESSAGES, **arguments)
