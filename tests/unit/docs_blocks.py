"""The code blocks of the documentation: what a comment above one says, and how it is run.

In README.md and docs/**/*.md a comment before a block says what the tests do with it:

``<!-- runs -->``
    before Python: it is run; the blocks of a page run in one process and share their names, from
    top to bottom. Before a console: its commands are run and must print what stands below them.
``<!-- launched: -n 2 -s 1 -->``
    before Python: a script of its own, run by the launcher with these options.
``<!-- exits: 7 -->``
    before a console: its last command must end with this code, and print what stands below it to
    standard output or standard error.
``<!-- file: NAME -->``
    the block is saved under this name, for what follows on the page.
``<!-- by hand: WHY -->``
    it is not run.

In Python, ``print(...)  # text`` says what is printed; every worker that prints anything must print
exactly these lines. In a console, lines are compared in any order, since the processes of a job
print as they come; ``...`` stands for any text, and alone on a line for any lines.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
PAGES = [page for page in PAGES if "_build" not in page.parts]
PAGE_NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
LAUNCH = [sys.executable, str(ROOT / "tools" / "launch.py")]

BLOCK = re.compile(
    r"^(?:<!-- (?P<what>runs|launched|exits|file|by hand)(?:: (?P<rest>[^>]+?))? -->\n)?"
    r"```(?P<language>[\w{}-]*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
PRINTED = re.compile(r"^\s*print\(.*\)  # (.*)$", re.MULTILINE)
COMMANDS = {"kvstore-launch": LAUNCH}
LIMIT_S = 120  # of a command; two processes that import Lightning need some seconds

#: Runs the blocks of one page in one process; each argument is the file of one.
_RUN_BLOCKS = """
import pathlib, sys
names = {"__name__": "__main__"}
for file in sys.argv[1:]:
    print(f"-- {file}", flush=True)
    exec(compile(pathlib.Path(file).read_text("utf-8"), file, "exec"), names)
"""


class Block(NamedTuple):
    """A code block of a page; ``what`` and ``rest`` are those of the comment above it."""

    language: str
    what: str
    rest: str
    text: str


def blocks(page: Path) -> list[Block]:
    """All code blocks, in order."""
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [Block(m["language"], m["what"] or "", m["rest"] or "", m["text"]) for m in found]


def runnable(page: Path) -> list[Block]:
    """The blocks with which the tests do something."""
    return [block for block in blocks(page) if block.what not in ("", "by hand")]


def run(
    command: list[str],
    folder: Path,
    exit_code: int = 0,
    variables: Sequence[tuple[str, str]] = (),
) -> tuple[str, str]:
    """Standard output and error of a command that must end with this code."""
    hidden = ("DMLC_", "PS_", "KVSTORE_", "PYTEST_")
    environment = {name: text for name, text in os.environ.items() if not name.startswith(hidden)}
    with tempfile.TemporaryDirectory() as scratch:  # a job that fails leaves its logs there
        environment.update({"PYTHONPATH": str(ROOT), "TMPDIR": scratch, **dict(variables)})
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    seen = f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
    assert done.returncode == exit_code, f"{seen}\nexit code {done.returncode}"
    return done.stdout, done.stderr


def run_page(page: Path, folder: Path) -> None:
    """Do with the blocks of a page what their comments say, from top to bottom."""
    scripts: list[Path] = []

    def run_scripts() -> None:
        if scripts:
            run_blocks(scripts, folder)
        scripts.clear()

    for number, block in enumerate(runnable(page)):
        if block.what == "file":
            (folder / block.rest).write_text(block.text, encoding="utf-8")
        elif block.language == "python" and block.what == "runs":
            scripts.append(folder / f"block-{number}.py")
            scripts[-1].write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            run_launched(block, folder)
        else:
            run_scripts()
            run_console(block, folder)
    run_scripts()


def run_blocks(scripts: list[Path], folder: Path) -> None:
    """One after the other in one process; they must print what their comments say."""
    driver = folder / "run_blocks.py"
    driver.write_text(_RUN_BLOCKS, encoding="utf-8")
    output, _ = run([sys.executable, "-W", "error", str(driver), *map(str, scripts)], folder)
    printed = re.split(r"^-- .*\n", output, flags=re.MULTILINE)[1:]
    for script, lines in zip(scripts, printed, strict=True):
        expected = PRINTED.findall(script.read_text(encoding="utf-8"))
        assert not expected or lines.splitlines() == expected, f"{script.read_text()}\n{lines}"


def run_launched(block: Block, folder: Path) -> None:
    """A script of its own, under the launcher."""
    (folder / "example.py").write_text(block.text, encoding="utf-8")
    options = [*shlex.split(block.rest), "--launcher", "local"]
    output, _ = run([*LAUNCH, *options, sys.executable, "-W", "error", "example.py"], folder)
    expected = PRINTED.findall(block.text)
    printed: dict[str, list[str]] = {}
    for line in output.splitlines():
        process, _, text = line.removeprefix("[").partition("] ")
        printed.setdefault(process, []).append(text)
    if expected:
        assert printed
        assert printed == dict.fromkeys(printed, expected)


def run_console(block: Block, folder: Path) -> None:
    """Its commands, and what they must print."""
    commands = dialogue(block.text)
    for position, (words, expected) in enumerate(commands, start=1):
        variables = []
        while "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            variables.append((name, value))
        program, *arguments = [sys.executable if word == "python" else word for word in words]
        is_last = position == len(commands)
        wanted = int(block.rest) if block.what == "exits" and is_last else 0
        command = [*COMMANDS.get(program, [program]), *arguments]
        output, errors = run(command, folder, wanted, variables)
        printed = output + errors if wanted else output
        assert_alike(printed.splitlines(), expected)


def dialogue(console: str) -> list[tuple[list[str], list[str]]]:
    """The commands of a console, and the lines that each prints."""
    parts = re.split(r"^\$ ", console.replace("\\\n", " "), flags=re.MULTILINE)[1:]
    return [(shlex.split(part.splitlines()[0]), part.splitlines()[1:]) for part in parts]


def assert_alike(printed: list[str], expected: list[str]) -> None:
    """Each expected line was printed and, unless ``...`` says so, nothing else."""
    left = list(printed)
    for line in expected:
        if line == "...":
            continue
        pattern = ".*".join(map(re.escape, line.split("...")))
        found = next((text for text in left if re.fullmatch(pattern, text)), None)
        assert found is not None, f"not printed: {line}\nprinted:\n" + "\n".join(printed)
        left.remove(found)
    assert "..." in expected or left == [], "\n".join(["printed, and not on the page:", *left])
