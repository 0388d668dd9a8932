"""What every dialect's request comes down to, and the fields they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clover.runtime.errors import RequestError
from clover.runtime.forms.template import Form
from clover.runtime.options import DecodeOptions
from clover.runtime.server.fields import Fields, whole_number
from clover.runtime.server.tools import Tools

MAX_CHOICES = 16
# fields that have the same name and meaning in a request as in DecodeOptions
SAMPLING_FIELDS = ("temperature", "top_p", "top_k")
PENALTY_FIELDS = ("seed", "presence_penalty", "frequency_penalty", "repetition_penalty")
INTEGER_FIELDS = ("top_k", "seed", "block_size")  # of them, those that are integers
CLOVER_FIELDS = ("threshold", "block_size", "coreset_top_p", "mode")


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


def decode_fields(fields: Fields, *, penalties: bool = True) -> dict[str, Any]:
    """The decode options a request gives, by DecodeOptions' names; make_options checks their values."""
    names = (*SAMPLING_FIELDS, *(PENALTY_FIELDS if penalties else ()), *CLOVER_FIELDS)
    given = {name: value for name in names if (value := fields.take(name)) is not None}
    return {name: whole_number(value) if name in INTEGER_FIELDS else value for name, value in given.items()}


def logit_bias(fields: Fields) -> dict[int, float] | None:
    """OpenAI's logit_bias: token ids as strings."""
    given = fields.take("logit_bias")
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise fields.refuse("logit_bias", "must be an object of token ids and biases.")
    biases = {}
    for key, bias in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise fields.refuse("logit_bias", f"names token {key[:20]!r}; keys must be token ids.")
        if isinstance(bias, bool):
            raise fields.refuse("logit_bias", f"of token {key} is {bias}; it must be a number.")
        biases[int(key)] = bias
    return biases


def stop_strings(fields: Fields, name: str = "stop") -> tuple[str, ...] | None:
    """One stop string or a list of them."""
    given = fields.take(name)
    if given is None:
        return None
    stops = (given,) if isinstance(given, str) else given
    if not isinstance(stops, tuple | list) or not all(isinstance(s, str) and s for s in stops):
        raise fields.refuse(name, "must be a non-empty string or a list of them.")
    return tuple(stops)


def thinking_flag(fields: Fields) -> bool | None:
    """`enable_thinking`, at the top or in chat_template_kwargs; None when neither is given."""
    top, template = fields.take("enable_thinking"), fields.object("chat_template_kwargs")
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


def timeout_field(fields: Fields, longest: float) -> float | None:
    """`timeout`: seconds until the request is given up, at most the server's own limit."""
    return fields.number("timeout", 0.0, longest)


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The error under the name the request used: clients say max_tokens for max_new_tokens."""
    if error.field not in names:
        return error
    name = names[error.field]
    return RequestError(name, str(error).replace(error.field, name))
