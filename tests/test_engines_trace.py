"""`clover trace`: what is drawn is what happened, in a page that needs nothing else."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from engine_support import NANO, bundle
from oracle_support import tiny_checkpoint
from serve_support import chat_ids, nano
from typer.testing import CliRunner

from clover import Clover
from clover.cli import app
from clover.engines.trace.page import render_page
from clover.engines.trace.record import Trace, record

ORDER = "Parse the dispatch: Send UAV7 to Cedar, priority high. UAV12: move waypoint 3 to 120,450."


def traced(text: str = ORDER, **options: Any) -> Trace:
    return record(nano(), chat_ids(nano(), text), nano().options(**options), threads=1)


@pytest.mark.parametrize("block", [8, 32])
def test_blocks_tokens_and_steps_are_those_of_the_reply(block: int) -> None:
    trace = traced(block_size=block)
    reply = nano().chat([{"role": "user", "content": ORDER}], block_size=block)
    assert trace.text == reply.text and len(trace.tokens) == len(reply.tokens)
    assert len(trace.steps) == reply.statistics.steps + reply.statistics.prefill_steps
    assert len(trace.blocks) == reply.statistics.blocks
    assert sum(b.steps for b in trace.blocks) == reply.statistics.steps
    for n, (text, probability, _) in enumerate(trace.tokens):
        drawn = trace.blocks[n // block]
        assert drawn.texts[n % block] == text and drawn.confidence[n % block] == pytest.approx(probability)
        assert 1 <= drawn.filled_at[n % block] <= drawn.steps
    for drawn in trace.blocks:
        for at, confidence in zip(drawn.filled_at, drawn.confidence, strict=True):
            same_step = drawn.filled_at.count(at)
            assert at == 0 or confidence > 0.95 or same_step == 1  # above the threshold, or the step's only one
    assert sum(s.commit for s in trace.steps) == len(chat_ids(nano(), ORDER)) + block * (len(trace.blocks) - 1)
    assert all(s.engine_ms > 0 and s.python_ms > 0 for s in trace.steps)


def test_without_a_coreset_every_row_touches_its_own_experts() -> None:
    whole, part = traced(coreset_top_p=1.0), traced(coreset_top_p=0.5)
    assert len(whole.experts) == nano().bundle.manifest.config.num_hidden_layers
    for e in whole.experts:
        assert (e.mean, e.least, e.most) == (e.free_mean, e.free_least, e.free_most)
        assert e.least >= whole.experts_per_token and e.most <= whole.experts_in_all
    assert sum(e.mean for e in part.experts) < 0.8 * sum(e.free_mean for e in part.experts)


@pytest.mark.parametrize("mode", ["autoregressive", "self-speculative", "adaptive"])
def test_every_mode_can_be_traced(mode: str) -> None:
    trace = traced(mode=mode, max_new_tokens=40)
    page = render_page(trace)
    assert ("develops no blocks" in page) == (mode == "autoregressive") and trace.text.startswith("[{")
    assert bool(trace.experts) == (mode != "autoregressive")


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_the_page_stands_alone_and_is_small() -> None:
    page = render_page(traced('Repeat: <script>alert("x")</script> & <img src=x>'))
    tags = Tags()
    tags.feed(page)
    assert not tags.seen & {"script", "link", "img", "iframe", "object", "base", "form"}
    assert not tags.attributes & {"src", "href", "onload", "onclick"}
    assert not re.search(r"https?:|url\(|@import", page)
    assert len(page) < 60_000 and "&lt;script&gt;" in page and "@media print" in page
    assert page.count("<rect") == page.count("</rect>") + len(re.findall(r"<rect[^>]*/>", page))


def test_a_bundle_without_tokenizer_is_traced_by_ids() -> None:
    with Clover.load(bundle(tiny_checkpoint(0)).directory, threads=1, cache=False, max_context=128) as engine:
        options = engine.options(max_new_tokens=6, block_size=8, length_ramp=None)
        trace = record(engine, [1, 2, 3], options, threads=1)
    assert re.fullmatch(r"\d+( \d+){5}", trace.text) and render_page(trace)


def test_the_verb_writes_a_page_or_json_and_refuses_the_rest(tmp_path: Path) -> None:
    directory, run = str(bundle(NANO).directory), CliRunner()
    for name in ("t.html", "t.json"):
        result = run.invoke(
            app, ["trace", directory, ORDER, "-o", str(tmp_path / name), "--threads", "1", "--max-context", "512"]
        )
        assert result.exit_code == 0 and name in result.output
    traced = json.loads((tmp_path / "t.json").read_text())
    assert traced["text"].startswith("[{")
    told = run.invoke(app, ["trace", directory, ORDER, "-o", str(tmp_path / "t.json"), "--threads", "1", "--json"])
    assert json.loads(told.stdout)["steps"] == len(traced["steps"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.html", "t.json"]
    for out, told in (("t.png", ".html or .json"), ("none/t.html", "not a directory")):
        result = run.invoke(app, ["trace", directory, ORDER, "-o", str(tmp_path / out)])
        assert result.exit_code == 2 and told in result.output
    result = run.invoke(app, ["trace", directory, ORDER, "-o", str(tmp_path / "t.html"), "--threshold", "2"])
    assert result.exit_code == 2 and "threshold" in result.output
