"""tools/prose.py finds phrases that are not plain English and long docstrings (``make lint``)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def prose() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prose", ROOT / "tools" / "prose.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


PAGE = """\
# A page

There is no file, and it is no longer needed.
This is
no number, and `whoever` is code.

```python
nobody = 1
```

It comes to nothing.
"""

CODE = '''\
"""What nobody needs."""

nobody = None
if nobody is None:  # of no use
    raise ValueError("this is "
                     "no number")
'''


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("page.md", PAGE, [(4, "is no"), (11, "comes to nothing")]),
        ("code.py", CODE, [(1, "nobody"), (4, "of no use"), (5, "is no")]),
        (
            "page.md",
            "It goes without\na key, from 0 on.\n",
            [(1, "goes without"), (2, "from 0 on")],
        ),
        ("page.md", "This is\nno number.\n", [(1, "is no")]),
        ("code.py", "number = 1  # srun and the like\n", [(1, "the like")]),
        ("code.py", "number = 1  # how many there are, from 0 to 9\n", []),
    ],
)
def test_a_planted_phrase_is_found_with_its_line(
    name: str, text: str, expected: list[tuple[int, str]], prose: ModuleType, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert list(prose.phrases(file)) == expected


def test_a_phrase_is_printed_and_ends_the_command_with_1(
    prose: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = tmp_path / "README.md"
    page.write_text("Good.\n\nWhoever reads this.\n")
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(prose, "PARTS", ("README.md",))
    assert prose.main() == 1
    assert capsys.readouterr().out == "README.md:3: Whoever: say it in plain English\n"
    page.write_text("Good.\n")
    assert prose.main() == 0
    assert capsys.readouterr().out == ""


SUMMARIES = f'''\
"""{"A" * 80}"""


class First:
    """A first line that goes on
    in the next one.
    """

    def second(self) -> None:
        """{"B" * 81}

        More.
        """


def short() -> None:
    """Return nothing.

    {"C" * 81}
    """
'''


def test_a_docstring_with_a_long_first_line_is_found(prose: ModuleType) -> None:
    assert list(prose.long_summaries(SUMMARIES)) == [
        (5, "A first line that goes on"),
        (10, "B" * 81),
    ]


def test_a_long_first_line_of_the_product_is_printed(
    prose: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("kvstore/a.py", "kvstore/frameworks/horovod/b.py", "examples/c.py"):
        module = tmp_path / name
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text(f'"""{"A" * 81}"""\n')
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(prose, "PARTS", ("kvstore", "examples"))
    assert prose.main() == 1
    assert capsys.readouterr().out == (
        f"kvstore/a.py:1: {'A' * 81}: begin the docstring with one line of at most 80 characters, "
        "then an empty line\n"
    )
