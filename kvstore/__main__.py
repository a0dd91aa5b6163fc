"""The command ``kvstore`` (also ``python -m kvstore``) with its subcommands.

Each subcommand is imported only when it is used, and reads its own arguments. The old names
(``kvstore-launch``, ``python -m kvstore.status``, ``python -m kvstore.bench``) do the same.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from kvstore.errors.hints import did_you_mean
from pslite.version import __version__

_COMMANDS = {
    "launch": ("kvstore.launch.cli", "start a job: scheduler, servers, and a command per worker"),
    "status": ("kvstore.status", "show what the nodes of a running job do"),
    "bench": (
        "kvstore.bench.__main__",
        "measure what push and pull cost, and estimate a step",
    ),
    "server": ("kvstore.server", "serve as scheduler or server, as the environment says"),
}

_USAGE = "\n".join(
    [
        "usage: kvstore COMMAND [ARGUMENT ...]",
        "",
        *(f"  {name:<8}{what}" for name, (_, what) in _COMMANDS.items()),
        "",
        "kvstore COMMAND --help tells more; kvstore --version prints the version.",
        "example: kvstore launch -n 2 -s 1 python train.py --kv-store dist_sync",
    ]
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code, or 2 if it does not exist.

    ``arguments`` are the command line without the program's name (default: this process's).
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given[0] if given else "--help"
    if name in ("-h", "--help", "help"):
        print(_USAGE)
        return 0 if given else 2
    if name == "--version":
        print(f"kvstore {__version__}")
        return 0
    if name not in _COMMANDS:
        meant = did_you_mean(name, _COMMANDS)
        print(f"kvstore: there is no command {name!r}{meant}\n\n{_USAGE}", file=sys.stderr)
        return 2
    module, _ = _COMMANDS[name]
    code: int = importlib.import_module(module).main(given[1:])
    return code


if __name__ == "__main__":
    sys.exit(main())
