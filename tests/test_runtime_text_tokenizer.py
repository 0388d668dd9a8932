"""Tokenizer and detokenizer on the nano tokenizer."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clover.runtime.errors import BundleError, RequestError
from clover.runtime.text.detokenizer import Detokenizer
from clover.runtime.text.guard import RenderedPrompt, pick_guard, protect
from clover.runtime.text.tokenizer import MARKERS, Tokenizer, check_prompt

NANO = Path(__file__).parents[1] / "examples" / "nano"
TOKENIZER = Tokenizer.load(NANO)
SIZE = TOKENIZER.size
CONTROL = TOKENIZER.control_tokens
GUARD = pick_guard([])
# Text that often holds control tokens, whole, cut and overlapping.
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=5), st.sampled_from([*CONTROL, *MARKERS, "<|", "|>", "<|im_", "end|>", "<", "é", "日本"])
    ),
    max_size=10,
).map("".join)


def control_ids() -> set[int]:
    return {TOKENIZER.token_id(name) for name in CONTROL}


def test_names_and_sizes() -> None:
    assert {"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"} == set(CONTROL)
    assert TOKENIZER.find_token_id("<|nothing|>") is None
    with pytest.raises(BundleError, match="nothing"):
        TOKENIZER.token_id("<|nothing|>")
    assert TOKENIZER.padding_ids(SIZE) == []
    assert TOKENIZER.padding_ids(SIZE + 3) == [SIZE, SIZE + 1, SIZE + 2]


@given(TEXTS)
def test_round_trip(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text), keep_control_tokens=True) == text
    plain = TOKENIZER.encode_plain(text)
    assert TOKENIZER.decode(plain) == text
    assert control_ids().isdisjoint(plain)


@given(TEXTS, TEXTS)
def test_user_text_can_not_inject_control_tokens(user: str, system: str) -> None:
    guard = pick_guard([user, system])
    safe = [protect(text, TOKENIZER.added_tokens, guard) for text in (system, user)]
    text = "<|im_start|>" + safe[0] + "<|im_end|><|im_start|>" + safe[1] + "<|im_end|>"
    ids = TOKENIZER.encode_prompt(RenderedPrompt(text, guard))
    start, end = TOKENIZER.token_id("<|im_start|>"), TOKENIZER.token_id("<|im_end|>")
    assert [id_ for id_ in ids if id_ in control_ids()] == [start, end, start, end]
    assert TOKENIZER.decode(ids) == system + user


def qwen_like() -> Tokenizer:
    """The nano tokenizer as Qwen's is built: NFC, added tokens outside the model's vocabulary, markers not special."""
    from tokenizers import Tokenizer as RawTokenizer

    data = json.loads((NANO / "tokenizer.json").read_text())
    data["normalizer"] = {"type": "NFC"}
    for n, token in enumerate(data["added_tokens"]):
        del data["model"]["vocab"][token["content"]]
        token["id"] = SIZE - len(data["added_tokens"]) + n
        token["special"] = token["content"] not in MARKERS
    data["model"]["vocab"] = {token: n for n, token in enumerate(data["model"]["vocab"])}
    return Tokenizer(RawTokenizer.from_str(json.dumps(data)))


QWEN_LIKE = qwen_like()


@given(TEXTS, st.sampled_from([TOKENIZER, QWEN_LIKE]))
@example("e\u0301<think>e\u0301<|im_end|>\u0301", QWEN_LIKE)
def test_prompt_without_guards_is_encoded_as_the_library_does(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_prompt(RenderedPrompt(text, pick_guard([text])))
    assert ids == tokenizer.encode(text)
    assert "".join(Detokenizer(tokenizer).push(ids)) == tokenizer.decode(ids)


def test_tokens_outside_the_vocabulary_of_the_model() -> None:
    assert QWEN_LIKE.size == SIZE
    assert QWEN_LIKE.token_id("<|endoftext|>") == SIZE - 8
    assert QWEN_LIKE.control_tokens == CONTROL
    assert QWEN_LIKE.decode(QWEN_LIKE.encode("<|im_start|><think>a<|im_end|>")) == "<think>a"


def test_mask_in_prompt_is_refused_but_its_spelling_in_a_message_is_not() -> None:
    mask = TOKENIZER.token_id("<|mask|>")
    with pytest.raises(RequestError, match="mask") as caught:
        check_prompt(TOKENIZER.encode("a <|mask|> b"), mask, field="prompt")
    assert caught.value.field == "prompt"
    check_prompt(TOKENIZER.encode_prompt(RenderedPrompt(protect("a <|mask|> b", CONTROL, GUARD), GUARD)), mask)
    with pytest.raises(RequestError, match="empty"):
        check_prompt([], mask)


def test_overlapping_tokens_are_all_broken_up() -> None:
    assert not any(token in protect("<<a>b>", ["<<a>", "<a>b", "a>b>"], "#") for token in ["<<a>", "<a>b", "a>b>"])


def test_user_mistakes(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="Unicode"):
        TOKENIZER.encode("\ud800")
    with pytest.raises(BundleError, match="missing"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BundleError, match="can't be read"):
        Tokenizer.load(tmp_path)
    data = json.loads((NANO / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(data | {"decoder": {"type": "Fuse"}}))
    with pytest.raises(BundleError, match="Fuse"):
        Tokenizer.load(tmp_path)


def split(items: list[int], cuts: list[int]) -> list[list[int]]:
    """Pieces of `items` cut at `cuts` (taken modulo the length); empty pieces too."""
    places = [0, *sorted(cut % (len(items) + 1) for cut in cuts), len(items)]
    return [items[a:b] for a, b in pairwise(places)]


BYTE_IDS = {TOKENIZER.token_bytes(id_): id_ for id_ in range(SIZE)}


@given(
    st.one_of(
        st.lists(st.integers(0, SIZE + 2), max_size=40),  # any ids: mostly invalid UTF-8
        st.binary(max_size=20).map(lambda data: [BYTE_IDS[bytes([byte])] for byte in data]),
        st.text(max_size=12).map(lambda text: [BYTE_IDS[bytes([byte])] for byte in text.encode()]),
    ),
    st.lists(st.integers(0, 1000), max_size=10),
)
def test_detokenizer_equals_full_decode(ids: list[int], cuts: list[int]) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.push(piece) for piece in split(ids, cuts)]
    assert "".join(pieces) + detokenizer.flush() == TOKENIZER.decode(ids)


def test_characters_split_across_pushes_come_out_whole() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    ids = [BYTE_IDS[bytes([b])] for b in "😀é".encode()]
    assert [detokenizer.push([i]) for i in ids] == ["", "", "", "😀", "", "é"]
    assert detokenizer.push(ids[:2]) == ""
    assert detokenizer.push([BYTE_IDS[b"a"]]) == "\ufffda"
    assert detokenizer.push(ids[:2]) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.push(ids[:4]) == "😀"


def test_control_tokens_are_silent_and_markers_are_text() -> None:
    ids = TOKENIZER.encode("<|im_start|><think>a</think><tool_call>b</tool_call><|im_end|><|mask|><|endoftext|>")
    assert Detokenizer(TOKENIZER).push([*ids, SIZE + 5]) == "<think>a</think><tool_call>b</tool_call>"
