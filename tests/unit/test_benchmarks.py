"""The pure parts of benchmarks/: a wrong figure or verdict must not come out of them."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import codecs, network
from benchmarks.compare import arithmetic, table
from benchmarks.compare.contenders import CONTENDERS, Programs, pslite_ms
from benchmarks.compare.figures import (
    Ask,
    paired_ratios,
    significant,
    slowest,
    summary,
    verdict,
)
from benchmarks.compare.jobs import Process
from benchmarks.compare.loop import Task
from benchmarks.compare.measure import Result, RowResult, fault_in
from benchmarks.compare.row_numbers import RowTask
from benchmarks.compare.rows import ROWS, Row, chosen
from benchmarks.compare.run_allreduce import BlockwiseSGD, pieces_of
from benchmarks.compare.run_kv import sorted_keys
from benchmarks.compare.scripts import holds
from benchmarks.models import MODELS
from benchmarks.models import chosen as chosen_models
from benchmarks.soak import Sample, growth

# -- figures ------------------------------------------------------------------------------


def test_a_round_takes_as_long_as_its_slowest_worker() -> None:
    assert slowest([[1.0, 5.0, 2.0], [3.0, 4.0, 2.5]]) == [3.0, 5.0, 2.5]


def test_reports_of_different_lengths_are_no_run() -> None:
    with pytest.raises(ValueError):
        slowest([[1.0, 2.0], [1.0]])


def test_a_summary_has_the_median_and_the_spread() -> None:
    found = summary([4.0, 1.0, 2.0, 3.0])
    assert (found.median, found.least, found.greatest, found.number) == (2.5, 1.0, 4.0, 4)
    assert found.text() == "2.50 (1.00 to 4.00)"
    assert summary([7.0]).text() == "7.00"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0123456, "0.0123"), (1.0, "1.00"), (99.96, "100.0"), (123.4, "123"), (4567.0, "4567"),
     (0.0, "0"), (math.inf, "inf")],
)  # fmt: skip
def test_numbers_have_three_significant_digits(value: float, text: str) -> None:
    assert significant(value) == text


def test_ratios_are_formed_pair_by_pair_so_that_a_slow_spell_cancels_out() -> None:
    ours, theirs = [10.0, 10.0, 20.0], [30.0, 30.0, 60.0]
    assert paired_ratios(ours, theirs) == [3.0, 3.0, 3.0]
    assert paired_ratios(ours, theirs[:2]) == [3.0, 3.0]


def test_a_verdict_compares_with_the_faster_of_two_peers() -> None:
    runs = {"ours": [10.0, 10.0], "gloo": [30.0, 30.0], "openmpi": [8.0, 12.0]}
    found = verdict(Ask("ours", ("gloo", "openmpi"), 1.0), runs)
    assert (found.to, found.holds, found.word) == ("openmpi", True, "yes")
    assert found.ratio is not None and found.ratio.median == 1.0
    assert verdict(Ask("ours", ("gloo", "openmpi"), 1.1), runs).word == "NO"


def test_a_verdict_without_a_measurement_is_none() -> None:
    ask = Ask("ours", ("mxnet",), 5)
    for runs in ({"ours": [1.0]}, {"mxnet": [9.0], "ours": []}):
        found = verdict(ask, runs)
        assert (found.ratio, found.holds, found.word) == (None, None, "not measured")


def test_a_fast_wrong_answer_counts_for_nobody() -> None:
    runs = {"ours": [1.0], "mxnet": [9.0]}
    ask = Ask("ours", ("mxnet",), 5)
    assert verdict(ask, runs).holds
    assert verdict(ask, runs, wrong=["ours"]).holds is False
    assert verdict(ask, runs, wrong=["mxnet"]).holds is None


def test_a_limit_can_be_above_or_below() -> None:
    assert holds(0.83, 0.8, at_least=True) == "0.83 (asked: at least 0.8, holds)"
    assert "does NOT hold" in holds(3.4, 3, at_least=False)


# -- the numbers of a run -----------------------------------------------------------------

SHAPES = [(2, 3), (5,)]


def test_expected_weights_follow_the_formula_of_sgd_with_momentum() -> None:
    lr, mu = np.float32(1e-3), np.float32(0.9)
    first, second = (arithmetic.gradients(SHAPES, number) for number in range(2))
    expected = arithmetic.first_weights(SHAPES)
    for weight, left, right in zip(expected, first, second, strict=True):
        velocity = np.zeros_like(weight)
        for _ in range(4):
            velocity = mu * velocity - lr * (left + right)
            weight += velocity
    found = arithmetic.expected_weights(SHAPES, 2, 4, one_by_one=False)
    assert arithmetic.compare(expected, found) == (True, 0.0)


def test_asynchronous_contributions_are_applied_one_by_one() -> None:
    once = arithmetic.expected_weights(SHAPES, 1, 6, one_by_one=False)
    found = arithmetic.expected_weights(SHAPES, 2, 3, one_by_one=True)
    assert arithmetic.compare(once, found).exact


def test_gradients_of_contributors_differ_and_repeat() -> None:
    task = Task("lenet", workers=2, devices=2)
    ours = task.gradients_of(1, 1)
    assert np.array_equal(ours[0], arithmetic.gradients(task.shapes, 3)[0])
    assert not np.array_equal(ours[0], task.gradients_of(0, 0)[0])
    asynchronous = replace(task, store="dist_async")
    assert np.array_equal(asynchronous.gradients_of(1)[0], asynchronous.gradients_of(0)[0])


def test_a_comparison_sees_one_wrong_bit_and_a_nan() -> None:
    weights = arithmetic.first_weights(SHAPES)
    other = [weight.copy() for weight in weights]
    assert arithmetic.compare(weights, other) == (True, 0.0)
    other[1][2] = np.nextafter(other[1][2], np.float32(10))
    found = arithmetic.compare(weights, other)
    assert not found.exact and 0 < found.difference < 1e-6
    other[0][0, 0] = np.nan
    assert arithmetic.compare(weights, other).difference == math.inf


def test_checksums_tell_different_bits() -> None:
    weights = arithmetic.first_weights(SHAPES)
    before = arithmetic.checksum(weights)
    assert before == arithmetic.checksum([weight.copy() for weight in weights])
    weights[1][0] = -weights[1][0]
    assert before != arithmetic.checksum(weights)


ROW_SETTINGS = {"rows": "200", "width": "3", "ids": "40"}


def test_ids_of_row_sparse_rounds_are_sorted_drawn_anew_and_partly_shared() -> None:
    task = RowTask(settings=ROW_SETTINGS)
    ids = task.ids(0, 0)
    assert len(ids) == 40 and bool((ids[1:] > ids[:-1]).all()) and 0 <= ids[0] <= ids[-1] < 200
    assert np.array_equal(ids, task.ids(0, 0))
    assert not np.array_equal(ids, task.ids(0, 1))
    assert 0 < len(np.intersect1d(ids, task.ids(1, 0))) < 40


def test_expected_rows_are_those_of_a_dense_table_updated_by_each_round() -> None:
    task = RowTask(warmup=1, rounds=2, settings=ROW_SETTINGS)
    table = task.first_table()
    for round_ in range(3):
        total = np.zeros_like(table)
        for rank in range(2):
            total[task.ids(rank, round_)] += task.gradients(rank)
        table -= np.float32(1e-3) * total
    assert np.array_equal(task.expected_weights()[0], table[task.compared_ids])


def test_the_update_of_the_all_reduce_peers_equals_the_formula() -> None:
    shapes = [(70_000,)]
    weights = arithmetic.first_weights(shapes)[0]
    gradients = arithmetic.gradients(shapes, 0)[0]
    sgd = BlockwiseSGD(weights, gradients)
    for _ in range(3):
        sgd.update()
    expected = arithmetic.expected_weights(shapes, 1, 3, one_by_one=False)
    assert arithmetic.compare(expected, [weights]).exact


@pytest.mark.parametrize("how", ["flat", "singly", "1", "0.5"])
def test_pieces_cover_the_model_without_gaps(how: str) -> None:
    sizes = [300_000, 1, 200_000, 7]
    pieces = pieces_of(sizes, how)
    assert [start for start, _ in pieces] == [0, *(end for _, end in pieces[:-1])]
    assert pieces[-1][1] == sum(sizes)
    assert len(pieces) == {"flat": 1, "singly": 4, "1": 2, "0.5": 4}[how]


@pytest.mark.parametrize("rng", [None, np.random.default_rng(1)])
def test_keys_are_sorted_and_unique(rng: np.random.Generator | None) -> None:
    keys = sorted_keys(10_000, rng)
    assert keys.dtype == np.uint64 and bool((keys[1:] > keys[:-1]).all())


# -- rows and contenders ------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_names_contenders_that_exist_and_asks_about_its_own(row: Row) -> None:
    assert set(row.contenders) <= set(CONTENDERS)
    assert row.asks
    for ask in row.asks:
        assert {ask.of, *ask.to} <= set(row.contenders)
    assert row.task.model in MODELS
    assert row.quick().task.rounds <= 20


def test_rows_are_chosen_by_name_in_the_order_of_the_table() -> None:
    assert [row.name for row in chosen("lenet, resnet50")] == ["resnet50", "lenet"]
    assert len(chosen(None)) == len(ROWS)
    with pytest.raises(ValueError, match=r"no row 'resnet'; the rows are resnet50, one"):
        chosen("resnet")


def test_a_task_survives_the_way_to_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    task = replace(ROWS[0].task, settings={"call": "push"}, directory="/x")
    monkeypatch.setattr("sys.argv", ["run", task.to_json()])
    assert Task.from_arguments() == task
    assert Task(tensors=3, tensor_bytes=400).shapes == [(100,)] * 3
    assert Task(tensors=3, tensor_bytes=400).nbytes == 1200


@pytest.mark.parametrize("name", CONTENDERS)
def test_each_contender_has_variants_with_names_of_their_own_and_a_command(name: str) -> None:
    contender = CONTENDERS[name]
    names = [variant.name for variant in contender.variants]
    assert len(set(names)) == len(names)
    task = Task("lenet", workers=2, settings={"keys": "5"}, directory="/x")
    programs = Programs(mxnet_python="/mx/python", pslite_binary="/bin/true")
    for variant in contender.variants:
        processes = contender.processes(programs, variant, task)
        assert processes and all(isinstance(process, Process) for process in processes)


def test_what_is_missing_is_said_with_how_to_get_it() -> None:
    nothing = Programs(mxnet_missing="MXNet needs Python 3.10 or 3.11")
    assert CONTENDERS["mxnet"].missing(nothing) == "MXNet needs Python 3.10 or 3.11"
    assert "--pslite-binary" in str(CONTENDERS["ps-lite"].missing(nothing))
    assert CONTENDERS["ours"].missing(nothing) is None


def test_times_of_ps_lites_benchmark_are_read_and_scaled_to_the_keys() -> None:
    output = (
        "[10:00] num = 10000000, Push average time cost: 125.5ms\n"
        "[10:00] num = 10000000, Pull average time cost: 1.8e+02ms\n"
    )
    assert pslite_ms(output, 10_000_000) == (125.5, 180.0)
    assert pslite_ms(output, 1_000_000) == (12.55, 18.0)
    with pytest.raises(ValueError, match="no time of a pull"):
        pslite_ms(output.splitlines()[0], 10)


# -- what is printed ----------------------------------------------------------------------


def report(exact: bool = True, difference: float = 0.0, checksum: int = 1) -> dict[str, object]:
    return {"checksum": checksum, "check": {"exact": exact, "difference": difference}}


def test_ours_must_be_equal_to_the_last_bit_and_peers_nearly() -> None:
    ours, gloo = CONTENDERS["ours"], CONTENDERS["gloo"]
    assert fault_in(ours, [report(), report()]) is None
    assert "1.0e-07" in str(fault_in(ours, [report(False, 1e-7)]))
    assert fault_in(gloo, [report(False, 1e-7)]) is None
    assert fault_in(gloo, [report(False, 1e-3)]) is not None
    assert fault_in(gloo, [report(False, math.nan)]) is not None
    assert fault_in(ours, [report(), report(checksum=2)]) == "the workers have different weights"


def outcome() -> RowResult:
    row = ROWS[0]
    runs = {"ours": [50.0, 60.0, 55.0], "mxnet": [300.0, 330.0, 200.0]}
    results = {name: Result(missing="not here") for name in row.contenders}
    for name, times in runs.items():
        results[name] = Result(runs=[{"median_ms": ms, "reports": [report()]} for ms in times])
    return RowResult(row, results)


def test_the_table_has_every_ask_with_its_ratio_and_whether_it_holds() -> None:
    lines = table.asks_table([outcome()]).splitlines()
    assert len(lines) == 2 + len(ROWS[0].asks)
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells[1:] == ["ours", "55.0", "MXNet 1.9.1", "300", "5.50 (3.64 to 6.00)", "5", "yes"]
    assert lines[3].rstrip(" |").endswith("not measured")
    assert len({len(line) for line in lines}) == 1


def test_figures_name_what_was_not_measured() -> None:
    text = table.figures_of(outcome())
    assert "55.0 (50.0 to 60.0) ms, 3 runs" in text
    assert "OpenMPI" in text and "not measured" in text


def test_figures_of_another_machine_are_marked_and_judge_nothing() -> None:
    row = chosen("kv")[0]
    run = {"median_ms": 90.0, "reports": [{"push_ms": [40.0], "pull_ms": [50.0]}]}
    found = RowResult(row, {"ours-kv": Result(runs=[run]), "ps-lite": Result(missing="none")})
    assert "500 ms on another machine" in table.figures_of(found)
    assert "push 40.0 ms, pull 50.0 ms" in table.figures_of(found)
    line = table.asks_table([found]).splitlines()[2]
    assert "(500, another machine)" in line and "not measured" in line


# -- soak ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("late_mb", "is_small"), [(104.9, True), (105.1, False), (90.0, True)])
def test_growth_is_what_the_last_tenth_has_beyond_the_second(
    late_mb: float, is_small: bool
) -> None:
    samples = [Sample(float(at), 50.0 if at < 10 else 100.0, 30.0) for at in range(90)]
    samples += [Sample(float(at), late_mb, 31.0) for at in range(90, 101)]
    found = growth("server 0", samples)
    assert found == ("server 0", 100.0, late_mb, 1.0)
    assert found.is_small == is_small
    assert ("does NOT hold" in str(found)) != is_small


# -- network ------------------------------------------------------------------------------


def test_each_machine_of_the_network_has_a_worker_and_a_server_and_one_has_the_scheduler() -> None:
    task = Task("lenet", workers=3, servers=3)
    made = network.processes(task, ["a", "b", "c"], {"PS_CONNECTIONS": "4"})
    placed = [(each.command[3], each.environment["DMLC_ROLE"]) for each in made]
    nodes = [(name, role) for role in ("server", "worker") for name in "abc"]
    assert placed == [("a", "scheduler"), *nodes]
    for each in made:
        machine = "abc".index(each.command[3])
        assert each.environment["DMLC_NODE_HOST"] == network.address(machine)
        assert each.environment["PS_MACHINE"] == f"machine {machine}"
        assert each.environment["PS_CONNECTIONS"] == "4"
    assert {each.environment["DMLC_PS_ROOT_URI"] for each in made} == {network.address(0)}


# -- what scripts are asked for -------------------------------------------------------------


def test_a_model_that_there_is_not_is_refused_in_words() -> None:
    assert chosen_models("lenet, one") == ["lenet", "one"]
    with pytest.raises(argparse.ArgumentTypeError, match=r"no model .foo.; the models are"):
        chosen_models("lenet,foo")


def test_what_a_codec_loses_comes_later_with_feedback() -> None:
    options = argparse.Namespace(elements=1000, pushes=20)
    first, last = codecs.sums_lost({"type": "int8", "feedback": True}, options)
    assert 0 < last < first / 5
    plain = codecs.sums_lost({"type": "int8", "feedback": False}, options)
    assert plain[0] == first
    assert plain[1] > last
