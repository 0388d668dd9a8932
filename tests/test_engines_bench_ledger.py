"""`clover bench --compare`: right answers counted rightly, broken-off runs resumed, dead servers told apart from slow ones."""

from __future__ import annotations

import json
import math
import random
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from clover.cli import app
from clover.engines.bench.cases import read_cases
from clover.engines.bench.comparison import compare_servers
from clover.engines.bench.statistics import (
    design_effect,
    median_interval,
    paired_difference,
    share_interval,
    sign_test,
    time_per_success,
    wilson,
)
from clover.runtime.errors import CloverError

Respond = Callable[[str], Any]  # the prompt -> an answer, or a status


BODIES: dict[str, list[Any]] = {}  # what each server was sent


@contextmanager
def server(respond: Respond, key: str | None = None) -> Iterator[tuple[str, list[str]]]:
    """A server of chat completions on a free port, and the prompts it was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "fake"}]})

        def do_POST(self) -> None:
            if key is not None and self.headers.get("Authorization") != f"Bearer {key}":
                self._send(401, {"error": {}})
                return
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt = body["messages"][-1]["content"]
            asked.append(prompt)
            BODIES.setdefault(f"http://127.0.0.1:{http.server_port}", []).append(body)
            answer = respond(prompt)
            if isinstance(answer, int):
                self._send(answer, {"error": {"message": "too\n busy " + "x" * 999} if answer == 503 else {}})
            else:
                self._send(200, {"choices": [{"message": {"content": answer}}], "usage": {"completion_tokens": 3}})

        def _send(self, status: int, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}", asked
    finally:
        http.shutdown()
        http.server_close()
        thread.join(10)


CASES = [
    {"id": "exact", "prompt": "1", "exact": "yes"},
    {"id": "regex", "prompt": "2", "regex": "^a+b$"},
    {"id": "json", "prompt": "3", "json": {"x": [1, True], "y": None}},
    {"id": "script", "prompt": "4", "script": "check.py"},
    {"messages": [{"role": "user", "content": "5"}], "exact": "fünf", "max_tokens": 9},
]
RIGHT = {"1": " yes\n", "2": "aaab", "3": '{"y": null, "x": [1, true]}', "4": "even", "5": "fünf"}
WRONG = {"1": "yes.", "2": "ab c", "3": '{"y": null, "x": [1, 1]}', "4": "odd", "5": "5"}


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    (tmp_path / "check.py").write_text("import sys; sys.exit(0 if sys.stdin.read() == 'even' else 3)")
    path = tmp_path / "cases.jsonl"
    path.write_text("\n".join(map(json.dumps, CASES)) + "\n")
    return path


def run(urls: tuple[str, str], cases: Path, **options: Any) -> dict[str, Any]:
    given_options = {"runs": 2, "timeout": 20.0, "max_tokens": 16, "ledger": None, "out": None, **options}
    return compare_servers(urls, cases, given_options.pop("ledger"), given_options.pop("out"), **given_options)[0]


def test_every_check_tells_right_from_wrong(cases: Path, tmp_path: Path) -> None:
    with server(RIGHT.__getitem__) as (good, _), server(WRONG.__getitem__) as (bad, _):
        result = run((good, bad), cases, out=tmp_path / "r.html")
    a, b = result["servers"]
    assert (a["successes"], a["answers"], a["share"], a["model"]) == (10, 10, 1.0, "fake")
    assert (b["successes"], b["answers"], b["time_per_success"]) == (0, 10, None)
    assert a["time_per_success"] > 0 and a["errors"] == {} and a["dead"] is None
    assert result["difference"]["difference"] == -1.0 and result["difference"]["only_first"] == 10
    assert [row["right"] for row in result["cases"]] == [[2, 0]] * 5
    assert [row["id"] for row in result["cases"]] == ["exact", "regex", "json", "script", "5"]
    page = (tmp_path / "r.html").read_text()
    assert "<script" not in page and "src=" not in page and good in page
    assert page.count("B answered") == 5 and "A answered" not in page and "ab c" in page
    assert "cases 5" in page and "runs 2" in page


def test_a_run_that_was_broken_off_goes_on(cases: Path) -> None:
    ledger = cases.parent / "ledger.jsonl"
    calls = 0

    def stops(prompt: str) -> str:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return RIGHT[prompt]

    with server(RIGHT.__getitem__) as (a, asked_a), server(RIGHT.__getitem__) as (b, asked_b):
        with pytest.MonkeyPatch.context() as patch:
            from clover.engines.bench import client
            from clover.engines.bench import ledger as module

            def ask(url: str, model: str, case: Any, **more: Any) -> Any:
                stops(case.messages[-1]["content"])
                return client.ask(url, model, case, **more)

            patch.setattr(module, "ask", ask)
            with pytest.raises(KeyboardInterrupt):
                run((a, b), cases, ledger=ledger)
        assert len(ledger.read_text().splitlines()) == 1 + 3
        with ledger.open("a") as file:
            file.write('{"server": 1, "case": "ex')  # killed while it wrote
        result = run((a, b), cases, ledger=ledger)
        assert len(asked_a) + len(asked_b) == 20  # nothing was asked twice
        assert [s["successes"] for s in result["servers"]] == [10, 10]
        assert run((a, b), cases, ledger=ledger)["servers"] == result["servers"]
        assert len(asked_a) + len(asked_b) == 20
        assert run((a, b), cases, ledger=ledger, runs=3)["servers"][0]["answers"] == 15
        with pytest.raises(CloverError, match="another comparison"):
            run((b, a), cases, ledger=ledger)
        lines = ledger.read_text().splitlines()
        lines[2] = "nonsense"
        ledger.write_text("\n".join(lines) + "\n")
        with pytest.raises(CloverError, match="line 3 is damaged"):
            run((a, b), cases, ledger=ledger)


def test_a_dead_server_is_reported_and_not_counted(cases: Path) -> None:
    with server(RIGHT.__getitem__) as (good, _):
        with server(RIGHT.__getitem__) as (gone, _):
            pass
        result = run((good, gone), cases)
    a, b = result["servers"]
    assert a["successes"] == 10 and a["dead"] is None and a["unanswered"] == 0
    assert b["answers"] == 0 and b["unanswered"] == 10 and "refused" in b["dead"]
    assert b["share"] is None and b["median_seconds"] is None and result["difference"] is None


def test_nobody_at_either_address_is_a_sentence(cases: Path) -> None:
    with server(RIGHT.__getitem__) as (gone, _):
        pass
    with pytest.raises(CloverError, match=r"no server answers \(.*refused"):
        run((gone, gone), cases)


def test_an_address_may_end_in_v1_and_fields_go_into_its_servers_requests(cases: Path) -> None:
    with server(RIGHT.__getitem__) as (a, _), server(RIGHT.__getitem__) as (b, _):
        fields = (["mode=autoregressive", "threshold=0.5"], ['stop=["x"]', "top_p=1"])
        result = run((f"{a}/v1/", f"{b}/v1"), cases, fields=fields)
        assert [s["successes"] for s in result["servers"]] == [10, 10]
        assert [s["url"] for s in result["servers"]] == [a, b]
        assert (BODIES[a][0]["mode"], BODIES[a][0]["threshold"]) == ("autoregressive", 0.5)
        assert BODIES[b][0]["stop"] == ["x"] and "mode" not in BODIES[b][0]
        with pytest.raises(CloverError, match="another comparison"):
            run((a, b), cases)
        for wrong in ("mode", "=x", "stream=true"):
            with pytest.raises(CloverError, match="--field-b"):
                run((a, b), cases, fields=([], [wrong]))


def test_errors_are_failures_with_a_name(cases: Path) -> None:
    with (
        server(RIGHT.__getitem__) as (good, _),
        server(lambda prompt: {"1": 503, "2": 500}.get(prompt, RIGHT[prompt])) as (bad, _),
    ):
        result = run((good, bad), cases)
    (busy, failed), counts = zip(*result["servers"][1]["errors"].items(), strict=True)
    assert (
        counts == (2, 2) and failed == "status 500" and busy.startswith("status 503: too busy xxx") and len(busy) < 200
    )
    assert result["servers"][1]["successes"] == 6
    assert result["difference"]["only_first"] == 4 and result["difference"]["only_second"] == 0


def test_a_key_is_sent_to_servers_that_ask_for_one(cases: Path) -> None:
    with server(RIGHT.__getitem__, "secret") as (a, _), server(RIGHT.__getitem__, "secret") as (b, _):
        assert run((a, b), cases, ledger=cases.parent / "1")["servers"][0]["errors"] == {"status 401": 10}
        assert run((a, b), cases, ledger=cases.parent / "2", key="secret")["servers"][1]["successes"] == 10
        assert "secret" not in (cases.parent / "2").read_text()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{broken", "is no JSON"),
        ("[1]", "no JSON object"),
        ('{"prompt": "a"}', "exactly one of"),
        ('{"prompt": "a", "exact": "b", "regex": "c"}', "exactly one of"),
        ('{"prompt": "a", "regex": "("}', "regex"),
        ('{"prompt": "a", "exact": 1}', "exact must be a text"),
        ('{"prompt": "a", "script": "none.py"}', "does not exist"),
        ('{"exact": "a"}', "prompt or messages"),
        ('{"prompt": 1, "exact": "a"}', "prompt must be a text"),
        ('{"prompt": "a", "exact": "b", "max_tokens": 0}', "max_tokens"),
        ('{"prompt": "a", "exact": "b", "weight": 2}', "'weight' is unknown"),
        ('{"id": "exact", "prompt": "a", "exact": "b"}', "stands in line 1 too"),
    ],
)
def test_a_bad_case_is_named_by_its_line(cases: Path, line: str, told: str) -> None:
    with cases.open("a") as file:
        file.write("\n" + line + "\n")
    with pytest.raises(CloverError, match=told) as refused:
        read_cases(cases)
    assert "line 7" in str(refused.value) and "\n" not in str(refused.value)


def test_bad_arguments_are_sentences(cases: Path) -> None:
    for arguments, told in (
        (["--compare", "http://a", "http://b"], "needs --cases"),
        (["--compare", "a", "http://b", "--cases", str(cases)], "no address"),
        (["--compare", "http://a", "http://b", "--cases", str(cases), "--runs", "0"], "runs"),
        (["--compare", "http://a", "http://b", "--cases", str(cases), "-o", "x.txt"], ".html"),
        (["somewhere", "--compare", "http://a", "http://b", "--cases", str(cases)], "give one of them"),
        (["somewhere", "--cases", str(cases)], "give --compare"),
        (["--compare", "http://a", "http://b", "--cases", str(cases.parent / "none")], "No such file"),
    ):
        result = CliRunner().invoke(app, ["bench", *arguments])
        assert result.exit_code == 2 and told in result.output and "Traceback" not in result.output


# -- statistics -----------------------------------------------------------------------------------------------


def test_wilson_intervals_are_the_known_ones() -> None:
    for successes, trials, low, high in (
        (8, 10, 0.4902, 0.9433),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (81, 263, 0.2553, 0.3662),
    ):
        assert wilson(successes, trials) == pytest.approx((low, high), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(7, 7)[1] == 1.0 and wilson(0, 7)[0] == 0.0


PAIRS = st.lists(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=5), min_size=1, max_size=30)


@settings(max_examples=80, deadline=None)
@given(PAIRS)
def test_paired_differences(by_case: list[list[tuple[bool, bool]]]) -> None:
    pairs = [pair for case in by_case for pair in case]
    d = paired_difference(by_case)
    assert d is not None and d.pairs == len(pairs)
    assert d.difference == pytest.approx(sum(b for _, b in pairs) / len(pairs) - sum(a for a, _ in pairs) / len(pairs))
    assert -1 <= d.low <= d.difference <= d.high <= 1 and 0 < d.p <= 1
    mirrored = paired_difference([[(b, a) for a, b in case] for case in by_case])
    assert (
        mirrored is not None
        and mirrored.difference == pytest.approx(-d.difference)
        and mirrored.p == pytest.approx(d.p)
        and [mirrored.low, mirrored.high] == pytest.approx([-d.high, -d.low])
    )


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=30), st.integers(2, 20))
def test_asking_a_server_that_always_says_the_same_again_proves_nothing_more(once: list[Any], runs: int) -> None:
    alone, again = [[pair] for pair in once], [[pair] * runs for pair in once]
    assert share_interval([[a for a, _ in case] for case in again]) == pytest.approx(
        share_interval([[a for a, _ in case] for case in alone]), abs=1 / len(once) / 4
    )
    one, many = paired_difference(alone), paired_difference(again)
    assert one is not None and many is not None and one.p == many.p
    assert many.high - many.low >= 0.9 * (one.high - one.low)


def test_intervals_of_repeated_answers_cover_what_they_should() -> None:
    """Cases as hard as may be, six answers each: the interval holds the true share nearly as often as it says; one that
    takes all answers for independent does not."""
    r, truth, cases, runs, held, naive = random.Random(1), 0.7, 30, 6, 0, 0
    for _ in range(400):
        hard = [r.betavariate(0.7, 0.3) for _ in range(cases)]
        answers = [[r.random() < chance for _ in range(runs)] for chance in hard]
        low, high = share_interval(answers)
        held += low <= truth <= high
        low, high = wilson(sum(map(sum, answers)), cases * runs)
        naive += low <= truth <= high
    assert held / 400 > 0.92 and naive / 400 < 0.75
    assert design_effect([[1.0], [0.0], [1.0]]) == 1.0


def test_the_exact_test_is_the_binomial_one() -> None:
    d = paired_difference([[(True, False)]] * 1 + [[(False, True)]] * 9 + [[(True, True)]] * 5)
    assert d is not None and d.p == pytest.approx(2 * 11 / 1024) == sign_test(9, 10)
    assert paired_difference([]) is None and paired_difference([[]]) is None
    same = paired_difference([[(True, True)]] * 40)
    assert same is not None and same.difference == 0 and same.low == pytest.approx(-0.0467, abs=1e-3) == -same.high


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.1, 9.0), min_size=1, max_size=40))
def test_the_medians_interval_is_the_order_statistics(values: list[float]) -> None:
    interval = median_interval(values)
    assert (interval is None) == (len(values) < 6)
    if interval is not None and interval.high is not None:
        assert interval.low <= statistics.median(values) <= interval.high
        outside = sorted(values).index(interval.low)  # values below it
        assert sum(math.comb(len(values), k) for k in range(outside + 1)) / 2 ** len(values) <= 0.025


def test_time_per_success_has_an_interval_and_may_lack_an_upper_end() -> None:
    found = time_per_success([(2.0, 1)] * 30 + [(4.0, 1)] * 30)
    assert found is not None and found[0] == pytest.approx(3.0)
    assert 2.6 < found[1].low < 3.0 < (found[1].high or 0) < 3.4
    assert time_per_success([(1.0, 0)] * 3) is None and time_per_success([]) is None
    rare = time_per_success([(1.0, 0)] * 9 + [(1.0, 1)])
    assert rare is not None and rare[0] == pytest.approx(10.0) and rare[1].high is None
