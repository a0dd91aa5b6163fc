"""Settings of Sphinx for this documentation: ``make docs`` builds it into docs/_build/html.

The pages are Markdown that also reads well where they lie, on a forge; so links between them and
to files of the repository are relative paths. Sphinx copies no source files: a link that leads
out of this folder goes to the file under the address that ``-D repository=...`` gives, and else
becomes plain text.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvstore import KVStore
from pslite.version import __version__

project = "kvstore"
author = "the kvstore developers"
copyright = author
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
root_doc = "index"

html_theme = "pydata_sphinx_theme"
html_title = f"kvstore {__version__}"
html_show_copyright = False
# Pages that belong to no group have nothing to show at their side.
html_sidebars: dict[str, list[str]] = {
    name: [] for name in ("index", "search", "genindex", "py-modindex", "_modules/**")
}
html_theme_options: dict[str, Any] = {
    "show_nav_level": 2,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": [],
    "footer_end": ["sphinx-version"],
}

myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_type_aliases = {name: name for name in ("Array", "Keys", "MetricLike", "Values")}
python_maximum_signature_line_length = 88
viewcode_line_numbers = True

# [text](../path#anchor), but no picture. The text may hold brackets, one level deep.
_LINK = re.compile(
    r"(?<!!)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]"
    r"\((?P<path>\.\./[^)\s#]+)(?P<anchor>#[^)\s]*)?\)"
)


def lead_out_of_the_folder(app: Any, name: str, source: list[str]) -> None:
    """Rewrite links to files that are no pages of this documentation."""
    folder = posixpath.dirname(name)
    repository = app.config.repository.rstrip("/")

    def rewritten(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, found["path"]))
        if path.startswith("docs/") and path.endswith(".md"):
            return found[0]
        if not repository:
            return found["text"]
        return f"[{found['text']}]({repository}/{path}{found['anchor'] or ''})"

    source[0] = _LINK.sub(rewritten, source[0])


_LONE_ASTERISK = re.compile(r"``.*?``|(?<!\*)(\*)(?!\*)")


def keep_asterisks(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Docstrings here are plain words: an asterisk in ``(n, *shape)`` begins no emphasis."""
    for number, line in enumerate(lines):
        if not line.startswith(" "):  # no code
            lines[number] = _LONE_ASTERISK.sub(lambda m: r"\*" if m[1] else m[0], line)


_ALIAS = re.compile(r"TypeAliasForwardRef\('(\w+)'\)")


def name_aliases(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: Any, returns: Any
) -> tuple[Any, Any]:
    """``Values | None`` where Sphinx writes ``TypeAliasForwardRef('Values') | None``."""

    def named(text: str | None) -> str | None:
        return None if text is None else _ALIAS.sub(r"\1", text)

    return named(signature), named(returns)


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_config_value("repository", "", "env")
    app.connect("source-read", lead_out_of_the_folder)
    app.connect("autodoc-process-docstring", keep_asterisks)
    app.connect("autodoc-process-signature", name_aliases)
    for name in KVStore.__abstractmethods__:  # users need not know that they are abstract
        getattr(KVStore, name).__isabstractmethod__ = False
    return {"parallel_read_safe": True, "parallel_write_safe": True}
