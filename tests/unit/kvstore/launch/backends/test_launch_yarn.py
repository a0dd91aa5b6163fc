"""The distributed shell's command line, what its client says, and what a container runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from kvstore.launch.agents.ticket import AgentTicket
from kvstore.launch.backends.yarn import (
    ClientWords,
    application_name,
    client_argv,
    container_script,
    container_size,
    own_jar,
    refuse_own_options,
    short,
    submit_script,
)
from kvstore.launch.options import LaunchError, Places, parse_arguments

TICKET = AgentTicket(["10.0.0.7"], 4711, "the-key", ["YARN_SHELL_ID"], 1, [])
INFO = "2026-11-22 08:00:00,123 INFO distributedshell.Client: "


def report(state: str, diagnostics: str) -> str:
    return (
        f"{INFO}Got application report from ASM for, appId=1, clientToAMToken=null, "
        f"appDiagnostics={diagnostics}, appMasterHost=N/A, appQueue=default, appMasterRpcPort=-1, "
        f"appStartTime=1, yarnAppState={state}, distributedFinalState=UNDEFINED, "
        "appTrackingUrl=http://rm:8088/, appUser=ann"
    )


def heard(*lines: str) -> tuple[ClientWords, list[str]]:
    """What is known after these lines, and which of them people see."""
    words = ClientWords()
    submitted = "26/11/22 08:00:00 INFO impl.YarnClientImpl: Submitted application application_17_1"
    news = [
        line for text in (submitted, *lines) for line in text.splitlines() if words.is_news(line)
    ]
    return words, news


# -- the command ------------------------------------------------------------------------------


def test_the_larger_size_is_that_of_all_containers() -> None:
    assert container_size(Places()) == (1024, 1)
    assert container_size(Places(worker_memory_mb=512, worker_cores=4)) == (512, 4)
    both = Places(worker_memory_mb=512, server_memory_mb=2048, worker_cores=2, server_cores=1)
    assert container_size(both) == (2048, 2)


def test_the_users_own_options_come_first() -> None:
    places = parse_arguments(
        ["-n", "1", "--launcher", "yarn", "--queue", "q", "--launcher-args=-timeout 5", "true"]
    ).places
    argv = client_argv(places, "/ds.jar", "kvstore-1", 2)
    client = "org.apache.hadoop.yarn.applications.distributedshell.Client"
    assert argv == [
        *("yarn", "jar", "/ds.jar", client, "-timeout", "5", "-jar", "/ds.jar"),
        *("-appname", "kvstore-1", "-queue", "q", "-num_containers", "2"),
        *("-container_memory", "1024", "-container_vcores", "1", "-timeout", "2147483647"),
    ]


def test_a_name_is_the_jobs_own_and_fit_for_a_directory() -> None:
    assert re.fullmatch(r"kvstore-[0-9a-f]{8}", application_name(None))
    assert re.fullmatch(r"my\.job-[0-9a-f]{8}", application_name("my.job"))
    assert application_name(None) != application_name(None)
    for wrong in ("a/b", "a b", "-a", "", "a;b", "..", ".a"):
        with pytest.raises(LaunchError, match="directory in HDFS"):
            application_name(wrong)


@pytest.mark.parametrize(
    ("words", "jar"),
    [
        (["-jar", "/a.jar"], "/a.jar"),
        (["-priority", "1", "--jar", "/b.jar"], "/b.jar"),
        (["-jar"], None),
        (["jar", "/c.jar"], None),
        ([], None),
    ],
)
def test_the_users_own_jar(words: list[str], jar: str | None) -> None:
    assert own_jar(words) == jar


@pytest.mark.parametrize("word", ["-appname", "--num_containers", "-shell_script=x"])
def test_what_the_launcher_says_itself_is_refused(word: str) -> None:
    with pytest.raises(
        LaunchError, match=f"{word} in --launcher-args is for the launcher"
    ) as caught:
        refuse_own_options(["-priority", "1", word, "x"])
    assert caught.value.exit_code == 2
    refuse_own_options(["-priority", "1", "-shell_env", "shell_script=1", "appname"])


@pytest.mark.parametrize("code", [0, 2])
def test_the_submission_makes_a_private_directory_and_removes_it(tmp_path: Path, code: int) -> None:
    calls = tmp_path / "calls"
    for name, status in (("hadoop", 0), ("yarn", code)):
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\necho {name} "$@" >>{calls}\nexit {status}\n')
        path.chmod(0o755)
    script = tmp_path / "submit.sh"
    script.write_text(submit_script(["yarn", "jar", "a b"], "job-1"))
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", str(script), "/x/container.sh"], env=environment, timeout=20)
    assert done.returncode == code
    assert calls.read_text().splitlines() == [
        "hadoop fs -D fs.permissions.umask-mode=077 -mkdir -p job-1",
        "yarn jar a b -shell_script /x/container.sh",
        "hadoop fs -rm -r -f -skipTrash job-1",
    ]


# -- what the client says ---------------------------------------------------------------------


def test_reports_are_no_news_but_tell_the_state() -> None:
    words, news = heard(
        report(
            "ACCEPTED",
            "[Sun Nov 22 08:00:00 +0000 2026] Application is added to the scheduler and is not yet "
            "activated. Queue's AM resource limit exceeded.  Details : AM Partition = <D>; ",
        )
    )
    assert news == []
    assert words.application == "application_17_1"
    assert words.state() == (
        "application_17_1 is ACCEPTED: Application is added to the scheduler and is not yet "
        "activated. Queue's AM resource limit exceeded."
    )


def test_a_report_of_several_lines_ends_where_the_next_field_begins() -> None:
    words, news = heard(
        report("FAILED", "AM exited with 1\nStack trace:\n\tat org.A.b(C.java:1)\nFailing.")
    )
    assert news == []
    assert words.explain([], 2) == (
        "application_17_1 is FAILED before all processes had started: AM exited with 1 Stack "
        "trace: Failing. ('yarn logs -applicationId application_17_1' may say more)"
    )


def test_a_report_that_is_cut_off_does_not_swallow_what_follows() -> None:
    _, news = heard(
        f"{INFO}Got application report from ASM for, appDiagnostics=one",
        "2026-11-22 08:00:01,000 ERROR distributedshell.Client: Error running Client",
        "java.io.IOException: no",
    )
    assert [line.rpartition(" ")[2] for line in news] == ["Client", "no"]


def test_errors_and_what_is_no_log_are_news_without_the_stack() -> None:
    lines = [
        "2026-11-22 08:00:00,123 [main] WARN util.NativeCodeLoader: Unable to load",
        "26/11/22 08:00:00 ERROR distributedshell.Client: Error running Client",
        "org.apache.commons.cli.UnrecognizedOptionException: Unrecognized option: -x",
        "\tat org.apache.commons.cli.Parser.processOption(Parser.java:363)",
        "\t... 3 more",
        "SLF4J: Class path contains multiple SLF4J bindings.",
    ]
    assert heard(*lines)[1] == [lines[1], lines[2]]


def test_a_client_that_ends_without_an_application_is_explained_by_what_it_said() -> None:
    assert ClientWords().explain(["mkdir: Permission denied"], 1) == (
        "yarn ended (exit code 1) before all processes had started; it said:"
        "\n  mkdir: Permission denied"
    )


def test_the_id_is_awaited_from_the_submission_on() -> None:
    words = ClientWords()
    assert not words.is_submitting()
    words.is_news(f"{INFO}Submitting application to ASM")
    assert words.is_submitting()
    words.is_news(f"{INFO}Submitted application application_17_1")
    assert not words.is_submitting()


def test_a_server_that_does_not_answer_is_named_until_it_does() -> None:
    words, _ = heard(
        "26/11/22 08:00:00 INFO ipc.Client: Retrying connect to server: rm/10.0.0.1:8032. Already "
        "tried 3 time(s); retry policy is RetryUpToMaximumCountWithFixedSleep(maxRetries=10)"
    )
    assert words.state() == "yarn cannot connect to rm/10.0.0.1:8032"
    words.is_news(report("RUNNING", ""))
    assert words.state().startswith("application_17_1 is RUNNING; 'yarn logs -applicationId")


@pytest.mark.parametrize("nothing", ["null", "N/A", "", "\n"])
def test_no_diagnosis_is_none(nothing: str) -> None:
    assert short(nothing) == ""


def test_a_long_diagnosis_is_cut() -> None:
    assert short("x" * 1000) == "x" * 400 + " ..."


# -- what a container runs --------------------------------------------------------------------


def run_container(
    directory: Path, python: str, working_directory: str = "/no/such", **environment: str
) -> subprocess.CompletedProcess[str]:
    (directory / "ExecScript.sh").write_text(
        container_script(TICKET, python, working_directory, None)
    )
    return subprocess.run(
        ["bash", "ExecScript.sh"],
        cwd=directory,
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=20,
    )


@pytest.fixture
def python_there(tmp_path: Path) -> str:
    """Shows what it is started with."""
    path = tmp_path / "my python"
    path.write_text('#!/bin/sh\necho "$YARN_SHELL_ID" "$PWD" "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_a_container_makes_its_agent_in_its_own_directory(
    tmp_path: Path, python_there: str
) -> None:
    done = run_container(tmp_path, python_there, YARN_SHELL_ID="2", CONTAINER_ID="container_1_07")
    files = tmp_path / "kvstore-agent"
    assert done.stdout == f"2 {tmp_path} {files}/agent.py\n", done.stderr
    assert AgentTicket.from_text((files / "ticket.json").read_text()) == TICKET
    assert {path.name for path in files.iterdir()} == {"agent.py", "join_answer.py", "ticket.json"}
    assert files.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in files.iterdir()} == {0o600}
    for name in ("agent.py", "join_answer.py"):
        compile((files / name).read_text(), name, "exec")


def test_a_directory_that_the_host_has_is_where_its_processes_run(
    tmp_path: Path, python_there: str
) -> None:
    shared = tmp_path / "it's $shared"
    shared.mkdir()
    done = run_container(tmp_path, python_there, str(shared), YARN_SHELL_ID="1")
    assert done.stdout == f"1 {shared} {tmp_path}/kvstore-agent/agent.py\n"


def test_an_older_hadoop_has_the_containers_number(tmp_path: Path, python_there: str) -> None:
    number = {"CONTAINER_ID": "container_1410901177871_0001_01_000005"}
    done = run_container(tmp_path, python_there, **number)
    assert done.stdout.startswith("000005 ")


def test_a_host_without_this_python_lets_another_one_say_so(
    tmp_path: Path, python_there: str
) -> None:
    other = Path(python_there).rename(tmp_path / "python3")
    path = f"{other.parent}:/usr/bin:/bin"
    done = run_container(tmp_path, "/no/python", PATH=path, YARN_SHELL_ID="1")
    assert done.stdout == (
        f"1 {tmp_path} {tmp_path}/kvstore-agent/join_answer.py there is no Python at /no/python; "
        "--python names another\n"
    )


def test_what_goes_to_hosts_without_this_package_needs_nothing_newer_than_python_3_6() -> None:
    import ast

    from kvstore.launch.agents import join_answer

    text = Path(join_answer.__file__).read_text()
    tree = ast.parse(text, feature_version=(3, 6))
    imported = {
        alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert imported == {"hashlib", "hmac", "json", "os", "socket", "struct", "sys"}
    assert "from __future__" not in text


def test_a_ticket_is_one_line_in_the_script() -> None:
    """So that nothing in it can end the here-document."""
    wild = AgentTicket(["a\nKVSTORE-END\n"], 1, "k\nKVSTORE-END", [], 1)
    assert "\n" not in wild.to_text()
    assert json.loads(wild.to_text())["key"] == "k\nKVSTORE-END"
