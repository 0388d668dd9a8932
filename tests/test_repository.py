"""The repository's own rules: packages are listed, the README's commands are what CI runs, files stay readable."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
TOP_LEVEL = {
    "exporter", "plugins", "engines", "runtime", "tests", "docs", "examples", "benchmarks", ".ci",
    "cli.py", "pyproject.toml", "__init__.py", "py.typed", "README.md", "LICENSE", ".gitignore",
}  # fmt: skip
PACKAGE_ROOMS = ("exporter", "plugins", "engines", "runtime")


def tracked() -> list[Path]:
    out = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    return [Path(line) for line in out.splitlines()]


def test_the_top_level_is_fixed() -> None:
    assert {p.parts[0] for p in tracked()} <= TOP_LEVEL


def test_every_package_is_listed_for_installation() -> None:
    listed = set(tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {p.parent for p in tracked() if p.suffix == ".py" and p.parts[0] in PACKAGE_ROOMS}
    assert listed == {"clover"} | {".".join(("clover", *folder.parts)) for folder in folders}
    assert all((REPOSITORY / folder / "__init__.py").is_file() for folder in folders)


def test_every_python_file_is_type_checked() -> None:
    (folders,) = re.findall(r"^\.venv/bin/mypy (.+)$", (REPOSITORY / ".ci" / "run").read_text(), re.M)
    for path in tracked():
        beside = path.suffix == ".py" and path.parts[0] not in (*PACKAGE_ROOMS, "cli.py", "__init__.py")
        if beside and not path.is_relative_to("tests/oracle"):
            assert any(path.is_relative_to(folder) for folder in folders.split()), f".ci/run gives mypy no {path}"


def test_the_package_needs_no_development_tool() -> None:
    heavy = re.compile(r"^(import|from) (torch|transformers|triton|gguf|hypothesis|pytest|tensorrt\w*)\b")
    for path in tracked():
        if path.suffix == ".py" and path.parts[0] in (*PACKAGE_ROOMS, "cli.py") and path.name != "kernel.py":
            for number, line in enumerate((REPOSITORY / path).read_text().splitlines(), 1):
                assert not heavy.match(line), f"{path}:{number} imports a development dependency at module level"


def test_base_dependencies_are_explained() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    explained = (REPOSITORY / "docs" / "dependencies.md").read_text()
    extras = [name for group in project["optional-dependencies"].values() for name in group]
    for requirement in [*project["dependencies"], *extras]:
        name = re.split(r"[<>=\[]", requirement)[0]
        assert f"`{name}`" in explained, f"docs/dependencies.md gives no reason for {name}"


def test_ci_runs_the_readme_commands() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", readme, re.S)
    assert "clover build examples/nano" in blocks[0] and "clover run" in blocks[0]
    assert "pytest" in blocks[1]
    for number in (1, 2):
        shown = subprocess.run(
            [sys.executable, str(REPOSITORY / ".ci" / "readme_command"), str(number)],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert shown.strip() == blocks[number - 1].strip()
    assert "readme_command 1" in (REPOSITORY / ".ci" / "run").read_text()
    assert "readme_command 2" in (REPOSITORY / ".ci" / "run").read_text()


def test_commands_shown_in_the_documents_have_the_options_they_show() -> None:
    from typer.core import TyperGroup
    from typer.main import get_command

    from clover.cli import app

    group = get_command(app)
    assert isinstance(group, TyperGroup)
    verbs = dict(group.commands)
    known = {name: {o for p in verb.params for o in (*p.opts, *p.secondary_opts)} for name, verb in verbs.items()}
    shown = re.compile(rf"(?<![\w./-])clover ({'|'.join(verbs)})\b([^`\n|&]*)")
    seen = 0
    for path in tracked():
        if path.suffix != ".md":
            continue
        for verb, rest in shown.findall((REPOSITORY / path).read_text(encoding="utf-8").replace("\\\n", " ")):
            for option in re.findall(r"(?<=\s)--?[a-z][\w-]*", rest.partition(" # ")[0]):
                seen += 1
                assert option in known[verb] | {"--help"}, f"{path}: clover {verb} has no option {option}"
    assert seen > 20
