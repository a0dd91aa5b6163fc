"""The plan of a local job: who is started with which command and environment."""

from __future__ import annotations

import dataclasses

import pytest

from kvstore.launch.options import LaunchError, LaunchOptions, parse_arguments
from kvstore.launch.plan import (
    THREAD_COUNT_NAMES,
    JobFacts,
    ProcessSpec,
    base_environment,
    brings_a_key,
    plan_job,
    scheduler_address,
)

FACTS = JobFacts(
    job_id="ab12", host="127.0.0.1", port=4711, listen_fd=9, cpu_count=8, checkout_root=None
)
OPTIONS = LaunchOptions(num_workers=2, num_servers=1, command=("prog", "$x y"))


def plan(
    options: LaunchOptions = OPTIONS,
    environ: dict[str, str] | None = None,
    facts: JobFacts = FACTS,
) -> dict[str, ProcessSpec]:
    specs = plan_job(options, facts, environ or {}, ("serve", "-m"))
    return {spec.name: spec for spec in specs}


def test_one_scheduler_then_servers_then_workers_with_the_contract_of_ps_lite() -> None:
    specs = plan()
    assert list(specs) == ["scheduler", "server 0", "worker 0", "worker 1"]
    assert [spec.argv for spec in specs.values()] == [
        ("serve", "-m"),
        ("serve", "-m"),
        ("prog", "$x y"),
        ("prog", "$x y"),
    ]
    for spec in specs.values():
        assert (
            spec.environment.items()
            >= {
                "DMLC_ROLE": spec.role,
                "DMLC_TASK_ID": str(spec.rank),
                "DMLC_PS_ROOT_URI": "127.0.0.1",
                "DMLC_PS_ROOT_PORT": "4711",
                "DMLC_NUM_WORKER": "2",
                "DMLC_NUM_SERVER": "1",
                "DMLC_JOB_CLUSTER": "local",
                "PS_JOB_ID": "ab12",
                "PYTHONUNBUFFERED": "1",
            }.items()
        )


def test_workers_are_told_in_the_words_of_torchrun_too() -> None:
    facts = dataclasses.replace(
        FACTS, worker_hosts=("alpha", "beta", "alpha", "beta"), store_port=2900
    )
    specs = plan(dataclasses.replace(OPTIONS, num_workers=4), facts=facts)
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK")
    workers = [specs[f"worker {rank}"].environment for rank in range(4)]
    assert [[each[name] for name in names] for each in workers] == [
        ["0", "0", "0"],
        ["1", "0", "1"],
        ["2", "1", "0"],
        ["3", "1", "1"],
    ]
    for each in workers:
        assert (each["WORLD_SIZE"], each["LOCAL_WORLD_SIZE"]) == ("4", "2")
        assert (each["MASTER_ADDR"], each["MASTER_PORT"]) == ("alpha", "2900")
        assert each["TORCHELASTIC_RUN_ID"] == "ab12"
    assert "RANK" not in specs["server 0"].environment


def test_the_users_own_address_of_a_torch_store_stays_and_that_of_an_outer_job_does_not() -> None:
    given = {"MASTER_ADDR": "gamma", "MASTER_PORT": "1", "RANK": "9"}
    told = plan(environ=given)["worker 1"].environment
    assert told["RANK"] == "1"
    assert "MASTER_ADDR" not in told
    inner = plan(environ={**given, "PS_JOB_ID": "outer", "DMLC_TASK_ID": "0"})["worker 1"]
    assert inner.environment["MASTER_ADDR"] == "127.0.0.1"


def test_only_the_scheduler_inherits_the_listening_socket() -> None:
    specs = plan()
    assert specs["scheduler"].environment["PS_LISTEN_FD"] == "9"
    assert specs["scheduler"].inherited_fds == (9,)
    for name in ("server 0", "worker 0", "worker 1"):
        assert "PS_LISTEN_FD" not in specs[name].environment
        assert specs[name].inherited_fds == ()


def test_only_the_scheduler_can_say_that_all_have_joined() -> None:
    facts = dataclasses.replace(FACTS, joined_fd=7)
    for spec in plan_job(OPTIONS, facts, {"PS_JOINED_FD": "5"}, ["service"]):
        is_scheduler = spec.role == "scheduler"
        assert (spec.environment.get("PS_JOINED_FD") == "7") == is_scheduler
        assert (7 in spec.inherited_fds) == is_scheduler
    assert "PS_JOINED_FD" not in base_environment({"PS_JOINED_FD": "5"})


def test_only_the_scheduler_has_the_journal_and_only_that_of_this_job() -> None:
    given = {"PS_SCHEDULER_JOURNAL": "of another job"}
    for journal in (None, "of this job"):
        facts = dataclasses.replace(FACTS, journal=journal)
        for spec in plan_job(OPTIONS, facts, given, ["service"]):
            expected = journal if spec.role == "scheduler" else None
            assert spec.environment.get("PS_SCHEDULER_JOURNAL") == expected
    assert base_environment(given) == {}
    with pytest.raises(LaunchError, match="PS_SCHEDULER_JOURNAL"):
        parse_arguments(["-n", "1", "--env", "PS_SCHEDULER_JOURNAL=x", "train"])


def test_workers_share_the_processors_and_services_get_one_thread() -> None:
    specs = plan()
    for name in THREAD_COUNT_NAMES:
        assert specs["worker 0"].environment[name] == "4"
        assert specs["server 0"].environment[name] == "1"
    many = dataclasses.replace(OPTIONS, num_workers=100)
    assert plan(many)["worker 0"].environment["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("environ", "worker_environment"),
    [({"MKL_NUM_THREADS": "3"}, ()), ({}, (("OMP_NUM_THREADS", "3"),))],
)
def test_a_thread_count_set_by_the_user_is_left_alone(
    environ: dict[str, str], worker_environment: tuple[tuple[str, str], ...]
) -> None:
    options = dataclasses.replace(OPTIONS, worker_environment=worker_environment)
    worker = plan(options, environ)["worker 0"].environment
    assert {name: worker[name] for name in THREAD_COUNT_NAMES if name in worker} == dict(
        worker_environment
    )


def test_variables_for_a_role_reach_only_that_role() -> None:
    options = dataclasses.replace(
        OPTIONS,
        environment=(("ALL", "1"),),
        server_environment=(("FOR", "server"), ("OMP_NUM_THREADS", "2")),
        worker_environment=(("FOR", "worker"),),
    )
    specs = plan(options)
    assert all(spec.environment["ALL"] == "1" for spec in specs.values())
    assert specs["server 0"].environment["FOR"] == "server"
    assert specs["server 0"].environment["OMP_NUM_THREADS"] == "2"
    assert specs["worker 1"].environment["FOR"] == "worker"
    assert "FOR" not in specs["scheduler"].environment


def test_what_the_job_says_of_itself_counts_before_what_the_user_says() -> None:
    given = (("DMLC_NUM_WORKER", "9"), ("DMLC_TASK_ID", "9"), ("PS_JOB_ID", "another"))
    options = dataclasses.replace(OPTIONS, environment=given, worker_environment=given)
    said = plan(options)["worker 1"].environment
    assert [said[name] for name, _ in given] == ["2", "1", "ab12"]


def test_a_checkout_comes_first_for_services_and_last_for_workers() -> None:
    facts = dataclasses.replace(FACTS, checkout_root="/repo")
    specs = plan(OPTIONS, {"PYTHONPATH": "/mine"}, facts)
    assert specs["scheduler"].environment["PYTHONPATH"] == "/repo:/mine"
    assert specs["server 0"].environment["PYTHONPATH"] == "/repo:/mine"
    assert specs["worker 0"].environment["PYTHONPATH"] == "/mine:/repo"
    assert plan(OPTIONS, {}, facts)["worker 0"].environment["PYTHONPATH"] == "/repo"
    assert "PYTHONPATH" not in plan()["worker 0"].environment


def test_the_scheduler_listens_on_loopback_unless_the_user_exported_an_address() -> None:
    assert scheduler_address({}) == ("127.0.0.1", 0)
    exported = {"DMLC_PS_ROOT_URI": "10.0.0.7", "DMLC_PS_ROOT_PORT": "9091"}
    assert scheduler_address(exported) == ("10.0.0.7", 9091)
    with pytest.raises(LaunchError, match="must be a port number, got '70000'"):
        scheduler_address({"DMLC_PS_ROOT_PORT": "70000"})


def test_a_job_inside_a_job_takes_neither_its_address_nor_its_socket() -> None:
    inside = {
        "PS_JOB_ID": "outer",
        "DMLC_TASK_ID": "0",
        "DMLC_PS_ROOT_PORT": "9091",
        "DMLC_RANK": "3",
        "PS_LISTEN_FD": "5",
        "HOME": "/h",
    }
    assert scheduler_address(inside) == ("127.0.0.1", 0)
    assert base_environment(inside).keys().isdisjoint({"PS_LISTEN_FD", "DMLC_RANK"})
    assert base_environment(inside)["HOME"] == "/h"


def test_everybody_is_told_where_the_key_is_and_that_authentication_is_enough() -> None:
    facts = dataclasses.replace(FACTS, key_file="/tmp/x/job.key")
    for spec in plan(facts=facts).values():
        assert spec.environment["PS_JOB_KEY_FILE"] == "/tmp/x/job.key"
        assert spec.environment["PS_SECURITY"] == "plain"
    assert all("PS_JOB_KEY_FILE" not in spec.environment for spec in plan().values())


def test_what_the_user_says_of_security_counts() -> None:
    exported = plan(environ={"PS_SECURITY": "curve"})
    assert all("PS_SECURITY" not in spec.environment for spec in exported.values())
    options = dataclasses.replace(OPTIONS, environment=(("PS_SECURITY", "curve"),))
    assert {spec.environment["PS_SECURITY"] for spec in plan(options).values()} == {"curve"}


def test_a_key_of_the_users_own_takes_the_place_of_a_new_one() -> None:
    given = dataclasses.replace(OPTIONS, environment=(("PS_JOB_KEY_FILE", "/mine"),))
    assert brings_a_key(given, {})
    assert brings_a_key(OPTIONS, {"PS_JOB_KEY_FILE": "/mine"})
    assert not brings_a_key(OPTIONS, {})
    assert not brings_a_key(OPTIONS, {"PS_JOB_KEY_FILE": ""})


def test_a_job_inside_a_job_has_a_key_of_its_own() -> None:
    inside = {
        "PS_JOB_ID": "outer",
        "DMLC_TASK_ID": "0",
        "PS_JOB_KEY_FILE": "/outer/job.key",
        "PS_JOB_KEY_FD": "5",
        "PS_SECURITY": "curve",
    }
    assert not brings_a_key(OPTIONS, inside)
    assert "PS_JOB_KEY_FD" not in base_environment(inside)
    facts = dataclasses.replace(FACTS, key_file="/inner/job.key")
    for spec in plan(environ=inside, facts=facts).values():
        seen = {**base_environment(inside), **spec.environment}
        assert (seen["PS_JOB_KEY_FILE"], seen["PS_SECURITY"]) == ("/inner/job.key", "plain")


def test_modules_for_servers_reach_servers_and_the_scheduler_only() -> None:
    options = dataclasses.replace(OPTIONS, server_imports=("my.optimizers", "other"))
    specs = plan(options)
    for name in ("scheduler", "server 0"):
        assert specs[name].environment["KVSTORE_SERVER_IMPORT"] == "my.optimizers,other"
    assert "KVSTORE_SERVER_IMPORT" not in specs["worker 0"].environment
    assert "KVSTORE_SERVER_IMPORT" not in plan()["server 0"].environment


def test_a_worker_that_crashes_in_compiled_code_says_where_it_was() -> None:
    assert plan()["worker 0"].environment["PYTHONFAULTHANDLER"] == "1"
    assert "PYTHONFAULTHANDLER" not in plan()["server 0"].environment
    chosen = plan(environ={"PYTHONFAULTHANDLER": ""})["worker 0"].environment
    assert "PYTHONFAULTHANDLER" not in chosen


def rejoin_of(options: LaunchOptions, environ: dict[str, str] | None = None) -> set[str | None]:
    """What the processes are told of PS_REJOIN_TIMEOUT."""
    return {spec.environment.get("PS_REJOIN_TIMEOUT") for spec in plan(options, environ).values()}


def test_with_restarts_all_processes_wait_as_long_for_one_in_place_of_a_lost_worker() -> None:
    restarts = dataclasses.replace(OPTIONS, restarts=1)
    assert rejoin_of(restarts) == {"60"}
    assert rejoin_of(OPTIONS) == {None}


@pytest.mark.parametrize("chosen", ["0", "5"])
def test_how_long_the_user_wants_to_wait_for_such_a_process_counts(chosen: str) -> None:
    restarts = dataclasses.replace(OPTIONS, restarts=1)
    given = dataclasses.replace(restarts, environment=(("PS_REJOIN_TIMEOUT", chosen),))
    assert rejoin_of(given) == {chosen}
    assert rejoin_of(given, {"PS_REJOIN_TIMEOUT": "7"}) == {chosen}
    assert rejoin_of(restarts, {"PS_REJOIN_TIMEOUT": chosen}) == {None}, "it is inherited"
    assert base_environment({"PS_REJOIN_TIMEOUT": chosen}) == {"PS_REJOIN_TIMEOUT": chosen}


def attempts_of(restarts: int, attempt: int) -> set[str | None]:
    options = dataclasses.replace(OPTIONS, restarts=restarts)
    specs = plan(options, facts=dataclasses.replace(FACTS, attempt=attempt))
    return {spec.environment.get("DMLC_NUM_ATTEMPT") for spec in specs.values()}


def test_all_processes_know_the_attempt_in_the_last_one_too() -> None:
    assert attempts_of(restarts=2, attempt=0) == {"0"}
    assert attempts_of(restarts=1, attempt=1) == {"1"}
    assert attempts_of(restarts=0, attempt=2) == {"2"}, "no restart is left"
    assert attempts_of(restarts=0, attempt=0) == {"0"}


def test_the_scheduler_of_a_job_that_was_started_again_knows_why() -> None:
    specs = plan(facts=dataclasses.replace(FACTS, attempt=2, restart_cause="server 0 ended"))
    assert {spec.environment["PS_JOB_RESTARTS"] for spec in specs.values()} == {"2"}
    causes = {name: spec.environment.get("PS_RESTART_CAUSE") for name, spec in specs.items()}
    assert causes == {**dict.fromkeys(specs), "scheduler": "server 0 ended"}
    assert not any("PS_JOB_RESTARTS" in spec.environment for spec in plan().values())


def test_a_standby_has_the_environment_of_its_server_and_comes_after_the_servers() -> None:
    given = (("PS_VERBOSE", "2"),)
    options = dataclasses.replace(OPTIONS, num_servers=2, standbys=1, server_environment=given)
    specs = plan(options)
    standbys = ["standby 0", "standby 1"]
    assert list(specs)[1:5] == ["server 0", "server 1", *standbys]
    for rank, name in enumerate(standbys):
        server = specs[f"server {rank}"]
        assert specs[name].argv == server.argv
        assert specs[name].environment == {**server.environment, "PS_STANDS_BY": "1"}
        assert (specs[name].role, specs[name].rank) == ("standby", rank)
        assert specs[name].environment["DMLC_ROLE"] == "server"


def test_all_processes_know_of_standbys_and_not_of_those_of_an_outer_job() -> None:
    options = dataclasses.replace(OPTIONS, standbys=1)
    assert {spec.environment["PS_STANDBYS"] for spec in plan(options).values()} == {"1"}
    assert not any("PS_STANDBYS" in spec.environment for spec in plan().values())
    assert base_environment({"PS_STANDBYS": "1", "PS_STANDS_BY": "1", "A": "b"}) == {"A": "b"}
