"""The combinations of parameters that ``make test`` keeps."""

from __future__ import annotations

import itertools

import pytest
from combinations import covering


@pytest.mark.parametrize("together", [1, 2])
def test_each_few_values_are_left_together_and_none_is_lost(together: int) -> None:
    parameters = ["abcdef", "xyz", "01"]
    found = covering(*parameters, together=together)
    assert [each.values for each in found] == [*itertools.product(*parameters)]
    left = [each.values for each in found if not each.marks]
    assert len(left) == (6 if together == 1 else 18)
    for columns in itertools.combinations(range(3), together):
        wanted = {*itertools.product(*(parameters[column] for column in columns))}
        assert {tuple(values[column] for column in columns) for values in left} == wanted


def test_too_few_parameters_are_an_error() -> None:
    with pytest.raises(ValueError, match="more than 2 parameters, found 2"):
        covering("ab", "cd")
