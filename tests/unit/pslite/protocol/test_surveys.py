"""Surveys of a job: when nodes are asked, and who is answered when."""

from __future__ import annotations

from pslite.protocol.surveys import ANSWER_S, FRESH_S, MAX_ASKERS, Surveys

A, B = 8, 9


def test_an_asker_is_answered_when_all_nodes_have_answered() -> None:
    surveys: Surveys[str] = Surveys()
    assert surveys.ask("O1", 7, [A, B], 0.0) == 1
    surveys.answer(A, 1, "a")
    assert surveys.take_served(0.1) == []
    surveys.answer(B, 1, "b")
    assert surveys.take_served(0.2) == [("O1", 7)]
    assert surveys.reports == {A: "a", B: "b"}
    assert (surveys.take_served(0.3), surveys.next_due()) == ([], None)


def test_a_job_without_nodes_is_answered_at_once() -> None:
    surveys: Surveys[str] = Surveys()
    surveys.ask("O1", 1, [], 0.0)
    assert surveys.take_served(0.0) == [("O1", 1)]


def test_a_node_that_does_not_answer_holds_nobody_up() -> None:
    surveys: Surveys[str] = Surveys()
    surveys.ask("O1", 1, [A, B], 10.0)
    surveys.answer(A, 1, "a")
    assert surveys.next_due() == 10.0 + ANSWER_S
    assert surveys.take_served(10.0 + ANSWER_S - 0.01) == []
    assert surveys.take_served(10.0 + ANSWER_S) == [("O1", 1)]
    assert surveys.reports == {A: "a"}


def test_a_node_that_departs_is_not_waited_for() -> None:
    surveys: Surveys[str] = Surveys()
    surveys.ask("O1", 1, [A], 0.0)
    surveys.depart(A)
    assert surveys.take_served(0.0) == [("O1", 1)]


def test_who_asks_meanwhile_gets_the_same_survey() -> None:
    surveys: Surveys[str] = Surveys()
    assert surveys.ask("O1", 1, [A], 0.0) == 1
    assert surveys.ask("O2", 5, [A], 1.0) is None
    surveys.answer(A, 1, "a")
    assert surveys.take_served(1.1) == [("O1", 1), ("O2", 5)]


def test_the_same_asker_again_is_answered_once_and_for_its_last_question() -> None:
    surveys: Surveys[str] = Surveys()
    surveys.ask("O1", 1, [A], 0.0)
    surveys.ask("O1", 2, [A], 0.1)
    surveys.answer(A, 1, "a")
    assert surveys.take_served(0.2) == [("O1", 2)]


def test_a_survey_that_is_fresh_is_given_again_and_no_node_is_asked() -> None:
    surveys: Surveys[str] = Surveys()
    surveys.ask("O1", 1, [A], 0.0)
    surveys.answer(A, 1, "a")
    surveys.take_served(0.0)
    assert surveys.ask("O2", 7, [A], FRESH_S / 2) is None
    assert surveys.take_served(FRESH_S / 2) == [("O2", 7)]
    assert surveys.reports == {A: "a"}
    assert surveys.ask("O2", 8, [A], FRESH_S) == 2
    assert surveys.reports == {}


def test_nobody_is_answered_more_often_than_there_are_new_surveys() -> None:
    surveys: Surveys[str] = Surveys()
    surveys.ask("O1", 1, [], 10.0)
    assert surveys.take_served(10.0) == [("O1", 1)]
    for number in range(2, 100):
        surveys.ask("O1", number, [], 10.0 + FRESH_S / 2)
        assert surveys.take_served(10.0 + FRESH_S / 2) == []
    assert surveys.next_due() == 10.0 + FRESH_S
    assert surveys.take_served(10.0 + FRESH_S) == [("O1", 99)]
    assert surveys.next_due() is None


def test_late_answers_and_those_of_nodes_that_were_not_asked_change_nothing() -> None:
    surveys: Surveys[str] = Surveys()
    surveys.ask("O1", 1, [A], 0.0)
    surveys.take_served(ANSWER_S)
    assert surveys.ask("O1", 2, [A], ANSWER_S) == 2
    surveys.answer(A, 1, "of the survey before")
    surveys.answer(B, 2, "not asked")
    assert surveys.reports == {}
    surveys.answer(A, 2, "first")
    surveys.answer(A, 2, "again")
    assert surveys.reports == {A: "first"}


def test_so_many_askers_are_remembered_and_no_more() -> None:
    surveys: Surveys[str] = Surveys()
    for number in range(MAX_ASKERS + 3):
        surveys.ask(f"O{number}", 1, [A], 0.0)
    surveys.answer(A, 1, "a")
    served = surveys.take_served(0.0)
    assert [peer for peer, _ in served] == [f"O{n}" for n in range(3, MAX_ASKERS + 3)]
