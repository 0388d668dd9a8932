"""The public API: load a bundle, chat, generate, stream. No torch, no network."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from clover.engines.bundle import Bundle, Verify
from clover.engines.open import Provider, open_session
from clover.exporter.config import read_json
from clover.runtime.adaptive import AdaptiveDecoder, StepTimesSeen
from clover.runtime.autoregressive import AutoregressiveDecoder
from clover.runtime.decoder import Decoder, StepEvent, TokenInfo
from clover.runtime.errors import RequestError
from clover.runtime.fill import FillDecoder
from clover.runtime.forms.fill import (
    Decision,
    FilledForm,
    check_form_options,
    decision_forms,
    decision_prompt,
    fill_form,
)
from clover.runtime.forms.schema import form_of_response_format
from clover.runtime.forms.template import Form, parse_template
from clover.runtime.forms.vocabulary import Vocabulary
from clover.runtime.loop import StepTimes, decode
from clover.runtime.options import DecodeOptions, check_flags, make_options
from clover.runtime.reply import Reply, ReplyFinished, StreamItem, make_reply, make_statistics
from clover.runtime.session import StepSession
from clover.runtime.speculative import SpeculativeDecoder
from clover.runtime.text.chat_template import ChatTemplate
from clover.runtime.text.json_schema import strict_checks
from clover.runtime.text.reply import ReplyEvent, ReplyParser
from clover.runtime.text.tokenizer import Tokenizer, check_prompt
from clover.runtime.turns import Turns

TOKENIZER_DIRECTORY = "tokenizer"


class Clover:
    """A loaded model. Calls from several threads take turns; for many at once use `clover serve`.

        engine = Clover.load("bundle/")
        reply = engine.chat([{"role": "user", "content": "…"}])
        for event in engine.stream(messages, threshold=0.95, max_new_tokens=512): ...

    Decode options (threshold, mode, max_new_tokens, temperature, …) are the fields of
    `clover.runtime.options.DecodeOptions`; what a call does not give comes from the bundle.
    """

    def __init__(
        self, bundle: Bundle, session: StepSession, tokenizer: Tokenizer | None, template: ChatTemplate | None
    ) -> None:
        self.bundle, self.session, self.tokenizer, self.template = bundle, session, tokenizer, template
        self._turns = Turns(session.close)
        self._step_times: dict[tuple[int, float], StepTimesSeen] = {}  # by block size and threshold
        self._vocabulary: Vocabulary | None = None  # of forms
        self._vocab_size = bundle.manifest.config.vocab_size  # kept: the manifest reads its config anew each time

    @classmethod
    def load(
        cls,
        directory: str | Path,
        *,
        verify: Verify = True,
        max_context: int | None = None,
        threads: int | None = None,
        cache: bool = True,
        provider: Provider | None = None,
    ) -> Clover:
        """Opens a bundle. `verify`: check hashes, of a large file when it was not checked before or has been written to
        since; "all": of every file; False: of none. `max_context`: most tokens of prompt and reply together.
        `threads`: CPU threads (default: one a core). `cache`: keep weights packed for this CPU beside the bundle.
        `provider`: tensorrt, cpu or cuda; default: the bundle's GPU engine where it has one, else the CPU.

        Raises BundleError when the bundle is damaged or for another machine.
        """
        if not isinstance(directory, str | PathLike):
            raise RequestError("directory", f"directory is {directory!r}; give the path of a bundle.")
        if verify != "all":
            check_flags(verify=verify)
        check_flags(cache=cache)
        bundle = Bundle.open(directory, verify=verify)
        session = open_session(
            bundle, max_context=max_context, threads=threads, cache=cache, verify=verify, provider=provider
        )
        folder = bundle.directory / TOKENIZER_DIRECTORY
        tokenizer = Tokenizer.load(folder) if (folder / "tokenizer.json").is_file() else None
        template = load_template(folder, tokenizer) if tokenizer else None
        return cls(bundle, session, tokenizer, template)

    # -- replies -----------------------------------------------------------------------------

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Reply:
        """The reply to a chat; see `stream` for the arguments. Raises RequestError naming a field that can't be honoured."""
        return _last(self.stream(messages, **options))

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Reply:
        """Continues a raw prompt (text or token ids) without the chat template."""
        return _last(self.stream_prompt(prompt, **options))

    def stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        steps: bool = False,
        **options: Any,
    ) -> Iterator[StreamItem]:
        """Yields content, reasoning and tool-call deltas, then ReplyFinished. `steps`: also a StepEvent for each step.

        The arguments are checked before this returns. Closing the iterator ends the decode.
        """
        if self.template is None or self.tokenizer is None:
            raise RequestError(
                "messages", "this bundle has no tokenizer or chat template; use generate with token ids."
            )
        check_flags(enable_thinking=enable_thinking, steps=steps)
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        rendered = self.template.render(messages, tools=tools, **thinking)
        ids = self.tokenizer.encode_prompt(rendered)
        return self._stream(
            ids, "messages", options, steps=steps, tools=tools, starts_in_thinking=rendered.opens_thinking
        )

    def stream_prompt(
        self, prompt: str | Sequence[int], *, steps: bool = False, **options: Any
    ) -> Iterator[StreamItem]:
        """As `stream`, for a raw prompt. Thinking and tool markers stay in the text."""
        check_flags(steps=steps)
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("prompt", "this bundle has no tokenizer; give token ids.")
            ids = self.tokenizer.encode(prompt)
        else:
            try:
                if isinstance(prompt, bytes | bytearray | Mapping):  # their items are integers, and no token ids
                    raise TypeError
                ids = [operator.index(t) for t in prompt]
            except TypeError:
                raise RequestError("prompt", "prompt is neither a text nor a sequence of token ids.") from None
        return self._stream(ids, "prompt", options, steps=steps, parse=False)

    # -- forms ------------------------------------------------------------------------------

    def fill(
        self,
        messages: Sequence[Mapping[str, Any]],
        template: str | None = None,
        *,
        response_format: Mapping[str, Any] | None = None,
        enable_thinking: bool | None = None,
        on_event: Callable[[StepEvent], None] | None = None,
        **options: Any,
    ) -> FilledForm:
        """Answers with a form: fixed text whose holes the model fills, all together (docs/forms.md).

        `template` holds `{{name:12}}` (at most 12 tokens), `{{ok:true|false}}`, `{{n:int}}` or `{{x:number}}`; or
        `response_format` is of type json_schema. Options are threshold, block_size and coreset_top_p.
        Raises RequestError naming what can't be filled.
        """
        if on_event is not None and not callable(on_event):
            raise RequestError("on_event", f"on_event is {on_event!r}; it must be a function of one StepEvent.")
        if (template is None) == (response_format is None):
            raise RequestError("template", "template or response_format must be given, and not both.")
        form = parse_template(template) if template is not None else form_of_response_format(response_format)
        return self._fill(messages, form, enable_thinking, options, on_event)

    def decide(
        self, document: str, questions: Mapping[str, Sequence[Any]], *, together: bool = True, **options: Any
    ) -> Decision:
        """Answers up to 8 questions on one document, each with one of its choices (JSON values), in one denoising.
        together False: each question alone, for comparison. Raises RequestError."""
        if not isinstance(document, str):
            raise RequestError("document", "document must be a text.")
        check_flags(together=together)
        filled = []
        for names, form in decision_forms(questions, together):
            content = decision_prompt(document, names)
            filled.append(self._fill([{"role": "user", "content": content}], form, None, options, None))
        values = {name: value for form in filled for name, value in form.values.items()}
        confidences = {name: value for form in filled for name, value in form.confidences.items()}
        return Decision(values, confidences, tuple(filled))

    def _fill(
        self,
        messages: Sequence[Mapping[str, Any]],
        form: Form,
        enable_thinking: bool | None,
        given: Mapping[str, Any],
        on_event: Callable[[StepEvent], None] | None,
    ) -> FilledForm:
        self._turns.check_open()
        if self.template is None or self.tokenizer is None:
            raise RequestError("messages", "this bundle has no tokenizer or chat template, so it can't fill forms.")
        check_form_options(given)
        check_flags(enable_thinking=enable_thinking)
        options, manifest = self.options(**given), self.bundle.manifest
        thinking: dict[str, Any] = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        ids = self.tokenizer.encode_prompt(self.template.render(messages, **thinking))
        check_prompt(ids, manifest.mask_token_id, "messages")
        if self._vocabulary is None:
            self._vocabulary = Vocabulary(self.tokenizer, manifest.config.vocab_size, manifest.excluded_token_ids)
        with self._turns.take():
            return fill_form(
                self.session,
                ids,
                form,
                options,
                self._vocabulary,
                mask_id=manifest.mask_token_id,
                eos_ids=manifest.eos_token_ids,
                vocab_size=manifest.config.vocab_size,
                on_event=on_event,
            )

    # -- pieces -----------------------------------------------------------------------------

    def options(self, **given: Any) -> DecodeOptions:
        """The decode options in force for a call. Raises RequestError."""
        manifest = self.bundle.manifest
        ramp = {"length_ramp": manifest.options["length_ramp"]} if "length_ramp" in manifest.options else {}
        options = make_options({**ramp, **manifest.defaults}, given)
        sizes = self.bundle.manifest.block_sizes
        if options.block_size not in sizes:
            raise RequestError(
                "block_size",
                f"block_size is {options.block_size}; this bundle was built for {', '.join(map(str, sizes))}.",
            )
        vocab = self._vocab_size
        for token in options.logit_bias:
            if not 0 <= token < vocab:
                raise RequestError("logit_bias", f"logit_bias names token {token}; ids go from 0 to {vocab - 1}.")
        return options

    def decoder(self, prompt: Sequence[int], options: DecodeOptions, field: str = "prompt") -> Decoder:
        """A decoder for a prompt of token ids. Raises RequestError when the prompt can't be decoded."""
        manifest, vocab = self.bundle.manifest, self._vocab_size
        if not prompt:
            raise RequestError(field, f"{field} holds no tokens; give at least one.")
        if (low := min(prompt)) < 0 or max(prompt) >= vocab:
            wrong = low if low < 0 else max(prompt)
            raise RequestError(field, f"{field} holds token {wrong}; ids go from 0 to {vocab - 1}.")
        check_prompt(prompt, manifest.mask_token_id, field)
        room = self.session.max_context - len(prompt)
        if room < 1:
            raise RequestError(
                field,
                f"{field} has {len(prompt)} tokens and the context holds {self.session.max_context}, reply included; shorten it.",
            )
        limit = min(options.max_new_tokens or room, room)
        common: dict[str, Any] = {
            "eos_ids": manifest.eos_token_ids,
            "vocab_size": vocab,
            "limit": limit,
            "thinking_ids": self._thinking_ids(),
        }
        if options.mode == "autoregressive":
            return AutoregressiveDecoder(prompt, options, **common)
        if options.mode == "self-speculative":
            return SpeculativeDecoder(prompt, options, mask_id=manifest.mask_token_id, **common)
        if options.mode == "adaptive":
            times = self._step_times.setdefault((options.block_size, options.threshold), StepTimesSeen())
            return AdaptiveDecoder(prompt, options, mask_id=manifest.mask_token_id, times=times, **common)
        return FillDecoder(prompt, options, mask_id=manifest.mask_token_id, **common)

    def _thinking_ids(self) -> tuple[int, int] | None:
        """Ids of `<think>` and `</think>`, where the tokenizer has them as tokens."""
        if self.tokenizer is None:
            return None
        opens, closes = (self.tokenizer.find_token_id(marker) for marker in ("<think>", "</think>"))
        return None if opens is None or closes is None else (opens, closes)

    def close(self) -> None:
        """Frees the engine. Harmless when closed already. A reply that runs in another thread ends with CloverError
        within a step, and the engine is freed then."""
        self._turns.close()

    def __getstate__(self) -> NoReturn:
        raise TypeError("a loaded engine can't be pickled or copied; call Clover.load in each process.")

    def __enter__(self) -> Clover:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stream(
        self,
        ids: Sequence[int],
        field: str,
        given: Mapping[str, Any],
        *,
        steps: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        starts_in_thinking: bool = False,
        parse: bool = True,
    ) -> Iterator[StreamItem]:
        self._turns.check_open()
        options = self.options(**given)
        decoder = self.decoder(ids, options, field)
        parser = None
        if self.tokenizer is not None:
            parser = ReplyParser(
                self.tokenizer,
                tools=tools,
                checks=strict_checks(tools),
                stop=options.stop,
                starts_in_thinking=starts_in_thinking,
                parse_thinking=parse,
                parse_tools=parse,
            )
        elif options.stop:
            raise RequestError("stop", "this bundle has no tokenizer, so stop strings can't be found; leave stop out.")
        return self._run(decoder, options, parser, steps)

    def _run(
        self, decoder: Decoder, options: DecodeOptions, parser: ReplyParser | None, steps: bool
    ) -> Iterator[StreamItem]:
        began = time.perf_counter()
        times = StepTimes()
        tokens: list[TokenInfo] = []
        texts: list[ReplyEvent] = []
        first: float | None = None
        with self._turns.take():
            self.session.reset(0)
            for event in decode(self.session, decoder, 0, times):
                self._turns.check_open()
                if isinstance(event, StepEvent):
                    if steps:
                        yield event
                    continue
                first = first or time.perf_counter() - began
                fresh: list[ReplyEvent] = []
                # one by one where a stop string may end the reply, so that no token behind it is given out
                for piece in [(t,) for t in event.tokens] if options.stop else [event.tokens]:
                    tokens.extend(piece)
                    fresh += parser.push(t.id for t in piece) if parser else []
                    if parser and parser.stopped:
                        break
                texts += fresh
                for item in fresh:
                    yield item  # type: ignore[misc]  # Finished comes from `finish` alone
                if parser and parser.stopped:
                    break
        ending = parser.finish(hit_limit=decoder.truncated) if parser else []
        texts += ending
        for item in ending[:-1]:
            yield item  # type: ignore[misc]
        total = time.perf_counter() - began
        statistics = make_statistics(
            decoder.counts, options.mode, len(tokens), engine=times.session, first=first, total=total
        )
        yield ReplyFinished(make_reply(texts, decoder.truncated, tokens, statistics))


def load_template(directory: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template beside a tokenizer, None when there is none. Raises CloverError when it is damaged."""
    config = directory / "tokenizer_config.json"
    given = (directory / "chat_template.jinja").is_file() or (
        config.is_file() and bool(read_json(config).get("chat_template"))
    )
    return ChatTemplate.load(directory, tokenizer) if given else None


def _last(stream: Iterator[StreamItem]) -> Reply:
    for item in stream:
        if isinstance(item, ReplyFinished):
            return item.reply
    raise RuntimeError("the stream ended without a reply")
