"""``tools/count_lines.py``: which line is of which kind, and what the table says."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "count_lines.py"
count_lines = runpy.run_path(str(TOOL))

MODULE = '''\
"""What it is.

More of it.
"""

import os  # a comment beside code

# a comment alone
text = """a string
over two lines"""


def function() -> str:
    """Say where."""
    return os.getcwd()
'''


def test_each_line_is_of_one_kind() -> None:
    kinds = count_lines["kinds_of"](MODULE)
    assert dict(kinds) == {"docstring": 5, "code": 5, "comment": 1, "blank": 4}
    assert kinds.total() == len(MODULE.splitlines())


def test_the_table_adds_up_and_names_files_beyond_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for package, lines in (("kvstore", 501), ("pslite", 60), ("pslite/van", 59)):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
        (tmp_path / package / "module.py").write_text("x = 1\n" * lines)
    count_lines["main"](tmp_path)
    table = capsys.readouterr().out.splitlines()
    assert table[3].split() == ["together", "3", "620", "620", "0", "0", "0"]
    assert table[5:] == [
        "files of fewer than 60 lines: 1",
        "kvstore/module.py has 501 lines, more than 500",
    ]
