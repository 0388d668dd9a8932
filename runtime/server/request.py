"""What every dialect's request comes down to, and the fields they share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clover.runtime.errors import RequestError
from clover.runtime.forms.template import Form
from clover.runtime.options import DecodeOptions
from clover.runtime.server.fields import Fields, whole_number
from clover.runtime.server.tools import Tools

if TYPE_CHECKING:
    from clover.runtime.server.service import Service

MAX_CHOICES = 16
# fields of OpenAI's requests that only label them
LABELS = ("user", "safety_identifier", "prompt_cache_key")
# fields that have the same name and meaning in a request as in DecodeOptions
DECODE_FIELDS = (
    *("temperature", "top_p", "top_k", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("threshold", "block_size", "coreset_top_p", "mode"),
)
INTEGER_FIELDS = ("top_k", "seed", "block_size")  # of them, those that are integers


@dataclass(frozen=True)
class Ask:
    """A checked request: prompts of token ids, and how to answer each of them `choices` times."""

    prompts: Sequence[Sequence[int]]
    options: DecodeOptions
    prompt_field: str  # the request's field that holds the prompt, for messages
    choices: int = 1
    tools: Tools = field(default_factory=Tools)  # calls are looked for only when there are any
    form: Form | None = None  # the reply fills it
    parse_thinking: bool = False
    starts_in_thinking: bool = False
    steps: bool = False  # tell of each denoise step
    timeout: float | None = None
    use_cache: bool = True


@dataclass(frozen=True)
class CompletionRequest:
    """A checked request for chat or text completions."""

    ask: Ask
    model: str
    stream: bool
    include_usage: bool
    logprobs: bool


@dataclass(frozen=True)
class SharedFields:
    """What requests of every dialect may give. `given`: decode options by DecodeOptions' names; `limit_name`: what the
    request calls max_new_tokens."""

    model: str
    given: dict[str, Any]
    limit_name: str
    timeout: float | None
    use_cache: bool


def shared_fields(f: Fields, service: Service, *limits: str, stop: str | None = "stop") -> SharedFields:
    """Takes them. `limits`: the dialect's names of max_new_tokens; `stop`: its name of the stop strings, None where neither
    they nor biases can act. Raises RequestError, or ApiError for a model that isn't here."""
    model = service.check_model(f)
    given = decode_fields(f)
    if stop is not None:
        given["logit_bias"], given["stop"] = logit_bias(f), stop_strings(f, stop)
    limit_name, given["max_new_tokens"] = token_limit(f, *limits)
    timeout = timeout_field(f, service.settings.request_timeout)
    return SharedFields(model, given, limit_name, timeout, use_cache=f.boolean("cache_prompt", True))


def decode_fields(f: Fields) -> dict[str, Any]:
    """The decode options a request gives, by DecodeOptions' names; make_options checks their values."""
    given = {name: value for name in DECODE_FIELDS if (value := f.take(name)) is not None}
    return {name: whole_number(value) if name in INTEGER_FIELDS else value for name, value in given.items()}


def token_limit(f: Fields, *names: str) -> tuple[str, int | None]:
    """(the name used, the limit) from fields that mean the same. Raises RequestError when two of them differ."""
    given = [(name, value) for name in names if (value := f.integer(name, 1, 2**31)) is not None]
    if len({value for _, value in given}) > 1:
        raise f.refuse(given[1][0], f"differs from {given[0][0]}; give one of them.")
    return given[0] if given else (names[0], None)


def stream_fields(f: Fields) -> tuple[bool, bool]:
    """OpenAI's (stream, stream_options.include_usage)."""
    stream = f.boolean("stream")
    had_options = f.take("stream_options")
    options = Fields({} if had_options is None else had_options, "stream_options")
    include_usage = options.boolean("include_usage")
    options.only("include_obfuscation", False, why="events are not padded.")
    options.close()
    if had_options is not None and not stream:
        raise f.refuse("stream_options", "needs stream: true.")
    return stream, include_usage


def denoise_field(f: Fields, stream: bool) -> bool:
    """`stream_denoise`, which only a stream can honour."""
    steps = f.boolean("stream_denoise")
    if steps and not stream:
        raise f.refuse("stream_denoise", "needs stream: true.")
    return steps


def choices_field(f: Fields) -> int:
    """`n`: how many replies."""
    return f.integer("n", 1, MAX_CHOICES) or 1


def tool_choice(f: Fields) -> bool:
    """OpenAI's tool_choice: whether the model may call tools. Raises RequestError when a call would have to be forced."""
    choice = f.take("tool_choice")
    if choice not in (None, "auto", "none"):
        raise f.refuse("tool_choice", "can be 'auto' or 'none'; a call can't be forced.")
    return bool(choice != "none")


def logit_bias(f: Fields) -> dict[int, float] | None:
    """OpenAI's logit_bias: token ids as strings."""
    given = f.take("logit_bias")
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise f.refuse("logit_bias", "must be an object of token ids and biases.")
    biases = {}
    for key, bias in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise f.refuse("logit_bias", f"names token {key[:20]!r}; keys must be token ids.")
        if isinstance(bias, bool):
            raise f.refuse("logit_bias", f"of token {key} is {bias}; it must be a number.")
        biases[int(key)] = bias
    return biases


def stop_strings(f: Fields, name: str = "stop") -> tuple[str, ...] | None:
    """One stop string or a list of them."""
    given = f.take(name)
    if given is None:
        return None
    stops = (given,) if isinstance(given, str) else given
    if not isinstance(stops, tuple | list) or not all(isinstance(s, str) and s for s in stops):
        raise f.refuse(name, "must be a non-empty string or a list of them.")
    return tuple(stops)


def thinking_flag(f: Fields) -> bool | None:
    """`enable_thinking`, at the top or in chat_template_kwargs; None when neither is given."""
    top, template = f.take("enable_thinking"), f.object("chat_template_kwargs")
    nested = template.take("enable_thinking")
    template.close()
    for name, value in (("enable_thinking", top), ("chat_template_kwargs.enable_thinking", nested)):
        if value is not None and not isinstance(value, bool):
            raise RequestError(name, f"{name} must be true or false.")
    if top is not None and nested is not None and top != nested:
        raise RequestError(
            "enable_thinking", "enable_thinking and chat_template_kwargs.enable_thinking differ; give one."
        )
    thinking: bool | None = top if nested is None else nested
    return thinking


def timeout_field(f: Fields, longest: float) -> float | None:
    """`timeout`: seconds until the request is given up, at most the server's own limit."""
    return f.number("timeout", 0.0, longest)


@contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """RequestErrors from inside come under the names the request used: clients say max_tokens for max_new_tokens."""
    try:
        yield
    except RequestError as error:
        if error.field not in names:
            raise
        name = names[error.field]
        raise RequestError(name, str(error).replace(error.field, name)) from None
