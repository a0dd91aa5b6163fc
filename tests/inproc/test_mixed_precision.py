"""float16 and bfloat16 keys in every type of store: what is small adds up in a float32 master."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from workers import Workers

import kvstore
from kvstore import KVStore, RowSparseArray, optimizer
from kvstore.arrays.dtypes import bfloat16
from kvstore.arrays.keys import KeySpec
from kvstore.checkpoint.safetensors import TensorReader, TensorWriter
from kvstore.errors import CheckpointError
from kvstore.optimizer.states import MASTER

Array = np.ndarray[Any, Any]

pytest.importorskip("ml_dtypes")

HALF, BRAIN = np.dtype(np.float16), bfloat16()
DIST = ["dist_sync", "dist_async", "dist_device_sync"]
KINDS = ["local", "device", *DIST]
MOMENTUM = optimizer.create("sgd", learning_rate=0.25, momentum=0.5)
ADAM = optimizer.create("adam", learning_rate=0.001)
PLAIN = optimizer.create("sgd", learning_rate=1.0)

SPECS = {"half": (HALF, (150,)), "brain": (BRAIN, (7, 3)), "float": (np.dtype("f4"), (20,))}
"""Neighbours of different dtypes, one of them longer than a chunk."""
CONFIG = {"chunk_bytes": 256, "credit_bytes": 512}


def first_values() -> list[Array]:
    return [np.linspace(1, 2, int(np.prod(s))).reshape(s).astype(d) for d, s in SPECS.values()]


def gradients(step: int) -> list[Array]:
    draw = np.random.default_rng(step)
    return [(1e-3 * draw.normal(size=shape)).astype(dtype) for dtype, shape in SPECS.values()]


def train(kv: KVStore, steps: range) -> list[Array]:
    for step in steps:
        kv.push(list(SPECS), gradients(step))
    kv.wait()
    values: list[Array] = kv.pull(list(SPECS))
    return values


def by_hand(chosen: optimizer.Optimizer, values: list[Array], steps: range) -> list[Array]:
    """The weights in float32 all the way, rounded at the end."""
    results = []
    for index, value in enumerate(values):
        wide = value.astype("f4").reshape(-1)
        state = chosen.create_state(wide)
        for count, step in enumerate(steps, start=1):
            gradient = gradients(step)[index].astype("f4").reshape(-1)
            chosen.update(wide, gradient, state, count, np.empty_like(wide))
        results.append(wide.astype(value.dtype).reshape(value.shape))
    return results


def assert_same(one: list[Array], other: list[Array]) -> None:
    assert [value.dtype for value in one] == [value.dtype for value in other]
    assert [value.tobytes() for value in one] == [value.tobytes() for value in other]


@pytest.mark.parametrize("kind", KINDS)
def test_small_steps_add_up(kind: str) -> None:
    """Near 64 the steps of float16 are 0.06, and those of bfloat16 0.5: 0.001 is lost in them."""
    num_steps = 10_000 if kind in ("local", "device") else 500

    def script(kv: KVStore) -> Any:
        kv.set_optimizer(PLAIN)
        kv.init(["half", "brain"], [np.full(3, 64, HALF), np.full(3, 64, BRAIN)])
        small = [np.full(3, 1e-3, HALF), np.full(3, 1e-3, BRAIN)]
        for _ in range(num_steps):
            kv.push(["half", "brain"], small)
        outs = [np.empty(3, HALF), np.empty(3, BRAIN)]
        kv.pull(["half", "brain"], out=outs)
        return outs

    with Workers(kind, 1, 2) as workers:
        half, brain = workers.run(script)[0]
    assert half.astype("f4") == pytest.approx([64 - num_steps * 1e-3] * 3, abs=0.04)
    assert brain.astype("f4") == pytest.approx([64 - num_steps * 1e-3] * 3, abs=0.3)


@pytest.mark.parametrize("chosen", [MOMENTUM, ADAM], ids=["momentum", "adam"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pull_gives_the_master_rounded_once_in_any_order_of_calls(
    kind: str, chosen: optimizer.Optimizer
) -> None:
    def optimizer_first(kv: KVStore) -> Any:
        kv.set_optimizer(chosen)
        kv.init(list(SPECS), first_values())
        return train(kv, range(6))

    def keys_first(kv: KVStore) -> Any:
        kv.init(list(SPECS), first_values())
        kv.set_optimizer(chosen)
        return train(kv, range(6))

    expected = by_hand(chosen, first_values(), range(6))
    for script in (optimizer_first, keys_first):
        with Workers(kind, 1, 2, **CONFIG) as workers:
            assert_same(workers.run(script)[0], expected)


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_what_was_pushed_before_the_optimizer_counts(kind: str) -> None:
    values = [value * value for value in first_values()]

    def script(kv: KVStore) -> Any:
        kv.init(list(SPECS), first_values())
        kv.push(list(SPECS), values)  # no optimizer: the values are replaced
        kv.set_optimizer(MOMENTUM)
        return train(kv, range(4))

    with Workers(kind, 1, 2, **CONFIG) as workers:
        assert_same(workers.run(script)[0], by_hand(MOMENTUM, values, range(4)))


@pytest.mark.parametrize("kind", ["local", "dist_sync", "dist_async"])
def test_another_optimizer_goes_on_from_the_master(kind: str) -> None:
    """Half a step of float16 by one, the other half by the other."""

    def script(kv: KVStore) -> Any:
        kv.init("w", np.full(3, 64, HALF))
        for chosen in (PLAIN, optimizer.create("nag", learning_rate=1.0), PLAIN.replace(lr=2.0)):
            kv.set_optimizer(chosen)
            kv.push("w", np.full(3, 2**-6, HALF))
        return kv.pull("w")

    with Workers(kind, 1, 1) as workers:
        assert workers.run(script)[0].tolist() == [64 - 4 * 2**-6] * 3


def test_float64_stays_float64_beside_them() -> None:
    def script(kv: KVStore) -> Any:
        kv.init(["half", "double"], [np.ones(2, HALF), np.full(2, 1 + 2.0**-40)])
        kv.set_optimizer(PLAIN)
        kv.push(["half", "double"], [np.zeros(2, HALF), np.full(2, 2.0**-45)])
        return kv.pull("double")

    for kind in KINDS:
        with Workers(kind, 1, 1) as workers:
            assert workers.run(script)[0].tolist() == [1 + 2.0**-40 - 2.0**-45] * 2


def test_only_keys_that_an_optimizer_updates_have_masters() -> None:
    def state_bytes(kv: KVStore) -> int:
        return sum(server["state_bytes"] for server in kv.stats()["servers"].values())

    def script(kv: KVStore) -> Any:
        kv.init(list(SPECS), first_values())
        kv.push(list(SPECS), gradients(0))
        kv.pull("float")
        before = state_bytes(kv)
        kv.set_optimizer(PLAIN)
        train(kv, range(1))
        return before, state_bytes(kv)

    with Workers("dist_sync", 1, 2) as workers:
        assert workers.run(script)[0] == (0, 4 * (150 + 21))


# -- files --------------------------------------------------------------------------------


def rewrite(
    path: Path, without: Sequence[str] = (), metadata: Mapping[str, str] | None = None
) -> int:
    """Change a file: the names that begin so are left out. How many arrays those were."""

    def stays(name: str) -> bool:
        return not name.startswith(tuple(without))

    with TensorReader(path) as states:
        names = list(filter(stays, states.names))
        num_left_out = len(list(states.names)) - len(names)
        arrays = {name: KeySpec(*states.spec(name)) for name in names}
        values = {n: states.read(n, 0, arrays[n].num_elements) for n in names}
        texts = {k: v for k, v in states.metadata.items() if k != "format" and stays(k)}
    path.unlink()
    with TensorWriter(path, arrays, texts | dict(metadata or {})) as file:
        for name, value in values.items():
            file.write(name, 0, value)
    return num_left_out


def remove_masters(directory: Path) -> None:
    """Make a checkpoint what it was before there were masters."""
    manifest = json.loads((directory / "manifest.json").read_text())
    path = directory / manifest["files"]["states"]
    assert rewrite(path, without=(f"{MASTER}/",)) == 2
    manifest["sizes"]["states"] = path.stat().st_size
    manifest["version"] = 1  # which has no digests
    (directory / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("kinds", [("local", 1, "dist_sync", 3), ("dist_sync", 2, "device", 1)])
def test_checkpoints_have_the_masters_and_need_not(
    tmp_path: Path, kinds: Any, is_old: bool
) -> None:
    saving, num_saving, loading, num_loading = kinds

    def save(kv: KVStore) -> Any:
        kv.init(list(SPECS), first_values())
        kv.set_optimizer(MOMENTUM)
        saved = train(kv, range(5))
        kv.save_checkpoint(tmp_path)
        return saved, train(kv, range(5, 9))

    def load(kv: KVStore) -> Any:
        kv.load_checkpoint(tmp_path)
        return kv.pull(list(SPECS)), train(kv, range(5, 9))

    with Workers(saving, 1, num_saving, **CONFIG) as workers:
        saved, went_on = workers.run(save)[0]
    if is_old:
        remove_masters(tmp_path)
    with Workers(loading, 1, num_loading, **CONFIG) as workers:
        loaded, resumed = workers.run(load)[0]
    assert_same(loaded, saved)
    if not is_old:
        assert_same(resumed, went_on)
    else:
        # As far off as the rounding of the saved values.
        for mine, theirs in zip(resumed, went_on, strict=True):
            spacing = {2: 2.0**-10, 4: 0.0}[mine.itemsize] if mine.dtype != BRAIN else 2.0**-7
            np.testing.assert_allclose(mine.astype("f8"), theirs.astype("f8"), atol=spacing)
        assert [mine.tobytes() for mine in resumed] != [each.tobytes() for each in went_on]


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_states_of_other_values_do_not_bring_their_values(tmp_path: Path, kind: str) -> None:
    def script(kv: KVStore) -> Any:
        kv.init(["w", "same"], [np.full(3, 64, HALF)] * 2)
        kv.set_optimizer(PLAIN)
        small = np.full(3, 2**-6, HALF)
        kv.push(["w", "same"], [small, small])  # the weights are rounded to 64
        kv.save_optimizer_states(tmp_path / "states")
        kv.delete("w")
        kv.init("w", np.array([32, np.nan, -0.0], HALF))
        kv.load_optimizer_states(tmp_path / "states")
        pulled = kv.pull("w")
        kv.push(["w", "same"], [small, small])
        return pulled.tolist(), kv.pull("w").tolist(), kv.pull("same").tolist()

    with Workers(kind, 1, 2) as workers:
        pulled, pushed, same = workers.run(script)[0]
    assert repr(pulled) == "[32.0, nan, -0.0]"
    assert repr(pushed) == f"[{32 - 2**-6}, nan, {-(2**-6)}]"
    assert same == [64 - 2**-5] * 3


FLOATS = {"float16": HALF, "bfloat16": BRAIN, "float32": np.dtype("f4"), "float64": np.dtype("f8")}


@pytest.mark.parametrize("is_row_sparse", [False, True])
@pytest.mark.parametrize(
    "dtypes",
    [
        ("float16", "float32"),
        ("float32", "float16"),
        ("float16", "bfloat16"),
        ("float32", "float64"),
    ],
    ids=" to ".join,
)
@pytest.mark.parametrize("kind", ["local", "device", "dist_sync", "dist_async"])
def test_states_of_a_key_of_another_dtype_are_refused_and_nothing_has_changed(
    tmp_path: Path, kind: str, dtypes: tuple[str, str], is_row_sparse: bool
) -> None:
    def value(name: str) -> Any:
        array = np.ones((3, 2), FLOATS[name])
        return RowSparseArray([0, 1, 2], array, (3, 2)) if is_row_sparse else array

    def script(kv: KVStore) -> Any:
        saved, there = dtypes
        kv.set_optimizer(MOMENTUM)
        kv.init("h", value(saved))
        kv.push("h", value(saved))
        kv.save_optimizer_states(tmp_path / "states", dump_optimizer=True)
        kv.delete("h")
        kv.set_optimizer(PLAIN)
        kv.init("h", value(there))
        with pytest.raises(CheckpointError) as caught:
            kv.load_optimizer_states(tmp_path / "states")
        assert kv.current_optimizer() == PLAIN
        kv.push("h", value(there))
        kv.push("h", value(there))
        return str(caught.value), kv.pull("h")

    with Workers(kind, 1, 2) as workers:
        text, pulled = workers.run(script)[0]
    for word in ("key 'h'", *dtypes, "states"):
        assert word in text
    rows = pulled.values if is_row_sparse else pulled
    np.testing.assert_array_equal(np.asarray(rows).astype("f4"), np.full((3, 2), -1, "f4"))


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_older_files_of_states_tell_a_dtype_by_their_masters(tmp_path: Path, kind: str) -> None:
    def script(kv: KVStore) -> Any:
        kv.set_optimizer(MOMENTUM)
        kv.init("h", np.ones(3, HALF))
        kv.push("h", np.ones(3, HALF))
        kv.save_optimizer_states(tmp_path / "states")
        rewrite(tmp_path / "states", without=("dtypes",))
        kv.delete("h")
        kv.init("h", np.ones(3, np.float32))
        with pytest.raises(
            CheckpointError, match=r"'h' has dtype float16 or bfloat16 in .* float32 in this store"
        ):
            kv.load_optimizer_states(tmp_path / "states")
        kv.push("h", np.ones(3, np.float32))
        return kv.pull("h").shape

    with Workers(kind, 1, 1) as workers:
        assert workers.run(script)[0] == (3,)


@pytest.mark.parametrize("text", ["[", "[]", '{"h": 3}', "[" * 100_000])
def test_malformed_dtypes_in_a_file_are_an_error(tmp_path: Path, text: str) -> None:
    kv = kvstore.create("local")
    kv.set_optimizer(MOMENTUM)
    kv.init("h", np.ones(3, HALF))
    kv.save_optimizer_states(tmp_path / "states")
    rewrite(tmp_path / "states", metadata={"dtypes": text})
    with pytest.raises(CheckpointError, match="cannot load the dtypes"):
        kv.load_optimizer_states(tmp_path / "states")


# -- row-sparse keys ----------------------------------------------------------------------

SHAPE = (60, 5)
ROW_KEYS = ["rows", "dense"]


def some_rows(step: int) -> RowSparseArray:
    draw = np.random.default_rng(step)
    return RowSparseArray(
        draw.permutation(SHAPE[0])[:20], (1e-3 * draw.normal(size=(20, 5))).astype(HALF), SHAPE
    )


def begin_rows(kv: KVStore, chosen: optimizer.Optimizer) -> None:
    values = np.linspace(1, 2, 300).reshape(SHAPE).astype(HALF)
    kv.init("rows", RowSparseArray(np.arange(0, 60, 3), values[::3], SHAPE))
    kv.init("dense", values)
    kv.set_optimizer(chosen)


def train_rows(kv: KVStore, steps: range) -> list[Array]:
    for step in steps:
        kv.push(ROW_KEYS, [some_rows(step)] * 2)
    outs = [np.zeros(SHAPE, HALF) for _ in ROW_KEYS]
    kv.pull(ROW_KEYS, out=outs, ignore_sparse=False)
    return outs


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_rows_on_servers_have_masters_of_the_same_bits(
    tmp_path: Path, kind: str, lazy: bool
) -> None:
    chosen = MOMENTUM.replace(lazy_update=lazy)

    def whole(kv: KVStore) -> Any:
        begin_rows(kv, chosen)
        train_rows(kv, range(8))
        kv.save_checkpoint(tmp_path / kv.type)
        return train_rows(kv, range(8, 16))

    def resumed(kv: KVStore) -> Any:
        kv.load_checkpoint(tmp_path / "local")
        return train_rows(kv, range(8, 16))

    with Workers("local", 1) as workers:
        expected = workers.run(whole)[0]
    for script in (whole, resumed):
        with Workers(kind, 1, 3, **CONFIG) as workers:
            assert_same(workers.run(script)[0], expected)


@pytest.mark.parametrize("chosen", [PLAIN, MOMENTUM], ids=["plain", "momentum"])
@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_rows_of_a_checkpoint_without_masters_begin_at_their_values(
    tmp_path: Path, kind: str, chosen: optimizer.Optimizer
) -> None:
    def save(kv: KVStore) -> None:
        begin_rows(kv, chosen)
        train_rows(kv, range(3))
        kv.save_checkpoint(tmp_path)

    def load(kv: KVStore) -> Any:
        kv.load_checkpoint(tmp_path)
        loaded = [kv.pull(key) for key in ROW_KEYS]
        for _ in range(3):
            kv.push(ROW_KEYS, [RowSparseArray([0, 3], np.zeros((2, 5), HALF), SHAPE)] * 2)
        if chosen is PLAIN:
            assert [kv.pull(key).tobytes() for key in ["dense"]] == [loaded[1].tobytes()]
        return train_rows(kv, range(3, 6))

    with Workers("local", 1) as workers:
        workers.run(save)
    remove_masters(tmp_path)
    results = []
    for each in ("local", kind):
        with Workers(each, 1, 3, **CONFIG) as workers:
            results.append(workers.run(load)[0])
    assert_same(*results)
    assert results[0][0].any()
