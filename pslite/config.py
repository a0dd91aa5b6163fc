"""All settings of the runtime, and the only place that reads the environment.

A ``Config`` is a frozen value. ``Config.from_env`` makes it once (argument > environment >
default), and it is passed to all code that needs it. The DMLC_* and PS_* names mean the same as in
ps-lite (``docs/env.md`` there); the other names are new. The check for unknown names here and the
page in the docs both use the metadata of the fields.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pslite.errors import ConfigError

MIB = 1 << 20
SECURITY_NAMES = ("plain", "curve")
LONGEST_S = 1e9
"""Thirty years: the value that replaces ``inf`` in a setting."""
MAX_CONNECTIONS = 16
"""The most connections to one peer: the first and 15 more (``wire.md``, section 2)."""
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_MAX_NAME = 512
"""The most characters in a name that is sent to peers (``wire.md``, section 5)."""


def _flag(text: str) -> bool:
    word = text.strip().lower()
    if word not in _YES + _NO:
        raise ValueError(f"{text!r} is neither 1 nor 0")
    return word in _YES


def _setting(
    name: str,
    default: Any,
    text: str,
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    choices: Sequence[str] = (),
    parse: Callable[[str], Any] | None = None,
) -> Any:
    """Declare a field: its environment variable, meaning, and range or choices.

    Without ``parse``, a text is read as the type of the default (``None``: as an integer).
    """
    if parse is None:
        parse = _flag if isinstance(default, bool) else int if default is None else type(default)
    limits = {"above": above, "least": least, "most": most, "choices": choices}
    return field(default=default, metadata={"name": name, "parse": parse, "help": text, **limits})


@dataclass(frozen=True)
class Config:
    """Settings of one node. Every field can be given as an argument of ``from_env``."""

    role: str = _setting(
        "DMLC_ROLE",
        "worker",
        "worker, server or scheduler",
        choices=("worker", "server", "scheduler"),
    )
    num_workers: int = _setting(
        "DMLC_NUM_WORKER", 0, "number of workers of the job", least=0, most=65_536
    )
    num_servers: int = _setting(
        "DMLC_NUM_SERVER", 0, "number of servers of the job", least=0, most=65_536
    )
    root_uri: str = _setting("DMLC_PS_ROOT_URI", "", "host or address of the scheduler")
    root_port: int = _setting("DMLC_PS_ROOT_PORT", 0, "port of the scheduler", least=0, most=65_535)
    task_id: int | None = _setting(
        "DMLC_TASK_ID",
        None,
        "requested rank within the role; by default, nodes get ranks in the order in which they "
        "register",
        least=0,
        most=65_535,
    )
    node_host: str = _setting("DMLC_NODE_HOST", "", "host that this node binds and advertises")
    interface: str = _setting(
        "DMLC_INTERFACE", "", "interface, address or network (10.1.0.0/16) to bind and advertise"
    )
    machine: str = _setting(
        "PS_MACHINE",
        "",
        "name of the machine that this node runs on, for containers of one host: nodes with "
        "equal names share one network connection, and a loss is then detected only by its "
        "connections. By default the identity of the running kernel",
    )
    port: int = _setting(
        "PORT", 0, "port that this node binds; 0 takes a free one", least=0, most=65_535
    )
    bind_all: bool = _setting(
        "DMLC_USE_KUBERNETES", False, "1: the scheduler binds every interface (0.0.0.0)"
    )
    van_type: str = _setting(
        "DMLC_PS_VAN_TYPE",
        "zmq",
        "zmq, or p3, which means the same (priorities always work)",
        choices=("zmq", "p3"),
    )
    job_id: str = _setting("PS_JOB_ID", "", "id of the job; messages of other jobs are rejected")
    listen_fd: int | None = _setting(
        "PS_LISTEN_FD", None, "inherited descriptor on which the scheduler listens", most=2**31 - 1
    )
    job_key_file: str = _setting(
        "PS_JOB_KEY_FILE",
        "",
        "file with the job's key, readable by its owner only; without a key a node accepts only "
        "connections from its own machine (security.md)",
    )
    job_key_fd: int | None = _setting(
        "PS_JOB_KEY_FD", None, "inherited file descriptor with the job's key", most=2**31 - 1
    )
    security: str = _setting(
        "PS_SECURITY",
        "",
        "what the key is used for: plain (authentication only, for one host or a trusted network) "
        "or curve (authentication and encryption); the default with a key is curve",
        choices=SECURITY_NAMES,
    )
    verbose: int = _setting(
        "PS_VERBOSE", 0, "1 prints connections; 2 prints connections and all messages"
    )
    heartbeat_interval_s: float = _setting(
        "PS_HEARTBEAT_INTERVAL",
        2.0,
        "seconds between heartbeats; 0: no heartbeats, and stalls are not detected",
        least=0,
    )
    heartbeat_timeout_s: float = _setting(
        "PS_HEARTBEAT_TIMEOUT",
        0.0,
        "seconds after which a stalled node counts as lost; 0: a stall is only reported",
        least=0,
    )
    rendezvous_timeout_s: float = _setting(
        "PS_RENDEZVOUS_TIMEOUT", 60.0, "seconds that nodes wait for all others to join", above=0
    )
    roster_interval_s: float = _setting(
        "PS_ROSTER_INTERVAL", 5.0, "seconds between log lines that name the missing nodes", above=0
    )
    lost_after_s: float = _setting(
        "PS_LOST_AFTER",
        5.0,
        "seconds without a connection after which a node is lost. A stopped process (Ctrl-Z, a "
        "debugger, a paused container) loses its connections after about 5 s; raise this value "
        "on all nodes to wait longer for it",
        above=0,
    )
    rejoin_timeout_s: float = _setting(
        "PS_REJOIN_TIMEOUT",
        0.0,
        "seconds that a job waits for a process that takes the place of a lost worker or of the "
        "scheduler (recovery.md); 0: a loss ends the job. kvstore-launch --restarts sets it to 60",
        least=0,
    )
    scheduler_journal: str = _setting(
        "PS_SCHEDULER_JOURNAL", "", "file from which the next scheduler goes on (recovery.md)"
    )
    standbys: int = _setting(
        "PS_STANDBYS",
        0,
        "standbys of each server, 0 or 1: a standby takes the place of a lost server (recovery.md)",
        least=0,
        most=1,
    )
    stands_by: bool = _setting(
        "PS_STANDS_BY", False, "1: this process stands by for the server with the rank DMLC_TASK_ID"
    )
    job_restarts: int = _setting(
        "PS_JOB_RESTARTS", 0, "how often the launcher started the job again", least=0, most=65_535
    )
    restart_cause: str = _setting("PS_RESTART_CAUSE", "", "why it did so the last time")
    stall_report_s: float = _setting(
        "PS_STALL_REPORT",
        10.0,
        "seconds after which a wait is reported, or a node that is connected but silent "
        "because its interpreter is busy",
        above=0,
    )
    stall_timeout_s: float = _setting(
        "PS_STALL_TIMEOUT",
        0.0,
        "seconds after which a wait for other nodes ends with an error that names the missing "
        "nodes; 0: no limit",
        least=0,
    )
    close_timeout_s: float = _setting(
        "PS_CLOSE_TIMEOUT",
        60.0,
        "seconds that a closing node waits while its peers accept none of its sent messages; "
        "then it drops them and reports an error. Time with progress does not count. inf: no "
        "limit",
        above=0,
    )
    resend_timeout_s: float = _setting(
        "PS_RESEND_TIMEOUT",
        2.0,
        "milliseconds until a message that was not accepted is sent again (doubled each time)",
        above=0,
        parse=lambda text: float(text) / 1000.0,
    )
    drop_percent: float = _setting(
        "PS_DROP_MSG", 0.0, "percentage of received messages to drop, for tests", least=0, most=100
    )
    shm: bool = _setting(
        "PS_SHM", True, "0: processes of one machine use TCP instead of shared memory"
    )
    sum_on_machines: bool = _setting(
        "PS_SUM_ON_MACHINES",
        True,
        "1: in collective calls over several machines the workers of each machine add up in shared "
        "memory, and one of them sends the sum; 0: every worker sends its values to the servers, "
        "and sums are in the order of ranks",
    )
    shm_bytes: int = _setting(
        "PS_SHM_BYTES",
        0,
        "most bytes of shared memory of a node; larger values travel by TCP. 0: no limit",
        least=0,
        most=2**62,
    )
    chunk_bytes: int = _setting(
        "PS_CHUNK_BYTES", MIB, "largest part of a dense key, in bytes", most=2**40
    )
    credit_bytes: int = _setting(
        "PS_CREDIT_BYTES",
        64 * MIB,
        "most bytes in flight to one server: sent, and not yet accepted",
        most=2**62,
    )
    connections: int = _setting(
        "PS_CONNECTIONS",
        1,
        "TCP connections between a worker and a server of another machine, 1 to 16: use more if "
        "one connection does not fill the network (`python -m kvstore.bench` tells)",
        above=0,
        most=MAX_CONNECTIONS,
    )
    round_window: int = _setting(
        "PS_ROUND_WINDOW",
        2,
        "how many rounds a worker may push ahead of the open round",
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
        "network: choose the servers' shares to minimize the network traffic of the busiest "
        "machine; equal: give all servers equal shares (set it for the scheduler, which decides)",
        choices=("network", "equal"),
    )
    hierarchical: str = _setting(
        "KVSTORE_HIERARCHICAL",
        "auto",
        "auto: a server adds up what the workers of its machine push to servers of other machines "
        "(synchronous stores, no --restarts, no --standbys); off: workers send their own values "
        "(set it for the scheduler, which decides)",
        choices=("auto", "off"),
    )
    torch_servers: int = _setting(
        "KVSTORE_TORCH_SERVERS",
        0,
        "how many servers a PyTorch process group starts if torchrun or mp.spawn started its "
        "processes; 0: one on each host, on several hosts as threads of ranks",
        least=0,
        most=65_536,
    )
    torch_replaces: str = _setting(
        "KVSTORE_TORCH_REPLACES",
        "",
        "names of torch.distributed backends that `kvstore` replaces, separated by commas "
        "(gloo,mpi); read when PyTorch is imported",
    )
    pool_threads: int = _setting(
        "PS_POOL_THREADS", 2, "threads that add and update on servers", above=0, most=1024
    )
    reduction_threads: int = _setting(
        "MXNET_KVSTORE_REDUCTION_NTHREADS",
        0,
        "threads that add and update in `local` and `device` stores, including the caller's; 0: "
        "one for each core of this process, at most 8",
        least=0,
        most=1024,
    )
    native: bool = _setting(
        "KVSTORE_NATIVE", True, "0: use NumPy, not the compiled kernels; all bits stay the same"
    )
    max_message_bytes: int = _setting(
        "PS_MAX_MESSAGE_BYTES", 256 * MIB, "largest message that a node receives", most=2**40
    )
    stranger_bytes: int = _setting(
        "PS_STRANGER_BYTES",
        64 * MIB,
        "most bytes of memory for all connections that have not yet proved that they know the "
        "job's key; the largest are closed first",
        above=0,
        most=2**62,
    )

    @classmethod
    def from_env(
        cls, mapping: Mapping[str, str] | None = None, **arguments: Any
    ) -> tuple[Config, list[str]]:
        """Read settings; arguments win over ``mapping`` (``os.environ`` when None).

        Returns:
            The settings, and sentences about unknown names (:func:`unknown_names`). With
            PS_VERBOSE=1 or more, also sentences about MXNet's names that have no effect here.

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
                f"the setting {name} has no effect: {reason}"
                for name, reason in WITHOUT_EFFECT.items()
                if mapping.get(name, "") != ""
            ]
        return config, remarks

    @classmethod
    def read(cls, name: str, mapping: Mapping[str, str] | None = None) -> Any:
        """Read one setting of ``mapping`` or ``os.environ``, for code that is not a node.

        ``name`` is the field's name. Raises ``ConfigError`` if this setting is malformed; the
        other settings are not checked.
        """
        mapping = os.environ if mapping is None else mapping
        (setting,) = (field for field in dataclasses.fields(cls) if field.name == name)
        text = mapping.get(setting.metadata["name"], "")
        value: Any = setting.default if text == "" else _parse(setting, text)
        _check_value(setting, value)
        return value

    def __post_init__(self) -> None:
        for name in _names():
            if name.endswith("_s") and getattr(self, name) > LONGEST_S:
                # Also for inf: clocks and locks cannot handle such large numbers.
                object.__setattr__(self, name, LONGEST_S)

    def _check_ranges(self) -> None:
        """Raise ``ConfigError`` if a field is out of its range."""
        for setting in dataclasses.fields(self):
            _check_value(setting, getattr(self, setting.name))

    def checked(self) -> Config:
        """Check that fields are in range and do not contradict each other; return self."""
        self._check_ranges()
        if self.heartbeat_timeout_s > 0 and self.heartbeat_interval_s == 0:
            raise ConfigError(
                "PS_HEARTBEAT_TIMEOUT needs heartbeats; set PS_HEARTBEAT_INTERVAL to more than 0"
            )
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
                "PS_CHUNK_BYTES must be at least 64 and PS_CREDIT_BYTES at least "
                f"PS_CHUNK_BYTES, got {self.chunk_bytes} and {self.credit_bytes}"
            )
        return self

    @property
    def report_after_s(self) -> float:
        """The seconds after which a wait is reported, always before PS_STALL_TIMEOUT."""
        return min(self.stall_report_s, self.stall_timeout_s / 4 or math.inf)

    def checked_for_cluster(self) -> Config:
        """Check that a node can join a cluster with these settings; return them."""
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
                f"a distributed store needs the environment variables {', '.join(missing)}; "
                "start the job with kvstore-launch (tools/launch.py), which sets them, or "
                "export them"
            )
        if self.security and not self.job_key_file and self.job_key_fd is None:
            raise ConfigError(
                f"PS_SECURITY={self.security} needs a job key; set PS_JOB_KEY_FILE too"
            )
        return self


def _check_value(setting: dataclasses.Field[Any], value: Any) -> None:
    """Raise ``ConfigError`` if a field may not have this value."""
    limits = ("above", "least", "most", "choices")
    above, least, most, choices = map(setting.metadata.__getitem__, limits)
    expected = ""
    # "not >" rather than "<=", so that NaN is rejected too.
    if value is None:
        return
    if above is not None and not value > above:
        expected = f"greater than {above}"
    elif least is not None and not value >= least:
        expected = f"{least} or greater"
    elif most is not None and not value <= most:
        expected = f"at most {most}"
    elif choices and value not in (*choices, setting.default):
        value, expected = repr(value), " or ".join([", ".join(choices[:-1]), choices[-1]])
    if expected:
        raise ConfigError(f"{setting.metadata['name']} is {value}; it must be {expected}")


def _names() -> dict[str, str]:
    return {setting.name: setting.metadata["name"] for setting in dataclasses.fields(Config)}


def _parse(setting: dataclasses.Field[Any], text: str) -> Any:
    try:
        return setting.metadata["parse"](text)
    except ValueError:
        name, meaning = setting.metadata["name"], setting.metadata["help"]
        expected = {_flag: "1 or 0", int: "a whole number"}.get(
            setting.metadata["parse"], "a number"
        )
        raise ConfigError(f"{name} is {text!r}; expected {expected} ({meaning})") from None


#: How similar (``difflib``) a name must be to a known name to be taken for its misspelling.
#: DMLC_PS_ROOT_URL and DMLC_PS_ROOT_URI have 0.94. DMLC_NUM_ALL_WORKER, a name of another
#: program, has 0.88.
_MISSPELT = 0.9
_OWN_WAY = "stores choose by themselves how to split and add arrays"
#: Names of MXNet and ps-lite that have no effect here and so have no field -> why.
WITHOUT_EFFECT = {
    "DMLC_LOCAL": "processes of one host choose by themselves how to exchange data",
    "DMLC_PS_WATER_MARK": "PS_CREDIT_BYTES limits the bytes in flight",
    "MXNET_KVSTORE_BIGARRAY_BOUND": "PS_CHUNK_BYTES sets the size of the parts of an array",
    "MXNET_KVSTORE_DIST_ROW_SPARSE_VERBOSE": "PS_VERBOSE=2 shows all messages",
    "MXNET_KVSTORE_LOGTREE": _OWN_WAY,
    "MXNET_KVSTORE_SERIAL_PUSH": _OWN_WAY,
    "MXNET_KVSTORE_SLICE_THRESHOLD": "PS_CHUNK_BYTES sets the size of the parts of an array",
    "MXNET_KVSTORE_TREE_ARRAY_BOUND": _OWN_WAY,
    "MXNET_KVSTORE_TREE_BACKTRACK": _OWN_WAY,
    "MXNET_KVSTORE_TREE_LINK_USAGE_PENALTY": _OWN_WAY,
    "MXNET_KVSTORE_USETREE": _OWN_WAY,
}
#: All names of MXNet and ps-lite that have no field. Resending (PS_RESEND) is always on.
ACCEPTED_NAMES = frozenset({"PS_RESEND", *WITHOUT_EFFECT})
#: Names that only the launcher reads, or sets for scripts.
LAUNCHER_NAMES = frozenset({"DMLC_JOB_CLUSTER", "DMLC_NUM_ATTEMPT", "KVSTORE_JOB_DIR"})


def unknown_names(mapping: Mapping[str, str]) -> list[str]:
    """Return a sentence for each unknown name that may be meant for this project.

    Every unknown ``PS_*`` name gets a sentence. MXNet and its trackers have many ``DMLC_*`` names
    that do not matter here, so a ``DMLC_*`` or ``KVSTORE_*`` name gets one only if it is almost
    equal to a known name.
    """
    known = set(_names().values()) | ACCEPTED_NAMES | LAUNCHER_NAMES
    sentences = []
    for name in sorted(mapping):
        if name in known or not name.startswith(("PS_", "DMLC_", "KVSTORE_")):
            continue
        import difflib  # not at the start of every process

        is_ours = name.startswith("PS_")
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.6 if is_ours else _MISSPELT)
        if is_ours or close:
            hint = f"; did you mean {close[0]}?" if close else ""
            sentences.append(f"the setting {name} is unknown and was ignored{hint}")
    return sentences
