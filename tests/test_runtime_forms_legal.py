"""Whatever a form holds and whatever the model says: fixed text stands byte for byte, and a hole holds what it may.

Forms are random, Unicode everywhere, and legal by construction: none may be refused. They are filled by the nano model and by
sessions that answer at random, with nano's tokenizer and with one whose tokens begin and end within characters.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serve_support import nano
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from clover.runtime.forms import decoder as form_decoder
from clover.runtime.forms.decoder import FormDecoder
from clover.runtime.forms.schema import form_of_schema
from clover.runtime.forms.slots import FreeSlot
from clover.runtime.forms.template import Choice, Form, Free, Hole, Number, make_form
from clover.runtime.forms.vocabulary import Vocabulary, is_delimiter, missing_bytes, read_utf8
from clover.runtime.loop import StepTimes, decode
from clover.runtime.options import DecodeOptions
from clover.runtime.session import Candidates, SequenceRows, StepSession
from clover.runtime.text.tokenizer import Tokenizer

MASK, EOS = 3, (2, 0)
ODD = ["é", "e\u0301", "\u212b", "ü", "ß", "“", "”", "。", "、", "日本", "한", "😀", "👩‍💻", "🇩🇪", "\u00a0", "\u2028", "\ufeff", "\U0010ffff"]  # fmt: skip


def a_text(most: int) -> st.SearchStrategy[str]:
    some = st.one_of(
        st.sampled_from([*ODD, ", ", ' "', '": ', "}, {", " and ", " ", "a", "<|im_end|>", "<think>", "\n", "1 km", "{{"]),
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=most),
    )  # fmt: skip
    return st.lists(some, min_size=1, max_size=3).map("".join)


KINDS = st.one_of(
    st.lists(st.one_of(a_text(4), st.sampled_from(["low", "lower", "lowest", "12", "üb", "üa"])),
             min_size=2, max_size=6, unique=True).map(lambda c: Choice(tuple(c), tuple(c))),
    st.integers(1, 9).map(Free),
    st.builds(lambda least, more: Free(4 * (least + more), least, least + more, '"\\'), st.integers(0, 3), st.integers(1, 4)),
    st.booleans().map(lambda whole: Number(whole, 6)),
)  # fmt: skip


@st.composite
def forms(draw: st.DrawFn) -> Form:
    """A legal form: what follows a hole can be told from what is in it."""
    holes, parts = draw(st.lists(KINDS, min_size=1, max_size=4)), list[str | Hole]()
    if draw(st.booleans()):
        parts.append(draw(a_text(12)))
    for n, kind in enumerate(holes):
        following = draw(a_text(12)) if n + 1 < len(holes) or draw(st.booleans()) else ""
        if isinstance(kind, Number) and re.match(r"[0-9.]", following):
            following = ";" + following
        if isinstance(kind, Choice) and following:
            kept: list[str] = []
            for text in kind.texts:
                if not any(_alike(a, b, following) for k in kept for a, b in ((k, text), (text, k))):
                    kept.append(text)
            kind = Choice(tuple(kept), tuple(kept))
        parts += [Hole(f"h{n}", kind), following]
    return make_form(parts, "template")


def _alike(one: str, other: str, following: str) -> bool:
    """Whether `one` before `following` might be read as `other`."""
    rest = other[len(one) :]
    if not rest or not other.startswith(one):
        return False
    if is_delimiter(following[0]):
        return rest[0] == following[0]
    return following.startswith(rest) or rest.startswith(following)


@lru_cache(maxsize=1)
def crossing() -> Tokenizer:
    """A byte-level tokenizer without words: its tokens hold ends and beginnings of characters, and it normalises."""
    raw = RawTokenizer(models.BPE())
    raw.normalizer = normalizers.NFC()
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>", "<|mask|>"],
        show_progress=False,
    )
    said = "a “b” é, è ü “c” ö; 日本。日木、月本 😀 😁 😂 “d”, “e”. Größe: ä “f” 12 “g” "
    raw.train_from_iterator([said * 5, said[::-1] * 5, "low lower lowest true false "], trainer)
    return Tokenizer(raw)


class Wild:
    """A session that says anything: every row's logits are random, flat or nearly certain."""

    max_rows, max_context = 256, 2048

    def __init__(self, seed: int, vocab: int) -> None:
        self._rng, self._vocab = np.random.default_rng(seed), vocab

    def step(self, rows: Sequence[SequenceRows], candidates: int = 1) -> list[Candidates]:
        (r,) = rows
        logits = self._rng.normal(size=(len(r.logit_rows), self._vocab)) * self._rng.choice([0.5, 4.0, 40.0])
        logprobs = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        logprobs = (logprobs - logits.max(1, keepdims=True)).astype(np.float32)
        scores = logits.copy()
        scores[:, r.adjustment.ids] += r.adjustment.bias
        ids = np.argsort(-scores, axis=1, kind="stable")[:, :candidates]
        best = [np.take_along_axis(x, ids, 1).astype(np.float32) for x in (logprobs, scores)]
        return [Candidates(ids, *best)]


@lru_cache(maxsize=2)
def vocabulary(kind: str) -> Vocabulary:
    tokenizer = nano().tokenizer if kind == "nano" else crossing()
    assert tokenizer is not None
    return Vocabulary(tokenizer, 768, [MASK, *tokenizer.padding_ids(768)])


FORMS = given(
    form=forms(),
    says=st.sampled_from(["nano", "wild", "wild"]),
    spells=st.sampled_from(["nano", "crossing"]),
    seed=st.integers(0, 2**32 - 1),
    block=st.sampled_from([8, 32, 64]),
    threshold=st.sampled_from([0.05, 0.5, 0.95]),
)


@settings(max_examples=300, deadline=None, derandomize=True)
@FORMS
def test_no_form_has_an_illegal_value_or_another_text(**drawn: Any) -> None:
    check_form(**drawn)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@FORMS
def test_no_form_of_ten_thousand_has_an_illegal_value_or_another_text(**drawn: Any) -> None:
    check_form(**drawn)


def fill(form: Form, session: Any, words: Vocabulary, options: DecodeOptions, room: int = 2000) -> FormDecoder:
    decoder = FormDecoder(
        [1, 5, 7], form, options, words, mask_id=MASK, eos_ids=EOS, vocab_size=768, room=room
    )  # fmt: skip
    for _ in decode(session, decoder, 0, StepTimes()):
        pass
    return decoder


def check_form(form: Form, says: str, spells: str, seed: int, block: int, threshold: float) -> None:
    """Fills a form and checks every byte of it."""
    session: StepSession | Wild = nano().session if says == "nano" else Wild(seed, 768)
    if says == "nano":
        nano().session.reset(0)
    words = vocabulary(says if says == "nano" else spells)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(form_decoder, "OTHERS", 8)  # what holes need is among the candidates whatever else is
        decoder = fill(form, session, words, DecodeOptions(block_size=block, threshold=threshold))
    assert not set(decoder.tokens) & {0, 1, 2, 3}, "a control token"
    written = b"".join(map(words.bytes_of, decoder.tokens))
    slots = {slot.name: slot for slot in decoder.slots}
    for part in form.parts:
        text = part if isinstance(part, str) else slots[part.name].text
        assert written.startswith(text.encode())
        written = written[len(text.encode()) :]
        if isinstance(part, Hole):
            check_hole(part, text, slots[part.name])
    assert written == b""


def check_hole(hole: Hole, text: str, slot: Any) -> None:
    kind = hole.kind
    assert 0 <= slot.confidence <= 1 + 1e-6
    if isinstance(kind, Choice):
        assert slot.value == text and text in kind.texts
    elif isinstance(kind, Number):
        assert re.fullmatch(r"-?(?:0|[1-9][0-9]*)" + ("" if kind.whole else r"(?:\.[0-9]+)?"), text)
        assert slot.value == (int(text) if kind.whole else float(text)) and len(slot.tokens) <= kind.tokens
    else:
        assert slot.value == text and len(slot.tokens) <= kind.tokens
        assert kind.least <= len(text) <= (kind.most or len(text))
        assert not re.search(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]", text) and not set(text) & set(kind.banned)


# -- one by one -----------------------------------------------------------------------------------------------


class Says:
    """A session that is nearly certain of one text, told in the tokens of a vocabulary."""

    max_rows, max_context = 256, 2048

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids, self._held = [1, 5, 7, *ids, *[2] * 64], 0

    def step(self, rows: Sequence[SequenceRows], candidates: int = 1) -> list[Candidates]:
        (r,) = rows
        self._held += r.commit
        ids = np.tile(np.arange(768), (len(r.logit_rows), 1))
        logprobs = np.full(ids.shape, -20.0, np.float32)
        for n, row in enumerate(r.logit_rows.tolist()):
            logprobs[n, self._ids[self._held + row - r.commit]] = -0.001
        order = np.argsort(-logprobs, axis=1, kind="stable")[:, :candidates]
        return [Candidates(order, *[np.take_along_axis(logprobs, order, 1)] * 2)]


@pytest.mark.parametrize("spells", ["nano", "crossing"])
@pytest.mark.parametrize(
    ("before", "text", "following"),
    [
        ("Ort: ", "Zürich", "."),
        ('{"a": "', "naïve “日本” 😀", '"}'),
        ("", "über", ""),
        ("x=", "é", "ü"),  # begin with the same byte
        ("“", "日木", "”"),
        ("", "日", "。"),
        ("", "日、月", "。"),  # the comma's first bytes are the full stop's too
        ("e", "\u0301a", "\u212b"),
        ("to ", "öl", " ärger"),
    ],
)
def test_what_the_model_is_sure_of_is_written(spells: str, before: str, text: str, following: str) -> None:
    """Text whose characters take several tokens comes out as the model says it, free or chosen, and ends where it says."""
    words = vocabulary(spells)
    other = text[:-1] + ("ö" if text[-1] != "ö" else "ä")
    for kind in (Free(40), Choice((other, text), (0, 1))):
        form = make_form([before, Hole("a", kind), following], "template")
        opened = FormDecoder([1], form, DecodeOptions(), words, mask_id=3, eos_ids=EOS, vocab_size=768, room=99)
        lead = opened.slots[0].lead
        said = [i for part in (before[: len(before) - len(lead)], lead + text, following) for i in words.encode(part)]
        decoder = fill(form, Says(said), words, DecodeOptions(threshold=0.9))
        (slot,) = decoder.slots
        assert slot.text == text and slot.confidence > 0.9
        # all in one step, but for choices of different lengths and the end
        assert decoder.counts.steps <= 2


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_character_is_not_begun_where_it_can_not_be_finished(limit: int) -> None:
    words = vocabulary("nano")
    form = make_form([Hole("a", Free(limit))], "template")
    (slot,) = fill(form, Says(words.encode("日本")), words, DecodeOptions(threshold=0.9)).slots
    assert (slot.text == "日") == (limit == 3) and len(slot.tokens) <= limit and slot.text.isprintable()


def test_a_schemas_strings_and_enums_hold_any_character() -> None:
    words = vocabulary("nano")
    schema = {
        "type": "object",
        "properties": {
            "straße": {"type": "string", "maxLength": 6},
            "wo": {"enum": ["Zürich", "Genève", "東京"]},
            "was": {"enum": ["é", 1]},
        },
    }
    said = '{"straße": "日本語の道", "wo": "東京", "was": "é"}'
    pieces = ['{"straße": "', "日本語の道", '", "wo": "', "東京", '", "was":', ' "é"', "}"]
    session = Says([i for piece in pieces for i in words.encode(piece)])
    form = form_of_schema(schema)
    decoder = fill(form, session, words, DecodeOptions(threshold=0.9))
    assert words.spells(decoder.tokens, said)
    values = form.assemble({slot.name: slot.value for slot in decoder.slots})
    assert values == {"straße": "日本語の道", "wo": "東京", "was": "é"}
    # where the context is short, a string has no more tokens than characters, and is legal all the same
    longest = FormDecoder([1], form, DecodeOptions(), words, mask_id=3, eos_ids=EOS, vocab_size=768, room=2000).longest
    short = fill(form, Wild(1, 768), words, DecodeOptions(), room=longest - 1)
    string = short.slots[0]
    assert isinstance(string, FreeSlot) and string.most_tokens == 6 and len(string.text) <= 6


def test_an_ending_raises_few_ids_and_knows_all() -> None:
    words = vocabulary("nano")
    ending = words.ending(",")
    assert ending.ids == {i for i in range(768) if words.bytes_of(i).startswith(b",")} and ending.needed <= ending.ids
    assert len(ending.needed) <= 32 and words.encode(",")[0] in ending.needed
    assert words.ending(", and so on") is ending, "looked up once"
    full_stop = words.ending("。")
    assert full_stop.spelled == tuple(words.encode("。")) and set(full_stop.spelled) <= full_stop.needed


@given(
    st.text(st.characters(codec="utf-8"), max_size=6),
    st.one_of(st.binary(max_size=4), st.tuples(st.integers(0xC0, 0xFF), st.integers(0x80, 0xBF)).map(bytes)),
)
def test_utf8_is_read_as_far_as_it_is_whole(text: str, rest: bytes) -> None:
    data = text.encode()
    for cut in range(len(data) + 1):
        read = read_utf8(data[:cut])
        assert read is not None
        whole, begun = read
        assert whole.encode() + begun == data[:cut] and text.startswith(whole)
        assert missing_bytes(begun) == (len(text[len(whole)].encode()) - len(begun) if begun else 0)
    read = read_utf8(rest)
    if read is not None:  # some character has these bytes, and all that it lacks are said to be missing
        lacks = missing_bytes(read[1])
        ends = (bytes([byte]) + b"\xa0" * (lacks - 1) for byte in range(0x80, 0xC0)) if lacks else (b"",)
        assert any(_is_text(rest + end) for end in ends)
    else:
        assert not any(
            _is_text(rest + bytes(end)) for n in range(3) for end in itertools.product((0x80, 0xA0), repeat=n)
        )


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
