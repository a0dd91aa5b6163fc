"""How the status of a job is shown: tables, one line, JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.launch.job.registry import FoundJob
from kvstore.status import Summary, as_json, as_line, as_table, main, rates, summarise
from kvstore.stores.dist.progress import StoreProgress
from pslite.wire.survey import (
    Event,
    NodeReport,
    NodeStatus,
    Progressed,
    StandbyStatus,
    Survey,
    Wait,
)


def report(
    uptime_s: float = 60.0,
    sent: int = 0,
    shared: int = 0,
    progress: Progressed | None = None,
    waits: tuple[Wait, ...] = (),
) -> NodeReport:
    return NodeReport("1.0", uptime_s, sent, 2 * sent, shared, 1, 2, 3, progress, waits)


def node(
    role: str, rank: int, found: NodeReport | None = None, state: str = "running"
) -> NodeStatus:
    return NodeStatus(role, rank, "host", 100 + rank, state, 0.0, "", found)


def progress(
    steps: int = 10, per_s: float = 2.0, share: float = 0.5, trained_s: float = 5.0
) -> Progressed:
    return Progressed(steps, 32 * steps, per_s, 32 * per_s, share, 0.25, trained_s)


def survey(*nodes: NodeStatus, state: str = "running") -> Survey:
    return Survey("j", "1.0", state, 2, 1, 0.0, (), (node("scheduler", 0, report()), *nodes))


def two_workers(first: Progressed, second: Progressed) -> Survey:
    return survey(
        node("worker", 0, report(progress=first)), node("worker", 1, report(progress=second))
    )


# -- what is slow ---------------------------------------------------------------------------


def test_alike_workers_have_no_slowest() -> None:
    found = summarise(two_workers(progress(share=0.5), progress(share=0.45)))
    assert found == Summary("running", 2, 2, 10, 2.0, 128.0, 0.475, "")


def test_the_worker_that_waits_for_nobody_is_the_one_that_others_wait_for() -> None:
    assert summarise(two_workers(progress(share=0.6), progress(share=0.1))).slowest == "worker 1"


def test_a_worker_with_fewer_steps_a_second_is_the_slowest_whatever_it_waits() -> None:
    slow = two_workers(progress(per_s=1.0, share=0.9), progress(share=0.1))
    assert summarise(slow).slowest == "worker 0"


@pytest.mark.parametrize(
    ("steps", "trained_s", "is_named"),
    [(15, 19.0, False), (10, 21.0, False), (11, 20.0, True), (3, 98.5, True)],
)
def test_a_worker_that_began_later_is_compared_once_no_average_contains_the_pause(
    steps: int, trained_s: float, is_named: bool
) -> None:
    for of_one in ({"per_s": 1.0}, {"share": 0.9}):  # of the worker that had to wait for the other
        first = progress(100, trained_s=100.0)
        waited = first._replace(
            steps_per_s=of_one.get("per_s", 2.0), communication=of_one.get("share", 0.5)
        )
        found = summarise(two_workers(waited, progress(steps, trained_s=trained_s))).slowest
        assert bool(found) is is_named


def test_a_worker_that_has_taken_a_place_is_not_yet_slow_in_a_synchronous_job() -> None:
    """Both make a step every half second; the old one waited 30 s for the other."""
    clock = [100.0]
    old, new = (StoreProgress(lambda: clock[0]) for _ in range(2))
    named = []
    for number in range(300):
        clock[0] += 30.0 if number == 50 else 0.5
        old.step(32)
        if number >= 50:
            new.step(32)
        named.append(summarise(two_workers(old.progressed(), new.progressed())).slowest)
    assert set(named) == {""}


def test_a_silent_worker_is_the_slowest() -> None:
    found = survey(
        node("worker", 0, report(progress=progress())),
        node("worker", 1, state="silent")._replace(silent_s=9.0),
    )
    assert summarise(found)[1:4] == (1, 2, 10)
    assert summarise(found).slowest == "worker 1"


def test_one_worker_alone_is_not_the_slowest() -> None:
    assert summarise(survey(node("worker", 0, report(progress=progress())))).slowest == ""


def test_a_job_without_steps_has_zeros() -> None:
    assert summarise(survey(node("worker", 0, report()))) == Summary(
        "running", 1, 2, 0, 0.0, 0.0, 0.0, ""
    )


# -- rates ------------------------------------------------------------------------------------


def test_rates_are_those_between_two_surveys_by_the_nodes_own_clock() -> None:
    before = survey(node("server", 0, report(10.0, sent=1000, shared=50)))
    now = node("server", 0, report(14.0, sent=5000, shared=50))
    assert rates(now, before) == (1000.0, 2000.0, 0.0)


def test_a_node_without_an_earlier_report_has_no_rates() -> None:
    now = node("server", 0, report(14.0, sent=5000))
    for before in (None, survey(), survey(node("server", 0)), survey(now)):
        assert rates(now, before) == (None, None, None)
    another = survey(now._replace(pid=1, report=report(1.0)))
    assert rates(now, another) == (None, None, None)


def test_a_counter_that_falls_is_no_negative_rate() -> None:
    before = survey(node("server", 0, report(10.0, sent=9000)))
    assert rates(node("server", 0, report(11.0, sent=10)), before) == (0.0, 0.0, 0.0)


# -- one line -------------------------------------------------------------------------------


def test_a_line_says_what_matters() -> None:
    summary = Summary("running", 2, 2, 1234, 19.23, 615.4, 0.384, "worker 1")
    assert as_line(summary) == (
        "2/2 workers, step 1234, 19.2 steps/s, 615 samples/s, 38% communication, slowest: worker 1"
    )


def test_a_line_leaves_out_what_is_not_known() -> None:
    assert as_line(Summary("running", 2, 2, 7, 0.5, 0.0, 0.0, "")) == (
        "2/2 workers, step 7, 0.50 steps/s, 0% communication"
    )
    assert as_line(Summary("gathering", 1, 4, 0, 0.0, 0.0, 0.0, "")) == "1/4 workers, gathering"
    assert as_line(Summary("failed", 1, 2, 0, 0.0, 0.0, 0.0, "")) == "1/2 workers, failed"


# -- tables ---------------------------------------------------------------------------------


def test_tables_show_every_node_what_waits_and_who_is_silent() -> None:
    wait = Wait("key 'w'", 7, ("worker 1",), 83.0)
    mine = Wait("the servers' answer for 'w'", 0, (), 84.0)
    before = survey(node("server", 0, report(59.0, sent=1_500_000)))
    found = survey(
        node("worker", 0, report(3723.0, progress=progress(), waits=(mine,))),
        node("worker", 1, state="silent")._replace(silent_s=83.4),
        node("server", 0, report(60.0, sent=2_000_000, shared=999, waits=(wait,))),
    )
    assert as_table(found, before).splitlines() == [
        "job j, version 1.0: running, 1 of 2 workers and 1 of 1 server answer",
        "",
        "node       host  pid  version    state         up     sent      /s  received       /s"
        "  shared     /s  requests  rounds  jobs",
        "scheduler  host  100      1.0  running   1:00 min      0 B               0 B         "
        "     0 B                1       2     3",
        "worker 0   host  100      1.0  running  1:02:03 h      0 B               0 B         "
        "     0 B                1       2     3",
        "worker 1   host  101            silent",
        "server 0   host  100      1.0  running   1:00 min  2.00 MB  500 kB   4.00 MB  1.00 MB"
        "   999 B  999 B         1       2     3",
        "",
        "          steps  steps/s  samples  samples/s  communication  last step",
        "worker 0     10     2.00      320       64.0            50%    0 s ago",
        "",
        "worker 1 (pid 101 on host) does not answer; silent for 1:23 min",
        "worker 0 has waited 1:24 min: the servers' answer for 'w'",
        "round 7 of key 'w' has waited 1:23 min for worker 1",
        "",
        "slowest: worker 1",
    ]


def test_a_job_that_gathers_says_who_is_missing() -> None:
    waiting = node("worker", -1, state="waiting")
    found = survey(waiting, state="gathering")._replace(
        waited_s=12.0, missing=("1 of 2 workers", "1 of 1 server"), job=""
    )
    lines = as_table(found, None).splitlines()
    assert lines[0] == (
        "a job without an id, version 1.0: gathering since 12 s, 1 of 2 workers, 1 of 1 server "
        "missing"
    )
    assert lines[-1].split() == ["worker", "host", "99", "waiting"]


def test_a_lost_node_is_listed_with_its_reason() -> None:
    lost = node("worker", 1, state="lost")._replace(reason="its process is gone")
    table = as_table(survey(lost, state="failed"), None)
    assert table.endswith("worker 1 (pid 101 on host) is lost: its process is gone")


def test_each_server_has_a_line_about_its_standby_above_the_events() -> None:
    standbys = (
        StandbyStatus(0, "ready", "host", 4711),
        StandbyStatus(1, "filling", "host", 4742),
        StandbyStatus(2, "none", "", 0),
    )
    found = survey()._replace(standbys=standbys, events=(Event(3.0, "server 2 is lost"),))
    assert as_table(found, None).partition("\n\n")[2].splitlines()[-5:] == [
        "server 0: standby pid 4711 on host",
        "server 1: standby pid 4742 on host, is being filled",
        "server 2: no standby",
        "",
        "3 s ago: server 2 is lost",
    ]


# -- JSON -----------------------------------------------------------------------------------


def test_json_has_all_fields_rates_and_the_summary() -> None:
    wait = Wait("key 'w'", 7, ("worker 1",), 83.0)
    before = survey(node("worker", 0, report(59.0)))
    found = as_json(
        survey(
            node("worker", 0, report(60.0, sent=100, progress=progress(), waits=(wait,))),
            node("server", 0, state="silent"),
        ),
        before,
    )
    assert json.loads(json.dumps(found)) == found
    assert list(found) == [*Survey._fields, "summary"]
    worker, server = found["nodes"][1:]
    assert list(worker) == list(NodeStatus._fields)
    assert (server["state"], server["report"]) == ("silent", None)
    assert worker["report"]["sent_bytes_per_s"] == 100.0
    assert worker["report"]["progress"] == progress()._asdict()
    assert worker["report"]["waits"] == [
        {"what": "key 'w'", "round": 7, "missing": ["worker 1"], "waited_s": 83.0}
    ]
    assert found["summary"] == summarise(survey(*()))._asdict() | {
        "workers_up": 1,
        "steps": 10,
        "steps_per_s": 2.0,
        "samples_per_s": 64.0,
        "communication": 0.5,
    }


@pytest.mark.parametrize("text", ["abc", "0.4", "nan", "inf"])
def test_an_interval_that_is_none_is_refused_in_words(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--watch", text])
    assert ended.value.code == 2
    assert f"--watch: expected at least 0.5 seconds, got {text}\n" in capsys.readouterr().err


def test_a_job_that_ends_when_it_is_asked_is_told_as_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its launcher removes the key after the note was read."""
    job = FoundJob("127.0.0.1:9091", "", str(tmp_path / "job.key"))
    monkeypatch.setattr("kvstore.status.running_jobs", lambda: [job])
    for name in ("PS_JOB_KEY_FILE", "PS_JOB_KEY_FD", "DMLC_PS_ROOT_URI"):
        monkeypatch.delenv(name, raising=False)
    assert main([]) == 1
    assert capsys.readouterr().err == "kvstore status: the job at 127.0.0.1:9091 has just ended\n"


def test_the_last_lines_say_what_has_happened() -> None:
    events = Event(3.2, "worker 1 (pid 5 on a) is lost: gone"), Event(2.0, "worker 1 is replaced")
    text = as_table(survey()._replace(events=events), None)
    assert text.splitlines()[-2:] == [
        "3 s ago: worker 1 (pid 5 on a) is lost: gone",
        "2 s ago: worker 1 is replaced",
    ]
