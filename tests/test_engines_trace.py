"""`clover trace`: what is drawn is what happened, in a page that needs nothing else."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from engine_support import NANO, bundle
from oracle_support import tiny_checkpoint
from serve_support import chat_ids, nano
from typer.testing import CliRunner

from clover import Clover
from clover.cli import app
from clover.engines.trace.drawing import TONES, Text
from clover.engines.trace.figures import block_figures, sections, tone_of
from clover.engines.trace.page import render_page
from clover.engines.trace.picture import render_png
from clover.engines.trace.profile import PARTS
from clover.engines.trace.record import STEP_KINDS, Trace, record
from clover.runtime.errors import CloverError

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
    previews = any(s.preview for s in trace.steps)  # `adaptive` decides by measured times whether there are any
    assert trace.text.startswith("[{") and (mode == "adaptive" or previews == (mode == "self-speculative"))
    assert ("develops no blocks" in page) == (not trace.blocks) and bool(trace.experts) == previews >= bool(
        trace.blocks
    )


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
    assert len(page) < 40_000 and "&lt;script&gt;" in page and "@media print" in page
    assert page.count("<rect") == page.count("</rect>") + len(re.findall(r"<rect[^>]*/>", page))


def test_a_bundle_without_tokenizer_is_traced_by_ids() -> None:
    with Clover.load(bundle(tiny_checkpoint(0)).directory, threads=1, cache=False, max_context=128) as engine:
        options = engine.options(max_new_tokens=6, block_size=8, length_ramp=None)
        trace = record(engine, [1, 2, 3], options, threads=1)
    assert re.fullmatch(r"\d+( \d+){5}", trace.text) and render_page(trace)


@cache
def slow_trace() -> Trace:
    """A reply of many steps."""
    return traced(threshold=0.9999, block_size=64, max_new_tokens=64)


def test_time_by_part_is_the_steps_time_shared_out() -> None:
    trace = slow_trace()
    assert [p.part for p in trace.parts] == list(PARTS[:-1])  # every node has its part: there is no `other`
    assert all(ms > 0 for p in trace.parts for ms in p.ms.values())
    for kind in STEP_KINDS:
        steps = [s.engine_ms for s in trace.steps if s.kind == kind]
        assert sum(p.ms.get(kind, 0.0) for p in trace.parts) == pytest.approx(sum(steps))
    told = "".join(
        i.text
        for _, parts in sections(trace)
        for f in parts
        if not isinstance(f, str)
        for i in f.items
        if isinstance(i, Text)
    )
    assert all(part in told for part in PARTS[:-1])
    assert {s.kind for s in trace.steps} == {"commit and preview", "preview"}


def luminance(colour: str) -> float:
    red, green, blue = bytes.fromhex(colour[1:])
    return 0.299 * red + 0.587 * green + 0.114 * blue


@pytest.mark.parametrize("scale", [("sure0", "sure1", "sure2", "sure3", "sure4"), ("light", "middle", "dark")])
def test_tones_can_be_told_apart_in_grey(scale: tuple[str, ...]) -> None:
    for screen in (0, 1):
        grey = [luminance(TONES[tone][screen]) for tone in ("paper", *scale)]
        apart = [a - b if screen == 0 else b - a for a, b in pairwise(grey)]
        assert min(apart) > 24, (scale, screen, grey)


def test_a_wide_block_goes_on_below() -> None:
    trace = slow_trace()
    first = block_figures(trace.blocks[0])
    assert len(first) == 2 and max(f.width for f in first) <= 720
    shown = [i.text for f in first for i in f.items if isinstance(i, Text) and i.turned]
    assert len(shown) == 64


def test_the_picture_holds_its_tones_and_its_size() -> None:
    from PIL import Image

    trace = slow_trace()
    picture = Image.open(io.BytesIO(render_png(trace, 150)))
    assert picture.width == round(7.68 * 150) and picture.height > picture.width
    assert [round(side) for side in picture.info["dpi"]] == [150, 150]
    colours = picture.convert("RGB").getcolors()
    assert colours is not None, "more than 256 colours"
    seen = {colour for _, colour in colours}
    drawn = {tone_of(c) for b in trace.blocks for c in b.confidence} | {"paper", "ink", "dim", "line", "light", "dark"}
    assert {tuple(bytes.fromhex(TONES[tone][0][1:])) for tone in drawn} <= seen
    assert len(render_png(trace, 300)) < 400_000
    long = replace(trace, text="many lines\n" * 2000)
    with pytest.raises(CloverError, match="pixels tall"):
        render_png(long, 300)


def test_any_text_can_be_drawn() -> None:
    trace = slow_trace()
    odd = "x" * 3000 + " \t\u0000\x07\ud7ff 漢字 العربية 🙂\n\n" + "word " * 400
    assert render_png(replace(trace, prompt=odd, text=""), 72)
    page = render_page(replace(trace, prompt=odd))
    assert "漢字" in page


def test_the_verb_writes_a_page_a_picture_or_json_and_refuses_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, run = str(bundle(NANO).directory), CliRunner()
    names = ["t.html", "t.json", "t.png"]
    for name in names:
        result = run.invoke(
            app, ["trace", directory, ORDER, "-o", str(tmp_path / name), "--threads", "1", "--max-context", "512"]
        )
        assert result.exit_code == 0 and name in result.output
    traced = json.loads((tmp_path / "t.json").read_text())
    assert traced["text"].startswith("[{") and traced["conditions"]["batch"] == 1
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    piped = ["trace", directory, "-", "-o", str(tmp_path / "t.json"), "--threads", "1", "--json"]
    result = run.invoke(app, piped, input=ORDER + "\n")
    assert json.loads(result.stdout)["steps"] == len(traced["steps"])
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    for arguments, told in (
        (["t.svg"], ".html, .png or .json"),
        (["none/t.html"], "not a directory"),
        (["t.html", "--dpi", "300"], "--dpi acts on .png"),
        (["t.png", "--dpi", "9"], "from 72 to 600"),
        (["t.html", "--threshold", "2"], "threshold"),
    ):
        result = run.invoke(app, ["trace", directory, ORDER, "-o", str(tmp_path / arguments[0]), *arguments[1:]])
        assert result.exit_code == 2 and told in result.output, result.output
    monkeypatch.setitem(sys.modules, "PIL", None)  # as where it is not installed
    result = run.invoke(app, ["trace", directory, ORDER, "-o", str(tmp_path / "t.png")])
    assert result.exit_code == 2 and ".[trace]" in result.output
    assert sorted(p.name for p in tmp_path.iterdir()) == names
