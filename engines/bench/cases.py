"""Cases of a comparison: a prompt and what makes its answer right."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from clover.runtime.errors import CloverError

Check = Literal["exact", "regex", "json", "script"]
CHECKS: tuple[Check, ...] = ("exact", "regex", "json", "script")
FIELDS = {"id", "prompt", "messages", "max_tokens", *CHECKS}
SCRIPT_SECONDS = 60.0


@dataclass(frozen=True)
class Case:
    """One case. `wanted`: a text, a pattern, a JSON value, or a script's path."""

    id: str
    messages: Sequence[Mapping[str, Any]]
    check: Check
    wanted: Any
    max_tokens: int | None

    def passes(self, answer: str) -> bool:
        """Whether an answer is right; white space around it never matters. Raises CloverError when a script can't run."""
        text = answer.strip()
        if self.check == "exact":
            return bool(text == self.wanted.strip())
        if self.check == "regex":
            return re.search(self.wanted, text) is not None
        if self.check == "json":
            try:
                return bool(_typed(json.loads(text)) == _typed(self.wanted))
            except (ValueError, RecursionError):
                return False
        return _script_passes(Path(self.wanted), text, self.id)


def _typed(value: Any) -> Any:
    """A JSON value in which true is not 1 and the order of an object's members doesn't matter."""
    if isinstance(value, dict):
        return {k: _typed(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_typed(v) for v in value]
    return (isinstance(value, bool), value)


def _script_passes(script: Path, text: str, case: str) -> bool:
    command = [sys.executable, str(script)] if script.suffix == ".py" else [str(script)]
    try:
        ended = subprocess.run(command, input=text.encode(), capture_output=True, timeout=SCRIPT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return False
    except OSError as error:
        raise CloverError(f"case {case}: script {script} can't be run ({error.strerror}); mend the case.") from None
    return ended.returncode == 0


def read_cases(path: Path) -> tuple[list[Case], str]:
    """The cases of a JSON lines file, and a hash of them. Raises CloverError naming the first bad line by number."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise CloverError(f"--cases {path} is not UTF-8 text; save it as UTF-8.") from None
    cases: list[Case] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            case = _case(line, number, path)
            if case.id in seen:
                raise CloverError(
                    f"--cases {path}, line {number}: id {case.id!r} stands in line {seen[case.id]} too; rename one."
                )
            seen[case.id] = number
            cases.append(case)
    if not cases:
        raise CloverError(f"--cases {path} holds no cases; write one JSON object a line.")
    return cases, hashlib.sha256("\n".join(line for line in lines if line.strip()).encode()).hexdigest()


def _case(line: str, number: int, path: Path) -> Case:
    where = f"--cases {path}, line {number}"
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CloverError(f"{where} is no JSON ({error}); mend or remove it.") from None
    if not isinstance(value, dict):
        raise CloverError(f"{where} is no JSON object; mend or remove it.")
    for field in value:
        if field not in FIELDS:
            raise CloverError(f"{where}: field {field!r} is unknown; known are {', '.join(sorted(FIELDS))}.")
    checks = [c for c in CHECKS if c in value]
    if len(checks) != 1:
        raise CloverError(f"{where} must have exactly one of exact, regex, json and script; mend it.")
    check, wanted = checks[0], value[checks[0]]
    if check != "json" and not isinstance(wanted, str):
        raise CloverError(f"{where}: {check} must be a text; mend it.")
    if check == "regex":
        try:
            re.compile(wanted)
        except re.error as error:
            raise CloverError(f"{where}: regex {wanted!r} is wrong ({error}); mend it.") from None
    if check == "script":
        wanted = str((path.parent / wanted).resolve())
        if not Path(wanted).is_file():
            raise CloverError(f"{where}: script {wanted} does not exist; mend its path.")
    if ("prompt" in value) == ("messages" in value):
        raise CloverError(f"{where} must have a prompt or messages, and not both; mend it.")
    messages = value.get("messages", [{"role": "user", "content": value.get("prompt")}])
    if not isinstance(value.get("prompt", ""), str) or not isinstance(messages, list) or not messages:
        raise CloverError(f"{where}: prompt must be a text, messages a list; mend it.")
    most = value.get("max_tokens")
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise CloverError(f"{where}: max_tokens must be a positive integer; mend it.")
    return Case(str(value.get("id", number)), messages, check, wanted, most)
