"""What --out names: refused before any work where it can't be written, and never half-written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from cli_support import clover, refused
from engine_support import NANO, bundle

from clover.runtime.errors import CloverError
from clover.runtime.terminal.output import write_out

VERBS: dict[str, list[str]] = {
    "trace": ["trace", "BUNDLE", "Hello", "--out", "OUT.html"],
    "logits": ["logits", "BUNDLE", "--block", "3,3", "--out", "OUT.npz"],
    "calibrate": ["calibrate", "BUNDLE", "--prompts", "PROMPTS", "--out", "OUT.safetensors"],
    "bench": [
        "bench",
        "--compare",
        "http://localhost:1",
        "http://localhost:2",
        "--cases",
        "CASES",
        "--out",
        "OUT.html",
    ],
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_place_that_can_not_be_written_is_refused_before_the_work(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p.txt").write_text("Hello\n")
    (tmp_path / "c.jsonl").write_text('{"prompt": "Hello", "exact": "Hi"}\n')
    place = tmp_path / "place"
    given = {"BUNDLE": str(bundle(NANO, with_logits=True).directory), "PROMPTS": str(tmp_path / "p.txt")}
    given["CASES"] = str(tmp_path / "c.jsonl")
    words = [given.get(w, w.replace("OUT", str(place / "x"))) for w in VERBS[verb]]
    assert "is not a directory" in refused(clover(*words))
    place.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != place)  # root may write anywhere
    assert "is read-only here" in refused(clover(*words))
    monkeypatch.undo()
    Path(words[-1]).mkdir()
    assert "is a directory" in refused(clover(*words))
    assert [p.name for p in place.iterdir()] == [Path(words[-1]).name]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_write_that_fails_names_the_option_and_keeps_what_stood_there(code: int, tmp_path: Path) -> None:
    out = tmp_path / "x"
    out.write_text("old")

    def write(work: Path) -> None:
        work.write_text("half")
        raise OSError(code, os.strerror(code))

    with pytest.raises(CloverError, match=f"^--out {out} can't be written .*; give another path.$"):
        write_out(out, write)
    assert out.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["x"]
