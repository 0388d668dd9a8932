"""llama.cpp as a rival: greedy replies of a GGUF file made from the same bundle, in a process of its own.

A process of its own since two thread pools in one process disturb each other, and so that llama-cpp-python may live in
another environment (`python -m venv V && V/bin/pip install llama-cpp-python`, which compiles llama.cpp). Used by
benchmarks/decode.py and modes.py with `--llama-cpp V/bin/python`.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CONTEXT = 2048


class LlamaCpp:
    """Runs prompts on `python`'s llama-cpp-python. Raises SystemExit when it can't be started."""

    def __init__(self, python: str, gguf: Path, threads: int) -> None:
        self._python = python
        command = [python, str(Path(__file__).resolve()), str(gguf), str(threads)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started = self._read()
        self.version = str(started["version"])

    def run(self, prompt: Sequence[int], limit: int, eos: Sequence[int]) -> tuple[list[int], float, float]:
        """(ids of the reply, end token excluded; seconds; seconds to the first token)."""
        assert self._child.stdin
        print(json.dumps([list(prompt), limit, list(eos)]), file=self._child.stdin, flush=True)
        answer = self._read()
        return answer["ids"], answer["seconds"], answer["first"]

    def close(self) -> None:
        self._child.communicate()  # end of input ends it

    def _read(self) -> dict[str, Any]:
        assert self._child.stdout
        line = self._child.stdout.readline()
        if not line:
            raise SystemExit(f"{self._python} could not run llama.cpp; its last words stand above")
        found: dict[str, Any] = json.loads(line)
        return found


def _serve(path: str, threads: int) -> None:
    """Answers prompts from standard input until it ends."""
    import llama_cpp as ll

    quiet = ll.llama_log_callback(lambda level, text, data: None)
    ll.llama_log_set(quiet, None)
    ll.llama_backend_init()
    model = ll.llama_model_load_from_file(path.encode(), ll.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp does not take {path}")
    p = ll.llama_context_default_params()
    p.n_ctx, p.n_batch, p.n_ubatch, p.n_threads, p.n_threads_batch = CONTEXT, CONTEXT, 512, threads, threads
    context = ll.llama_init_from_model(model, p)
    memory = ll.llama_get_memory(context)
    vocabulary = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
    print(json.dumps({"version": ll.__version__}), flush=True)

    import numpy as np

    def decode(ids: list[int]) -> int:
        tokens = (ll.llama_token * len(ids))(*ids)
        if ll.llama_decode(context, ll.llama_batch_get_one(tokens, len(ids))):
            raise SystemExit("llama_decode failed")
        logits = ctypes.cast(ll.llama_get_logits_ith(context, -1), ctypes.POINTER(ctypes.c_float))
        return int(np.argmax(np.ctypeslib.as_array(logits, shape=(vocabulary,))))

    for line in sys.stdin:
        prompt, limit, eos = json.loads(line)
        ll.llama_memory_clear(memory, True)
        began, ids = time.perf_counter(), []
        token = decode(prompt)
        first = time.perf_counter() - began
        while token not in eos:
            ids.append(token)
            if len(ids) == limit:
                break
            token = decode([token])
        seconds = time.perf_counter() - began
        print(json.dumps({"ids": ids, "seconds": seconds, "first": first}), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
