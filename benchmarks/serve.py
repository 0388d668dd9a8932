"""What the server costs and what its batching and its conversation cache gain, all in one run.

    python benchmarks/serve.py BUNDLE [--threads 1] [--repeats 20] [--json out.json]

- overhead: one client's streamed replies over HTTP against the same replies from the library, in turns
- throughput: 1 to 16 clients at once, tokens a second against one client
- share of the engine: one client's requests, split into the time inside the engine's steps and all the rest
- agent trace: ten turns whose prompt grows, time to the first token with the conversation cache and without

A bundle without a tokenizer gets a made-up one and prompts of token ids, and only the share of the engine is measured.
Trust the ratios, not the seconds.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from clover import Clover
from clover.runtime.text.stream_parser import ContentDelta

CHAT = "/v1/chat/completions"
QUESTION = (
    "Parse the dispatch: UAV7: move waypoint 3 to 120,455. Assign survey at Cedar to UAV12. "
    "Send UAV31 to Thorn, priority high. UAV9 search radius 750 metres."
)
NEVER_ENDS_JSON = {"0": -100.0, "2": -100.0}


@contextmanager
def serving(bundle: Path, threads: int, *flags: str) -> Iterator[tuple[httpx.Client, psutil.Process]]:
    """A client of a server in a process of its own, and that process."""
    command = [
        sys.executable,
        "-m",
        "clover.cli",
        "serve",
        str(bundle),
        "--port",
        "0",
        "--threads",
        str(threads),
        *flags,
    ]
    if not has_tokenizer(bundle):
        command = [sys.executable, __file__, str(bundle), "--threads", str(threads), "--serve"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"at (http://\S+)", line):
            break
    else:
        raise SystemExit("the server did not start")
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=found[1], timeout=600, trust_env=False) as client:
        pool.submit(process.stderr.read)  # or its log would fill the pipe
        for _ in range(500):
            try:
                client.get("/ready")
                break
            except httpx.HTTPError:
                time.sleep(0.02)
        try:
            yield client, psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(30)


def ask(client: httpx.Client, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
    """One streamed reply: seconds to the first token and in all, text and usage."""
    body = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}, **fields}
    began, first, text = time.perf_counter(), None, ""
    usage: dict[str, Any] = {}
    with client.stream("POST", CHAT, json=body) as response:
        if response.status_code != 200:
            raise SystemExit(response.read().decode())
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                first = first or time.perf_counter() - began
                text += chunk["choices"][0]["delta"]["content"]
            usage = chunk.get("usage") or usage
    return {"first": first or 0.0, "total": time.perf_counter() - began, "text": text, "usage": usage}


def has_tokenizer(bundle: Path) -> bool:
    return (bundle / "tokenizer" / "tokenizer.json").is_file()


def serve_made_up(bundle: Path, threads: int) -> None:
    """Serves a bundle that has no tokenizer, with one whose tokens spell their numbers."""
    from tokenizers import Tokenizer as RawTokenizer
    from tokenizers import decoders, models, pre_tokenizers

    from clover.runtime.server.load import load_engine
    from clover.runtime.server.serve import listen, run_server
    from clover.runtime.server.settings import ServeSettings
    from clover.runtime.text.tokenizer import Tokenizer

    settings = ServeSettings(port=0, slots=1, threads=threads, cache_mb=0)
    listener = listen(settings)
    loaded = load_engine(bundle, settings)
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    names += [f"{i}," for i in range(loaded.bundle.manifest.config.vocab_size - len(names))]
    raw = RawTokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    run_server(Clover(loaded.bundle, loaded.session, Tokenizer(raw), None), settings, listener)


def engine_share(bundle: Path, threads: int, repeats: int) -> list[dict[str, Any]]:
    """One client's streamed requests: seconds in all and inside the engine's steps, by how many steps a reply takes."""
    prompt = [300 + i for i in range(64)]
    kinds: list[dict[str, Any]] = [
        {"mode": "autoregressive", "max_tokens": 16},
        {"mode": "fill", "threshold": 1.0, "max_tokens": 16},  # a token a step
        {"mode": "fill", "threshold": 1e-9, "max_tokens": 64},  # a block a step: the least engine a token
    ]
    rows: list[dict[str, Any]] = []
    with serving(bundle, threads, "--cache-mb", "0", "--slots", "1") as (client, _):

        def engine_seconds() -> float:
            time.sleep(0.05)  # a step is counted when its tokens are out
            found = re.search(r"^clover_engine_seconds_total (\S+)", client.get("/metrics").text, re.MULTILINE)
            assert found
            return float(found[1])

        for kind in kinds:
            body = {"prompt": prompt, "stream": True, "stream_options": {"include_usage": True}, **kind}
            if has_tokenizer(bundle):  # a made-up prompt would end a trained model's reply at once
                body["logit_bias"] = NEVER_ENDS_JSON
            seen: list[tuple[float, float]] = []
            for turn in range(repeats + 1):
                usage: dict[str, Any] = {}
                before, began = engine_seconds(), time.perf_counter()
                with client.stream("POST", "/v1/completions", json=body) as response:
                    for line in response.iter_lines():
                        if line.startswith("data: {"):
                            usage = json.loads(line[6:]).get("usage") or usage
                total = time.perf_counter() - began
                if turn:  # the first one warms up
                    seen.append((total, engine_seconds() - before))
            rest = median([1 - engine / total for total, engine in seen])
            rows.append(
                {
                    **kind,
                    "tokens": usage["completion_tokens"],
                    "steps": usage["steps"],
                    "total": median([total for total, _ in seen]),
                    "rest_ms": 1000 * median([total - engine for total, engine in seen]),
                    "rest_share": rest,
                }
            )
    return rows


def median(values: list[float]) -> float:
    return statistics.median(values)


def read(engine: Clover, messages: list[dict[str, str]]) -> dict[str, Any]:
    """`ask` without a server: a streamed reply, timed from the messages to its end."""
    began, first, text = time.perf_counter(), None, ""
    for event in engine.stream(messages, max_new_tokens=128):
        if isinstance(event, ContentDelta):
            first = first or time.perf_counter() - began
            text += event.text
    return {"first": first or 0.0, "total": time.perf_counter() - began, "text": text}


def overhead(bundle: Path, threads: int, repeats: int) -> dict[str, float]:
    """One client's streams over HTTP against the library's, alternating, so that both see the same machine."""
    messages = [{"role": "user", "content": QUESTION}]
    times: dict[str, list[float]] = {
        name + what: [] for name in ("library", "server") for what in ("", "_first", "_cpu")
    }
    with (
        Clover.load(bundle, threads=threads) as engine,
        serving(bundle, threads, "--cache-mb", "0") as (client, process),
    ):
        for turn in range(repeats + 2):
            cpu = time.process_time()
            bare = read(engine, messages)
            own_cpu = time.process_time() - cpu
            cpu = sum(process.cpu_times()[:2])
            over = ask(client, messages, max_tokens=128)
            server_cpu = sum(process.cpu_times()[:2]) - cpu
            if turn >= 2:  # the first ones warm up
                times["library_cpu"].append(own_cpu)
                times["server_cpu"].append(server_cpu)
                if bare["text"] != over["text"]:
                    raise SystemExit("the server's reply differs from the library's")
                times["library"].append(bare["total"])
                times["library_first"].append(bare["first"])
                times["server"].append(over["total"])
                times["server_first"].append(over["first"])
    # the system counts CPU time in ticks of 10 ms, so only its mean means something
    result = {name: (statistics.mean if "cpu" in name else median)(values) for name, values in times.items()}
    for what in ("", "_first", "_cpu"):
        result["ratio" + what] = result["server" + what] / result["library" + what]
    result["added_ms"] = 1000 * (result["server"] - result["library"])
    return result


def throughput(bundle: Path, threads: int, tokens: int) -> list[dict[str, float]]:
    """Tokens a second with more and more clients at once, and the longest wait for a first token."""
    rows = []
    with serving(bundle, threads, "--cache-mb", "0", "--slots", "16") as (client, _):
        for clients in (1, 2, 4, 8, 16):

            def one(number: int) -> dict[str, Any]:
                messages = [{"role": "user", "content": f"{QUESTION} Number {number}."}]
                return ask(client, messages, max_tokens=tokens, logit_bias=NEVER_ENDS_JSON)

            one(0)
            began = time.perf_counter()
            with ThreadPoolExecutor(clients) as pool:
                replies = list(pool.map(one, range(2 * clients)))
            seconds = time.perf_counter() - began
            made = sum(r["usage"]["completion_tokens"] for r in replies)
            first = median([r["first"] for r in replies])
            rows.append({"clients": clients, "tokens_per_second": made / seconds, "first_token": first})
    for row in rows:
        row["ratio"] = row["tokens_per_second"] / rows[0]["tokens_per_second"]
    return rows


def agent_trace(bundle: Path, threads: int, turns: int, repeats: int) -> list[dict[str, float]]:
    """A conversation that grows by a tool's result a turn. Each turn is asked with the cache and without, in turns."""
    system = "You dispatch drones. " + " ".join(f"Rule {i}: UAV{i} keeps clear of site {i}." for i in range(80))
    rows: list[dict[str, float]] = []
    with serving(bundle, threads, "--cache-mb", "256") as (client, _):
        for run in range(repeats):
            messages = [{"role": "system", "content": f"{system} Run {run}."}]
            for turn in range(turns):
                messages.append({"role": "user", "content": f"Result {turn}: UAV{turn} at Cedar. Repeat: Elm {turn}"})
                plain = ask(client, messages, max_tokens=24, cache_prompt=False, logit_bias=NEVER_ENDS_JSON)
                kept = ask(client, messages, max_tokens=24, logit_bias=NEVER_ENDS_JSON)
                if plain["text"] != kept["text"]:
                    raise SystemExit(f"turn {turn}: the reply with the cache differs from the one without")
                messages.append({"role": "assistant", "content": kept["text"]})
                usage = kept["usage"]
                rows.append(
                    {
                        "turn": turn,
                        "prompt_tokens": usage["prompt_tokens"],
                        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                        "without": plain["first"],
                        "with": kept["first"],
                    }
                )
    return [
        {name: median([row[name] for row in rows if row["turn"] == turn]) for name in rows[0]} for turn in range(turns)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve_made_up(given.bundle, given.threads)
        return
    share = engine_share(given.bundle, given.threads, given.repeats)
    print("mode             tokens  steps  a request  beside the engine")
    for row in share:
        shown = f"{row['mode']:15} {row['tokens']:7} {row['steps']:6} {1000 * row['total']:7.0f} ms"
        print(f"{shown} {row['rest_ms']:7.1f} ms = {100 * row['rest_share']:.1f} %")
    if not has_tokenizer(given.bundle):
        if given.json:
            given.json.write_text(json.dumps({"engine_share": share}, indent=1) + "\n")
        return
    print()
    cost = overhead(given.bundle, given.threads, given.repeats)
    print("a streamed reply  library   server  ratio")
    for name, what in (("wall time", ""), ("first text", "_first"), ("CPU time", "_cpu")):
        shown = f"{1000 * cost['library' + what]:7.1f} {1000 * cost['server' + what]:8.1f} ms"
        print(f"{name:16} {shown} {cost['ratio' + what]:6.2f}")
    print()
    load = throughput(given.bundle, given.threads, given.tokens)
    print("clients  tokens/s  against one  median first token")
    for row in load:
        print(
            f"{row['clients']:7} {row['tokens_per_second']:9.0f} {row['ratio']:11.2f}x {1000 * row['first_token']:15.0f} ms"
        )
    trace = agent_trace(given.bundle, given.threads, 10, max(1, given.repeats // 5))
    print("\nturn  prompt  from cache  first token without  with  ratio")
    for row in trace:
        shown = f"{row['turn']:4.0f} {row['prompt_tokens']:7.0f} {row['cached_tokens']:11.0f}"
        print(
            f"{shown} {1000 * row['without']:17.0f} ms {1000 * row['with']:4.0f} ms {row['with'] / row['without']:5.2f}"
        )
    whole = [sum(row[name] for row in trace) for name in ("with", "without")]
    print(f"all turns: {whole[0] / whole[1]:.2f} of the time to the first token")
    if given.json:
        given.json.write_text(
            json.dumps({"engine_share": share, "overhead": cost, "throughput": load, "trace": trace}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
