"""The module that setup.py builds from native/kernels.c where there is a compiler.

``kernels.py`` is the one door to it. ``states`` are those of the rule and, where it updates weights
of 16 bits, their float32 master.
"""

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

INTERFACE: int
INSTRUCTIONS: tuple[str, ...]

def use(name: str, /) -> None: ...
def run(
    formula: tuple[int, float, float, float, float, float, float, float, float, float],
    weight_kind: int,
    kind: int,
    weight: NDArray[Any],
    states: Sequence[NDArray[Any]],
    rows: Sequence[Sequence[NDArray[Any]]],
    outs: Sequence[Sequence[NDArray[Any]]],
    /,
) -> bool: ...
def merge_ids(
    merged: NDArray[Any], places: Sequence[NDArray[Any]], ids: Sequence[NDArray[Any]], /
) -> int: ...
def take_rows(
    table: NDArray[Any], places: NDArray[Any], out: NDArray[Any], row_bytes: int, /
) -> bool: ...
def update_rows(
    formula: tuple[int, float, float, float, float, float, float, float, float, float],
    weight_kind: int,
    kind: int,
    width: int,
    weight: NDArray[Any],
    states: Sequence[NDArray[Any]],
    places: NDArray[Any],
    values: Sequence[NDArray[Any]],
    at: Sequence[NDArray[Any]],
    start: int,
    stop: int,
    /,
) -> bool: ...
def encode(
    codec: int,
    kind: int,
    source: NDArray[Any] | None,
    residual: NDArray[Any] | None,
    payload: NDArray[Any],
    number: float,
    start: int,
    stop: int,
    /,
) -> bool: ...
def decode(
    codec: int,
    kind: int,
    payload: NDArray[Any],
    out: NDArray[Any],
    number: float,
    start: int,
    stop: int,
    add: bool,
    /,
) -> bool: ...
