"""All settings of the runtime, and the only place that reads the environment.

A ``Config`` is a frozen value: made once by ``Config.from_env`` (argument > environment >
default) and passed to those who need it. The meaning of the DMLC_* and PS_* names is
ps-lite's (``docs/env.md`` there); the others are new. ``SETTINGS`` describes each field, for
the check of unknown names here and for the page in the docs.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pslite.errors import ConfigError
from pslite.ids import Role

MIB = 1 << 20
SECURITY_NAMES = ("plain", "curve")
PLACEMENT_NAMES = ("network", "equal")
LONGEST_S = 1e9
"""Thirty years: what a setting of ``inf`` comes to."""
MAX_CONNECTIONS = 16
"""With one peer: a first one and 15 further ones (``wire.md``, section 2)."""
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_MAX_NAME = 512
"""Characters in a name that peers are told (``wire.md``, section 5)."""


def _flag(text: str) -> bool:
    word = text.strip().lower()
    if word not in _YES + _NO:
        raise ValueError(f"{text!r} is neither yes nor no")
    return word in _YES


def _setting(
    name: str,
    default: Any,
    text: str,
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    parse: Callable[[str], Any] | None = None,
) -> Any:
    """Declare a field: its name in the environment, what it means, and its range.

    Without ``parse``, a text is read as what the default is (``None``: as an integer).
    """
    if parse is None:
        parse = _flag if isinstance(default, bool) else int if default is None else type(default)
    limits = {"above": above, "least": least, "most": most}
    return field(default=default, metadata={"name": name, "parse": parse, "help": text, **limits})


@dataclass(frozen=True)
class Config:
    """Settings of one node. Every field can be given as an argument of ``from_env``."""

    role: str = _setting("DMLC_ROLE", "worker", "worker, server or scheduler")
    num_workers: int = _setting(
        "DMLC_NUM_WORKER", 0, "how many workers the job has", least=0, most=65_536
    )
    num_servers: int = _setting(
        "DMLC_NUM_SERVER", 0, "how many servers the job has", least=0, most=65_536
    )
    root_uri: str = _setting("DMLC_PS_ROOT_URI", "", "host or address of the scheduler")
    root_port: int = _setting("DMLC_PS_ROOT_PORT", 0, "port of the scheduler", least=0, most=65_535)
    task_id: int | None = _setting(
        "DMLC_TASK_ID",
        None,
        "wanted rank within the role; else order of registration",
        least=0,
        most=65_535,
    )
    node_host: str = _setting("DMLC_NODE_HOST", "", "host that this node binds and advertises")
    interface: str = _setting(
        "DMLC_INTERFACE",
        "",
        "interface name, address or network (192.168.20.0/24) to bind and advertise",
    )
    machine: str = _setting(
        "PS_MACHINE",
        "",
        "name of the machine whose network connection this node uses, where that cannot be found "
        "out (containers of one host): nodes with equal names share one; losses are then noticed "
        "by connections only. By default the identity of the running kernel",
    )
    port: int = _setting(
        "PORT", 0, "port that this node binds; 0 takes a free one", least=0, most=65_535
    )
    bind_all: bool = _setting(
        "DMLC_USE_KUBERNETES", False, "1: the scheduler binds every interface (0.0.0.0)"
    )
    van_type: str = _setting(
        "DMLC_PS_VAN_TYPE", "zmq", "zmq; p3 is accepted and the same (priorities always work)"
    )
    job_id: str = _setting("PS_JOB_ID", "", "job of this node; other jobs are refused")
    listen_fd: int | None = _setting(
        "PS_LISTEN_FD", None, "inherited listening socket that the scheduler adopts", most=2**31 - 1
    )
    job_key_file: str = _setting(
        "PS_JOB_KEY_FILE",
        "",
        "file with the job's key, readable by its owner only; without one a node serves loopback "
        "addresses only (security.md)",
    )
    job_key_fd: int | None = _setting(
        "PS_JOB_KEY_FD",
        None,
        "inherited descriptor to read the job's key from, to its end",
        most=2**31 - 1,
    )
    security: str = _setting(
        "PS_SECURITY",
        "",
        "what the key is used for: plain (authentication, for one host or a trusted network) or "
        "curve (and encryption); where there is a key, the default is curve",
    )
    verbose: int = _setting("PS_VERBOSE", 0, "1 prints connections, 2 every message as well")
    heartbeat_interval_s: float = _setting(
        "PS_HEARTBEAT_INTERVAL",
        2.0,
        "seconds between signs of life; 0: none, and stalls are not noticed",
        least=0,
    )
    heartbeat_timeout_s: float = _setting(
        "PS_HEARTBEAT_TIMEOUT",
        0.0,
        "seconds after which a stalled node counts as lost; 0: a stall is only reported",
        least=0,
    )
    rendezvous_timeout_s: float = _setting(
        "PS_RENDEZVOUS_TIMEOUT", 60.0, "seconds that nodes wait for each other at start", above=0
    )
    roster_interval_s: float = _setting(
        "PS_ROSTER_INTERVAL", 5.0, "seconds between lines that say who is missing", above=0
    )
    lost_after_s: float = _setting(
        "PS_LOST_AFTER",
        5.0,
        "seconds without a connection after which a node is lost. A process that is stopped as a "
        "whole (Ctrl-Z, a debugger, a paused container) has none after about 5 s: what is set for "
        "all nodes here is how much longer it is waited for",
        above=0,
    )
    stall_report_s: float = _setting(
        "PS_STALL_REPORT",
        10.0,
        "seconds after which a wait is reported, and a node that is connected and silent because "
        "something holds its interpreter",
        above=0,
    )
    stall_timeout_s: float = _setting(
        "PS_STALL_TIMEOUT",
        0.0,
        "seconds after which a wait for other nodes ends with an error that says who is missing; "
        "0: it has no end of its own",
        least=0,
    )
    close_timeout_s: float = _setting(
        "PS_CLOSE_TIMEOUT",
        60.0,
        "seconds for which a node that ends waits for peers that accept nothing of what it has "
        "sent, before it gives that up with an error; time in which anything moves does not count. "
        "inf: no limit",
        above=0,
    )
    resend_timeout_s: float = _setting(
        "PS_RESEND_TIMEOUT",
        2.0,
        "milliseconds after which what was not accepted is sent again (doubled each time)",
        above=0,
        parse=lambda text: float(text) / 1000.0,
    )
    drop_percent: float = _setting(
        "PS_DROP_MSG", 0.0, "percent of received messages to drop, to test with", least=0, most=100
    )
    shm: bool = _setting("PS_SHM", True, "0: processes of one machine use TCP only, as others do")
    shm_bytes: int = _setting(
        "PS_SHM_BYTES",
        0,
        "bytes of memory that a node shares at most; what is beyond travels by TCP. 0: no limit",
        least=0,
        most=2**62,
    )
    chunk_bytes: int = _setting(
        "PS_CHUNK_BYTES", MIB, "largest part of a dense key, in bytes", most=2**40
    )
    credit_bytes: int = _setting(
        "PS_CREDIT_BYTES",
        64 * MIB,
        "bytes per server that may be under way, not yet accepted",
        most=2**62,
    )
    connections: int = _setting(
        "PS_CONNECTIONS",
        1,
        "TCP connections between a worker and a server of another machine, 1 to 16: more than one "
        "where the network gives a single flow less than all (`python -m kvstore.bench` finds out)",
    )
    round_window: int = _setting(
        "PS_ROUND_WINDOW",
        2,
        "rounds that a worker may push ahead of the open one",
        least=0,
        most=1_000_000,
    )
    server_import: str = _setting(
        "KVSTORE_SERVER_IMPORT",
        "",
        "modules (or .py files) that servers import at their start, separated by commas",
    )
    placement: str = _setting(
        "KVSTORE_PLACEMENT",
        "network",
        "network: servers get shares that keep the busiest machine's network traffic least; equal: "
        "all servers get the same share (set it for the scheduler, which decides)",
    )
    pool_threads: int = _setting(
        "PS_POOL_THREADS", 2, "threads that add and update on servers", above=0, most=1024
    )
    reduction_threads: int = _setting(
        "MXNET_KVSTORE_REDUCTION_NTHREADS",
        0,
        "threads that add and update in `local` and `device` stores, the caller's among them; 0: "
        "as many as there are cores for this process, at most 8",
        least=0,
        most=1024,
    )
    native: bool = _setting(
        "KVSTORE_NATIVE",
        True,
        "0: add and update with NumPy also where the compiled kernels are; the bits are the same",
    )
    max_message_bytes: int = _setting(
        "PS_MAX_MESSAGE_BYTES", 256 * MIB, "largest message that a node receives", most=2**40
    )
    stranger_bytes: int = _setting(
        "PS_STRANGER_BYTES",
        64 * MIB,
        "bytes of memory that connections may fill together before they have shown that they know "
        "the job's key; those that send most are ended first",
        above=0,
        most=2**62,
    )

    @classmethod
    def from_env(
        cls, mapping: Mapping[str, str] | None = None, **arguments: Any
    ) -> tuple[Config, list[str]]:
        """Read settings; arguments win over ``mapping`` (``os.environ`` when None).

        Returns:
            The settings, and sentences about unknown names (:func:`unknown_names`);
            from PS_VERBOSE=1 on also about names of the original that change nothing here.

        Raises:
            ConfigError: a value is malformed, or the settings contradict each other.
        """
        mapping = os.environ if mapping is None else mapping
        values: dict[str, Any] = {}
        for setting in dataclasses.fields(cls):
            text = mapping.get(setting.metadata["name"], "")
            if text != "":
                values[setting.name] = _parse(setting, text)
        values.update(arguments)
        config = cls(**values).checked()
        remarks = unknown_names(mapping)
        if config.verbose:
            remarks += [
                f"the setting {name} has no effect here: {reason}"
                for name, reason in WITHOUT_EFFECT.items()
                if mapping.get(name, "") != ""
            ]
        return config, remarks

    @classmethod
    def read(cls, name: str, mapping: Mapping[str, str] | None = None) -> Any:
        """Read one setting of ``mapping`` or ``os.environ``, for code that is not a node.

        ``name`` is the field's. Raises ``ConfigError`` when this one is malformed; others may be.
        """
        mapping = os.environ if mapping is None else mapping
        (setting,) = (field for field in dataclasses.fields(cls) if field.name == name)
        text = mapping.get(setting.metadata["name"], "")
        value: Any = setting.default if text == "" else _parse(setting, text)
        _check_range(setting, value)
        return value

    def __post_init__(self) -> None:
        for name in _names():
            if name.endswith("_s") and getattr(self, name) > LONGEST_S:
                # inf, too: clocks and locks cannot count so far
                object.__setattr__(self, name, LONGEST_S)

    def _check_ranges(self) -> None:
        """Raise ``ConfigError`` for numbers that no node could work with."""
        for setting in dataclasses.fields(self):
            _check_range(setting, getattr(self, setting.name))

    def checked(self) -> Config:
        """Check ranges and what fields say together; return this value."""
        self._check_ranges()
        if self.role not in {role.value for role in Role}:
            raise ConfigError(f"DMLC_ROLE is {self.role!r}; it must be worker, server or scheduler")
        if self.heartbeat_timeout_s > 0 and self.heartbeat_interval_s == 0:
            raise ConfigError(
                "PS_HEARTBEAT_TIMEOUT needs signs of life: set PS_HEARTBEAT_INTERVAL above 0"
            )
        if self.security not in ("", *SECURITY_NAMES):
            raise ConfigError(
                f"PS_SECURITY is {self.security!r}; it must be {' or '.join(SECURITY_NAMES)}"
            )
        if self.placement not in PLACEMENT_NAMES:
            names = " or ".join(PLACEMENT_NAMES)
            raise ConfigError(f"KVSTORE_PLACEMENT is {self.placement!r}; it must be {names}")
        if len(self.machine) > _MAX_NAME or not self.machine.isprintable():
            raise ConfigError(
                f"PS_MACHINE must be printable and have at most {_MAX_NAME} characters, got "
                f"{len(self.machine)}: {self.machine!r:.60}"
            )
        if self.max_message_bytes < self.chunk_bytes:
            raise ConfigError(
                f"PS_MAX_MESSAGE_BYTES must be at least PS_CHUNK_BYTES ({self.chunk_bytes}), got "
                f"{self.max_message_bytes}"
            )
        if self.chunk_bytes < 64 or self.credit_bytes < self.chunk_bytes:
            raise ConfigError(
                "PS_CHUNK_BYTES must be >= 64 and PS_CREDIT_BYTES at least as large, got "
                f"{self.chunk_bytes} and {self.credit_bytes}"
            )
        if not 1 <= self.connections <= MAX_CONNECTIONS:
            raise ConfigError(
                f"PS_CONNECTIONS must be from 1 to {MAX_CONNECTIONS}, got {self.connections}"
            )
        if self.van_type not in ("zmq", "p3"):
            raise ConfigError(f"DMLC_PS_VAN_TYPE is {self.van_type!r}; this build has zmq (and p3)")
        return self

    @property
    def report_after_s(self) -> float:
        """Seconds until waits are reported: soon enough for what PS_STALL_TIMEOUT will say."""
        return min(self.stall_report_s, self.stall_timeout_s / 4 or math.inf)

    def checked_for_cluster(self) -> Config:
        """Check that a cluster can be joined with these settings; return them."""
        self._check_ranges()
        missing = [
            _names()[name]
            for name in ("num_workers", "num_servers", "root_uri")
            if not getattr(self, name)
        ]
        if not self.root_port and self.listen_fd is None:
            missing.append("DMLC_PS_ROOT_PORT")
        if missing:
            raise ConfigError(
                f"a distributed store needs {', '.join(missing)}; start the job with "
                "tools/launch.py (kvstore-launch), which sets them, or export them yourself"
            )
        if self.security and not self.job_key_file and self.job_key_fd is None:
            raise ConfigError(
                f"PS_SECURITY={self.security} needs a job key: set PS_JOB_KEY_FILE as well"
            )
        return self


def _check_range(setting: dataclasses.Field[Any], value: Any) -> None:
    """Raise ``ConfigError`` where a field may not have this value."""
    above, least, most = (setting.metadata[limit] for limit in ("above", "least", "most"))
    expected = ""
    # "not >" rather than "<=", so that NaN is refused as well.
    if value is None:
        return
    if above is not None and not value > above:
        expected = f"greater than {above}"
    elif least is not None and not value >= least:
        expected = f"{least} or greater"
    elif most is not None and not value <= most:
        expected = f"at most {most}"
    if expected:
        raise ConfigError(f"{setting.metadata['name']} is {value}; it must be {expected}")


def _names() -> dict[str, str]:
    return {setting.name: setting.metadata["name"] for setting in dataclasses.fields(Config)}


def _parse(setting: dataclasses.Field[Any], text: str) -> Any:
    try:
        return setting.metadata["parse"](text)
    except ValueError:
        name, expected = setting.metadata["name"], setting.metadata["help"]
        if setting.metadata["parse"] is _flag:
            expected = f"1 or 0 ({expected})"
        raise ConfigError(f"{name} is {text!r}; expected: {expected}") from None


#: How alike (``difflib``) a name must be to one of ours to be taken for it, misspelt.
#: DMLC_PS_ROOT_URL is by 0.94 DMLC_PS_ROOT_URI; DMLC_NUM_ALL_WORKER, another's, by 0.88.
_MISSPELT = 0.9
_OWN_WAY = "stores share arrays out and add them up in a way of their own"
#: Names of the original that need no field, because they change nothing here -> why.
WITHOUT_EFFECT = {
    "DMLC_LOCAL": "processes of one host find their own way to exchange data",
    "DMLC_PS_WATER_MARK": "credits bound what is under way (PS_CREDIT_BYTES)",
    "MXNET_KVSTORE_BIGARRAY_BOUND": "arrays are cut by bytes (PS_CHUNK_BYTES)",
    "MXNET_KVSTORE_DIST_ROW_SPARSE_VERBOSE": "PS_VERBOSE=2 shows all messages",
    "MXNET_KVSTORE_LOGTREE": _OWN_WAY,
    "MXNET_KVSTORE_SERIAL_PUSH": _OWN_WAY,
    "MXNET_KVSTORE_SLICE_THRESHOLD": "arrays are cut by bytes (PS_CHUNK_BYTES)",
    "MXNET_KVSTORE_TREE_ARRAY_BOUND": _OWN_WAY,
    "MXNET_KVSTORE_TREE_BACKTRACK": _OWN_WAY,
    "MXNET_KVSTORE_TREE_LINK_USAGE_PENALTY": _OWN_WAY,
    "MXNET_KVSTORE_USETREE": _OWN_WAY,
}
#: All names of the original without a field; what PS_RESEND asks for is always on.
ACCEPTED_NAMES = frozenset({"PS_RESEND", *WITHOUT_EFFECT})
#: What the launcher alone reads, or sets for scripts.
LAUNCHER_NAMES = frozenset({"DMLC_JOB_CLUSTER", "KVSTORE_JOB_DIR"})


def unknown_names(mapping: Mapping[str, str]) -> list[str]:
    """Return a sentence for each unknown name that may be meant for this project.

    That is each ``PS_*`` name. MXNet and its trackers have many ``DMLC_*`` names of no concern
    here: of these, and of ``KVSTORE_*``, only what is all but equal to a known name.
    """
    known = set(_names().values()) | ACCEPTED_NAMES | LAUNCHER_NAMES
    sentences = []
    for name in sorted(mapping):
        if name in known or not name.startswith(("PS_", "DMLC_", "KVSTORE_")):
            continue
        is_ours = name.startswith("PS_")
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.6 if is_ours else _MISSPELT)
        if is_ours or close:
            hint = f"; did you mean {close[0]}?" if close else ""
            sentences.append(f"the setting {name} is unknown and was ignored{hint}")
    return sentences
