"""What the script that submits does, and the one that a container runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from stand_ins import program

from kvstore.launch.agents.join import AgentTicket
from kvstore.launch.backends.yarn import (
    YarnApplication,
    application_name,
    container_script,
    submit_script,
)
from kvstore.launch.options import parse_arguments

TICKET = AgentTicket(["10.0.0.7"], 4711, "the-key", ["YARN_SHELL_ID"], 1, [])


# -- the command ------------------------------------------------------------------------------


def test_a_name_is_the_jobs_own() -> None:
    assert re.fullmatch(r"kvstore-[0-9a-f]{8}", application_name(None))
    assert re.fullmatch(r"my\.job-[0-9a-f]{8}", application_name("my.job"))
    assert application_name(None) != application_name(None)


@pytest.mark.parametrize("code", [0, 2])
def test_the_submission_makes_a_private_directory_and_removes_it(tmp_path: Path, code: int) -> None:
    calls = tmp_path / "calls"
    for name, status in (("hadoop", 0), ("yarn", code)):
        program(tmp_path, name, f'echo {name} "$@" >>{calls}; exit {status}')
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


def test_the_id_is_awaited_from_the_submission_on() -> None:
    log = "2026-11-22 08:00:00,123 INFO distributedshell.Client: "
    job = YarnApplication(parse_arguments(["-n", "1", "true"]), {})
    assert not job.is_submitting()
    job.is_news(f"{log}Submitting application to ASM")
    assert job.is_submitting()
    submitted = f"{log}Submitted application application_17_1"
    job.is_news(submitted)
    assert not job.is_submitting()
    command = job.cancel(submitted)
    assert command is not None and command[-2:] == ["application_17_1", job.name]


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
    return str(program(tmp_path, "my python", 'echo "$YARN_SHELL_ID" "$PWD" "$@"'))


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
