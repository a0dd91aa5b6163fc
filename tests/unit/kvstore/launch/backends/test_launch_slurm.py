"""What srun is called with, what an allocation says, and the words for what Slurm says."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.launch.backends.slurm import (
    AgentsEnd,
    Allocation,
    allocation,
    check_meaning,
    explain,
    job_argv,
    needs,
    own_job,
    refuse_copies,
    refuse_others_job,
    step,
    step_argv,
    step_environment,
    without_redirection,
)
from kvstore.launch.backends.slurm_queue import Queued, describe, parse
from kvstore.launch.environment import share_gpus, visible_gpus
from kvstore.launch.options import LaunchError, LaunchOptions, parse_arguments

DIRECTORY = Path("/shared/4f")
AGENT = ["/py", "/shared/4f/agent.py"]


def chosen(*words: str) -> LaunchOptions:
    own = ["-n", "4", "-s", "2", "--launcher", "slurm", "--python", "/py"]
    return parse_arguments([*own, *words, "train"])


def components(argv: list[str]) -> list[list[str]]:
    """The words of each, without srun's own."""
    assert argv[0] == "srun"
    parts: list[list[str]] = [[]]
    for word in argv[1:]:
        if word == ":":
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


# -- a job of its own ----------------------------------------------------------------------


def test_servers_and_workers_with_the_same_needs_are_tasks_of_one_job() -> None:
    options = chosen("--worker-cores", "2", "--server-cores", "2", "--jobname", "my job")
    [words] = components(job_argv(options, DIRECTORY))
    assert words[-2:] == AGENT
    assert {"--ntasks=6", "--cpus-per-task=2", "--job-name=my job", "--mpi=none"} < set(words)
    assert "--chdir=/shared/4f" in words, "by which the queue is searched for the job"


def test_different_needs_make_two_components() -> None:
    options = chosen("--worker-gpus", "1", "--server-memory", "512m", "--queue", "gpu")
    servers, workers = components(job_argv(options, DIRECTORY))
    assert {"--ntasks=2", "--mem-per-cpu=512M", "--partition=gpu"} < set(servers)
    assert {"--ntasks=4", "--gpus-per-task=1", "--partition=gpu"} < set(workers)
    assert not any("gpus" in word for word in servers)
    for words in (servers, workers):
        assert words[-2:] == AGENT
        assert {"--mpi=none", "--chdir=/shared/4f", "--kill-on-bad-exit=0", "--wait=0"} < set(words)


def test_the_memory_of_a_process_is_asked_for_by_processor() -> None:
    assert needs(chosen("--worker-memory", "1g"), "worker") == ["--mem-per-cpu=1024M"]
    found = needs(chosen("--worker-memory", "1g", "--worker-cores", "3"), "worker")
    assert found == ["--cpus-per-task=3", "--mem-per-cpu=342M"], "rounded up"
    assert needs(chosen("--worker-memory", "1g"), "server") == []


def test_the_users_words_win_over_our_wishes_and_not_over_what_has_to_be() -> None:
    [words] = components(job_argv(chosen("--launcher-args=--distribution=block -N 2"), DIRECTORY))
    assert words.index("--distribution=cyclic") < words.index("--distribution=block")
    assert words.index("-N") < words.index("--ntasks=6")


def test_nothing_of_the_job_stays_when_the_launcher_is_lost() -> None:
    cluster = own_job(chosen(), {})
    cluster.command(DIRECTORY)
    command = cluster.cancel("")
    assert command is not None and command[-1] == "/shared/4f"
    assert cluster.if_lost == ("scancel", "--quiet", "$SLURM_JOB_ID")
    assert cluster.connect_s is None, "a job can wait for days"


# -- in an allocation ----------------------------------------------------------------------


def test_in_an_allocation_all_share_its_processors() -> None:
    [words] = components(step_argv(chosen(), Allocation("7", (3,)), DIRECTORY))
    assert {"--nodes=3", "--ntasks=6", "--overlap", "--overcommit"} < set(words)
    assert not any(word.startswith(("--chdir", "--cpus", "--het-group")) for word in words)
    [words] = components(step_argv(chosen(), Allocation("7", (30,)), DIRECTORY))
    assert "--nodes=6" in words, "srun would complain of nodes without a task"
    [words] = components(step_argv(chosen(), Allocation("7", (None,)), DIRECTORY))
    assert not any(word.startswith("--nodes") for word in words)


def test_servers_are_in_the_first_component_of_an_allocation() -> None:
    servers, workers = components(step_argv(chosen(), Allocation("7", (1, 5)), DIRECTORY))
    assert {"--het-group=0", "--nodes=1", "--ntasks=2"} < set(servers)
    assert {"--het-group=1", "--nodes=4", "--ntasks=4"} < set(workers)


def test_an_allocation_is_the_users_and_stays() -> None:
    cluster = step(chosen(), Allocation("7", (1,)), {})
    assert cluster.cancel("") is None and cluster.if_lost == ()
    assert cluster.connect_s is not None


def test_gpus_for_each_task_are_gpus_for_each_worker() -> None:
    assert step(chosen(), Allocation("7", (1,), 2), {}).worker_gpus == 2
    assert step(chosen("--worker-gpus", "1"), Allocation("7", (1,), 2), {}).worker_gpus == 1
    assert step(chosen(), Allocation("7", (1,)), {}).worker_gpus == 0


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}, Allocation("7", (2,))),
        ({"SLURM_JOBID": "7", "SLURM_NNODES": "2"}, Allocation("7", (2,))),
        ({"SLURM_JOB_ID": "7"}, Allocation("7", (None,))),
        ({"SLURM_JOB_ID": "7", "SLURM_GPUS_PER_TASK": "a100:2"}, Allocation("7", (None,), 2)),
        (
            {
                "SLURM_JOB_ID": "7",
                "SLURM_HET_SIZE": "2",
                "SLURM_JOB_NUM_NODES": "1",
                "SLURM_JOB_NUM_NODES_HET_GROUP_0": "1",
                "SLURM_JOB_NUM_NODES_HET_GROUP_1": "4",
                "SLURM_GPUS_PER_TASK_HET_GROUP_1": "1",
            },
            Allocation("7", (1, 4), 1),
        ),
    ],
)
def test_the_environment_tells_of_an_allocation(
    environ: dict[str, str], found: Allocation | None
) -> None:
    assert allocation(environ) == found


def test_three_components_are_too_many() -> None:
    with pytest.raises(LaunchError, match="has 3 components") as caught:
        allocation({"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "3"})
    assert caught.value.exit_code == 2


def test_a_launcher_that_srun_has_copied_is_refused() -> None:
    with pytest.raises(LaunchError, match="one of 6 launchers") as caught:
        refuse_copies({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "6"})
    assert caught.value.exit_code == 2
    refuse_copies({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"})
    refuse_copies({"SLURM_NTASKS": "6"})
    within_a_worker = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "6", "DMLC_ROLE": "worker"}
    refuse_copies(within_a_worker)


@pytest.mark.parametrize("words", [["--jobid", "7"], ["-v", "--jobid=7"]])
def test_a_step_in_a_job_that_is_not_ours_is_refused(words: list[str]) -> None:
    with pytest.raises(
        LaunchError, match="--jobid in --launcher-args names an allocation"
    ) as caught:
        refuse_others_job(words)
    assert caught.value.exit_code == 2
    refuse_others_job(["--job-name=7", "--account", "7"])


@pytest.mark.parametrize(
    "words",
    [
        ["--queue", "gpu"],
        ["--server-cores", "1"],
        ["--worker-memory", "1g"],
        ["--server-memory", "1g"],
    ],
)
def test_what_the_allocation_has_decided_cannot_be_asked_for(words: list[str]) -> None:
    with pytest.raises(LaunchError, match=f"{words[0]} has no meaning in the allocation 7"):
        check_meaning(chosen(*words), Allocation("7", (1,)))
    check_meaning(chosen("--worker-cores", "2", "--worker-gpus", "1"), Allocation("7", (1,)))


def test_how_the_script_lays_out_its_tasks_is_kept_from_srun() -> None:
    kept = {"SLURM_JOB_ID": "7", "SLURM_CONF": "/etc/slurm.conf", "SLURM_MEM_PER_CPU": "100"}
    layout = ["SLURM_NTASKS_PER_NODE", "SRUN_CPUS_PER_TASK", "SLURM_GPUS_PER_TASK_HET_GROUP_1"]
    redirection = ["SLURM_STDOUTMODE", "SLURM_LABELIO"]
    environ = {**kept, **dict.fromkeys([*layout, *redirection], "1")}
    assert step_environment(environ) == kept
    assert without_redirection(environ) == {**kept, **dict.fromkeys(layout, "1")}


# -- what Slurm says -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("srun: Job allocation 9 has been revoked", "it was cancelled"),
        (
            "srun: error: Unable to allocate resources: Invalid partition name specified",
            "there is no such partition",
        ),
        (
            "srun: error: Unable to allocate resources: Requested node configuration is not "
            "available",
            "no node of it can give",
        ),
    ],
)
def test_what_slurm_refuses_is_said_in_plain_words(line: str, words: str) -> None:
    found = explain(["srun: error: Unable to contact slurm controller", line], 1)
    assert found.startswith("Slurm does not run the job: ") and words in found
    assert "\n" not in found


def test_what_was_said_long_before_is_not_why_it_ended() -> None:
    waiting = ["srun: error: Unable to contact slurm controller"]
    lines = [*waiting, *(f"srun: {n}" for n in range(30)), "srun: error: Invalid account"]
    found = explain(lines, 1)
    assert found.startswith("srun ended (exit code 1)")
    assert found.endswith("\n  srun: error: Invalid account")


def test_what_is_not_known_is_quoted() -> None:
    found = explain(["srun: error: the moon is in the way"], 1)
    assert found == (
        "srun ended (exit code 1) before all processes had started; it said:\n"
        "  srun: error: the moon is in the way"
    )
    assert explain([], -9) == "srun ended (killed by signal 9) before all processes had started"


def test_an_agent_that_cannot_start_is_told_with_what_was_said() -> None:
    heard = AgentsEnd()
    assert heard.fatal("slurmstepd: error: execve(): /py: No such file or directory") is None
    assert heard.fatal("srun: error: node2: task 1: Exited with exit code 2") == (
        "node2: the agent could not start (Exited with exit code 2); it said:\n"
        "  slurmstepd: error: execve(): /py: No such file or directory"
    )
    assert heard.fatal("srun: error: node[1-2]: tasks 0,3-4: Killed") is not None


def test_an_agent_that_says_itself_why_it_cannot_serve_is_not_told_of_twice() -> None:
    assert AgentsEnd().fatal("srun: error: node2: tasks 0-3: Exited with exit code 3") is None


def test_the_queue_is_searched_by_the_jobs_directory() -> None:
    text = "5|RUNNING|None|node1|/home/ann\n7|PENDING|Resources||/shared/4f\n\n8|odd\n"
    assert parse(text, "/shared/4f") == [Queued("7", "PENDING", "Resources", "")]
    assert parse(text, "/shared") == []


def test_the_queue_is_described_in_slurms_words() -> None:
    assert describe([]) == ""
    jobs = [Queued("7", "PENDING", "Priority", ""), Queued("8", "RUNNING", "None", "node[1-2]")]
    assert describe(jobs) == (
        "Slurm's job 7 is PENDING (Priority), Slurm's job 8 is RUNNING on node[1-2]"
    )
    assert "no nodes of its partition can give" in describe(
        [Queued("7", "PENDING", "PartitionConfig", "")]
    )


# -- GPUs that all processes of a host see -------------------------------------------------


def test_each_worker_gets_gpus_of_its_host_and_a_server_none() -> None:
    members = [("server", 0), ("worker", 0), ("worker", 1), ("worker", 2)]
    one, two = {"host": "a", "gpu_names": ["0", "GPU-x"]}, {"host": "b", "gpu_names": ["3"]}
    found = share_gpus(members, [one, one, two, one], 1)
    assert {member: list(given.values()) for member, given in found.items()} == {
        ("server", 0): [""],
        ("worker", 0): ["0"],
        ("worker", 1): ["3"],
        ("worker", 2): ["GPU-x"],
    }


def test_too_few_gpus_are_an_error_that_names_the_host() -> None:
    members = [("worker", 0), ("worker", 1)]
    with pytest.raises(LaunchError, match="3 GPUs on a, and each of its workers there needs 2"):
        share_gpus(members, 2 * [{"host": "a", "gpu_names": ["0", "1", "2"]}], 2)


@pytest.mark.parametrize(
    ("value", "names"),
    [("0, 2", ["0", "2"]), ("", []), ("-1", []), ("NoDevFiles", []), ("GPU-7", ["GPU-7"])],
)
def test_the_gpus_of_a_process_are_those_it_may_see(value: str, names: list[str]) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": value}) == names
