"""The figures of a trace: how blocks developed, where time went, which experts were touched."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from clover.engines.trace.drawing import MASK, Box, Figure, Text
from clover.engines.trace.record import STEP_KINDS, Trace, TracedBlock, TracedExperts, TracedPart, TracedStep

WIDTH = 720.0
CELL, ROW, LEFT = 21, 15, 48
LETTER = 6.2  # hundredths of an inch that a letter may take
MOST_LETTERS = 14  # of a token above its column
COLUMNS = 32  # positions side by side; a wider block goes on below
CONFIDENCE = ((0.5, "sure0"), (0.8, "sure1"), (0.95, "sure2"), (0.99, "sure3"), (2.0, "sure4"))
CONFIDENCE_NAMES = ("≤ 0.5", "≤ 0.8", "≤ 0.95", "≤ 0.99", "> 0.99")
KIND_TONES = dict(zip(STEP_KINDS, ("dark", "middle", "light"), strict=True))

HOW_BLOCKS_READ = (
    "Columns are positions, rows are steps. A whole cell is a token filled in that step, in the tone of its confidence; a "
    "line keeps it from then on; an empty cell is still a mask."
)


def sections(trace: Trace) -> list[tuple[str, list[Figure | str]]]:
    """Heading and content of each part of a report: notes and figures, in order."""
    blocks: list[Figure | str] = ["This mode develops no blocks."]
    if trace.blocks:
        blocks = [HOW_BLOCKS_READ, confidence_key(), *(f for b in trace.blocks for f in block_figures(b))]
    times: list[Figure | str] = ["No steps."]
    if trace.steps:
        times = [kinds_table(trace.steps), step_chart(trace.steps)]
        if trace.parts:
            shared = "shared out as in a run of the same steps under ONNX Runtime's profiler."
            times += [f"By part of the model: each step's time as timed, {shared}", parts_chart(trace.parts)]
        else:
            times.append("Time by part of the model is known for bundles that run on the CPU only.")
    experts: list[Figure | str] = ["No step previewed a block."]
    if trace.experts:
        experts = [
            f"Experts of {trace.experts_in_all} that the rows of one denoise step touch in each layer, mean over the steps: with "
            f"the block's coreset (inner bars), and if every row took its own best {trace.experts_per_token} (outer bars).",
            experts_chart(trace.experts, trace.experts_in_all),
        ]
    return [("Blocks", blocks), ("Time", times), ("Experts", experts)]


def tone_of(confidence: float) -> str:
    return next(tone for most, tone in CONFIDENCE if confidence <= most)


def confidence_key() -> Figure:
    """Which tone stands for which confidence."""
    items: list[Box | Text] = []
    keys = [*zip((tone for _, tone in CONFIDENCE), CONFIDENCE_NAMES, strict=True), (MASK, "mask")]
    for n, (tone, name) in enumerate(keys):
        items += [Box(58 * n, 1, 14, 12, tone), Text(58 * n + 18, 11, name)]
    return Figure(58 * len(keys), 16, "tones of confidence", tuple(items))


def block_figures(block: TracedBlock) -> list[Figure]:
    """Position by step, at most COLUMNS positions side by side."""
    size = len(block.texts)
    return [_block(block, start, min(start + COLUMNS, size)) for start in range(0, size, COLUMNS)]


def _block(b: TracedBlock, start: int, stop: int) -> Figure:
    shown = [_short(text) for text in b.texts[start:stop]]
    above = max(32.0, 20 + LETTER * max(map(len, shown)))
    items: list[Box | Text] = [Text(0, 12, f"block {b.block}", "dim")]
    if len(b.texts) > COLUMNS:
        items.append(Text(0, 26, f"{start + 1}–{stop}", "dim"))
    items += [Text(LEFT + CELL * n + CELL / 2 + 3, above - 5, text, turned=True) for n, text in enumerate(shown)]
    for step in range(1, b.steps + 1):
        y = above + ROW * (step - 1)
        items.append(Text(0, y + 11, f"step {step}", "dim"))
        cells = zip(b.texts[start:stop], b.filled_at[start:stop], b.confidence[start:stop], strict=True)
        for n, (text, at, confidence) in enumerate(cells):
            x, tone = LEFT + CELL * n, tone_of(confidence)
            if at == step:
                items.append(Box(x, y, CELL - 1, ROW - 1, tone, f"{text} at {confidence:.3f}"))
            elif 0 < at < step:
                items.append(Box(x, y + ROW // 2 - 2, CELL - 1, 3, tone))
            else:
                items.append(Box(x, y, CELL - 1, ROW - 1, MASK))
    return Figure(LEFT + CELL * (stop - start), above + ROW * b.steps + 2, f"block {b.block}", tuple(items))


def _short(text: str) -> str:
    shown = text.replace("\n", "⏎").replace(" ", "·")
    return shown if len(shown) <= MOST_LETTERS else shown[: MOST_LETTERS - 1] + "…"


def kinds_table(steps: Sequence[TracedStep]) -> Figure:
    """Time by kind of step, and between the steps."""
    engine, python = sum(s.engine_ms for s in steps), sum(s.python_ms for s in steps)
    columns = (195.0, 255.0, 305.0, 350.0)
    items: list[Box | Text] = [
        Text(x, 11, name, "dim", "end")
        for x, name in zip(columns, ("steps", "rows each", "ms", "share"), strict=True)
    ]  # fmt: skip
    lines: list[tuple[str, str, tuple[str, ...]]] = []
    for kind, tone in KIND_TONES.items():
        own = [s for s in steps if s.kind == kind]
        if own:
            spent = sum(s.engine_ms for s in own)
            rows = sum(s.commit + s.preview for s in own) / len(own)
            share = 100 * spent / (engine + python)
            lines.append((kind, tone, (str(len(own)), f"{rows:.0f}", f"{spent:.1f}", f"{share:.0f} %")))
    share = 100 * python / (engine + python)
    lines.append(("between the steps (Python)", "", (str(len(steps)), "", f"{python:.1f}", f"{share:.0f} %")))
    for n, (name, tone, values) in enumerate(lines):
        y = 16 * (n + 1)
        if tone:
            items.append(Box(0, y + 1, 12, 12, tone))
        items.append(Text(18, y + 11, name))
        items += [Text(x, y + 11, value, anchor="end") for x, value in zip(columns, values, strict=True)]
    return Figure(columns[-1], 16 * (len(lines) + 1) + 4, "time by kind of step", tuple(items))


def step_chart(steps: Sequence[TracedStep]) -> Figure:
    """One bar a step, as tall as it took long."""
    most = max(s.engine_ms for s in steps)
    height, each = 80.0, min(WIDTH / len(steps), 24.0)
    items: list[Box | Text] = [Text(0, height + 14, f"each step in order; the longest took {most:.1f} ms", "dim")]
    for n, s in enumerate(steps):
        tall = height * s.engine_ms / most
        title = f"step {n + 1}: {s.kind}, {s.commit + s.preview} rows, {s.engine_ms:.2f} ms"
        items.append(Box(n * each, height - tall, max(each - 1, 0.5), tall, KIND_TONES[s.kind], title))
    return Figure(WIDTH, height + 18, "time of each step", tuple(items))


def parts_chart(parts: Sequence[TracedPart]) -> Figure:
    """Time by part of the model, each bar divided by kind of step."""
    whole = sum(sum(p.ms.values()) for p in parts) or 1.0
    left, row = 90.0, 16
    scale = (WIDTH - left - 130) / max(sum(p.ms.values()) for p in parts)
    items: list[Box | Text] = []
    for n, p in enumerate(parts):
        y, own = row * n, sum(p.ms.values())
        items.append(Text(0, y + 11, p.part, "dim"))
        for (kind, ms), end in zip(p.ms.items(), accumulate(p.ms.values()), strict=True):
            items.append(
                Box(left + scale * (end - ms), y + 2, scale * ms, row - 5, KIND_TONES[kind], f"{kind}: {ms:.1f} ms")
            )
        items.append(Text(left + scale * own + 8, y + 11, f"{own:.1f} ms, {100 * own / whole:.0f} %"))
    return Figure(WIDTH, row * len(parts) + 4, "time by part of the model", tuple(items))


def experts_chart(experts: Sequence[TracedExperts], in_all: int) -> Figure:
    """Experts touched in every layer."""
    left, row = 60.0, 16
    scale = (WIDTH - left - 150) / in_all
    items: list[Box | Text] = []
    for n, e in enumerate(experts):
        y = row * n
        items += [
            Text(0, y + 11, f"layer {e.layer}", "dim"),
            Box(left, y + 1, scale * e.free_mean, row - 3, "light"),
            Box(left, y + 4, scale * e.mean, row - 9, "dark"),
            Text(left + scale * in_all + 8, y + 11, f"{e.mean:.1f} ({e.least}–{e.most}) of {e.free_mean:.1f}"),
        ]
    return Figure(WIDTH, row * len(experts) + 4, "experts by layer", tuple(items))
