"""Arguments by position mean what they mean in MXNet 1.9.1.

``tests/reference/record_signatures.py`` recorded the parameters of its public calls. A call here
has the same ones in the same order, as far as it takes them by position; what it has besides is
taken by name only. What stands under ``REASONS`` differs on purpose.
"""

from __future__ import annotations

import importlib
import json
import runpy
from fnmatch import fnmatchcase
from pathlib import Path

REFERENCE = Path(__file__).parents[3] / "reference"
THEIRS: dict[str, list[str]] = json.loads(
    (REFERENCE / "signatures.json").read_text(encoding="utf-8")
)
RECORDER = runpy.run_path(str(REFERENCE / "record_signatures.py"))

#: Where a module has another name here.
OURS = {
    "init": "initializer",
    "nd.random": "random",
    "nd.sparse": "mxnet.nd.sparse",
}

#: Calls that differ on purpose, and why. A * stands for any class.
REASONS: dict[str, str] = {
    "gluon.Parameter": "made around an array of any library, which comes first",
    "init.create": "MXNet's takes any arguments and passes them on",
    "metric.Loss.update": "the first parameter has a name, which MXNet leaves out",
    "metric.Caffe.update": "the same",
    "metric.Torch.update": "the same",
    "metric.CompositeEvalMetric.update_dict": "named as in its base, there and here",
    "metric.register": "takes further names of the class",
    "model.FeedForward.create": "passes on what fit takes, in the order of fit",
    "nd.NDArray": "wraps the memory of an array in place of a handle of MXNet's library",
    "nd.NDArray.transpose": "takes the axes one by one, too",
    "nd.sparse.RowSparseNDArray": "made of its rows in place of a handle of MXNet's library",
    "nd.sparse.RowSparseNDArray.retain": "MXNet's passes its arguments on",
    "optimizer.Optimizer": "its subclasses are made, not it",
    "optimizer.*.create_state": "an optimizer is a value that knows no index; a class that is "
    "written MXNet's way has MXNet's methods",
    "optimizer.*.update": "the same",
}


def our_calls() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in RECORDER["MODULES"]:
        module = importlib.import_module(f"kvstore.{OURS.get(path, path)}")
        for name, parameters in RECORDER["calls_of"](module, path, ("kvstore",), set()):
            if name in THEIRS:
                found[name] = parameters
    return found


CALLS = our_calls()


def by_position(parameters: list[str]) -> list[str]:
    """The names of those that may be given by position, in order."""
    names: list[str] = []
    for each in parameters:
        if each == "*" or each.startswith("**"):
            break
        names.append(each.rstrip("="))
        if each.startswith("*"):
            break
    return names


def is_same(ours: list[str], theirs: list[str]) -> bool:
    mine, other = by_position(ours), by_position(theirs)
    return mine == other[: len(mine)]


def reason_for(name: str) -> str | None:
    return next((REASONS[each] for each in REASONS if fnmatchcase(name, each)), None)


def test_arguments_by_position_stand_in_mxnets_order() -> None:
    differing = [
        f"{name}: here {ours}, in MXNet {THEIRS[name]}"
        for name, ours in sorted(CALLS.items())
        if reason_for(name) is None and not is_same(ours, THEIRS[name])
    ]
    assert differing == []


def test_what_differs_on_purpose_does_differ() -> None:
    differing = {name for name in CALLS if not is_same(CALLS[name], THEIRS[name])}
    needless = [each for each in REASONS if not any(fnmatchcase(name, each) for name in differing)]
    assert needless == []


def test_hundreds_of_calls_are_compared() -> None:
    assert len(CALLS) > 300
    for name in ("nd.arange", "nd.NDArray.norm", "io.NDArrayIter", "kvstore.KVStore.pull"):
        assert name in CALLS
    assert by_position(["a", "b=", "*", "c="]) == ["a", "b"]
    assert by_position(["*args", "x="]) == ["*args"]
    assert not is_same(["b", "a"], ["a", "b"])
    assert is_same(["a", "*", "z="], ["a", "b"])
