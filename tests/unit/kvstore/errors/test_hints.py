"""Names of MXNet and Horovod that are not here: an AttributeError that says what to use instead."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

import kvstore as mx
from kvstore.errors.hints import INSTEAD, MOST_NAMES, did_you_mean, shown
from kvstore.optimizer.parameters import NOT_TAKEN

PAGE = (Path(__file__).parents[4] / "docs" / "migration.md").read_text(encoding="utf-8")
NAMES = [
    (module, name)
    for module, names in INSTEAD.items()
    for name in names
    if module != "kvstore.horovod.torch" or importlib.util.find_spec("torch")
]


def test_a_name_of_mxnet_that_is_not_here_says_what_to_use() -> None:
    for module, name in NAMES:
        loaded = importlib.import_module(module)
        assert not hasattr(loaded, name), (module, name)
        with pytest.raises(AttributeError) as raised:
            getattr(loaded, name)
        expected = f"there is no {shown(module, name)} here: {INSTEAD[module][name]}"
        assert (str(raised.value), raised.value.name) == (expected, name)


def test_a_script_reaches_them_as_in_mxnet() -> None:
    for missing in (
        *(lambda: mx.mod.Module, lambda: mx.sym.Variable, lambda: mx.autograd.record),
        *(lambda: mx.gluon.nn.Dense, lambda: mx.gluon.data.DataLoader, lambda: mx.nd.save),
    ):
        with pytest.raises(AttributeError, match=r"^there is no mx\.\w+.* here: "):
            missing()


def test_a_from_import_of_such_a_name_says_so_too() -> None:
    for module, name in NAMES:
        line = f"from {module} import {name}"
        for script in line, f"def f():\n {line}\nf()":
            assert_says_what_to_use(ImportError, script, module, name)
        assert not hasattr(importlib.import_module(module), name), (module, name)


def test_an_import_of_such_a_module_says_so_too() -> None:
    for module, name in NAMES:
        if module not in ("kvstore.io", "kvstore.context"):
            for script in f"import {module}.{name}", f"from {module}.{name} import anything":
                assert_says_what_to_use(ModuleNotFoundError, script, module, name)


def assert_says_what_to_use(kind: type[ImportError], script: str, module: str, name: str) -> None:
    with pytest.raises(kind) as raised:
        exec(script, {})
    expected = f"there is no {shown(module, name)} here: {INSTEAD[module][name]}"
    assert (str(raised.value), raised.value.name) == (expected, f"{module}.{name}")


def test_other_modules_that_are_missing_are_told_by_python() -> None:
    for name in "kvstore.autogard", "kvstore.gluon.nnn", "kvstore_autograd", "nowhere.kvstore.rnn":
        with pytest.raises(ModuleNotFoundError, match="No module named"):
            importlib.import_module(name)
    importlib.reload(mx)
    assert [str(finder) for finder in sys.meta_path].count("<class 'kvstore._Absent'>") == 1


def test_a_from_import_suggests_a_name_that_is_near() -> None:
    with pytest.raises(ImportError, match=r"no attribute 'zeroes'; did you mean 'zeros'\?$"):
        from kvstore.mxnet.nd import zeroes  # type: ignore[attr-defined]  # noqa: F401
    with pytest.raises(ImportError, match=r"no attribute 'Trainr'; did you mean 'Trainer'\?$"):
        from kvstore.mxnet.gluon import Trainr  # type: ignore[attr-defined]  # noqa: F401


def test_ndarray_is_another_name_of_nd() -> None:
    from kvstore.mxnet.nd import ndarray
    from kvstore.mxnet.nd.ndarray import array, zeros  # type: ignore[attr-defined]

    assert (ndarray.zeros, ndarray.NDArray) == (mx.nd.zeros, mx.nd.NDArray)  # type: ignore[attr-defined]
    assert (zeros, array) == (mx.nd.zeros, mx.nd.array)
    assert mx.ndarray.sparse is mx.nd.sparse  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"there is no mx\.nd\.save here"):
        _ = ndarray.save  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", dict(NAMES))
def test_a_mistyped_name_is_no_name_of_mxnet_and_one_that_is_near_is_suggested(module: str) -> None:
    loaded = importlib.import_module(module)
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'qqq'$"):
        _ = loaded.qqq
    with pytest.raises(AttributeError, match=r"no attribute 'zeroes'; did you mean 'zeros'\?$"):
        _ = mx.nd.zeroes


def test_the_page_of_migration_lists_these_names_with_these_sentences() -> None:
    begin = PAGE.index("## Names that are not there")
    table = PAGE[begin : PAGE.index("## Environment")]
    assert listed(table) == {
        shown(module, name): sentence(INSTEAD[module][name]) for module, name in NAMES
    }


def test_the_page_of_migration_lists_the_parameters_that_are_not_taken() -> None:
    begin = PAGE.index("| parameter | instead |")
    table = PAGE[begin : PAGE.index("`multi_precision` is accepted")]
    assert listed(table) == {name: sentence(text) for name, text in NOT_TAKEN.items()}


def test_nothing_is_suggested_that_is_not_alike_and_long_lists_are_cut() -> None:
    assert did_you_mean("wieght", ["bias", "weight"]) == "; did you mean 'weight'?"
    assert did_you_mean("x", ["bias", "weight"]) == ""
    assert did_you_mean(3, [3, 4]) == ""
    assert did_you_mean("wieght", [*map(str, range(MOST_NAMES)), "weight"]) == ""


def listed(table: str) -> dict[str, str]:
    """Each name in the first column, with its second column."""
    rows = re.findall(r"^\| (`.*?) \| (.+) \|$", table, re.MULTILINE)
    return {name: text for names, text in rows for name in re.findall(r"`([^`]+)`", names)}


def sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
