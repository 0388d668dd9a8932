"""A trace as a PNG picture, for papers and slides. Needs Pillow: the extra `trace`."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

from clover.engines.trace.drawing import MASK, TEXT_SIZE, TONES, Box, Figure, Text
from clover.engines.trace.figures import WIDTH, sections
from clover.engines.trace.page import describe_conditions
from clover.engines.trace.record import Trace
from clover.runtime.errors import CloverError

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

DPI = (72, 600)
MAX_HEIGHT = 65_000  # pixels; what programs that open pictures can be hoped to take
MARGIN, GAP = 24.0, 10.0
# Tried in order; the first that has every character of the trace is taken. Pillow's own has Latin letters.
FONTS = (
    "DejaVuSans.ttf", "NotoSans-Regular.ttf", "LiberationSans-Regular.ttf", "Arial.ttf", "arial.ttf", "Helvetica.ttc",
    "NotoSansCJK-Regular.ttc", "Arial Unicode.ttf", "msyh.ttc", "msgothic.ttc", "PingFang.ttc", "wqy-zenhei.ttc",
)  # fmt: skip


def require_pillow() -> None:
    """Raises CloverError saying how to install it where it is missing."""
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise CloverError(
            "--out: a .png picture needs Pillow; `pip install '.[trace]'` in Clover's checkout brings it, or write .html or .json."
        ) from None


def render_png(trace: Trace, dpi: int) -> bytes:
    """The picture, 7.7 inches wide. Raises CloverError when the reply is too long for one."""
    from PIL import Image
    from PIL.ImageDraw import Draw

    canvas = _Canvas(dpi / 100, "".join((trace.prompt, trace.text, *(t for b in trace.blocks for t in b.texts))))
    figures = canvas.lay_out(trace)
    height = 2 * MARGIN + sum(f.height + GAP for f in figures) - GAP
    width, tall = round(dpi / 100 * (WIDTH + 2 * MARGIN)), round(dpi / 100 * height)
    if tall > MAX_HEIGHT:
        raise CloverError(
            f"--out: the picture of this reply would be {tall:,} pixels tall, and {MAX_HEIGHT:,} is the most; give a "
            "smaller --dpi or --max-new-tokens, or write .html."
        )
    image = Image.new("RGB", (width, tall), TONES["paper"][0])
    draw, y = Draw(image), MARGIN
    for figure in figures:
        canvas.draw(image, draw, figure, y)
        y += figure.height + GAP
    out = io.BytesIO()
    image.quantize(palette=_palette(), dither=Image.Dither.NONE).save(out, "PNG", dpi=(dpi, dpi), optimize=True)
    return out.getvalue()


def _palette() -> Image:
    """The tones, and the shades between text and paper: a picture of few colours is a quarter of the size."""
    from PIL import Image

    def rgb(tone: str) -> list[int]:
        return list(bytes.fromhex(TONES[tone][0][1:]))

    shades = [
        [(i * a + (15 - i) * b) // 15 for a, b in zip(rgb(t), rgb("paper"), strict=True)]
        for t in ("ink", "dim")
        for i in range(16)
    ]
    colours = [rgb(tone) for tone in TONES] + shades
    image = Image.new("P", (1, 1))
    image.putpalette([value for colour in colours for value in colour])
    return image


class _Canvas:
    """Draws figures at a scale, in pixels per hundredth of an inch, with a font that has what they say."""

    def __init__(self, scale: float, said: str) -> None:
        self._scale = scale
        self._path = _choose_font(said)
        self._fonts: dict[float, FreeTypeFont] = {}

    def lay_out(self, trace: Trace) -> list[Figure]:
        """The whole report as figures, one below the other."""
        found = [self._line("How a reply came to be", 18), self._paragraph(describe_conditions(trace), "dim")]
        for heading, text in (("Prompt", trace.prompt), ("Reply", trace.text)):
            found += [self._line(heading, 13), self._paragraph(text, "ink")]
        for heading, parts in sections(trace):
            found.append(self._line(heading, 13))
            found += [self._paragraph(p, "dim") if isinstance(p, str) else p for p in parts]
        return found

    def draw(self, image: Image, draw: ImageDraw, figure: Figure, top: float) -> None:
        for item in figure.items:
            if isinstance(item, Text):
                self._text(image, draw, item, top)
            else:
                self._box(draw, item, top)

    def _box(self, draw: ImageDraw, b: Box, top: float) -> None:
        s = self._scale
        left, upper = s * (MARGIN + b.x), s * (top + b.y)
        # at least a pixel; the last pixel belongs to the box
        right = max(left, s * (MARGIN + b.x + b.width) - 1)
        lower = max(upper, s * (top + b.y + b.height) - 1)
        corners = (round(left), round(upper), round(right), round(lower))
        if b.tone == MASK:
            draw.rectangle(corners, outline=TONES["line"][0], width=max(1, round(0.8 * s)))
        elif b.width > 0 and b.height > 0:
            draw.rectangle(corners, fill=TONES[b.tone][0])

    def _text(self, image: Image, draw: ImageDraw, t: Text, top: float) -> None:
        s, font, colour = self._scale, self._font(t.size), TONES[t.tone][0]
        x, y = s * (MARGIN + t.x), s * (top + t.y)
        if not t.turned:
            draw.text(
                (x, y), t.text, fill=colour, font=font, anchor={"start": "ls", "middle": "ms", "end": "rs"}[t.anchor]
            )
            return
        from PIL import Image as images
        from PIL.ImageDraw import Draw

        ascent, descent = font.getmetrics()
        strip = images.new("L", (max(1, round(font.getlength(t.text)) + 1), ascent + descent))
        Draw(strip).text((0, ascent), t.text, fill=255, font=font, anchor="ls")
        turned = strip.rotate(90, expand=True)
        image.paste(colour, (round(x) - ascent, round(y) - turned.height), turned)

    def _font(self, size: float) -> FreeTypeFont:
        from PIL import ImageFont

        if size not in self._fonts:
            pixels = self._scale * size
            if self._path is None:
                self._fonts[size] = ImageFont.load_default(pixels)  # type: ignore[assignment]  # with FreeType always one
            else:
                self._fonts[size] = ImageFont.truetype(self._path, pixels)
        return self._fonts[size]

    # -- text ------------------------------------------------------------------------------------

    def _line(self, text: str, size: int) -> Figure:
        return Figure(WIDTH, size + 10.0, text, (Text(0, size + 6, text, size=size),))

    def _paragraph(self, text: str, tone: str) -> Figure:
        lines = [line for part in text.split("\n") for line in self._wrap(part)]
        step = 1.4 * TEXT_SIZE
        return Figure(
            WIDTH, step * len(lines), "text", tuple(Text(0, step * (n + 0.75), x, tone) for n, x in enumerate(lines))
        )

    def _wrap(self, text: str) -> list[str]:
        """Lines of at most the picture's width, broken between words where that can be."""
        font, most = self._font(TEXT_SIZE), self._scale * WIDTH
        lines, line = [], ""
        for word in text.expandtabs(4).split(" "):
            longer = f"{line} {word}" if line else word
            if font.getlength(longer) <= most:
                line = longer
                continue
            if line:
                lines.append(line)
            line = word
            while font.getlength(line) > most:
                fits = self._fitting(line, font, most)
                lines.append(line[:fits])
                line = line[fits:]
        return [*lines, line]

    def _fitting(self, line: str, font: FreeTypeFont, most: float) -> int:
        """How many of a line's first characters fit, at least one."""

        def length(characters: int) -> float:
            return font.getlength(line[:characters])

        return max(1, bisect_right(range(len(line)), most, key=length) - 1)


def _choose_font(said: str) -> str | None:
    """The first font of this machine that has every character, else the one that lacks the fewest; None: Pillow's own."""
    from PIL import ImageFont

    wanted = sorted({c for c in said if c.isprintable()} | set("≤–…⏎·%"))
    best: tuple[int, str | None] = (_lacking(ImageFont.load_default(12), wanted), None)  # type: ignore[arg-type]
    for name in FONTS:
        try:
            lacks = _lacking(ImageFont.truetype(name, 12), wanted)
        except OSError:
            continue
        if not lacks:
            return name
        best = min(best, (lacks, name), key=lambda b: b[0])
    return best[1]


def _lacking(font: FreeTypeFont, wanted: Sequence[str]) -> int:
    missing = bytes(font.getmask("\U0010fffe"))
    return sum(bytes(font.getmask(c)) == missing for c in wanted if c.strip())
