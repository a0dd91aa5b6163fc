"""The launcher's command line: what is ours, what is the user's, what is refused."""

from __future__ import annotations

import pytest

from kvstore.launch.options import LaunchError, parse_arguments
from pslite.version import __version__


def test_everything_from_the_first_non_option_on_belongs_to_the_user() -> None:
    command = [
        "python",
        "train.py",
        "--num-workers",
        "7",
        "-n",
        "9",
        "--",
        "--launcher=ssh",
        "a b",
        'it\'s "quoted"',
        "$HOME",
        "two\nlines",
        "",
    ]
    options = parse_arguments(["-n", "2", "-s", "1", *command])
    assert (options.num_workers, options.num_servers) == (2, 1)
    assert options.command == tuple(command)


@pytest.mark.parametrize(
    "own",
    [["-n", "3"], ["-n3"], ["--num-workers=3"], ["--num-workers", "3"], ["--p3", "-n", "3"]],
)
def test_every_spelling_of_an_option_ends_before_the_command(own: list[str]) -> None:
    options = parse_arguments([*own, "true", "-n", "4"])
    assert (options.num_workers, options.command) == (3, ("true", "-n", "4"))


def test_a_double_dash_ends_the_options_so_that_a_command_may_begin_with_a_dash() -> None:
    options = parse_arguments(["-n", "1", "--", "-odd-program", "--", "x"])
    assert options.command == ("-odd-program", "--", "x")


def test_servers_default_to_as_many_as_workers() -> None:
    assert parse_arguments(["-n", "4", "true"]).num_servers == 4


def test_without_launcher_and_hostfile_the_job_is_local() -> None:
    assert parse_arguments(["-n", "1", "true"]).notes == ()
    assert parse_arguments(["-n", "1", "--launcher", "local", "true"]).notes == ()


def test_a_file_of_hosts_alone_means_ssh() -> None:
    options = parse_arguments(["-n", "1", "-H", "hosts", "--sync-dst-dir", "/d", "true"])
    assert (options.launcher, options.hostfile, options.sync_dst_dir) == ("ssh", "hosts", "/d")
    assert options.notes == ()


def test_copying_is_for_ssh_and_no_error_elsewhere() -> None:
    options = parse_arguments(["-n", "1", "--launcher", "local", "--sync-dst-dir", "/d", "true"])
    assert "--sync-dst-dir has no effect with --launcher local" in options.notes[0]


def test_what_is_asked_of_a_cluster_is_read_as_numbers_and_words() -> None:
    cores = ["--worker-cores", "4", "--server-cores=2", "--worker-gpus", "1"]
    memory = ["--worker-memory", "4g", "--server-memory", "512M"]
    more = ["--launcher-args=-p gpu --comment 'a b'", "--launcher-args=-x", "--queue", "long"]
    own = ["--launcher", "slurm", "--jobname", "mine", *cores, *memory, *more]
    places = parse_arguments(["-n", "1", *own, "true"]).places
    assert (places.worker_cores, places.server_cores, places.worker_gpus) == (4, 2, 1)
    assert (places.worker_memory_mb, places.server_memory_mb) == (4096, 512)
    assert places.launcher_args == ("-p", "gpu", "--comment", "a b", "-x")
    assert (places.jobname, places.queue) == ("mine", "long")


def test_p3_is_accepted_and_explained() -> None:
    options = parse_arguments(["-n", "1", "--launcher", "local", "--p3", "true"])
    assert "priority" in options.notes[0]


def test_variables_are_read_per_role_and_a_value_may_hold_colons_and_equal_signs() -> None:
    servers = ["--env-server", "URL:http://h:1/"]
    workers = ["--env-worker", "EMPTY:", "--env-worker", "X:a=b"]
    options = parse_arguments(
        ["-n1", "--env", "HOME", "--env", "A=b=c", *servers, *workers, "true"]
    )
    assert options.environment == (("A", "b=c"),)
    assert options.forwarded_names == ("HOME",)
    assert options.server_environment == (("URL", "http://h:1/"),)
    assert options.worker_environment == (("EMPTY", ""), ("X", "a=b"))


def test_modules_for_servers_may_be_many_and_each_counts_once() -> None:
    own = ["--server-import", "my.optimizers", "--server-import=x", "--server-import", "x"]
    options = parse_arguments([*own, "--server-import", "dir/mine.py", "-n", "1", "true"])
    assert options.server_imports == ("my.optimizers", "x", "dir/mine.py")
    assert parse_arguments(["-n", "1", "true"]).server_imports == ()


def test_the_version_needs_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        parse_arguments(["--version"])
    assert raised.value.code == 0
    assert capsys.readouterr().out == f"kvstore-launch {__version__}\n"


def test_a_limit_of_waits_is_a_setting_of_all_processes() -> None:
    options = parse_arguments(["-n", "1", "--timeout", "90", "true"])
    assert options.environment == (("PS_STALL_TIMEOUT", "90"),)


@pytest.mark.parametrize("text", ["a\0b", "a\ud800"])
@pytest.mark.parametrize(
    "before",
    [["--env"], ["--env-worker"], ["--log-dir"], ["-H"], ["python"], ["python", "-c"]],
    ids=" ".join,
)
def test_text_that_no_process_can_be_given_is_refused_by_its_value(
    before: list[str], text: str
) -> None:
    word = f"NAME={text}" if before[0].startswith("--env") else text
    with pytest.raises(LaunchError, match="an argument of a process must be text") as caught:
        parse_arguments(["-n", "1", *before, word, "true"])
    assert repr(word) in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("own", "text"),
    [
        (["--standbys", "2"], "--standbys must be at most 1, got 2"),
        (["--standbys=-1"], "--standbys must be at least 0, got -1"),
        (["--env", "PS_STANDBYS=1"], "--env cannot set PS_STANDBYS, since the launcher sets it"),
        (
            ["--standbys", "1", "--launcher", "kubernetes"],
            "--standbys works only with --launcher local, ssh, mpi, slurm, sge, ray, yarn, got "
            "kubernetes; remove it",
        ),
    ],
)
def test_a_server_has_one_standby_or_none(own: list[str], text: str) -> None:
    assert parse_arguments(["-n", "1", "--standbys", "1", "true"]).standbys == 1
    assert parse_arguments(["-n", "1", "true"]).standbys == 0
    with pytest.raises(LaunchError) as caught:
        parse_arguments(["-n", "1", *own, "true"])
    assert str(caught.value).startswith(text)
