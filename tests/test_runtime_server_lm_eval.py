"""lm-eval's local-completions against a running server: the score is the library's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from random import Random

import engine_support
import pytest
from serve_support import RunningServer, nano, nano_slots

TASK = engine_support.REPOSITORY / "examples" / "lm_eval"


def documents() -> list[dict[str, str]]:
    return [json.loads(line) for line in (TASK / "nano_dispatch.jsonl").read_text().splitlines()]


def test_the_task_holds_what_the_model_was_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(engine_support.NANO))
    import data

    r = Random(data.HELD_OUT_SEED)
    assert [(d["prompt"], d["answer"]) for d in documents()] == [data.dispatch(r) for _ in documents()]


def test_likelihoods_are_refused_by_name() -> None:
    with RunningServer(nano_slots(1), model_name=("nano",)) as server:
        asked = {"model": "nano", "prompt": "a b", "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
        refused = server.http.post("/v1/completions", json={**asked, "seed": 1234})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "echo"


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("lm_eval") is None or find_spec("tenacity") is None, reason="lm-eval[api] is not installed"
)
def test_lm_eval_gives_the_score_of_the_library(tmp_path: Path) -> None:
    replies = [nano().chat([{"role": "user", "content": d["prompt"]}], max_new_tokens=256).text for d in documents()]
    right = sum(reply == d["answer"] for reply, d in zip(replies, documents(), strict=True))
    assert 0 < right < len(replies), "a score at an end tells little"
    with RunningServer(nano_slots(4), slots=4, model_name=("nano",)) as server:
        arguments = {
            "base_url": server.url + "/v1/completions",
            "model": "nano",
            "tokenizer_backend": "None",
            "tokenized_requests": "False",
            "num_concurrent": "2",
            "max_retries": "1",
        }
        command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--tasks", "nano_dispatch"]
        command += ["--model_args", ",".join(f"{k}={v}" for k, v in arguments.items()), "--include_path", str(TASK)]
        command += ["--batch_size", "4", "--log_samples", "--output_path", str(tmp_path / "out")]
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "no_proxy": "*"}
        done = subprocess.run(command, cwd=TASK, env={**os.environ, **offline}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = (tmp_path / "out").rglob("results_*.json")
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    score = json.loads(results.read_text())["results"]["nano_dispatch"]["exact_match,none"]
    given = {s["doc"]["prompt"]: s["resps"][0][0] for s in map(json.loads, samples.read_text().splitlines())}
    assert [given[d["prompt"]] for d in documents()] == replies
    assert score == pytest.approx(right / len(replies))
