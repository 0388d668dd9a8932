"""`clover fill` and `clover decide`: what the API gives, and one sentence for what it refuses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from cli_support import clover, refused
from engine_support import NANO, REPOSITORY, bundle
from serve_support import RunningServer, nano, nano_slots
from typer.testing import Result

from clover.runtime.forms.command import parse_questions

PROMPT = "Parse the dispatch: Send UAV7 to Cedar, priority high."
TEMPLATE = '[{"op": "{{op:dispatch|assign}}", "uav": {{uav:int}}, "site": "{{site:4}}"}]'
DOCUMENT = "Ana left Elm and gave notice 3 days late. Notice may be at most 7 days late. The deposit is 400. The room was clean.\n"


def on_nano(verb: str, *arguments: str | Path, stdin: bytes | None = None) -> Result:
    return clover(verb, bundle(NANO).directory, "--threads", "1", "--max-context", "512", *arguments, stdin=stdin)


def test_a_form_is_what_the_api_fills(tmp_path: Path) -> None:
    want = nano().fill([{"role": "user", "content": PROMPT}], TEMPLATE, threshold=0.5)
    said = on_nano("fill", "--template", TEMPLATE, "--threshold", "0.5", "--json", PROMPT)
    got = json.loads(said.stdout)
    assert (got["text"], got["values"], got["steps"]) == (want.text, want.values, want.steps)
    assert got["value"] == want.value and got["confidences"].keys() == {"op", "uav", "site"}
    plain = on_nano("fill", "-", "--template", TEMPLATE, stdin=PROMPT.encode())
    assert json.loads(plain.stdout)[0]["site"] == "Cedar"
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "properties": {"op": {"enum": ["dispatch", 7]}, "ok": {"type": "boolean"}}}')
    value = json.loads(on_nano("fill", "--schema", schema, "--json", PROMPT).stdout)["value"]
    assert value["op"] in ("dispatch", 7) and isinstance(value["ok"], bool)


def test_decisions_are_what_the_api_decides(tmp_path: Path) -> None:
    file = tmp_path / "document.txt"
    file.write_text(DOCUMENT)
    asked = ("notice_in_time=true|false", "room_damaged=true|false", "keep_deposit=true|false", "refund=0|400")
    options = [a for q in asked for a in ("--question", q)]
    got = json.loads(on_nano("decide", "--document", file, *options, "--json").stdout)
    want = nano().decide(DOCUMENT, parse_questions(asked))
    assert got["answers"] == want.answers and len(got["forms"]) == 1
    assert got["answers"].keys() == {"notice_in_time", "room_damaged", "keep_deposit", "refund"}
    alone = json.loads(
        on_nano("decide", "--document", "-", *options, "--alone", "--json", stdin=DOCUMENT.encode()).stdout
    )
    assert len(alone["forms"]) == 4 and alone["answers"].keys() == got["answers"].keys()
    table = on_nano("decide", "--document", file, *options).stdout
    assert all(name in table for name in got["answers"]) and str(got["answers"]["refund"]) in table


def test_the_documents_calls_over_http_run() -> None:
    page = (REPOSITORY / "docs" / "forms.md").read_text()
    (calls,) = [block for block in page.split("```")[1::2] if "curl" in block]
    words = shlex.split(calls)
    at = [n for n, word in enumerate(words) if word == "curl"]
    with RunningServer(nano_slots(1), slots=1, cache_mb=16) as server:
        for start, end in zip(at, [*at[1:], len(words)], strict=True):
            _, url, _, header, _, body = words[start:end]
            path = "/" + url.partition("/")[2]
            got = server.http.post(path, content=body, headers=dict([header.split(": ")]))
            assert got.status_code == 200, got.text
            reply = got.json()
            values = reply["values" if path.endswith("fill") else "answers"]
            assert json.loads(reply["text"]) == ([values] if path.endswith("fill") else values)
            assert reply["usage"]["steps"] >= 1 and reply["confidences"].keys() == values.keys()
            if path.endswith("fill"):
                assert values == {"op": "assign", "uav": 7, "task": "survey", "site": "Elm"}
    assert len(at) == 2


def test_the_documents_command_fills_its_form_right() -> None:
    page = (REPOSITORY / "docs" / "forms.md").read_text()
    (commands,) = [block for block in page.split("```")[1::2] if "clover fill" in block]
    words = shlex.split(commands.partition("clover decide")[0].replace("\\\n", ""))
    assert words[:3] == ["clover", "fill", "BUNDLE"]
    assert json.loads(on_nano("fill", *words[3:]).stdout) == [{"op": "dispatch", "uav": 7, "site": "Cedar"}]


def test_choices_are_json_values_or_texts() -> None:
    assert parse_questions(["a=b=true|null", 'q=12|"12"|-1.5|low|NaN|[']) == {
        "a=b": [True, None],
        "q": [12, "12", -1.5, "low", "NaN", "["],
    }


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["fill", PROMPT], "--template or --schema"),
        (["fill", PROMPT, "--template", "{{a:0}}"], "1 to 4096"),
        (["fill", PROMPT, "--template", "{{a:2}}", "--schema", "x"], "not both"),
        (["fill", PROMPT, "--schema", "nowhere.json"], "nowhere.json"),
        (["fill", PROMPT, "--schema", "BAD"], "not JSON"),
        (["fill", PROMPT, "--template", "{{a:2}}", "--threshold", "7"], "threshold"),
        (["decide", "--document", "nowhere.txt", "--question", "a=1|2"], "nowhere.txt"),
        (["decide", "--document", "LATIN", "--question", "a=1|2"], "UTF-8"),
        (["decide", "--document", "BAD", "--question", "a"], "name=true|false"),
        (["decide", "--document", "BAD", "--question", "a=1"], "name=true|false"),
        (["decide", "--document", "BAD", "--question", "=1|2"], "name=true|false"),
        (["decide", "--document", "BAD", "--question", "a=1|1"], "twice"),
        (["decide", "--document", "BAD", "--question", "a=1|2", "--question", "a=3|4"], "twice"),
        (["decide", "--document", "BAD", *(x for n in range(9) for x in ("--question", f"q{n}=1|2"))], "at most 8"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(arguments: list[str], told: str, tmp_path: Path) -> None:
    bad, latin = tmp_path / "bad", tmp_path / "latin"
    bad.write_text("{no json")
    latin.write_bytes("Zürich".encode("latin-1"))
    places = {"BAD": str(bad), "LATIN": str(latin)}
    verb, *rest = arguments
    assert told in refused(on_nano(verb, *(places.get(a, a) for a in rest)))
