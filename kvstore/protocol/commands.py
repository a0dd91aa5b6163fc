"""Commands from workers to servers: ``kv.send_command_to_servers(head, body)``.

A command is a number and a text. Its function is registered by a module that the servers import
at their start (``--server-import``)::

    @kvstore.register_command(17)
    def tidy_up(body: str) -> str:
        ...

Only the number and the text are sent: a server runs only code that it was started with. The import
has no effect. Any thread may register; functions run on a server's pool threads.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvstore.errors import ArgumentTypeError, ArgumentValueError
from pslite.errors import UsageError, check_unicode

Command = Callable[[str], str | None]

_commands: dict[int, Command] = {}


def register_command(head: int) -> Callable[[Command], Command]:
    """Let servers answer the command ``head`` with the decorated function.

    The function gets the command's text and may return a text, which is sent to the worker. If it
    raises, the worker raises that error. A reloaded module may register the same function again;
    another function for the same number raises ``ArgumentTypeError``.
    """
    if isinstance(head, bool) or not isinstance(head, int) or head < 0:
        raise ArgumentTypeError(f"a command's head must be an int of at least 0, got {head!r}")

    def register(function: Command) -> Command:
        if not callable(function):
            raise ArgumentTypeError(f"a command must be a function, got {function!r}")
        taken_by = _name(_commands.get(head, function))
        if taken_by != _name(function):
            raise ArgumentTypeError(
                f"the command {head} is already registered by {taken_by}; choose another number"
            )
        _commands[head] = function
        return function

    return register


def _name(function: Command) -> str:
    # Some callables have neither: a partial, a method of a built-in type.
    name = getattr(function, "__qualname__", None)
    return repr(function) if name is None else f"{getattr(function, '__module__', '')}.{name}"


def check_command(head: object, body: object) -> None:
    """Raise unless a worker can send this command.

    Raises ``ArgumentTypeError`` or ``ArgumentValueError``.
    """
    if isinstance(head, bool) or not isinstance(head, int | np.integer) or not 0 <= head < 2**63:
        raise ArgumentTypeError(f"a command's head must be an int of at least 0, got {head!r}")
    if not isinstance(body, str):
        raise ArgumentTypeError(f"a command's body must be a str, got {type(body).__name__}")
    check_unicode("a command's body", body, ArgumentValueError)


def run_command(head: int, body: str) -> str:
    """Return the registered function's answer; an empty text for None.

    Raises:
        UsageError: no function is registered for ``head``, or it did not return a text.
    """
    function = _commands.get(head)
    if function is None:
        known = ", ".join(str(number) for number in sorted(_commands)) or "none"
        raise UsageError(
            f"this server has no command {head} (registered: {known}); register it with "
            "kvstore.register_command in a module that servers import (--server-import)"
        )
    answer = function(body)
    if answer is not None and not isinstance(answer, str):
        raise UsageError(
            f"the command {head} must return a str or None, got {type(answer).__name__}"
        )
    return answer or ""
