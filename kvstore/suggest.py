"""``did_you_mean``: what an unknown name may have been meant to be, for the end of an error's text.

Pure, and called on the way to an error only. Any thread may call. Read next: ``absent.py``, for
names of the original that are not here at all.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable

MOST_NAMES = 2000
"""So many are compared at most: about 10 ms, also for a script that catches such errors."""


def nearest(name: object, known: Iterable[object]) -> str | None:
    """The known name that looks most like ``name``, or None when there is none like it."""
    if not isinstance(name, str):
        return None
    names = (each for each in known if isinstance(each, str))
    found = difflib.get_close_matches(name, itertools.islice(names, MOST_NAMES), n=1)
    return found[0] if found else None


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """``"; did you mean 'weight'?"``, or an empty text."""
    found = nearest(name, known)
    return "" if found is None else f"; did you mean {found!r}?"
