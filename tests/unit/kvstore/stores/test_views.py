"""Views of stores in one process, and the table of views that all stores share."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvstore import RowSparseArray, create, optimizer
from kvstore.arrays.dtypes import bfloat16
from kvstore.errors import NotSupportedError, UnknownKeyError, ValueMismatchError
from kvstore.stores.base import KVStore
from kvstore.stores.views import ShownBytes, Views, address_of

LARGE = np.zeros((300, 300), np.float32)
"""Has memory of its own in a local store, so that its view is live."""
SMALL = np.zeros(10, np.float32)
SHAPES = {"large": LARGE, "small": SMALL}


@pytest.fixture(params=["local", "device"])
def kv(request: pytest.FixtureRequest) -> Iterator[KVStore]:
    with create(request.param) as store:
        store.init(list(SHAPES), list(SHAPES.values()))
        yield store


def added(kv: KVStore) -> None:
    kv.set_optimizer(optimizer.create("sgd", learning_rate=-1.0))


@pytest.mark.parametrize("key", SHAPES)
def test_a_view_shows_the_value_and_cannot_be_written(kv: KVStore, key: str) -> None:
    kv.push(key, SHAPES[key] + 3)
    view = kv.view(key)
    assert (view == 3).all()
    assert (view.shape, view.dtype) == (SHAPES[key].shape, np.float32)
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1.0


@pytest.mark.parametrize("key", SHAPES)
def test_a_push_and_pull_that_has_it_as_out_renews_it(kv: KVStore, key: str) -> None:
    added(kv)
    view = kv.view(key)
    for step in range(1, 4):
        kv.pushpull(key, SHAPES[key] + 1, out=view)
        assert (view == step).all()
    kv.wait(kv.pushpull_async(key, SHAPES[key] + 1, out=view))
    assert (view == 4).all()
    assert address_of(kv.view(key)) == address_of(view)


@pytest.mark.parametrize("key", SHAPES)
def test_a_view_that_is_kept_beyond_a_push_keeps_its_value(kv: KVStore, key: str) -> None:
    added(kv)
    kept = kv.view(key)
    kv.push(key, SHAPES[key] + 1)
    assert (kept == 0).all()
    new = kv.view(key)
    assert (new == 1).all()
    kv.pushpull(key, SHAPES[key] + 1, out=new)
    assert (kept == 0).all()
    assert (new == 2).all()
    with pytest.raises(ValueMismatchError, match="read-only"):
        kv.pull(key, out=kept)


def test_lists_of_keys_may_mix_views_and_other_arrays(kv: KVStore) -> None:
    added(kv)
    view, own = kv.view("large"), np.empty_like(SMALL)
    kv.pushpull(["large", "small"], [LARGE + 1, SMALL + 2], out=[view, own])
    assert (view == 1).all()
    assert (own == 2).all()
    kv.pull(["small", "large"], out=[own, [view]])
    assert (own == 2).all()
    both = kv.view(["small", "large", "small"])
    assert [each.mean() for each in both] == [2, 1, 2]


def test_a_pull_into_a_view_changes_nothing(kv: KVStore) -> None:
    view = kv.view("large")
    kv.pull("large", out=view)
    kv.wait(kv.pull_async("large", out=view))
    assert address_of(kv.view("large")) == address_of(view)


def test_other_outs_of_a_push_end_it(kv: KVStore) -> None:
    added(kv)
    view, own = kv.view("large"), np.empty_like(LARGE)
    kv.pushpull("large", LARGE + 1, out=own)
    assert (view == 0).all()
    assert (own == 1).all()
    assert (kv.view("large") == 1).all()


def test_a_local_store_copies_only_what_somebody_still_uses(kv: KVStore) -> None:
    place = address_of(kv.view("large"))
    kv.push("large", LARGE + 1)  # nobody has the array
    view = kv.view("large")
    assert address_of(view) == place
    kv.push("large", LARGE + 2)
    assert address_of(kv.view("large")) != place
    assert (view == 1).all()


def test_a_deleted_key_leaves_its_value_to_the_view(kv: KVStore) -> None:
    kv.push("large", LARGE + 3)
    view = kv.view("large")
    kv.delete("large")
    kv.init("large", LARGE + 9)
    kv.push("large", LARGE + 8)
    assert (view == 3).all()


def test_a_closed_store_leaves_its_value_to_the_view(kv: KVStore) -> None:
    view = kv.view("large")
    kv.close()
    assert (view == 0).all()


def test_a_loaded_checkpoint_does_not_change_a_view(kv: KVStore, tmp_path: pathlib.Path) -> None:
    kv.save_checkpoint(tmp_path)
    kv.push("large", LARGE + 3)
    view = kv.view("large")
    kv.load_checkpoint(tmp_path)
    assert (view == 3).all()
    assert (kv.view("large") == 0).all()


def test_an_updater_that_moves_the_value_is_followed(kv: KVStore) -> None:
    def updater(key: Any, received: Any, local: Any) -> None:
        local += received

    kv.set_updater(updater)
    view = kv.view("large")
    for step in range(1, 3):
        kv.pushpull("large", LARGE + 1, out=view)
        assert (view == step).all()


def test_encoded_pulls_show_what_comes_through_the_codec(kv: KVStore) -> None:
    before = kv.view("large")
    kv.set_gradient_compression({"type": "fp16", "pull": {"type": "fp16"}})
    kv.push("large", LARGE + 1 / 3)
    assert (kv.view("large") == kv.pull("large")).all()
    assert (before == 0).all()


def test_bfloat16_has_views_too(kv: KVStore) -> None:
    kind = bfloat16()
    kv.init("b", LARGE.astype(kind))
    view = kv.view("b")
    kv.pushpull("b", (LARGE + 2).astype(kind), out=view)
    assert view.dtype == kind
    assert (view.astype(np.float32) == 2).all()


def test_what_has_no_view_is_said(kv: KVStore) -> None:
    kv.init("rows", RowSparseArray.zeros((5, 2)))
    with pytest.raises(NotSupportedError, match=r"'rows' is row-sparse.*call row_sparse_pull"):
        kv.view("rows")
    with pytest.raises(UnknownKeyError, match="'nothing'"):
        kv.view(["large", "nothing"])


# -- the table ----------------------------------------------------------------------------


def test_a_table_forgets_views_that_nobody_uses() -> None:
    kept: list[object] = []
    views = Views(lambda key, _: kept.append(key))
    view = views.add("w", np.zeros(4), is_live=True)
    part = view[1:3]
    del view
    assert views.array("w") is not None
    views.end(["w"])
    assert kept == ["w"]
    views.add("w", np.zeros(4), is_live=True)
    views.end()
    assert kept == ["w"]
    assert not views.by_key
    del part


def test_only_the_whole_view_of_the_same_key_is_opened() -> None:
    views = Views(lambda key, memory: None)
    view = views.add("w", np.zeros((2, 3)), is_live=False)
    other = np.zeros((2, 3))
    for key, out in (
        ("w", other),
        ("v", view),
        ("w", view[:1]),
        ("w", view.T),
        ("w", view.reshape(6)),
    ):
        found, keys = views.opened(key, out)
        assert found is out
        assert keys == set()
    found, keys = views.opened("w", view)
    assert found.flags.writeable
    assert keys == {"w"}
    assert not view.flags.writeable


def test_the_memory_of_live_views_can_be_had_for_libraries_that_write() -> None:
    views = Views(lambda key, memory: None)
    own = views.add("own", np.zeros((2, 3)), is_live=False)
    live = views.add("live", np.zeros((2, 3), np.float16), is_live=True)
    found = views.live()
    assert list(found) == ["live"]
    found["live"][1, 2] = 5.0
    assert live[1, 2] == 5.0
    assert own.sum() == 0


def test_a_value_that_arrives_after_its_view_has_ended_is_copied() -> None:
    """A push has ended it, while an earlier call that fills it was under way."""
    views = Views(lambda key, memory: None)
    view = views.add("w", np.zeros(4), is_live=True)
    memory = views.live()["w"].view(np.uint8)
    targets = [np.zeros(32, np.uint8), memory]
    views.watch(["v", "w"], targets)
    assert type(targets[0]) is np.ndarray
    target = targets[1]
    assert type(target) is ShownBytes
    value = np.ones(4).view(np.uint8)
    target.receive(0, 16, value[:16])
    assert view.sum() == 0  # the store writes there itself
    views.end(["w"])
    target.receive(0, 16, value[:16])
    assert view.tolist() == [1, 1, 0, 0]
    targets = [memory]
    views.watch(["w"], targets)
    assert targets[0] is memory


def test_a_view_that_is_one_of_several_outs_is_not_opened(kv: KVStore) -> None:
    view, own = kv.view("large"), np.empty_like(LARGE)
    for key, value, out in (
        ("large", LARGE, [own, view]),
        (["large", "large"], [LARGE, LARGE], [own, view]),
    ):
        with pytest.raises(ValueMismatchError, match=r"read-only.*the only out of its key"):
            kv.pushpull(key, value, out=out)
    assert (kv.view("large") == 0).all()


def test_keys_may_be_integers_of_numpy(kv: KVStore) -> None:
    with create(kv.type) as other:
        other.init(np.int64(3), LARGE)
        view = other.view(np.int64(3))
        other.pushpull(np.int64(3), LARGE + 1, out=view)
        assert (view == 1).all()


def test_a_view_may_be_pushed_while_the_call_renews_it(kv: KVStore) -> None:
    kv.init("other", LARGE)
    kv.push("large", LARGE + 1)
    view, out = kv.view("large"), np.empty_like(LARGE)
    kv.pushpull(["large", "other"], [LARGE + 5, view], out=[view, out])
    assert (view == 5).all()
    assert (out == 1).all()
    kv.pushpull("large", [LARGE + 1, LARGE + 2, view], out=view)
    assert (view == 8).all()


def test_states_can_be_loaded_under_a_view(kv: KVStore, tmp_path: pathlib.Path) -> None:
    kv.set_optimizer(optimizer.create("sgd", learning_rate=-1.0, momentum=0.5))
    kv.push("large", LARGE + 1)
    kv.save_optimizer_states(tmp_path / "states")
    view = kv.view("large")
    kv.load_optimizer_states(tmp_path / "states")
    kv.pushpull("large", LARGE, out=view)
    assert (view == 1.5).all()
