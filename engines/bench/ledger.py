"""A comparison of two servers: every answer is written down when it comes, so that a broken-off run goes on."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clover.engines.bench.cases import Case
from clover.engines.bench.client import DeadServerError, ask, find_model
from clover.engines.bench.statistics import PairedDifference, paired_difference, wilson
from clover.runtime.errors import CloverError

DEAD_AFTER = 3  # failed connections in a row


@dataclass(frozen=True)
class Entry:
    """One answer. server: 0 or 1."""

    server: int
    case: str
    run: int
    success: bool
    seconds: float
    tokens: int | None
    error: str | None


@dataclass(frozen=True)
class ServerResult:
    """One server over all its answers. Seconds; time_per_success counts the time of failures too."""

    url: str
    model: str | None
    answers: int
    unanswered: int  # of all that it was to be asked
    successes: int
    share: float | None
    low: float
    high: float
    median_seconds: float | None
    time_per_success: float | None
    errors: dict[str, int]
    dead: str | None  # why it stopped answering; what it didn't answer counts neither as wrong nor as slow


@dataclass(frozen=True)
class Comparison:
    """Everything a report shows."""

    conditions: dict[str, Any]
    servers: tuple[ServerResult, ServerResult]
    difference: PairedDifference | None
    time_ratio: float | None  # median over pairs that both got right: second's time over first's
    cases: tuple[dict[str, Any], ...]  # id, check, and per server successes of answers

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Ledger:
    """A JSON lines file: a header, then one line an answer."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """Opens or begins it. Raises CloverError when it is of another comparison or damaged before its last line."""
        self._path = path
        self.entries: dict[tuple[int, str, int], Entry] = {}
        if path.exists():
            self._read(header)
        else:
            path.write_text(json.dumps(header) + "\n", encoding="utf-8")

    def _read(self, header: Mapping[str, Any]) -> None:
        text = self._path.read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        good = 0
        for number, line in enumerate(lines, 1):
            try:
                value = json.loads(line)
                if number == 1:
                    if value != json.loads(json.dumps(header)):
                        raise CloverError(
                            f"--ledger {self._path} is of another comparison (other servers, cases or settings); "
                            "give another path, or remove it to begin again."
                        )
                else:
                    entry = Entry(**value)
                    self.entries[entry.server, entry.case, entry.run] = entry
            except (ValueError, TypeError):
                if number == len(lines) and number > 1:
                    break  # the line that was being written when the run was broken off
                raise CloverError(
                    f"--ledger {self._path}, line {number} is damaged; remove the file to begin again."
                ) from None
            good += len(line.encode())
        if not text.endswith("\n") or good < len(text.encode()):
            with self._path.open("r+b") as file:
                file.truncate(good)
            if good and not text.encode()[:good].endswith(b"\n"):
                with self._path.open("ab") as file:
                    file.write(b"\n")

    def add(self, entry: Entry) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(entry)) + "\n")
        self.entries[entry.server, entry.case, entry.run] = entry


def compare(
    urls: tuple[str, str],
    cases: Sequence[Case],
    cases_hash: str,
    ledger: Path,
    *,
    runs: int,
    timeout: float,
    max_tokens: int,
    key: str | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Asks both servers every case `runs` times, in turns and in changing order. Raises CloverError for what can't be asked."""
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise CloverError(f"--compare {url} is no address; give it as http://host:port.")
    if runs < 1:
        raise CloverError(f"--runs is {runs}; it must be at least 1.")
    urls = (urls[0].rstrip("/"), urls[1].rstrip("/"))
    header = {"ledger": 1, "urls": list(urls), "cases": cases_hash, "timeout": timeout, "max_tokens": max_tokens}
    book = Ledger(ledger, header)
    models: list[str | None] = [None, None]
    dead: list[str | None] = [None, None]
    for server, url in enumerate(urls):
        try:
            models[server] = find_model(url, timeout, key)
        except DeadServerError as error:
            dead[server] = str(error)
    failed, r, done = [0, 0], random.Random(seed), 0
    for run in range(runs):
        for case in cases:
            order = [0, 1]
            r.shuffle(order)
            for server in order:
                done += 1
                if (server, case.id, run) in book.entries or dead[server] is not None:
                    continue
                try:
                    answer = ask(
                        urls[server], models[server] or "default", case, timeout=timeout, max_tokens=max_tokens, key=key
                    )
                except DeadServerError as error:
                    failed[server] += 1
                    if failed[server] >= DEAD_AFTER:
                        dead[server] = str(error)
                    continue
                failed[server] = 0
                right = answer.text is not None and case.passes(answer.text)
                book.add(Entry(server, case.id, run, right, answer.seconds, answer.tokens, answer.error))
                if progress:
                    progress(done, 2 * runs * len(cases))
    conditions = {
        "cases": len(cases),
        "cases_sha256": cases_hash[:12],
        "runs": runs,
        "timeout": timeout,
        "max_tokens": max_tokens,
    }
    return summarise_ledger(urls, cases, runs, book, conditions, models, dead)


def summarise_ledger(
    urls: tuple[str, str],
    cases: Sequence[Case],
    runs: int,
    book: Ledger,
    conditions: dict[str, Any],
    models: Sequence[str | None],
    dead: Sequence[str | None],
) -> Comparison:
    """What the entries of these cases and runs add up to."""
    known = {case.id for case in cases}
    entries = {k: e for k, e in book.entries.items() if k[1] in known and k[2] < runs}
    pairs = [
        (e, entries[1, case, run])
        for (server, case, run), e in entries.items()
        if server == 0 and (1, case, run) in entries
    ]
    both = [b.seconds / a.seconds for a, b in pairs if a.success and b.success]
    rows = []
    for case in cases:
        per = [[e for e in entries.values() if e.case == case.id and e.server == s] for s in (0, 1)]
        rows.append(
            {
                "id": case.id,
                "check": case.check,
                "right": [sum(e.success for e in p) for p in per],
                "of": [len(p) for p in per],
            }
        )
    results = tuple(
        _server(urls[s], models[s], [e for e in entries.values() if e.server == s], dead[s], runs * len(cases))
        for s in (0, 1)
    )
    return Comparison(
        conditions,
        (results[0], results[1]),
        paired_difference([(a.success, b.success) for a, b in pairs]),
        statistics.median(both) if both else None,
        tuple(rows),
    )


def _server(url: str, model: str | None, entries: Sequence[Entry], dead: str | None, asked: int) -> ServerResult:
    right, n = sum(e.success for e in entries), len(entries)
    errors: dict[str, int] = {}
    for e in entries:
        if e.error:
            errors[e.error] = errors.get(e.error, 0) + 1
    low, high = wilson(right, n)
    return ServerResult(
        url=url,
        model=model,
        answers=n,
        unanswered=asked - n,
        successes=right,
        share=right / n if n else None,
        low=low,
        high=high,
        median_seconds=statistics.median(e.seconds for e in entries) if entries else None,
        time_per_success=sum(e.seconds for e in entries) / right if right else None,
        errors=errors,
        dead=dead,
    )
