"""Record what MXNet's array functions return: run it with a Python that has MXNet 1.9.1.

::

    python tests/reference/record_arrays.py

writes ``arrays.json`` beside itself: calls with their arguments, and the shape and values of
what came back (null where MXNet raised an error). The tests repeat them and need no MXNet.
"""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

A = [[[0, 5, 2, 3], [9, 5, 6, 7], [8, 1, 10, 11]], [[4, 13, -14, 15], [16, 0, 18, 2], [2, 2, 2, 2]]]
"""An array of shape (2, 3, 4)."""
M = [[1, -2, 3], [-4, 5, 6]]
ROW = [[10, 20, 30]]

CALLS: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("argmax", [A], {}),
    *(
        ("argmax", [A], {"axis": axis, "keepdims": kept})
        for axis in (0, 1, 2, -1)
        for kept in (0, 1)
    ),
    ("transpose", [A], {}),
    *(("transpose", [A], {"axes": axes}) for axes in ([1, 0, 2], [2, 0, 1], [0, 2, 1])),
    *(("expand_dims", [M], {"axis": axis}) for axis in (0, 1, 2, -1)),
    ("flatten", [A], {}),
    ("split", [A], {"num_outputs": 3}),
    ("split", [A], {"num_outputs": 1}),
    ("split", [A], {"num_outputs": 2, "axis": 0, "squeeze_axis": True}),
    ("split", [A], {"num_outputs": 2, "axis": -1}),
    ("split", [A], {"num_outputs": 2}),
    *((name, [M, ROW], {}) for name in ("broadcast_add", "broadcast_sub", "broadcast_mul")),
    ("broadcast_div", [M, ROW], {}),
    *((name, [M, ROW], {}) for name in ("add", "subtract", "multiply", "divide")),
    ("broadcast_to", [ROW], {"shape": [2, 3]}),
    *((name, [A], {"axis": axis}) for name in ("sum", "mean", "max", "min") for axis in (0, 1, 2)),
    ("sum", [A], {"axis": [0, 2], "keepdims": True}),
    *(("norm", [A], {"ord": ord_}) for ord_ in (1, 2)),
    *(("norm", [M], {"ord": ord_, "axis": 1, "keepdims": True}) for ord_ in (1, 2)),
    ("clip", [A], {"a_min": 1, "a_max": 9}),
    ("dot", [M, ROW], {"transpose_b": True}),
    ("dot", [M, M], {"transpose_a": True}),
    *((name, [M], {}) for name in ("abs", "sign", "square", "exp", "zeros_like", "ones_like")),
    ("maximum", [M, ROW], {}),
    ("minimum", [M, ROW], {}),
]

CODES = [0, -1, -2, -3, -4, 2, 3, 12]
SHAPES: list[tuple[list[int], list[int], bool]] = [
    *(
        ([2, 3, 4], list(codes), False)
        for length in (1, 2, 3)
        for codes in itertools.product(CODES, repeat=length)
        if not (-4 in codes and 0 in codes)  # a division by zero ends the process there
    ),
    *(
        ([2, 3, 4], list(codes), True)
        for codes in itertools.product(CODES, repeat=2)
        if -4 not in codes
    ),
    ([6], [-4, 2, -1], False),
    ([6], [-4, -1, 3], False),
    ([6], [-4, -1, -1], False),
    ([6], [-4, 4, -1], False),
    ([2, 3, 4], [-4, 1, 2, -2], False),
    ([2, 3, 4], [2, -4, -1, 3, -2], False),
    ([2, 3, 4, 5], [-3, -3], False),
    ([2, 3, 4, 5], [0, -3, 0], False),
    ([2, 3, 4, 5], [-3, 0, 0], False),
    ([2, 3, 4, 5], [0, 0, -2], False),
    ([10, 5, 4], [-1, 0], False),
    ([10, 5, 4], [-1, 0], True),
    ([8, 3, 3, 3, 4, 4], [0, 0, -1, 0], True),
    ([2, 3, 4], [-5], False),
    ([2, 3, 4], [24, 1, 1, 1], False),
]


BATCHES = [
    (n, size, handling)
    for handling in ("pad", "discard", "roll_over")
    for n, size in ((6, 2), (5, 2), (7, 3), (4, 4))
] + [(3, 4, "pad"), (3, 8, "pad")]


def batches(mx: Any) -> Iterator[list[Any]]:
    """What three passes of an iterator give: the samples of each batch, the label and ``pad``."""
    for n, size, handling in BATCHES:
        data = {"x": mx.nd.arange(n), "a": mx.nd.arange(2 * n).reshape((n, 2))}
        iterator = mx.io.NDArrayIter(data, mx.nd.arange(n) + 10, size, False, handling)
        described = [iterator.provide_data, iterator.provide_label]
        shapes = [[[each.name, list(each.shape)] for each in kind] for kind in described]
        found = []
        for _ in range(3):
            found.append([shown(batch) for batch in iterator])
            iterator.reset()
        yield [n, size, handling, shapes, found]


def shown(batch: Any) -> list[Any]:
    return [[each.asnumpy().tolist() for each in [*batch.data, *batch.label]], batch.pad]


OPERANDS = ("rows", "other", "dense", "number")
IN_PLACE = ("iadd", "isub", "imul", "itruediv")
FUNCTIONS = (
    "abs",
    "sqrt",
    "square",
    "sign",
    "exp",
    "sum",
    "mean",
    "norm",
    "zeros_like",
    "ones_like",
)


def operands(mx: Any) -> dict[str, Any]:
    """What row-sparse arithmetic is tried with; ``mx`` may be any library of these names."""
    rows = mx.nd.sparse.row_sparse_array(([[1, 2], [3, 4]], [0, 2]), shape=(4, 2))
    other = mx.nd.sparse.row_sparse_array(([[5, -6], [7, 8]], [2, 3]), shape=(4, 2))
    dense = mx.nd.array([[1, 2], [3, 4], [5, 6], [7, 8]])
    return {"rows": rows, "other": other, "dense": dense, "number": 2.0}


def sparse(mx: Any) -> Iterator[list[Any]]:
    """What arithmetic with row-sparse arrays gives: the operation, storage type and values."""
    for name in ("add", "sub", "mul", "truediv", "pow"):
        for left, right in itertools.product(OPERANDS, repeat=2):
            if "rows" in (left, right):
                yield [name, left, right, *result(mx, name, left, right)]
    for name, right in itertools.product(IN_PLACE, OPERANDS[1:]):
        yield [name, "rows", right, *result(mx, name, "rows", right)]
    yield ["iadd", "dense", "rows", *result(mx, "iadd", "dense", "rows")]
    yield ["isub", "dense", "rows", *result(mx, "isub", "dense", "rows")]
    for name in FUNCTIONS:
        made = getattr(mx.nd, name)(operands(mx)["rows"])
        yield [name, "rows", None, made.stype, made.asnumpy().tolist()]


def result(mx: Any, name: str, left: str, right: str) -> list[Any]:
    given = operands(mx)
    made = getattr(operator, name)(given[left], given[right])
    return [made.stype, made.asnumpy().tolist()]


def main() -> None:
    import mxnet as mx  # type: ignore[import-not-found]

    calls = [
        [name, arrays, options, answer(mx, name, arrays, options)]
        for name, arrays, options in CALLS
    ]
    shapes = [[old, new, reverse, reshaped(mx, old, new, reverse)] for old, new, reverse in SHAPES]
    found = {"calls": calls, "reshape": shapes, "sparse": list(sparse(mx))}
    found["batches"] = list(batches(mx))
    parts = [
        f'"{name}": [\n' + ",\n".join(map(json.dumps, each)) + "\n]" for name, each in found.items()
    ]
    path = Path(__file__).with_name("arrays.json")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def answer(mx: Any, name: str, arrays: list[Any], options: dict[str, Any]) -> Any:
    """The values of what came back, in a list where it was one; None for an error."""
    try:
        made = getattr(mx.nd, name)(*map(mx.nd.array, arrays), **options)
        return (
            [one.asnumpy().tolist() for one in made]
            if isinstance(made, list)
            else made.asnumpy().tolist()
        )
    except (mx.MXNetError, ValueError):
        return None


def reshaped(mx: Any, old: list[int], new: list[int], reverse: bool) -> list[int] | None:
    try:
        return list(mx.nd.zeros(old).reshape(new, reverse=reverse).shape)
    except (mx.MXNetError, ValueError):
        return None


if __name__ == "__main__":
    main()
