"""What the launcher's output means to the process that started it.

Pure: lines in, lines to show out. Three things are not shown: the marks by which a worker says
that all lines of a call have come, the launcher's final block about a failure (which becomes the
text of an exception), and, once the caller ends the job, what launcher, scheduler and nodes say
about that. Used by
``background.py``; ``worker_main.py`` writes the marks, ``report.py`` the block.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from kvstore.launch.report import FAILURE_HEADING, GOES_ON

_MARK = "\x1fkvstore call "
_MARKED = re.compile(r"(?P<before>.*)\x1fkvstore call (?P<call>\d+)\Z", re.DOTALL)
_PREFIX = re.compile(r"\[(?P<role>worker|server|scheduler)(?: (?P<rank>\d+))?[^]]*\] ")
# What nodes say when others end: all of scheduler and servers, and the dated lines of workers.
_OF_THE_END = re.compile(r"\[(?:scheduler|server|worker \d+[^]]*\] \[\d\d:\d\d:\d\d\] W\[)")
_PROCESS = re.compile(r"process: +(?P<role>worker|server|scheduler)(?: (?P<rank>\d+))?\b")
_ENDED = re.compile(r"ended: +(?P<how>.*?), [0-9.]+ s after the start")
_LOG_HEADING = re.compile(r"the last (?:line|\d+ lines) of its log:|its log is empty")


def marker(call: int) -> str:
    """The line, or end of a line, that ends what a worker writes in a call."""
    return f"{_MARK}{call}"


@dataclass(frozen=True)
class Report:
    """The launcher's final block: who failed first and how; ``text`` is for people."""

    role: str
    rank: int
    how: str
    text: str


@dataclass
class Output:
    """Sorts the lines of one launcher. ``said`` are the launcher's own, without their prefix."""

    said: list[str] = field(default_factory=list)
    block: list[str] = field(default_factory=list)
    marks: set[tuple[int, int, bool]] = field(default_factory=set)
    is_ending: bool = False
    _goes_on: bool = False

    def show(self, line: str, *, is_error: bool) -> str | None:
        """The line as it is to be shown, or None. Lines come without their end."""
        if is_error and (self.block or line == FAILURE_HEADING):
            self.block.append(line)
            return None
        if is_error and not line:  # stands above the block, and nowhere else
            return None
        if self._is_of_the_launcher(line, is_error):
            self.said.append(line.removeprefix("[launcher] "))
            return None if self.is_ending else line
        if self.is_ending and _OF_THE_END.match(line):
            return None
        return self._without_mark(line, is_error)

    def has_all_of(self, call: int, ranks: int) -> bool:
        """Whether every worker has said, on both streams, that the call's lines are complete."""
        return all(
            (call, rank, is_error) in self.marks
            for rank in range(ranks)
            for is_error in (False, True)
        )

    @property
    def is_without_scheduler(self) -> bool:
        """Whether the launcher has said that the scheduler is lost and the job goes on."""
        return any(GOES_ON in text for text in self.said)

    def _is_of_the_launcher(self, line: str, is_error: bool) -> bool:
        """Its messages begin with its name; what a cluster's program said follows, indented."""
        begins = line.startswith("[launcher] ")
        if not is_error:
            return begins
        self._goes_on = begins or (self._goes_on and line.startswith("  "))
        return self._goes_on

    def _without_mark(self, line: str, is_error: bool) -> str | None:
        found = _MARKED.match(line)
        prefix = _PREFIX.match(line)
        if found is None or prefix is None or prefix["rank"] is None:
            return line
        self.marks.add((int(found["call"]), int(prefix["rank"]), is_error))
        return None if found["before"] == prefix[0] else found["before"]

    def report(self, without: str) -> Report | None:
        """What the final block says, or None where there was none.

        ``without`` is a directory that will be gone when somebody reads it: lines that name it
        are left out.
        """
        return read_block([line for line in self.block if without not in line])


def read_block(lines: list[str]) -> Report | None:
    """The block of ``report.failure_block`` as data; None when it names no process."""
    process = next(filter(None, map(_PROCESS.match, lines)), None)
    ended = next(filter(None, map(_ENDED.match, lines)), None)
    if process is None or ended is None:
        return None
    begin = next((i for i, line in enumerate(lines) if _LOG_HEADING.match(line)), len(lines))
    kept = [line.partition(_MARK)[0] for line in lines[begin:]]
    text = "\n".join(line for line in kept if line.strip())
    return Report(process["role"], int(process["rank"] or 0), ended["how"], text)
