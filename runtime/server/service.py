"""The model and its scheduler, as the routes use them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from clover.engines.open import choose_provider
from clover.runtime.clover import Clover
from clover.runtime.errors import BundleError, RequestError
from clover.runtime.forms.decoder import FormDecoder
from clover.runtime.forms.template import Form
from clover.runtime.forms.vocabulary import Vocabulary
from clover.runtime.options import DecodeOptions
from clover.runtime.scheduler.job import Job
from clover.runtime.scheduler.scheduler import DrainingError, QueueFullError, Scheduler
from clover.runtime.server.errors import ApiError
from clover.runtime.server.fields import Fields
from clover.runtime.server.forms import FormSink, check_length, form_options
from clover.runtime.server.generation import ChoiceSink, Generation
from clover.runtime.server.metrics import Metrics
from clover.runtime.server.request import Ask
from clover.runtime.server.settings import ServeSettings
from clover.runtime.server.tools import Tools
from clover.runtime.text.chat_template import ChatTemplate
from clover.runtime.text.reply import ReplyParser
from clover.runtime.text.tokenizer import Tokenizer, check_prompt

CHARACTERS_A_TOKEN = 8  # ordinary text has fewer


class Service:
    """One loaded model. Owns the engine's session through its scheduler; close it once."""

    def __init__(self, engine: Clover, settings: ServeSettings) -> None:
        if engine.tokenizer is None:
            raise BundleError(
                f"{engine.bundle.directory} has no tokenizer, which serving needs; build it again from a checkpoint with tokenizer.json."
            )
        self.engine, self.settings = engine, settings
        self.tokenizer: Tokenizer = engine.tokenizer
        self.model_names = settings.model_name or (engine.bundle.manifest.model.name,)
        self.created = int(time.time())
        manifest = engine.bundle.manifest
        self._vocabulary = Vocabulary(self.tokenizer, manifest.config.vocab_size, manifest.excluded_token_ids)
        self.metrics = Metrics()
        self.scheduler = Scheduler(
            engine.session,
            max_queue=settings.max_queue,
            shared_rows=settings.shared_rows or _shared_rows(engine, settings.provider),
            cache_bytes=settings.cache_mb * 2**20,
            turn_opener=_turn_opener(engine.template, engine.tokenizer),
            on_step=self.metrics.step,
        )
        self.metrics.watch(self.scheduler)

    def close(self) -> None:
        """Ends what runs and frees the engine."""
        self.scheduler.close()

    # -- requests ----------------------------------------------------------------------------

    def check_model(self, fields: Fields) -> str:
        """Takes `model`. Raises ApiError 404 for one this server doesn't have; absent means the only one."""
        name = fields.text("model")
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            have = ", ".join(self.model_names)
            raise ApiError(404, f"model {name[:100]!r} isn't here; this server has {have}.", "model", "model_not_found")
        return name

    def chat_prompt(
        self, messages: Any, tools: Sequence[Mapping[str, Any]], thinking: bool | None, field: str = "messages"
    ) -> tuple[list[int], bool]:
        """(token ids, whether the reply starts with reasoning) of a chat. Raises RequestError."""
        template = self.engine.template
        if template is None:
            raise RequestError(field, "this bundle has no chat template; use /v1/completions.")
        rendered = template.render(messages, tools=tools or None, enable_thinking=thinking)
        self.check_text(rendered.text, field)
        return self.tokenizer.encode_prompt(rendered), rendered.opens_thinking

    def chat_ask(
        self, messages: Any, given: Mapping[str, Any], tools: Tools, thinking: bool | None, field: str = "messages"
    ) -> Ask:
        """A chat, answered in free text. Raises RequestError."""
        options = self.engine.options(**given)
        ids, opens_thinking = self.chat_prompt(messages, tools.shown, thinking, field)
        return Ask([ids], options, field, tools=tools, parse_thinking=True, starts_in_thinking=opens_thinking)

    def start(self, ask: Ask) -> Generation:
        """Queues a request. Raises RequestError, or ApiError 429 or 503."""
        generation = Generation(self.scheduler)
        seconds = min(self.settings.request_timeout, ask.timeout or self.settings.request_timeout)
        jobs: list[Job] = []
        room = self.settings.slots + self.settings.max_queue
        if len(ask.prompts) * ask.choices > room:
            raise RequestError(
                "n", f"n asks for {len(ask.prompts) * ask.choices} replies at once; this server holds {room}."
            )
        for prompt in ask.prompts:
            self._check_context(prompt, ask.prompt_field)
            for n in range(ask.choices):
                jobs.append(self._job(ask, prompt, n, len(jobs), generation, time.monotonic() + seconds))
        try:
            generation.run(jobs, ask.choices)
        except QueueFullError as full:
            raise ApiError(
                429,
                f"{self.settings.max_queue} requests wait already; try again in {full.retry_after} s.",
                code="queue_full",
                retry_after=full.retry_after,
            ) from None
        except DrainingError:
            raise ApiError(
                503, "the server takes no more requests; it is shutting down.", code="shutdown", retry_after=5
            ) from None
        return generation

    def check_text(self, text: str, field: str) -> None:
        """Refuses a text whose beginning alone is longer than the context, without making tokens of the rest: those of a
        few megabytes take seconds and gigabytes. Raises ApiError 400."""
        context = self.engine.session.max_context
        start = text[: CHARACTERS_A_TOKEN * context]
        # where the start is cut, its last tokens can be others than the whole text's
        if len(start) < len(text) and len(self.tokenizer.encode_plain(start)) > context + CHARACTERS_A_TOKEN:
            message = f"{field} has more than {context} tokens, which this server's context holds, reply included."
            raise ApiError(400, message, field, "context_length_exceeded")

    def _check_context(self, prompt: Sequence[int], field: str) -> None:
        context = self.engine.session.max_context
        if len(prompt) >= context:
            message = f"{field} has {len(prompt)} tokens; this server's context holds {context}, reply included."
            raise ApiError(400, message, field, "context_length_exceeded")

    def _job(
        self, ask: Ask, prompt: Sequence[int], n: int, choice: int, generation: Generation, deadline: float
    ) -> Job:
        options = ask.options
        if options.seed is not None and n:
            options = replace(options, seed=(options.seed + n) % 2**63)
        rows = {"least_rows": least_rows(options), "deadline": deadline, "cacheable": ask.use_cache}
        if ask.form is not None:
            filling = self.form_decoder(prompt, ask.form, options)
            owner = FormSink(generation, choice, filling, ask.form, steps=ask.steps)
            owner.job = Job(filling, prompt, owner, **rows)  # type: ignore[arg-type]
            return owner.job
        decoder = self.engine.decoder(prompt, options, ask.prompt_field)
        parser = ReplyParser(
            self.tokenizer,
            tools=ask.tools.shown,
            checks=ask.tools.checks,
            one_call=ask.tools.one_call,
            stop=options.stop,
            starts_in_thinking=ask.starts_in_thinking,
            parse_thinking=ask.parse_thinking,
            parse_tools=bool(ask.tools.shown),
        )
        sink = ChoiceSink(generation, choice, decoder, parser, steps=ask.steps)
        sink.job = Job(decoder, prompt, sink, **rows)  # type: ignore[arg-type]
        return sink.job

    def form_decoder(self, prompt: Sequence[int], form: Form, options: DecodeOptions) -> FormDecoder:
        """A decoder that fills a form. Raises RequestError for a form that can't be spelled in tokens."""
        manifest = self.engine.bundle.manifest
        return FormDecoder(
            prompt,
            form,
            options,
            self._vocabulary,
            mask_id=manifest.mask_token_id,
            eos_ids=manifest.eos_token_ids,
            vocab_size=manifest.config.vocab_size,
            room=self.engine.session.max_context - len(prompt),
        )

    def form_ask(
        self,
        messages: Any,
        form: Form,
        given: Mapping[str, Any],
        limit_name: str,
        tools: Tools,
        thinking: bool | None,
        field: str = "messages",
    ) -> Ask:
        """A chat answered by a form. Raises RequestError for what can't go together with one."""
        if tools.shown:
            raise RequestError(
                "tools", "tools can't be given together with a JSON schema for the reply; leave one out."
            )
        if thinking:
            raise RequestError(
                "enable_thinking",
                "enable_thinking must be false where the reply is a form (a template or a JSON schema).",
            )
        template = self.engine.template
        if template is not None and template.supports_thinking:
            thinking = False
        # the limit does not act on a form, but strings that it leaves no room for are kept short
        options = self.engine.options(**form_options(given), max_new_tokens=given.get("max_new_tokens"))
        ids, opens_thinking = self.chat_prompt(messages, [], thinking, field)
        if opens_thinking:
            raise RequestError(
                form.field, f"{form.field} can't be followed: this bundle's chat template always opens <think>."
            )
        check_prompt(ids, self.engine.bundle.manifest.mask_token_id, field)
        self._check_context(ids, field)
        room = self.engine.session.max_context - len(ids)
        check_length(self.form_decoder(ids, form, options), form, room, given.get("max_new_tokens"), limit_name)
        return Ask([ids], options, field, form=form)


def least_rows(options: DecodeOptions) -> int:
    """Rows in which a decoder makes good progress: its block; self-speculation also commits in the step that drafts."""
    return options.block_size * (2 if options.mode == "self-speculative" else 1)


def _shared_rows(engine: Clover, provider: str | None) -> int:
    """One trained block where a step's time goes with its rows, four where it goes with the weights it reads."""
    on_cpu = choose_provider(engine.bundle, provider) == "cpu"
    return engine.bundle.manifest.trained_block_size * (1 if on_cpu else 4)


def _turn_opener(template: ChatTemplate | None, tokenizer: Tokenizer) -> int | None:
    """The control token with which the template begins every turn; None when it has none."""
    if template is None:
        return None
    try:
        ids = tokenizer.encode_prompt(template.render([{"role": "user", "content": "a"}]))
    except (RequestError, BundleError):  # a template that wants more than one user message
        return None
    control = {tokenizer.find_token_id(name) for name in tokenizer.control_tokens}
    return ids[0] if ids and ids[0] in control and ids.count(ids[0]) > 1 else None
