"""A comparison of two servers: every answer is written down when it comes, so that a broken-off run goes on."""

from __future__ import annotations

import json
import random
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clover import __version__
from clover.engines.bench.cases import Case
from clover.engines.bench.client import DeadServerError, ask, base_url, find_model
from clover.engines.bench.statistics import (
    Interval,
    PairedDifference,
    paired_difference,
    ratio_of_times,
    share_interval,
    time_per_success,
)
from clover.runtime.errors import CloverError

DEAD_AFTER = 3  # failed connections in a row
KEPT = 4000  # characters of an answer that the ledger keeps


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
    answer: str | None = None  # at most KEPT characters


@dataclass(frozen=True)
class ServerResult:
    """One server over all its answers, with 95 % intervals over cases. Seconds; the median is of what was answered, right
    or wrong; time_per_success counts the time of wrong answers and errors too."""

    url: str
    model: str | None
    fields: Mapping[str, Any]
    answers: int
    unanswered: int  # of all that it was to be asked
    successes: int
    share: float | None
    low: float
    high: float
    median_seconds: float | None
    time_per_success: float | None
    time_per_success_interval: Interval | None
    errors: dict[str, int]
    dead: str | None  # why it stopped answering; what it didn't answer counts neither as wrong nor as slow


@dataclass(frozen=True)
class Comparison:
    """Everything a report shows."""

    conditions: dict[str, Any]
    servers: tuple[ServerResult, ServerResult]
    difference: PairedDifference | None
    time_ratio: float | None  # second's time over first's where both are right: median over cases of each one's median
    time_ratio_interval: Interval | None
    cases: tuple[dict[str, Any], ...]  # id, check, and per server successes, answers and the first wrong one

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
        try:
            text = self._path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise CloverError(f"--ledger {self._path} is no text, so no ledger; give another path.") from None
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
    fields: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {}),
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Asks both servers every case `runs` times, in turns and in changing order; `fields` go into each one's requests.

    Raises CloverError for what can't be asked, and when nobody ever answered at either address.
    """
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise CloverError(f"--compare {url} is no address; give it as http://host:port.")
    if runs < 1:
        raise CloverError(f"--runs is {runs}; it must be at least 1.")
    urls = (base_url(urls[0]), base_url(urls[1]))
    header = {"ledger": 1, "urls": list(urls), "cases": cases_hash, "timeout": timeout, "max_tokens": max_tokens}
    if any(fields):
        header["fields"] = list(fields)
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
                        urls[server], models[server] or "default", case, timeout=timeout, max_tokens=max_tokens, key=key,
                        fields=fields[server],
                    )  # fmt: skip
                except DeadServerError as error:
                    failed[server] += 1
                    if failed[server] >= DEAD_AFTER:
                        dead[server] = str(error)
                    continue
                failed[server] = 0
                right = answer.text is not None and case.passes(answer.text)
                kept = None if answer.text is None else answer.text[:KEPT]
                book.add(Entry(server, case.id, run, right, answer.seconds, answer.tokens, answer.error, kept))
                if progress:
                    progress(done, 2 * runs * len(cases))
    if not book.entries and all(dead):
        told = "; ".join(f"{url}: {why}" for url, why in zip(urls, dead, strict=True))
        raise CloverError(f"--compare: no server answers ({told}); start them or mend the addresses.")
    conditions = {
        "clover": __version__,
        "cases": len(cases),
        "cases_sha256": cases_hash[:12],
        "runs": runs,
        "timeout": timeout,
        "max_tokens": max_tokens,
        "order": "one request at a time, both servers in turns, shuffled",
    }
    return summarise_ledger(urls, cases, runs, book, conditions, models, dead, fields)


def summarise_ledger(
    urls: tuple[str, str],
    cases: Sequence[Case],
    runs: int,
    book: Ledger,
    conditions: dict[str, Any],
    models: Sequence[str | None],
    dead: Sequence[str | None],
    fields: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {}),
) -> Comparison:
    """What the entries of these cases and runs add up to."""
    by_case: list[tuple[list[Entry], list[Entry]]] = [
        (
            [book.entries[0, case.id, run] for run in range(runs) if (0, case.id, run) in book.entries],
            [book.entries[1, case.id, run] for run in range(runs) if (1, case.id, run) in book.entries],
        )
        for case in cases
    ]
    pairs = [[(a, b) for a in left for b in right if a.run == b.run] for left, right in by_case]
    rows = tuple(
        {
            "id": case.id,
            "check": case.check,
            "right": [sum(e.success for e in own) for own in both],
            "of": [len(own) for own in both],
            "wrong": [next((e.error or e.answer or "" for e in own if not e.success), None) for own in both],
        }
        for case, both in zip(cases, by_case, strict=True)
    )
    results = [_server([both[s] for both in by_case], urls[s], models[s], fields[s], dead[s], runs) for s in (0, 1)]
    ratio = ratio_of_times([[b.seconds / a.seconds for a, b in case if a.success and b.success] for case in pairs])
    return Comparison(
        conditions,
        (results[0], results[1]),
        paired_difference([[(a.success, b.success) for a, b in case] for case in pairs]),
        ratio[0] if ratio else None,
        ratio[1] if ratio else None,
        rows,
    )


def _server(
    by_case: Sequence[Sequence[Entry]],
    url: str,
    model: str | None,
    fields: Mapping[str, Any],
    dead: str | None,
    runs: int,
) -> ServerResult:
    entries = [e for case in by_case for e in case]
    right, n = sum(e.success for e in entries), len(entries)
    low, high = share_interval([[e.success for e in case] for case in by_case])
    answered = [e.seconds for e in entries if e.error is None]
    per_success = time_per_success([(sum(e.seconds for e in c), sum(e.success for e in c)) for c in by_case if c])
    return ServerResult(
        url=url,
        model=model,
        fields=fields,
        answers=n,
        unanswered=runs * len(by_case) - n,
        successes=right,
        share=right / n if n else None,
        low=low,
        high=high,
        median_seconds=statistics.median(answered) if answered else None,
        time_per_success=per_success[0] if per_success else None,
        time_per_success_interval=per_success[1] if per_success else None,
        errors=dict(Counter(e.error for e in entries if e.error)),
        dead=dead,
    )
