"""Views of values in the memory of servers: no copies, no half-updated values, on any servers."""

from __future__ import annotations

import os
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from workers import Workers

from kvstore import optimizer
from kvstore.errors import NotSupportedError
from kvstore.stores.views import ShownBytes, address_of

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd here")

LARGE = np.zeros((300, 300), np.float32)
SMALL = np.zeros(10, np.float32)
HUGE = np.zeros(2_400_000, np.float32)
"""In ten parts, and in two arenas of a server."""
KEYS = {"large": LARGE, "small": SMALL, "huge": HUGE}
STEPS = 3


def started(kv: Any) -> None:
    kv.set_optimizer(optimizer.create("sgd", learning_rate=-1.0))
    kv.init(list(KEYS), list(KEYS.values()))


def is_live(kv: Any, key: str) -> bool:
    """Whether new values appear in the view without a copy."""
    return bool(kv._views.by_key[key].is_live)


def renewed(kv: Any, views: list[Any]) -> None:
    for step in range(1, STEPS + 1):
        kv.pushpull(list(KEYS), [value + 1 for value in KEYS.values()], out=views)
        for view in views:
            assert (view == step * kv.num_workers).all()


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("shm", [True, False])
def test_views_show_each_round_wherever_the_servers_are(servers: int, shm: bool) -> None:
    def script(kv: Any) -> list[bool]:
        started(kv)
        views = kv.view(list(KEYS))
        live = [is_live(kv, key) for key in KEYS]
        renewed(kv, views)
        assert [address_of(each) for each in kv.view(list(KEYS))] == list(map(address_of, views))
        return live

    with Workers("dist_sync", 2, servers, shm=shm) as workers:
        found = workers.run(script)
    if shm and servers == 1:
        assert found == [[True, False, True]] * 2  # a small value is copied
    if not shm:
        assert found == [[False] * 3] * 2


@pytest.fixture
def two() -> Any:
    with Workers("dist_sync", 2, 1) as workers:
        yield workers


def both(two: Workers, script: Callable[[Any], Any]) -> list[Any]:
    """Run a script on a store of its own, which is closed afterwards."""

    def run(kv: Any) -> Any:
        with kv:
            started(kv)
            return script(kv)

    return two.run(run, two.create())


def test_a_view_that_is_kept_beyond_a_push_keeps_its_value(two: Workers) -> None:
    def script(kv: Any) -> None:
        kept = kv.view("large")
        part = kept[7]
        assert is_live(kv, "large")
        kv.push("large", LARGE + 1)
        kv.wait("large")
        assert (kept == 0).all()
        assert (kv.view("large") == 2).all()
        new = kv.view("large")
        kv.pushpull("large", LARGE + 1, out=new)
        assert (new == 4).all()
        assert (part == 0).all()

    both(two, script)


def test_no_view_is_ever_seen_half_updated(two: Workers) -> None:
    """Each value has one number everywhere; a thread looks while the other worker pushes."""

    def script(kv: Any) -> set[int]:
        seen: set[int] = set()
        for step in range(12):
            view = kv.view("huge")
            ends = threading.Event()

            def look(view: Any = view, ends: threading.Event = ends) -> None:
                while not ends.wait(0.0005):
                    assert view.min() == view.max()

            thread = threading.Thread(target=look)
            thread.start()
            try:
                if step % 2:  # a push ends the view, which keeps its value
                    kv.push("huge", HUGE + 1)
                    kv.wait("huge")
                    assert (view == 2 * step).all()
                else:  # the other worker's push alone changes nothing
                    kv.barrier()
                    if kv.rank == 1:
                        kv.push("huge", HUGE + 1)
                    kv.barrier()
                    assert (view == 2 * step).all()
                    if kv.rank == 0:
                        kv.push("huge", HUGE + 1)
            finally:
                ends.set()
                thread.join()
            seen.add(int(view[0]))
        return seen

    assert both(two, script) == [{2 * step for step in range(12)}] * 2


def test_writing_to_the_memory_damages_neither_the_server_nor_other_workers(two: Workers) -> None:
    def script(kv: Any) -> float:
        view = kv.view("large")
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 7.0
        assert kv.views.written() == []
        if kv.rank == 0:
            kv.views.live()["large"][0, 0] = 7.0
            assert view[0, 0] == 7.0
        assert kv.views.written() == (["large"] if kv.rank == 0 else [])
        kv.barrier()
        return float(kv.pull("large").max())

    assert both(two, script) == [0.0, 0.0]


def test_a_deleted_key_leaves_its_value_to_the_views_of_all_workers(two: Workers) -> None:
    def script(kv: Any) -> None:
        kv.pushpull("large", LARGE + 1, out=LARGE.copy())
        view = kv.view("large")
        kv.delete("large")
        for round_ in range(3):  # the memory is used again
            kv.init("large", LARGE + 9 + round_)
            kv.delete("large")
        assert (view == 2).all()

    both(two, script)


def test_a_closed_store_leaves_its_values_to_the_views(two: Workers) -> None:
    def script(kv: Any) -> Any:
        kv.barrier()
        return kv.view("large")

    for view in both(two, script):
        assert (view == 0).all()


def test_a_loaded_checkpoint_does_not_change_a_view(two: Workers, tmp_path: pathlib.Path) -> None:
    def script(kv: Any) -> None:
        kv.save_checkpoint(tmp_path)
        kv.barrier()
        kv.push("large", LARGE + 1)
        view = kv.view("large")
        kv.load_checkpoint(tmp_path)
        assert (view == 2).all()
        assert (kv.view("large") == 0).all()

    both(two, script)


def test_encoded_pulls_have_views_of_what_comes_through_the_codec(two: Workers) -> None:
    def script(kv: Any) -> None:
        before = kv.view("large")
        kv.set_gradient_compression({"type": "fp16", "pull": {"type": "fp16"}})
        kv.push("large", LARGE + 1)
        view = kv.view("large")
        assert not is_live(kv, "large")
        assert (view == kv.pull("large")).all()
        kv.pushpull("large", LARGE + 1, out=view)
        assert (view == 4).all()
        assert (before == 0).all()

    both(two, script)


def test_calls_that_come_together_renew_views(two: Workers) -> None:
    def script(kv: Any) -> None:
        view, other = kv.view(["large", "small"])
        kv.wait([kv.pull_async("large", out=view), kv.pull_async("small", out=other)])
        futures = [
            kv.pushpull_async(key, KEYS[key] + 1, out=out)
            for key, out in (("large", view), ("small", other))
        ]
        kv.wait(futures)
        assert (view == 2).all()
        assert (other == 2).all()

    both(two, script)


def test_an_asynchronous_store_says_that_it_has_no_views() -> None:
    def script(kv: Any) -> None:
        kv.set_optimizer(optimizer.create("sgd"))
        kv.init("w", LARGE)
        with pytest.raises(NotSupportedError, match=r"dist_async .*at any time; call pull"):
            kv.view("w")

    with Workers("dist_async", 2, 1) as workers:
        workers.run(script)


def test_a_training_step_copies_no_weight(two: Workers) -> None:
    """Gradients in the store's memory and weights in views: nothing is received anywhere."""

    def script(kv: Any) -> None:
        gradient, view = kv.zeros(HUGE.shape), kv.view("huge")
        gradient[...] = 1.0
        landing = kv._landing
        skipped = []

        def noting(filled: Any) -> Any:
            found = landing(filled)
            skipped.extend(type(memory) is ShownBytes for memory in found.memories)
            return found

        kv._landing = noting
        kv.pushpull("huge", gradient, out=view)
        assert skipped == [True]
        assert (view == 2).all()

    both(two, script)


def test_a_call_under_way_is_not_lost_when_the_next_push_ends_its_view(two: Workers) -> None:
    def script(kv: Any) -> None:
        view = kv.view("huge")
        if kv.rank == 0:
            kv.barrier()  # its calls come late, so that those of worker 1 are under way
        first = kv.pushpull_async("huge", HUGE + 1, out=view)
        kv.push("huge", HUGE + 1)
        if kv.rank == 1:
            kv.barrier()
        kv.wait(first)
        assert (view == 2).all()
        assert (kv.view("huge") == 4).all()

    both(two, script)


def test_keys_of_one_message_may_be_encoded_and_live(two: Workers) -> None:
    def script(kv: Any) -> None:
        rules = [{"type": "fp16", "pull": {"type": "fp16"}, "only": ["small"]}]
        kv.set_gradient_compression(rules)
        out, view = np.empty_like(SMALL), kv.view("large")
        assert is_live(kv, "large")
        kv.pushpull(["small", "large"], [SMALL + 1, LARGE + 1], out=[out, view])
        assert (out == 2).all()
        assert (view == 2).all()
        assert (kv.view(["small", "large"])[1] == 2).all()

    both(two, script)


def test_a_view_may_be_pushed_while_the_call_renews_it(two: Workers) -> None:
    def script(kv: Any) -> None:
        kv.init("other", HUGE)
        view, out = kv.view("huge"), np.empty_like(HUGE)
        for step in range(3):
            kv.pushpull(["huge", "other"], [HUGE + 1, view], out=[view, out])
            assert (view == 2 * step + 2).all()
        assert (out == 2 * (0 + 2 + 4)).all()

    both(two, script)
