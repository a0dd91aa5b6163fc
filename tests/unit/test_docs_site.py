"""The documentation as a site: Sphinx builds it, every page is in it, figures can be repeated."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs_blocks import PAGE_NAMES, ROOT

DOCS = ROOT / "docs"
COMMAND = re.compile(r"^\$ |`[^`]*(?:make |python|kvstore-launch|benchmarks/|tests/|tests\.)", re.M)
MEASURED_CELL = re.compile(r"\d[\d.,]*( to \d[\d.,]*)? ?(?:ms|s|us|µs|GB/s|MB/s|samples/s)")
MEASURED_COLUMN = re.compile(r"seconds|milliseconds|accuracy|samples per second|images per second")


@pytest.mark.process
@pytest.mark.slow(reason="it builds the whole site, for half a minute")
@pytest.mark.timeout(180)  # it takes ten seconds of a whole core, and other tests run beside it
def test_sphinx_builds_every_page_without_a_warning(tmp_path: Path) -> None:
    for package in ("sphinx", "myst_parser", "pydata_sphinx_theme"):
        pytest.importorskip(package)
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    done = subprocess.run(
        [*command, "-d", str(tmp_path / "doctrees"), str(DOCS), str(tmp_path / "html")],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    html = (tmp_path / "html" / "reference.html").read_text(encoding="utf-8")
    assert "kvstore.KVStore.pushpull" in html
    built = {
        page.relative_to(tmp_path / "html").with_suffix("") for page in tmp_path.rglob("*.html")
    }
    pages = {
        Path(name).relative_to("docs").with_suffix("") for name in PAGE_NAMES if "docs/" in name
    }
    assert pages <= built
    for name in sorted(str(page) for page in pages - {Path("index")}):
        text = (tmp_path / "html" / f"{name}.html").read_text(encoding="utf-8")
        side = text.partition('class="bd-docs-nav')[2].partition("</nav>")[0]
        assert 'class="reference internal"' in side, f"{name} has an empty side bar"
        path = text.partition('aria-label="Breadcrumb"')[2].partition("</nav>")[0]
        assert not name.startswith("decisions/") or ">For developers<" in path
    start = (tmp_path / "html" / "index.html").read_text(encoding="utf-8")
    assert "hide-on-wide" in start.partition('class="bd-sidebar-primary')[2].partition('"')[0]


def tables(section: str) -> list[list[list[str]]]:
    """The Markdown tables of a text: rows of cells."""
    found = re.findall(r"(?:^\|.*\|\n)+", section + "\n", re.MULTILINE)
    return [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
        for text in found
    ]


def is_measured(table: list[list[str]]) -> bool:
    """Whether it holds figures of a run: cells such as ``127 ms``, or a column of them."""
    header, *rows = table
    cells = [cell for row in rows for cell in row]
    return any(MEASURED_CELL.fullmatch(cell) for cell in cells) or any(
        MEASURED_COLUMN.search(cell) for cell in header
    )


def without_a_command(text: str) -> list[str]:
    """The headings of sections with measured figures and no command to repeat them."""
    sections = re.split(r"^## ", text, flags=re.MULTILINE)
    return [
        section.splitlines()[0]
        for section in sections
        if any(is_measured(table) for table in tables(section)) and not COMMAND.search(section)
    ]


def test_figures_have_their_command_beside_them() -> None:
    found = {
        name: without_a_command((ROOT / name).read_text(encoding="utf-8")) for name in PAGE_NAMES
    }
    assert {name: headings for name, headings in found.items() if headings} == {}


def test_figures_without_a_command_would_be_noticed() -> None:
    figures = "## Speed\n\n| model | time |\n| --- | --- |\n| LeNet | 3.2 ms |\n"
    assert without_a_command(figures) == ["Speed"]
    assert without_a_command(f"{figures}\n$ make bench\n") == []
    assert is_measured(
        tables((ROOT / "README.md").read_text(encoding="utf-8").split("## Results")[1])[0]
    )
