"""``kv.steps`` in one process: a training that ends anywhere goes on to the same bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore as mx
from kvstore.errors import ArgumentTypeError, ArgumentValueError, CheckpointError

STOP = 7


class Ended(Exception):
    """The process dies here."""


def store() -> mx.KVStore:
    kv = mx.kv.create("local")
    kv.init("w", np.zeros(5, np.float32))
    kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.1, momentum=0.9))
    return kv


def train(directory: Path, ends_in: int | None = None, every: int = 2) -> Any:
    """Train from where the last call has ended; return the weights and what the worker has."""
    kv = store()
    state = {"draws": np.random.default_rng(1), "mean": np.zeros(5, np.float32)}
    mean = state["mean"]
    steps = kv.steps(STOP, state=state, checkpoint=directory, every=every)
    weights = kv.pull("w")
    for step in steps:
        gradient = (state["draws"].normal(size=5) + weights).astype(np.float32)
        kv.pushpull("w", gradient, out=weights)
        mean += weights
        if step == ends_in:
            raise Ended
    assert state["mean"] is mean, "filled in place"
    return weights.tobytes(), mean.tobytes(), state["draws"].random()


@pytest.mark.parametrize("every", [1, 2, 3, 100])
@pytest.mark.parametrize("ends_in", range(STOP))
def test_a_training_that_ends_in_any_step_goes_on_to_the_same_bits(
    tmp_path: Path, every: int, ends_in: int
) -> None:
    expected = train(tmp_path / "whole", every=every)
    with pytest.raises(Ended):
        train(tmp_path / "ended", ends_in, every)
    saved = list((tmp_path / "ended").glob("kvstore-step-*"))
    assert [path.name for path in saved] == (
        [f"kvstore-step-{ends_in // every * every:08}"] if ends_in >= every else []
    )
    assert train(tmp_path / "ended", every=every) == expected


def test_a_training_that_is_over_is_not_done_again(tmp_path: Path) -> None:
    expected = train(tmp_path)
    assert train(tmp_path) == expected
    assert [path.name for path in tmp_path.glob("*step-*")] == [f"kvstore-step-{STOP:08}"]
    steps = store().steps(STOP, {}, tmp_path, 1)
    assert (steps.first, list(steps), list(steps)) == (STOP, [], [])


def test_without_a_directory_the_steps_are_numbers_and_nothing_is_saved() -> None:
    steps = store().steps(3)
    assert (steps.first, list(steps), list(steps)) == (0, [0, 1, 2], [])
    assert list(store().steps(0)) == []


def test_a_step_that_is_left_is_not_counted(tmp_path: Path) -> None:
    for _ in store().steps(3, checkpoint=tmp_path, every=1):
        break
    assert store().steps(3, checkpoint=tmp_path, every=1).first == 0


def test_a_save_that_ends_before_its_last_file_leaves_the_earlier_one(tmp_path: Path) -> None:
    with pytest.raises(Ended):
        train(tmp_path, 4, every=2)
    saved, unfinished = (tmp_path / f"kvstore-step-0000000{number}" for number in (4, 6))
    shutil.copytree(saved, unfinished)
    (unfinished / "manifest.json").unlink()
    assert train(tmp_path, every=2) == train(tmp_path / "whole", every=2)
    assert [path.name for path in tmp_path.glob("*step-*")] == [f"kvstore-step-{STOP:08}"]


def test_files_of_others_in_the_directory_stay(tmp_path: Path) -> None:
    """Also those that look like checkpoints of ``kv.steps``, which may be of another training."""
    others = ["kvstore-step-00000001", "kvstore-step-00000099", "notes", "step-00000002"]
    for name in others:
        (tmp_path / name).mkdir()
    train(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted([*others, "latest.json", f"kvstore-step-{STOP:08}"])


def test_a_step_that_was_left_is_the_first_of_another_loop(tmp_path: Path) -> None:
    steps = store().steps(3, checkpoint=tmp_path, every=1)
    for _ in steps:
        break
    assert list(steps) == [0, 1, 2]


class Keeper:
    """Has a state as modules and optimizers of PyTorch have."""

    def __init__(self) -> None:
        self.state: Any = {"groups": [{"lr": 0.1, "betas": (0.9, 0.99)}], 1: None}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def saved_and_loaded(tmp_path: Path, state: Any, fresh: Any) -> Any:
    list(store().steps(1, state, tmp_path, 1))
    store().steps(1, fresh, tmp_path, 1)
    return fresh


def test_an_object_with_a_state_is_given_it_back(tmp_path: Path) -> None:
    keeper, fresh = Keeper(), Keeper()
    fresh.state = None
    assert saved_and_loaded(tmp_path, keeper, fresh).state == keeper.state


def test_a_dict_may_hold_such_objects_and_generators_and_plain_values(tmp_path: Path) -> None:
    def state() -> dict[str, Any]:
        return {
            "keeper": Keeper(),
            "new": np.random.Generator(np.random.MT19937(3)),
            "old": np.random.RandomState(3),
            "epoch": 4,
            "history": [(0, 0.5)],
        }

    before: dict[str, Any] = state()
    after: dict[str, Any] = state()
    before["new"].random(3)
    before["old"].rand(3)
    before["keeper"].state = 5
    before["epoch"], after["history"], after["more"] = 5, None, 1
    found = saved_and_loaded(tmp_path, before, after)
    assert found.keys() == {*before, "more"}, "what the script has added stays"
    assert (found["epoch"], found["history"], found["keeper"].state) == (5, [(0, 0.5)], 5)
    assert found["new"].random() == before["new"].random()
    assert found["old"].rand() == before["old"].rand()


def test_tensors_come_back_as_tensors(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(1)
    model, fresh = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    adam.step()
    half = torch.ones(2, dtype=torch.bfloat16)
    before = {"model": model, "adam": adam, "half": half, "draws": torch.Generator(), "a": half}
    after = {"model": fresh, "adam": torch.optim.Adam(fresh.parameters())}
    before["a"] = np.arange(2)
    after |= {"draws": torch.Generator()}
    before["draws"].manual_seed(5)
    found = saved_and_loaded(tmp_path, before, after)
    assert torch.equal(fresh.weight, model.weight)
    assert torch.equal(
        found["adam"].state_dict()["state"][0]["exp_avg"],
        adam.state_dict()["state"][0]["exp_avg"],
    )
    assert found["half"].dtype == torch.bfloat16
    assert torch.equal(found["half"], half)
    assert isinstance(found["a"], np.ndarray)
    assert found["draws"].initial_seed() == 5


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"stop": 1.5}, ArgumentTypeError, "stop must be an int, got 1.5"),
        ({"stop": True}, ArgumentTypeError, "stop must be an int, got True"),
        ({"stop": -1}, ArgumentValueError, "stop must be at least 0, got -1"),
        ({"checkpoint": "x"}, ArgumentValueError, "checkpoint and every belong together"),
        ({"every": 2}, ArgumentValueError, "checkpoint and every belong together"),
        ({"checkpoint": 3, "every": 2}, ArgumentTypeError, "a file name must be a str"),
        ({"state": 3}, ArgumentTypeError, "state must be a dict, or an object with state_dict"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        store().steps(**{"stop": 3, **arguments})


def test_a_state_or_directory_that_cannot_be_saved_is_refused_before_the_first_step(
    tmp_path: Path,
) -> None:
    for wrong in ({"a": 1, "b": object()}, {"b": {"c": np.random.default_rng()}}, {"b": 1j}):
        with pytest.raises(CheckpointError, match=r"^state\['b'\] cannot be saved: an object may"):
            store().steps(1, wrong, tmp_path, 1)
        with pytest.raises((ArgumentTypeError, ArgumentValueError), match=r"^state\['b'\] cannot"):
            store().steps(1, wrong)  # not only where it is saved
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot read .*: Not a directory"):
        store().steps(1, None, tmp_path / "file", 1)


def test_arrays_of_any_library_are_filled_in_place(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    def state(value: float) -> dict[str, Any]:
        made = {
            "leaf": torch.full((2,), value, requires_grad=True),
            "parameter": torch.nn.Parameter(torch.full((2,), value)),
            "nd": mx.nd.full((2,), value),
            "other shape": np.full(3 if value else 2, value),
        }
        made["frozen"] = np.full(2, value)
        made["frozen"].flags.writeable = False
        return made

    before, after = state(5.0), state(0.0)
    kept = dict(after)
    found = saved_and_loaded(tmp_path, before, after)
    assert {name for name in kept if found[name] is kept[name]} == {"leaf", "parameter", "nd"}
    assert found["leaf"].tolist() == found["parameter"].tolist() == [5, 5]
    assert found["nd"].asnumpy().tolist() == found["frozen"].tolist() == [5, 5]
    assert found["other shape"].tolist() == [5, 5, 5]


def test_a_value_that_does_not_take_what_was_saved_is_named(tmp_path: Path) -> None:
    old, new = np.random.default_rng(1), np.random.Generator(np.random.MT19937(1))
    with pytest.raises(CheckpointError, match=r"^state\['draws'\] does not take what was"):
        saved_and_loaded(tmp_path, {"draws": old}, {"draws": new})


def test_progress_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    train(tmp_path)
    with pytest.raises(CheckpointError, match=f"progress of {STOP} steps, but stop is 3"):
        store().steps(3, {}, tmp_path, 1)
    list(store().steps(1, None, tmp_path / "bare", 1))
    with pytest.raises(CheckpointError, match="without the states of workers"):
        store().steps(1, {}, tmp_path / "bare", 1)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": "other"}, "expected the names format, has_states"),
        ({"version": 9}, "has version 9, expected 1"),
        ({"num_steps": -1}, "expected numbers of at least 0"),
        ({"num_workers": "2"}, "expected numbers of at least 0"),
        ({"num_workers": 2}, "has the states of 2 workers, this job has 1"),
        ({"more": 1}, "is damaged: expected the names"),
    ],
)
def test_a_wrong_note_of_the_progress_is_refused(
    tmp_path: Path, change: dict[str, Any], text: str
) -> None:
    train(tmp_path)
    path = tmp_path / "latest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError, match=text):
        train(tmp_path)


def test_a_damaged_or_missing_state_is_refused_and_nothing_is_loaded(tmp_path: Path) -> None:
    train(tmp_path)
    path = tmp_path / f"kvstore-step-{STOP:08}" / "worker-0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    kv = store()
    with pytest.raises(CheckpointError, match=r"worker-0\.safetensors is damaged"):
        kv.steps(STOP, {}, tmp_path, 1)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"worker-0\.safetensors is missing"):
        kv.steps(STOP, {}, tmp_path, 1)
    np.testing.assert_array_equal(kv.pull("w"), np.zeros(5))
