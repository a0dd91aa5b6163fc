"""``Observer``: ask the scheduler of a running job for its status.

::

    print(pslite.ask_status("127.0.0.1:9091").state)

An ``Observer`` has one connection to the scheduler. If there is a job key, it uses the key and
never tries without it. An observer has no rank, enters no barriers and is not in the roster, so the
job does not depend on it. It works on the caller's thread and starts no others (libzmq has its
own). Every call ends in time, with a ``Survey`` (``wire/survey.py``) or a one-sentence error.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from pslite.config import Config
from pslite.errors import ConfigError, DeadlineError, ProtocolError, rebuild
from pslite.ids import Role
from pslite.security import WHAT_TO_COMPARE, mechanism_of
from pslite.van.base import Denied, Disconnected, Received, Van
from pslite.van.zmq.addresses import format_address, parse_address, resolve, without_key
from pslite.version import __version__
from pslite.wire.codec import MAX_HEADER_BYTES, Envelope, decode, encode
from pslite.wire.messages import Refused, StatusQuestion, StatusSurvey
from pslite.wire.survey import Survey, clean, unpacked

ANSWER_S = 4.5
"""The time for the scheduler's answer; its nodes have less (``protocol/surveys.py``)."""
_KNOCK_S = 3.0
"""The time for a machine to accept or refuse a first connection."""
_AGAIN_S = 1.0
_LEAST_S = 0.1
_SCHEDULER = Role.SCHEDULER.value


class Observer:
    """A client that asks one scheduler for its status, any number of times.

    Use it as ``with Observer(...) as observer:``.

    Args:
        address: ``host:port`` of the scheduler; None takes the address in the settings
            (DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT).
        config: the key's settings (``job_key_file``, ``job_key_fd``, ``security``); by default
            from the environment. Its ``job_id`` is used only if ``address`` is None: an address
            selects whatever job runs there.

    Raises:
        ConfigError: the address or the key cannot be used.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        config: Config | None = None,
        make_van: Callable[[str], Van] | None = None,
    ) -> None:
        if config is None:
            config, _ = Config.from_env()
        self._host, self._port = _host_and_port(address, config)
        self._job = config.job_id if address is None else ""
        self._incarnation = secrets.randbits(62) | 1
        #: The time that connecting took; it is subtracted from the first question's time.
        self._spent_s = 0.0
        self._question = 0
        self._is_heard = False
        self._van = (make_van or self._zmq_van(config))(f"O{self._incarnation:016x}")
        self._van.connect(_SCHEDULER, format_address(self._host, self._port))

    @property
    def where(self) -> str:
        """The scheduler's address, for people."""
        return format_address(self._host, self._port).removeprefix("tcp://")

    def ask(self, timeout_s: float = ANSWER_S) -> Survey:
        """Ask for the job's status; the first call's time includes the connection.

        Raises:
            DeadlineError: no answer arrived in time; the job may have ended.
            ConfigError: the key or the version differs from the job's.
        """
        self._question += 1
        last = time.monotonic() + max(timeout_s - self._spent_s, _LEAST_S)
        self._spent_s = 0.0
        ask_at = 0.0
        while (now := time.monotonic()) < last:
            if now >= ask_at:
                ask_at = now + _AGAIN_S
                self._send()
            for event in self._van.poll(min(ask_at, last) - now):
                survey = self._take(event)
                if survey is not None:
                    return survey
        text = f"the scheduler at {self.where} did not answer within {timeout_s:g} s: "
        if self._is_heard:
            raise DeadlineError(f"{text}its process is stopped, or its host is overloaded")
        # Under CURVE, the other end does not say that the key differs.
        raise DeadlineError(
            f"{text}check that a job of version {__version__} runs there; {WHAT_TO_COMPARE}"
        )

    def _zmq_van(self, config: Config) -> Callable[[str], Van]:
        """Check the key and the address, and that a process listens there."""
        from pslite.van.zmq.van import ZmqVan

        mechanism = mechanism_of(config)
        if mechanism is None and config.security:
            raise ConfigError(
                f"PS_SECURITY={config.security} needs a job key; set PS_JOB_KEY_FILE too"
            )
        began_at = time.monotonic()
        try:
            # Without a key, only a job on this machine accepts the question.
            if mechanism is None and not resolve(self._host, self._port).is_local:
                raise ConfigError(f"the scheduler is at {self.where}: {without_key(self._host)}")
            with socket.create_connection((self._host, self._port), timeout=_KNOCK_S):
                pass
        except OSError as error:
            reason = "no answer" if isinstance(error, TimeoutError) else error.strerror
            raise DeadlineError(
                f"cannot connect to a scheduler at {self.where} ({reason or error}); check that "
                "the job is running and that the address is right"
            ) from None
        self._spent_s = time.monotonic() - began_at
        return lambda uid: ZmqVan(
            uid, mechanism=mechanism, linger_s=0.0, max_message_bytes=MAX_HEADER_BYTES
        )

    def _send(self) -> None:
        message = StatusQuestion(self._question, __version__)
        envelope = Envelope(self._job, 0, self._incarnation, 0, 0, 0, (), (), message)
        self._van.send(_SCHEDULER, [encode(envelope)])

    def _take(self, event: Any) -> Survey | None:
        """Return the survey if ``event`` is the answer; else None."""
        if isinstance(event, Denied):
            raise ConfigError(event.reason)
        if isinstance(event, Disconnected) and self._is_heard:
            raise DeadlineError(f"the scheduler at {self.where} has ended, and so has its job")
        if not isinstance(event, Received):
            return None
        try:
            message = decode(event.frames).message
            if isinstance(message, Refused):
                raise rebuild(message.kind, clean(message.error))
            if not isinstance(message, StatusSurvey) or message.question != self._question:
                return None
            survey = unpacked(Survey, message.body)
        except ProtocolError as error:
            raise ConfigError(
                f"cannot read the answer of {self.where} ({error}); expected a scheduler of "
                f"version {__version__}"
            ) from None
        self._is_heard = True
        return survey

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._van.close()

    def __enter__(self) -> Observer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def ask_status(
    address: str | None = None, *, config: Config | None = None, timeout_s: float = ANSWER_S
) -> Survey:
    """Ask the scheduler at ``address`` for its job's status, as ``Observer`` does.

    To ask more than once, use one ``Observer``.
    """
    with Observer(address, config=config) as observer:
        return observer.ask(timeout_s)


def _host_and_port(address: str | None, config: Config) -> tuple[str, int]:
    if address is not None:
        try:
            return parse_address(f"tcp://{address.removeprefix('tcp://')}")
        except ConfigError:
            raise ConfigError(
                f"expected a scheduler's address as host:port, got {clean(address)!r}"
            ) from None
    if not config.root_uri or not config.root_port:
        raise ConfigError(
            "the scheduler's address is missing; pass host:port, or set DMLC_PS_ROOT_URI and "
            "DMLC_PS_ROOT_PORT"
        )
    return config.root_uri, config.root_port
