"""Text to token ids and back, over the bundle's tokenizer.json.

Control tokens in what a user writes. A chat prompt is one string in which the template's `<|im_end|>` ends a turn,
while the same letters inside a message are only letters. `Tokenizer.encode` recognises every added token, so it is for
text that is trusted as a whole (a raw completion prompt). A chat prompt goes through `encode_prompt`: the chat
template marks each control token that stands inside a message with a guard character (see guard.py), and a guarded
spelling is encoded as ordinary text. So a user may ask what `<|im_end|>` or the mask token means, and can inject
neither. As the last line of defence, a prompt that still holds the mask id (possible with `encode` only) is refused by
`check_prompt`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clover.runtime.errors import BundleError, RequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RawTokenizer

    from clover.runtime.text.guard import RenderedPrompt

# Added tokens that carry meaning inside a reply. They stay in decoded text even if tokenizer.json calls them special.
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def byte_of_character() -> dict[str, int]:
    """GPT-2's byte-level alphabet: printable Latin-1 stands for itself, other bytes for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(rest)}


_BYTE_OF_CHARACTER = byte_of_character()


class Tokenizer:
    """A byte-level BPE tokenizer. Immutable after construction, so sequences and threads may share one."""

    def __init__(self, raw: RawTokenizer) -> None:
        """Raises BundleError for a tokenizer of another kind than byte-level BPE."""
        from tokenizers import Tokenizer as RawTokenizer

        decoder = json.loads(raw.to_str())["decoder"] or {}
        if decoder.get("type") != "ByteLevel":
            raise BundleError(
                f"tokenizer.json has a decoder of type {decoder.get('type')!r}, but Clover's tokenizer is byte-level "
                "BPE (decoder type 'ByteLevel'); use the tokenizer.json that came with the checkpoint."
            )
        added: dict[int, Any] = raw.get_added_tokens_decoder()
        for token in added.values():
            for option in ("lstrip", "rstrip", "single_word"):
                if getattr(token, option):
                    raise BundleError(
                        f"tokenizer.json: added token {token.content!r} sets {option}, which isn't supported."
                    )
        self._raw = raw
        # The same model without added tokens: what it encodes is ordinary text, whatever it spells.
        self._plain = RawTokenizer(raw.model)
        if raw.normalizer is not None:
            self._plain.normalizer = raw.normalizer
        if raw.pre_tokenizer is not None:
            self._plain.pre_tokenizer = raw.pre_tokenizer
        self._added_ids: dict[str, int] = {token.content: id_ for id_, token in added.items()}
        self._skipped = frozenset(id_ for id_, token in added.items() if token.special and token.content not in MARKERS)
        # And without normalisation, which puts other characters in the place of some.
        self._exact = self._plain if raw.normalizer is None else RawTokenizer(raw.model)
        if raw.normalizer is not None and raw.pre_tokenizer is not None:
            self._exact.pre_tokenizer = raw.pre_tokenizer
        # Longest first: the tokenizers library matches the longest added token at the leftmost place.
        names = sorted(self._added_ids, key=len, reverse=True)
        self._added_pattern = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Reads `directory`/tokenizer.json. Raises BundleError when it is missing or can't be read."""
        from tokenizers import Tokenizer as RawTokenizer

        path = directory / "tokenizer.json"
        if not path.is_file():
            raise BundleError(f"{path} is missing; a bundle needs the checkpoint's tokenizer.json.")
        try:
            raw = RawTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise BundleError(f"{path} can't be read as a tokenizer: {error}.") from error
        return cls(raw)

    @cached_property
    def _known_ids(self) -> frozenset[int]:
        return frozenset(int(id_) for id_ in self._raw.get_vocab(with_added_tokens=True).values())

    @property
    def size(self) -> int:
        """One more than the largest id that has a token."""
        return 1 + max(self._known_ids)

    @property
    def added_tokens(self) -> tuple[str, ...]:
        """Names of all added tokens."""
        return tuple(self._added_ids)

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """Names of the special tokens that structure a prompt (end of turn, mask …): all special ones but MARKERS."""
        return tuple(name for name, id_ in self._added_ids.items() if id_ in self._skipped)

    def find_token_id(self, name: str) -> int | None:
        """Id of the token spelled `name` (`<|im_end|>`), or None."""
        id_ = self._raw.token_to_id(name)
        return None if id_ is None else int(id_)

    def token_id(self, name: str) -> int:
        """Id of the token spelled `name`. Raises BundleError when there is none."""
        id_ = self.find_token_id(name)
        if id_ is None:
            raise BundleError(f"tokenizer.json has no token {name!r}.")
        return id_

    def padding_ids(self, model_vocab_size: int) -> list[int]:
        """Ids below `model_vocab_size` that no token has. The model's head has rows for them; they must never be
        chosen."""
        return [id_ for id_ in range(model_vocab_size) if id_ not in self._known_ids]

    def encode(self, text: str) -> list[int]:
        """Ids of text that is trusted as a whole: every added token in it is recognised. Adds no tokens of its own."""
        return _ids(self._raw, text)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of text in which nothing is a control token: `<|im_end|>` is encoded as the letters it is made of."""
        return self._without_control(_ids(self._plain, text))

    def encode_exact(self, text: str) -> list[int]:
        """`encode_plain` of the very characters given, normalised or not: the ids' bytes are the text's."""
        return self._without_control(_ids(self._exact, text))

    def _without_control(self, ids: list[int]) -> list[int]:
        # A model that keeps added tokens in its own vocabulary could still yield one for a whole word.
        if not self._skipped.isdisjoint(ids):
            raise RequestError("prompt", "the text can't be encoded without control tokens; remove the special tokens.")
        return ids

    def encode_prompt(self, prompt: RenderedPrompt) -> list[int]:
        """Ids of a rendered chat prompt: the template's control tokens are recognised, guarded ones are ordinary text.

        Equals `encode(prompt.text)` when no message spells a control token.
        """
        if self._added_pattern is None:
            return self.encode_plain(prompt.text_without_guards)
        ids: list[int] = []
        for n, piece in enumerate(self._added_pattern.split(prompt.text)):
            if n % 2:  # re.split puts what the group matched at the odd places
                ids.append(self._added_ids[piece])
            elif piece:
                ids.extend(self.encode_plain(piece.replace(prompt.guard, "")))
        return ids

    def decode(self, ids: Sequence[int], *, keep_control_tokens: bool = False) -> str:
        """Text of `ids`. Control tokens are left out unless asked for; MARKERS stay; ids without a token give
        nothing."""
        kept = [id_ for id_ in ids if keep_control_tokens or id_ not in self._skipped]
        return str(self._raw.decode(kept, skip_special_tokens=False))

    def token_bytes(self, id_: int) -> bytes:
        """What one token adds to the decoded bytes: nothing for control tokens and for ids without a token."""
        known = self._bytes.get(id_)
        if known is None:
            known = self._bytes[id_] = self._token_bytes(id_)
        return known

    def _token_bytes(self, id_: int) -> bytes:
        token = None if id_ in self._skipped else self._raw.id_to_token(id_)
        if token is None:
            return b""
        try:
            return bytes(_BYTE_OF_CHARACTER[character] for character in token)
        except KeyError:  # an added token with characters outside the alphabet stands for itself
            return str(token).encode()


def check_prompt(ids: Sequence[int], mask_token_id: int, field: str = "messages") -> None:
    """Raises RequestError when a prompt is empty or holds the mask id, which only the decode loop may place."""
    if not ids:
        raise RequestError(field, f"{field} gives an empty prompt; it needs at least one token.")
    if mask_token_id in ids:
        raise RequestError(field, f"{field} contains the mask token (id {mask_token_id}); remove it from the prompt.")


def _ids(raw: RawTokenizer, text: str) -> list[int]:
    try:
        return list(raw.encode(text, add_special_tokens=False).ids)
    except (UnicodeEncodeError, TypeError) as error:
        raise RequestError("prompt", "the prompt is not valid Unicode (it holds half of a surrogate pair).") from error
