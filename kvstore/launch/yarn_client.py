"""What Hadoop's distributed shell client says, read line by line.

Pure. The client logs as log4j does: a time, a level, a class, and the message, which can have
several lines. It tells the application's id once it is submitted, and a report each second. The
words are those of ``Client.java`` (hadoop-yarn-applications-distributedshell) and
``YarnClientImpl.java`` of Hadoop 2.7 to 3.3. Used by ``yarn.py``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvstore.launch.clusters import quoted

_LOGGED = re.compile(
    r"\d{2,4}[-/]\d\d[-/]\d\d \d\d:\d\d:\d\d(?:[,.]\d+)? (?:\[[^\]]*\] )?([A-Z]+) +\S+: (.*)"
)
_QUIET = ("INFO", "WARN", "DEBUG")
_FRAME = re.compile(r"\s*(?:at [\w.$/<>]+\(|\.\.\. \d+ more)")  # of a Java stack
_GRUMBLE = re.compile(r"(?:SLF4J|WARNING|log4j|Picked up \w+): |OpenJDK ")  # not of the application
_SUBMITTED = re.compile(r"Submitted application (application_\d+_\d+)")
_RETRYING = re.compile(r"Retrying connect to server: (\S+)\. Already")
_DIAGNOSTICS = re.compile(r"appDiagnostics=(.*)")
_AFTER_DIAGNOSTICS = ", appMasterHost="
_STATE = re.compile(r"yarnAppState=(\w+)")
_DATE = re.compile(r"\A\[[^\]]*\d{4}\]\s*")
_DETAILS = re.compile(r"\s*Details :.*", re.S)
_LONGEST = 400


class ClientWords:
    """``application`` is its id, "" until it is known; ``app_state`` as YARN calls it."""

    def __init__(self) -> None:
        self.application = ""
        self.app_state = ""
        self.diagnostics = ""
        self._unreachable = ""
        self._is_submitting = False
        self._open: list[str] | None = None  # a diagnosis of several lines

    def is_news(self, line: str) -> bool:
        """Take in what the client has said, and whether people should see it."""
        logged = _LOGGED.match(line)
        if self._open is not None and logged is None:
            self._go_on(line)
            return False
        self._open = None
        if logged is None:
            return not _FRAME.match(line) and not _GRUMBLE.match(line)
        level, text = logged.groups()
        self._take_in(text)
        return level not in _QUIET

    def is_submitting(self) -> bool:
        """The application may be there, and its id has not been said."""
        return self._is_submitting and not self.application

    def state(self) -> str:
        """What the job waits for, in YARN's own words."""
        if self._unreachable:
            return f"yarn gets no connection to {self._unreachable}"
        if not self.app_state:
            return ""
        found = f"{self.application} is {self.app_state}"
        if self.app_state == "RUNNING":
            return f"{found}; {self.logs()} shows what its containers say"
        return f"{found}: {self.diagnostics}" if self.diagnostics else found

    def explain(self, lines: Sequence[str], code: int) -> str:
        """The client has ended before all agents had come; ``lines`` are its news."""
        if self.app_state in ("FINISHED", "FAILED", "KILLED"):
            why = f": {self.diagnostics}" if self.diagnostics else ""
            found = f"{self.application} is {self.app_state} before all processes had started{why}"
            return f"{found} ({self.logs()} may say more)"
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        said = quoted(lines)
        return f"yarn ended ({how}) before all processes had started" + (
            f"; it said:{said}" if said else ""
        )

    def logs(self) -> str:
        return f"'yarn logs -applicationId {self.application}'"

    def _take_in(self, text: str) -> None:
        retrying = _RETRYING.search(text)
        self._unreachable = "" if retrying is None else retrying[1]
        if text.startswith("Submitting application to ASM"):
            self._is_submitting = True
        if submitted := submitted_application(text):
            self.application = submitted
        self._take_state(text)
        if diagnosed := _DIAGNOSTICS.search(text):
            self._open = []
            self._go_on(diagnosed[1])

    def _take_state(self, text: str) -> None:
        if found := _STATE.search(text):
            self.app_state = found[1]

    def _go_on(self, text: str) -> None:
        assert self._open is not None
        before, after, rest = text.partition(_AFTER_DIAGNOSTICS)
        self._open.append(before)
        if after:
            self.diagnostics = short("\n".join(self._open))
            self._open = None
            self._take_state(rest)


def submitted_application(line: str) -> str | None:
    """The application's id if this line tells it."""
    found = _SUBMITTED.search(line)
    return None if found is None else found[1]


def short(diagnostics: str) -> str:
    """Without the date in front, stacks and details, on one line; "" for none."""
    lines = [line for line in _DATE.sub("", diagnostics).splitlines() if not _FRAME.match(line)]
    text = _DETAILS.sub("", " ".join(" ".join(lines).split()))
    if text in ("null", "N/A"):
        return ""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
