"""The estimate of a step and its advice: whatever it says follows from what was measured."""

from __future__ import annotations

import pytest

from kvstore.bench import __main__ as bench
from kvstore.bench.estimate import (
    LARGE_BYTES,
    MIDDLE_BYTES,
    MODELS,
    Alternative,
    Costs,
    Model,
    advise,
    busy_share,
    costs_from,
    costs_text,
    estimate_text,
    load_text,
    model_from_shapes,
)
from kvstore.errors import ArgumentValueError

MODEL = Model("toy", 25_000_000, 101)  # 100 MB
COSTS = Costs(
    "2 workers, 1 server, TCP",
    call_ms=1.0,
    key_ms=0.02,
    mb_ms=1.0,
    empty_mb_ms=1.0,
    loop_key_ms=0.2,
    barrier_ms=0.3,
)


def times(**changed: float) -> dict[str, float]:
    per_mb = (LARGE_BYTES - MIDDLE_BYTES) / 1e6
    base = {
        "small": 1.0,
        "list": 1.0 + 99 * 0.02,
        "loop": 20.0,
        "middle": 5.0,
        "large": 5.0 + 2.0 * per_mb,
        "empty_middle": 4.0,
        "empty_large": 4.0 + 1.5 * per_mb,
        "barrier": 0.3,
    }
    return {**base, **changed}


def test_costs_are_the_slopes_between_what_was_measured() -> None:
    found = costs_from("here", times())
    assert found.setup == "here"
    assert found.call_ms == 1.0
    assert found.key_ms == pytest.approx(0.02)
    assert found.mb_ms == pytest.approx(2.0)
    assert found.empty_mb_ms == pytest.approx(1.5)
    assert (found.loop_key_ms, found.barrier_ms) == (0.2, 0.3)


def test_noise_makes_no_cost_negative() -> None:
    found = costs_from("here", times(list=0.5, large=1.0, empty_large=0.0))
    assert (found.key_ms, found.mb_ms, found.empty_mb_ms) == (0.0, 0.0, 0.0)


def test_a_step_is_the_call_and_its_keys_and_its_bytes() -> None:
    assert COSTS.step_ms(MODEL) == pytest.approx(1 + 100 * 0.02 + 100)
    assert COSTS.loop_step_ms(MODEL) == pytest.approx(101 * 0.2 + 100)
    assert Costs("", 1, 0, 1.0, 0.6, 0, 0).empty_step_ms(MODEL) == pytest.approx(61)


def test_advice_begins_with_what_saves_most_and_leaves_noise_out() -> None:
    faster = Costs("", 1.0, 0.02, 0.4, 0.4, 0.2, 0.3)
    hardly = Costs("", 1.0, 0.02, 0.98, 0.98, 0.2, 0.3)
    slower = Costs("", 1.0, 0.02, 3.0, 3.0, 0.2, 0.3)
    costs = Costs("", 1.0, 0.02, 1.0, 0.8, 0.2, 0.3)
    others = [
        Alternative("use 2 servers", slower),
        Alternative("set PS_SHM=1", faster),
        Alternative("do something else", hardly),
    ]
    found = advise(MODEL, costs, others)
    assert [advice.text for advice in found] == [
        "set PS_SHM=1: 43.0 ms instead of 103 ms",
        "keep gradients and weights in arrays of kv.empty(): 83.0 ms instead of 103 ms",
    ]
    assert [round(advice.saving_ms) for advice in found] == [60, 20]


def test_where_nothing_helps_that_is_said() -> None:
    assert advise(MODEL, COSTS, []) == []
    text = estimate_text(MODEL, COSTS, [])
    assert "nothing else that was tried saves 5% of it" in text
    assert "toy (101 tensors, 100.0 MB)" in text
    assert "103 ms by one call with all keys: 100 ms for its bytes, 2.00 ms" in text
    assert "120 ms by a loop" in text


def test_the_best_advice_is_marked() -> None:
    faster = Costs("", 1.0, 0.02, 0.4, 0.4, 0.2, 0.3)
    text = estimate_text(MODEL, COSTS, [Alternative("set PS_SHM=1", faster)])
    assert text.endswith("helps most: set PS_SHM=1: 43.0 ms instead of 103 ms")


def test_costs_are_printed_with_the_cluster_they_belong_to() -> None:
    text = costs_text(COSTS)
    assert text.startswith("2 workers, 1 server, TCP, push and pull:\n")
    assert "each further key in it    0.020 ms" in text


def test_shapes_are_read_in_the_ways_people_write_them() -> None:
    text = "64, 3, 7, 7\n# a comment\n\n(64,)\n[512x2048]  # the last\n10\n"
    found = model_from_shapes(text, "net.txt")
    assert found == Model("net.txt", 64 * 3 * 49 + 64 + 512 * 2048 + 10, 4)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("3, 4\nconv1 64\n", "line 2 of net.txt is not a shape: 'conv1 64'"),
        ("-3\n", "line 1 of net.txt is not a shape"),
        ("# nothing\n", "net.txt does not contain a shape"),
    ],
)
def test_what_is_no_shape_is_named_by_its_line(text: str, sentence: str) -> None:
    with pytest.raises(ArgumentValueError, match=sentence):
        model_from_shapes(text, "net.txt")


def test_known_models_have_the_sizes_of_the_benchmarks() -> None:
    from benchmarks.models import MODELS as SHAPES

    for name in "lenet", "resnet110", "resnet50":
        text = "\n".join(str(shape) for shape in SHAPES[name]())
        assert model_from_shapes(text, name) == MODELS[name]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--parameters", "10"],
        ["--parameters", "10", "--tensors", "0"],
        ["--model", "resnet50", "--parameters", "10", "--tensors", "1"],
        ["--shapes", "/there/is/no/such/file"],
        ["--model", "resnet5"],
    ],
)
def test_a_model_that_makes_no_sense_is_refused_before_anything_starts(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(arguments)
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--shapes", "/no/shapes.txt"], "cannot read /no/shapes.txt: No such file or direct"),
        (["--seconds", "-3"], "--seconds: expected a number of seconds greater than 0, got -3"),
        (["--seconds", "0"], "--seconds: expected a number of seconds greater than 0, got 0"),
        (["--seconds", "soon"], "--seconds: expected a number of seconds greater than 0, got soon"),
    ],
)
def test_a_measurement_that_makes_no_sense_is_refused(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(options)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_how_busy_the_machine_is_follows_from_two_readings_of_its_processors() -> None:
    before = "cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 ..."
    after = "cpu  160 0 70 900 70 0 0 0 0 0\ncpu0 ..."  # 80 of 200 ticks
    assert busy_share(before, after) == pytest.approx(0.4)
    assert busy_share(before, before) == 0.0
    assert busy_share("", "intr 5") == 0.0


def test_a_busy_machine_is_warned_of() -> None:
    assert load_text(0.25, 0.03, 2) == "before: load 0.25, others use 3% of 2 processors"
    first, second = load_text(3.5, 0.9, 2).splitlines()
    assert first == "before: load 3.50, others use 90% of 2 processors"
    assert second.startswith("warning: the machine is busy, and everything below is slower")
