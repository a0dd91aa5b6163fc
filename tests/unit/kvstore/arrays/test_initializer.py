"""Initializers: what the values look like, by the name of the parameter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.arrays import initializer
from kvstore.errors import ArgumentTypeError, ArgumentValueError, NotSupportedError


def values(made: Any, name: str = "fc1_weight", shape: tuple[int, ...] = (80, 200)) -> Any:
    return made(name, shape, np.random.default_rng(3))


@pytest.mark.parametrize(
    ("name", "numbers", "deviation", "largest"),
    [
        ("uniform", {"scale": 0.3}, 0.3 / np.sqrt(3), 0.3),
        ("normal", {"sigma": 0.2}, 0.2, 2.0),
        ("Xavier", {}, np.sqrt(1 / 140), np.sqrt(3 / 140)),
        ("xavier", {"factor_type": "out", "magnitude": 6}, np.sqrt(2 / 80), np.sqrt(6 / 80)),
        ("xavier", {"rnd_type": "gaussian", "factor_type": "in"}, np.sqrt(3 / 200), 2.0),
        ("msra", {"slope": 0.0, "factor_type": "in"}, np.sqrt(2 / 200), 2.0),
    ],
)
def test_weights_spread_as_the_formula_says(
    name: str, numbers: dict[str, Any], deviation: float, largest: float
) -> None:
    drawn = values(initializer.create(name, **numbers))
    assert drawn.dtype == np.float32
    assert drawn.std() == pytest.approx(deviation, rel=0.03)
    assert abs(drawn.mean()) < deviation / 20
    assert np.abs(drawn).max() <= np.float32(largest)


def test_a_filter_counts_its_area() -> None:
    drawn = values(initializer.Xavier(factor_type="in"), "conv_weight", (30, 20, 5, 5))
    assert np.abs(drawn).max() <= np.sqrt(3 / 500)
    assert drawn.std() == pytest.approx(np.sqrt(1 / 500), rel=0.03)


@pytest.mark.parametrize("shape", [(20, 30), (30, 20), (6, 2, 3)])
def test_orthogonal_rows_or_columns_are_orthonormal(shape: tuple[int, ...]) -> None:
    drawn = values(initializer.create("orthogonal", scale=2.0), shape=shape).reshape(shape[0], -1)
    short = drawn if drawn.shape[0] <= drawn.shape[1] else drawn.T
    assert np.allclose(short @ short.T, 4 * np.eye(len(short)), atol=1e-5)


@pytest.mark.parametrize("name", ["uniform", "normal", "xavier", "msra", "orthogonal", "one"])
def test_what_is_no_weight_begins_at_0_or_1(name: str) -> None:
    made = initializer.create(name)
    assert values(made, "fc1_bias", (5,)).tolist() == [0] * 5
    assert values(made, "bn_moving_mean", (2,)).tolist() == [0, 0]
    assert values(made, "bn_gamma", (2,)).tolist() == [1, 1]


def test_constants_and_equal_generators() -> None:
    assert set(values(initializer.create("constant", value=0.5)).ravel()) == {0.5}
    assert set(values(initializer.create("zero")).ravel()) == {0.0}
    assert set(values(initializer.create("one")).ravel()) == {1.0}
    assert np.array_equal(values(initializer.Uniform()), values(initializer.Uniform()))


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(ArgumentValueError, match="named 'xaver'; known: constant, msra"):
        initializer.create("xaver")
    with pytest.raises(ArgumentValueError, match="rnd_type must be uniform or gaussian"):
        initializer.Xavier("normal")
    with pytest.raises(ArgumentValueError, match="factor_type must be in, out or avg"):
        initializer.Xavier(factor_type="both")
    with pytest.raises(ArgumentValueError, match=r"Xavier needs .* scale has shape \(3,\)"):
        values(initializer.Xavier(), "scale", (3,))


def test_names_choose_among_initializers_by_the_first_pattern_that_matches() -> None:
    mixed = initializer.Mixed(
        ["gate_.*", ".*weight", ".*"],
        [initializer.One(), initializer.Constant(3), initializer.Zero()],
    )
    found = [values(mixed, name, (2, 2)) for name in ("gate_w", "fc_weight", "fc_w", "fc_bias")]
    assert [each.max() for each in found] == [1, 3, 0, 0]
    assert [each.min() for each in found] == [1, 3, 0, 0]
    with pytest.raises(
        ArgumentValueError, match=r"no pattern matches the parameter 'b' .patterns: a.; add"
    ):
        values(initializer.Mixed(["a"], [initializer.Zero()]), "b")
    with pytest.raises(ArgumentValueError, match="got 2 patterns and 1 initializers"):
        initializer.Mixed(["a", "b"], [initializer.Zero()])


def test_an_initializer_of_ones_own_is_created_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(initializer, "_BY_NAME", dict(initializer._BY_NAME))

    @initializer.register
    class Halves(initializer.Initializer):
        def _init_weight(self, name: str, arr: Any) -> None:
            arr[:] = 0.5

    made = initializer.create("halves")
    assert type(made) is Halves
    assert values(made, shape=(2, 3)).tolist() == [[0.5] * 3] * 2
    assert values(made, "fc_bias", (2,)).tolist() == [0, 0]
    with pytest.raises(NotSupportedError, match=r"Initializer|_ByName must override weight"):
        values(initializer.Initializer())
    with pytest.raises(ArgumentTypeError, match="needs a subclass of Initializer, got 'x'"):
        initializer.register("x")  # type: ignore[type-var]
