"""Settings: from arguments, the environment or defaults, in this order; wrong ones are named."""

from __future__ import annotations

import dataclasses
import math
import re
import threading
from typing import Any

import pytest

from pslite.config import Config, unknown_names
from pslite.errors import ConfigError

#: Field -> (text in the environment, its value, another value given as an argument).
SAMPLES: dict[str, tuple[str, Any, Any]] = {
    "role": ("server", "server", "scheduler"),
    "num_workers": ("3", 3, 4),
    "num_servers": ("2", 2, 1),
    "root_uri": ("head", "head", "10.0.0.1"),
    "root_port": ("9000", 9000, 9001),
    "task_id": ("0", 0, 1),
    "node_host": ("alpha", "alpha", "beta"),
    "interface": ("eth0", "eth0", "192.168.20.0/24"),
    "machine": ("rack 3", "rack 3", "rack 4"),
    "port": ("7000", 7000, 7001),
    "bind_all": ("1", True, False),
    "van_type": ("p3", "p3", "zmq"),
    "job_id": ("job-7", "job-7", "job-8"),
    "listen_fd": ("5", 5, 6),
    "job_key_file": ("/run/job.key", "/run/job.key", "other.key"),
    "job_key_fd": ("7", 7, 8),
    "security": ("plain", "plain", "curve"),
    "server_import": ("module.a,b", "module.a,b", "c"),
    "verbose": ("2", 2, 1),
    "heartbeat_interval_s": ("0.5", 0.5, 1.5),
    "heartbeat_timeout_s": ("30", 30.0, 31.0),
    "rendezvous_timeout_s": ("5", 5.0, 6.0),
    "roster_interval_s": ("2.5", 2.5, 3.5),
    "lost_after_s": ("7", 7.0, 8.0),
    "rejoin_timeout_s": ("90", 90.0, 91.0),
    "scheduler_journal": ("/tmp/j", "/tmp/j", "/tmp/k"),
    "standbys": ("1", 1, 0),
    "stands_by": ("1", True, False),
    "job_restarts": ("2", 2, 0),
    "restart_cause": ("worker 1 ended", "worker 1 ended", ""),
    "stall_report_s": ("12", 12.0, 13.0),
    "stall_timeout_s": ("600", 600.0, 7.5),
    "close_timeout_s": ("3", 3.0, 4.0),
    "resend_timeout_s": ("1500", 1.5, 0.25),
    "drop_percent": ("10", 10.0, 20.0),
    "shm": ("0", False, True),
    "sum_on_machines": ("0", False, True),
    "shm_bytes": ("1048576", 1 << 20, 2 << 20),
    "chunk_bytes": ("4096", 4096, 8192),
    "credit_bytes": ("2097152", 2 << 20, 3 << 20),
    "connections": ("4", 4, 2),
    "round_window": ("0", 0, 1),
    "placement": ("equal", "equal", "network"),
    "hierarchical": ("off", "off", "auto"),
    "torch_servers": ("3", 3, 1),
    "torch_replaces": ("gloo,mpi", "gloo,mpi", "mpi"),
    "pool_threads": ("4", 4, 3),
    "reduction_threads": ("3", 3, 2),
    "native": ("0", False, True),
    "max_message_bytes": ("3000000", 3_000_000, 4_000_000),
    "stranger_bytes": ("1000000", 1_000_000, 2_000_000),
}
FIELDS = {field.name: field for field in dataclasses.fields(Config)}
NUMBERS = sorted(name for name, sample in SAMPLES.items() if type(sample[1]) in (int, float))


def env_name(field: str) -> str:
    name: str = FIELDS[field].metadata["name"]
    return name


def test_the_samples_cover_every_setting() -> None:
    assert set(SAMPLES) == set(FIELDS)


def test_each_setting_is_read_from_the_environment() -> None:
    for field, (text, value, _) in SAMPLES.items():
        config, unknown = Config.from_env({env_name(field): text})
        assert (getattr(config, field), type(getattr(config, field))) == (value, type(value))
        changed = [name for name in FIELDS if getattr(config, name) != getattr(Config(), name)]
        assert (changed, unknown) == ([field], [])


def test_an_argument_wins_over_the_environment() -> None:
    for field, (text, _, argument) in SAMPLES.items():
        config, _ = Config.from_env({env_name(field): text}, **{field: argument})
        assert (field, getattr(config, field)) == (field, argument)


def test_an_empty_variable_is_as_good_as_none() -> None:
    for field in SAMPLES:
        assert Config.from_env({env_name(field): ""})[0] == Config(), field


@pytest.mark.parametrize("text", ["many", "1,5", "0x"])
def test_a_malformed_value_is_named_with_its_setting(text: str) -> None:
    for field in NUMBERS:
        with pytest.raises(ConfigError) as caught:
            Config.from_env({env_name(field): text})
        kind = "a number" if "float" in str(FIELDS[field].type) else "a whole number"
        assert str(caught.value) == (
            f"{env_name(field)} is {text!r}; expected {kind} ({FIELDS[field].metadata['help']})"
        )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((text, False) for text in ("0", "false", "No", " OFF ", "")),
        *((text, True) for text in ("1", "true", "YES", " On ")),
    ],
)
def test_a_flag_can_be_said_in_words(text: str, value: bool) -> None:
    assert Config.from_env({"DMLC_USE_KUBERNETES": text})[0].bind_all is value


@pytest.mark.parametrize("text", ["maybe", "2", "x", " "])
def test_a_flag_that_is_neither_yes_nor_no_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_env({"PS_SHM": text})
    assert str(caught.value) == (
        f"PS_SHM is {text!r}; expected 1 or 0 ({FIELDS['shm'].metadata['help']})"
    )


def test_without_a_mapping_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_VERBOSE", "2")
    assert Config.from_env()[0].verbose == 2


# -- settings that contradict each other, or nobody could work with ------------------------


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"role": "boss"}, "DMLC_ROLE is 'boss'"),
        ({"num_workers": -1}, "DMLC_NUM_WORKER"),
        ({"num_servers": -1}, "DMLC_NUM_SERVER"),
        ({"root_port": -1}, "DMLC_PS_ROOT_PORT"),
        ({"port": -1}, "PORT"),
        ({"round_window": -1}, "PS_ROUND_WINDOW"),
        ({"chunk_bytes": 63}, "PS_CHUNK_BYTES"),
        ({"chunk_bytes": 4096, "credit_bytes": 4095}, "PS_CREDIT_BYTES"),
        ({"connections": 0}, "PS_CONNECTIONS is 0; it must be greater than 0"),
        ({"connections": 17}, "PS_CONNECTIONS is 17; it must be at most 16"),
        ({"van_type": "ibverbs"}, "DMLC_PS_VAN_TYPE is 'ibverbs'"),
        ({"machine": "x" * 513}, "PS_MACHINE must be printable"),
        ({"machine": "two\nlines"}, "PS_MACHINE must be printable"),
        ({"placement": "best"}, "KVSTORE_PLACEMENT is 'best'; it must be network or equal"),
        ({"security": "none"}, "PS_SECURITY is 'none'; it must be plain or curve"),
        (
            {"heartbeat_interval_s": 0.0, "heartbeat_timeout_s": 10.0},
            "PS_HEARTBEAT_TIMEOUT needs heartbeats",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        Config.from_env({}, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"pool_threads": 0},
        {"resend_timeout_s": 0.0},
        {"heartbeat_interval_s": -1.0},
        {"heartbeat_timeout_s": -1.0},
        {"lost_after_s": math.nan},
        {"drop_percent": -0.1},
        {"max_message_bytes": 4096},
        {"stranger_bytes": 0},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_that_nobody_could_work_with_are_refused_by_name(settings: dict[str, Any]) -> None:
    # No thread to work on; repeats without a pause; beats without a pause; a time that never
    # comes; parts that are larger than what may arrive.
    (field,) = settings
    with pytest.raises(ConfigError, match=env_name(field)):
        Config.from_env({}, **settings)


def test_settings_at_the_border_are_taken() -> None:
    least = {"chunk_bytes": 64, "credit_bytes": 64, "max_message_bytes": 64, "pool_threads": 1}
    assert Config.from_env({}, **least)[0].chunk_bytes == 64


def test_what_a_cluster_needs_is_listed_whole() -> None:
    with pytest.raises(ConfigError) as caught:
        Config().checked_for_cluster()
    names = ("DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT")
    assert ", ".join(names) in str(caught.value)
    assert "tools/launch.py" in str(caught.value)


def test_an_inherited_socket_stands_in_for_the_port() -> None:
    config = Config(num_workers=1, num_servers=1, root_uri="head", listen_fd=5)
    assert config.checked_for_cluster() is config


def test_security_without_a_key_is_refused_when_a_cluster_is_joined() -> None:
    wanted = {"num_workers": 1, "num_servers": 1, "root_uri": "head", "root_port": 9000}
    for key in ({"job_key_file": "job.key"}, {"job_key_fd": 5}):
        assert Config(**wanted, security="plain", **key).checked_for_cluster()
    with pytest.raises(ConfigError, match=r"PS_SECURITY=plain needs a job key; .*PS_JOB_KEY_FILE"):
        Config(**wanted, security="plain").checked_for_cluster()


def test_signs_of_life_can_be_turned_off_as_in_the_original() -> None:
    assert Config.from_env({"PS_HEARTBEAT_INTERVAL": "0"})[0].heartbeat_interval_s == 0


# -- names that nobody knows --------------------------------------------------------------


def test_an_unknown_setting_is_reported_with_a_suggestion() -> None:
    _, unknown = Config.from_env({"PS_VERBOS": "1", "PS_QQQ": "1", "PATH": "x", "DMLC_X": "1"})
    assert unknown == [
        "the setting PS_QQQ is unknown and was ignored",
        "the setting PS_VERBOS is unknown and was ignored; did you mean PS_VERBOSE?",
    ]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("KVSTORE_NAITVE", "KVSTORE_NATIVE"),
        ("DMLC_PS_ROOT_URL", "DMLC_PS_ROOT_URI"),
        ("DMLC_NUM_WORKERS", "DMLC_NUM_WORKER"),
    ],
)
def test_a_misspelt_name_is_reported_with_the_one_that_was_meant(name: str, meant: str) -> None:
    assert unknown_names({name: "1"}) == [
        f"the setting {name} is unknown and was ignored; did you mean {meant}?"
    ]


@pytest.mark.parametrize(
    "name",
    [
        *("DMLC_WORKER_ID", "DMLC_NUM_PORTS", "DMLC_NUM_ALL_WORKER", "DMLC_TRACKER_URI"),
        *("DMLC_PS_GLOBAL_ROOT_PORT", "DMLC_JOB_CLUSTER", "KVSTORE_JOB_DIR", "KVSTORE_AGENT_ID"),
    ],
)
def test_names_of_other_programs_are_left_alone(name: str) -> None:
    assert unknown_names({name: "1"}) == []


def test_settings_of_the_original_that_need_no_field_are_known() -> None:
    assert unknown_names({"PS_RESEND": "1", "PS_RESEND_TIMEOUT": "500"}) == []


def test_what_changes_nothing_here_is_said_to_those_who_ask_for_more_lines() -> None:
    original = {"MXNET_KVSTORE_BIGARRAY_BOUND": "1000", "DMLC_LOCAL": "", "PS_RESEND": "1"}
    assert Config.from_env(original)[1] == []
    assert Config.from_env({**original, "PS_VERBOSE": "1"})[1] == [
        "the setting MXNET_KVSTORE_BIGARRAY_BOUND has no effect: PS_CHUNK_BYTES sets the size of "
        "the parts of an array"
    ]


def test_every_setting_has_a_name_and_a_help_of_its_own() -> None:
    names = [field.metadata["name"] for field in FIELDS.values()]
    helps = [field.metadata["help"] for field in FIELDS.values()]
    assert len(set(names)) == len(names)
    assert all(helps)


@pytest.mark.parametrize(
    ("name", "value"),
    [("DMLC_PS_ROOT_PORT", "99999"), ("PS_DROP_MSG", "200"), ("DMLC_TASK_ID", "-3")],
)
def test_a_number_out_of_its_range_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Config.from_env({name: value})


# -- extremes --------------------------------------------------------------------------------

SECONDS = sorted(name for name in SAMPLES if name.endswith("_s"))
INTEGERS = sorted(
    name
    for name, sample in SAMPLES.items()
    if type(sample[1]) is int and name not in ("verbose", "connections")
)


@pytest.mark.parametrize("text", ["inf", "1e308", "1e12"])
def test_a_time_without_end_is_one_that_clocks_and_locks_can_count(text: str) -> None:
    for field in SECONDS:
        config, _ = Config.from_env({env_name(field): text})
        assert getattr(config, field) == 1e9, field
        assert getattr(Config(**{field: math.inf}), field) == 1e9, field
        assert getattr(config, field) < threading.TIMEOUT_MAX


@pytest.mark.parametrize("field", INTEGERS)
@pytest.mark.parametrize("value", [2**63, 10**30])
def test_a_number_that_nothing_could_count_is_named_with_its_bound(field: str, value: int) -> None:
    expected = rf"{env_name(field)} is {value}; it must be at most \d+$"
    with pytest.raises(ConfigError, match=expected):
        Config.from_env({env_name(field): str(value)})
    ready = Config("worker", 1, 1, "head", 9091)
    with pytest.raises(ConfigError, match=expected):
        dataclasses.replace(ready, **{field: value}).checked_for_cluster()
    with pytest.raises(ConfigError, match=expected):
        Config.read(field, {env_name(field): str(value)})


@pytest.mark.parametrize("field", [*SECONDS, "drop_percent"])
@pytest.mark.parametrize("text", ["nan", "-inf", "-1"])
def test_what_is_no_number_or_negative_is_refused(field: str, text: str) -> None:
    with pytest.raises(ConfigError, match=env_name(field)):
        Config.from_env({env_name(field): text})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("DMLC_TASK_ID", "-3", "0 or greater"),
        ("PS_DROP_MSG", "200", "at most 100"),
        ("PS_LOST_AFTER", "0", "greater than 0"),
        ("PS_STALL_TIMEOUT", "nan", "0 or greater"),
    ],
)
def test_a_number_out_of_its_range_is_shown_beside_what_was_expected(
    name: str, value: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_env({name: value})
    assert re.fullmatch(rf"{name} is {value}(\.0)?; it must be {expected}", str(caught.value))
