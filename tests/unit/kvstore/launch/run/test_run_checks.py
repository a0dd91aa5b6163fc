"""Which error a caller of ``kvstore.run`` sees, and what is refused before anything starts."""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvstore as mx
from kvstore.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    JobFailed,
    MissingDependencyError,
    WorkerFailed,
)
from kvstore.launch.job.signals import parse
from kvstore.launch.options import LaunchError
from kvstore.launch.run.background import (
    JobOptions,
    LauncherExit,
    checked_command,
    first_cause,
    own_environment,
)
from kvstore.launch.run.call_files import WorkerAnswer, own_path, value_of
from pslite.errors import NodeLostError


def raised(error: Exception, at_s: float, *, blames: bool = False) -> WorkerAnswer:
    return WorkerAnswer(
        "error",
        pickle.dumps(error),
        type=type(error).__name__,
        text=f"Traceback: {error}",
        at_s=at_s,
        blames_another=blames,
    )


def returned(value: Any) -> WorkerAnswer:
    return WorkerAnswer("value", pickle.dumps(value))


LOST = NodeLostError("worker 2 is lost", role="worker", rank=2)
KILLED = WorkerFailed("worker 2 ended with signal SIGKILL", role="worker", rank=2)
ALSO = WorkerFailed("worker 0 ended with exit code 1", role="worker", rank=0)


def test_the_earliest_error_of_a_worker_s_own_comes_first() -> None:
    answers = {
        0: raised(LOST, 1.0, blames=True),
        1: raised(KeyError("late"), 3.0),
        2: raised(ValueError("early"), 2.0),
        3: returned("fine"),
    }
    error = first_cause(answers, LauncherExit(1, ALSO))
    assert isinstance(error, ValueError)
    assert str(error.__cause__) == (
        "worker 2 raised ValueError; its traceback there:\nTraceback: early"
    )


def test_the_same_error_on_others_is_said_once() -> None:
    answers = {rank: raised(ValueError("x"), 1.0) for rank in (10, 2, 0)}
    error = first_cause(answers, None)
    assert str(error.__cause__).startswith("worker 0 raised ValueError, as did workers 2, 10; its")


def test_a_process_that_died_is_named_before_those_that_miss_it() -> None:
    lost = {0: raised(LOST, 1.0, blames=True)}
    assert first_cause(lost, LauncherExit(137, KILLED)) is KILLED


def test_without_a_verdict_a_lost_node_is_what_there_is() -> None:
    for ending in (
        None,
        LauncherExit(143, None),
        LauncherExit(1, ALSO),
    ):
        assert isinstance(first_cause({0: raised(LOST, 1.0, blames=True)}, ending), NodeLostError)


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        (LauncherExit(2, None, ("no such host",)), "all workers had returned: no such host"),
        (LauncherExit(0, None), "its launcher ended with exit code 0"),
        (LauncherExit(-9, None), "the launcher of the job was ended by signal SIGKILL"),
    ],
)
def test_a_job_that_ended_without_a_report_says_what_there_is_to_say(
    ending: LauncherExit, words: str
) -> None:
    error = first_cause({0: returned(1)}, ending)
    assert type(error) is JobFailed
    assert str(error).endswith(words)


def test_an_exception_whose_class_is_not_here_comes_as_its_traceback() -> None:
    answer = raised(ValueError("x"), 1.0)
    for body in (b"", b"\x80\x04cno_such_module\nNothing\n.", pickle.dumps("no exception")):
        error = first_cause({1: replace(answer, body=body)}, None)
        assert isinstance(error, WorkerFailed)
        assert str(error).endswith("worker 1 raised ValueError; its traceback there:\nTraceback: x")


def test_a_result_whose_class_is_not_here_names_the_worker() -> None:
    assert value_of(0, returned([1, "a"])) == [1, "a"]
    with pytest.raises(WorkerFailed, match="cannot read the result of worker 3: Module"):
        value_of(3, WorkerAnswer("value", b"\x80\x04cno_such_module\nNothing\n."))


# -- before the start -----------------------------------------------------------------------


def test_the_launcher_s_command_line_holds_no_values_of_variables(tmp_path: Path) -> None:
    options = JobOptions(3, 2, "ssh", env={"TOKEN": "secret"}, options=("--hostfile=h",))
    arguments = checked_command(options, tmp_path, "once")
    assert "secret" not in " ".join(arguments)
    assert "--worker-restarts" not in arguments
    again = checked_command(replace(options, restarts=2), tmp_path, "once")
    assert again[again.index("--worker-restarts") + 1] == "2"
    assert "--standbys" not in arguments
    followed = checked_command(replace(options, standbys=1), tmp_path, "once")
    assert followed[followed.index("--standbys") + 1] == "1"
    assert arguments[:6] == ["-n", "3", "-s", "2", "--launcher", "ssh"]
    assert arguments[arguments.index("--env") + 1] == "TOKEN"
    assert arguments[-5:] == [
        *(sys.executable, "-m", "kvstore.launch.run.worker", str(tmp_path), "once")
    ]


def test_a_python_of_other_hosts_is_the_launcher_s_too(tmp_path: Path) -> None:
    remote = checked_command(
        JobOptions(1, 1, "ssh", options=("-H", "h"), python="/opt/py"), tmp_path, "once"
    )
    assert remote[remote.index("--python") + 1] == "/opt/py"
    local = checked_command(JobOptions(1, 1, python="/opt/py"), tmp_path, "once")
    assert "--python" not in local
    assert local[-5] == "/opt/py"


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"workers": 0}, "^workers must be an int of at least 1, got 0$"),
        ({"servers": -1}, "^servers must be an int of at least 1, got -1$"),
        ({"restarts": -1}, "^restarts must be an int of at least 0, got -1$"),
        ({"standbys": 2}, "^--standbys must be at most 1, got 2$"),
        ({"launcher": "slrm"}, "launcher must be one of local, .*'slrm'; did you mean 'slurm'"),
        ({"launcher": 3}, "launcher must be one of local, .*, got 3$"),
        ({"timeout_s": float("nan")}, "^timeout_s must be a number of seconds, got nan$"),
        (
            {"launcher": "kubernetes"},
            "cannot run a function, since pods share no directory .* script",
        ),
        ({"launcher": "ssh"}, r"needs a hosts file: options=\('--hostfile=FILE',\)"),
        ({"options": ("--nope",)}, r"unknown option '--nope'.* \(kvstore-launch --help lists"),
        ({"options": ("--help",)}, "options must not have -n, -s, --launcher"),
        ({"options": ("--", "true")}, "options must not have -n, -s, --launcher"),
        ({"options": ("-n", "7")}, "use the arguments workers, servers and launcher"),
        ({"options": ("--dry-run",)}, "--check or --dry-run"),
        ({"options": ("--restarts", "2")}, "must not have --restarts, because .* start a job once"),
        ({"env": {"DMLC_ROLE": "server"}}, "DMLC_ROLE"),
        ({"env": {"A=B": "x"}}, "env has an invalid variable, 'A=B': 'x'"),
        ({"env": {"A": "x\0"}}, r"^env\['A'\]: .* must be text .* got 'x\\x00'"),
        ({"env": {"A": "x\ud800"}}, r"^env\['A'\]: .* must be text .* got 'x\\ud800'"),
        ({"log_dir": "x\0"}, r"^log_dir: .* must be text .* got 'x\\x00'"),
        ({"python": "x\0"}, r"^python: .* must be text .* got 'x\\x00'"),
        ({"options": ("--env", "A=x\0")}, r"must be text .* got 'A=x\\x00'"),
        ({"share_dir": "x\0"}, r"^share_dir: .* must be text .* got 'x\\x00'"),
        (
            {"share_dir": "/nowhere/at/all"},
            r"cannot create the job's directory in /nowhere.*share_dir=",
        ),
    ],
)
def test_arguments_that_make_no_sense_are_refused_before_anything_starts(
    wanted: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentValueError, match=words):
        mx.run(os.getpid, **wanted)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"fn": 7}, "fn must be a function, got int"),
        ({"args": "ab"}, r"args must be a sequence .*, as in args=\(2,\); got str"),
        ({"args": 2}, r"args must be a sequence .*, as in args=\(2,\); got int"),
        ({"kwargs": [("rate", 1)]}, "kwargs must map names to values"),
        ({"kwargs": {1: 2}}, "kwargs must map names to values"),
        ({"workers": "2"}, "^workers must be an int of at least 1, got '2'$"),
        ({"servers": 1.5}, "^servers must be an int of at least 1, got 1.5$"),
        ({"timeout_s": "9"}, "^timeout_s must be a number of seconds, or None .*, got '9'$"),
        ({"share_dir": 3}, "^share_dir must be a path, got 3$"),
        ({"options": (1,)}, r"^options must be a sequence of texts, got \(1,\)$"),
        ({"env": 7}, "^env must map names to texts, got int$"),
        ({"args": (open,), "options": "-H hosts"}, "options must be a sequence of texts"),
        ({"env": {"A": 1}}, "env must map names to texts, got 'A': 1"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused(wanted: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentTypeError, match=words):
        mx.run(**{"fn": os.getpid, **wanted})


def test_a_cluster_names_its_arguments_too() -> None:
    with pytest.raises(ArgumentTypeError, match=r"^workers must be an int .*, got 'x'$"):
        mx.LocalCluster("x")  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match=r"^timeout_s must be a number"):
        mx.LocalCluster(1, 1, timeout_s="soon")  # type: ignore[arg-type]


def test_a_function_that_cannot_travel_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(MissingDependencyError, match="pip install cloudpickle"):
        mx.run(lambda: 1)


def test_workers_get_the_caller_s_own_directories_and_not_its_libraries() -> None:
    version = f"python{sys.version_info[0]}{sys.version_info[1]}"
    path = ["", "tests", "/srv/app/", f"/usr/lib/{version}.zip", "/v/lib/site-packages/x.egg"]
    assert own_path([*path, os.path.dirname(os.__file__)], "/here") == [
        *("/here", "/here/tests", "/srv/app")
    ]


def test_a_job_within_a_job_inherits_nothing_of_it() -> None:
    outer = {"DMLC_ROLE": "worker", "PS_JOB_ID": "x", "PS_JOB_KEY_FILE": "f", "HOME": "/h"}
    assert own_environment(outer, {"A": "b"}) == {"HOME": "/h", "A": "b"}
    wish = {"DMLC_PS_ROOT_PORT": "9091", "PS_SECURITY": "curve"}
    assert own_environment(wish, {}) == wish


@pytest.mark.parametrize("text", ["", "7", "x:/tmp", "7:relative"])
def test_the_launcher_s_tie_is_checked(text: str) -> None:
    with pytest.raises(LaunchError, match="--tied needs FD:DIRECTORY"):
        parse(text)
    assert parse("7:/a:b").directory == Path("/a:b")
