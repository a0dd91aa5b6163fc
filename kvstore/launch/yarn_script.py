"""The shell script that the containers of YARN's distributed shell run: it becomes an agent.

Pure. No directory is shared with the containers, so the script holds all that an agent needs: the
ticket, and with it the job's key, and the programs. It writes them into the container's own
directory, where only its user can read them and which YARN removes with the container. Read
``yarn.py`` first, ``enlist.py`` next.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from kvstore.launch import excuse
from kvstore.launch.agent import agent_program
from kvstore.launch.ticket import PROGRAM_NAME, TICKET_NAME, Ticket

RANK_NAME = "YARN_SHELL_ID"  # counted from 1; Hadoop 2.7 does not set it
FIRST_RANK = 1
_EXCUSE_NAME = "excuse.py"
_END = "KVSTORE-END"

_SCRIPT = """\
# An agent of kvstore-launch, run by bash in a container. It holds the job's key.
umask 077
files=$PWD/kvstore-agent
mkdir -p "$files" || exit
{files}
# What counts the containers in a Hadoop that does not set it.
export {rank}="${{{rank}:-${{CONTAINER_ID##*_}}}}"
python={python}
cd {directory} 2>/dev/null || true
if command -v "$python" >/dev/null; then exec "$python" "$files/{program}"; fi
for other in python3 python /usr/libexec/platform-python; do
    if command -v "$other" >/dev/null; then
        exec "$other" "$files/{excuse}" "there is no Python at $python; --python names another"
    fi
done
echo "there is no Python at $python, nor any other" >&2
exit 127
"""


def container_script(ticket: Ticket, python: str, directory: str, root: str | None) -> str:
    """What makes a container an agent with ``python``.

    Processes will run in ``directory`` where the container's host has it, else in the container's
    own. ``root`` is as for :func:`agent_program`.
    """
    programs = {
        TICKET_NAME: ticket.to_text(),
        PROGRAM_NAME: agent_program(".", root, "enlist", _EXCUSE_NAME),
        _EXCUSE_NAME: Path(excuse.__file__).read_text(encoding="utf-8"),
    }
    return _SCRIPT.format(
        files="".join(_here_document(name, text) for name, text in programs.items()),
        rank=RANK_NAME,
        python=shlex.quote(python),
        directory=shlex.quote(directory),
        program=PROGRAM_NAME,
        excuse=_EXCUSE_NAME,
    )


def _here_document(name: str, text: str) -> str:
    return f"cat >\"$files/{name}\" <<'{_END}'\n{text.rstrip()}\n{_END}\n"
