"""A worker of ``kvstore.run`` or ``LocalCluster``: ``python -m kvstore.launch.run.worker``.

Its arguments are the directory of the parcels and how long it serves: ``once`` for one call, then
it ends as any script does; ``serve`` for the calls whose numbers come by its pipe, until the
caller closes that. It joins the job before the first call, so that no timeout runs out
while a call computes or a notebook thinks. What a function raises goes back to the caller and,
with ``once``, ends this worker without a goodbye, as an uncaught exception ends a script. Runs on
the main thread. Read ``parcels.py`` first; the other side is ``kvstore/launch/run/cluster.py``.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.launch.run import parcels
from kvstore.launch.run.parcels import marker
from pslite.errors import NodeLostError, PSError

EXIT_FAILED = 1
TO_BE_ENDED_S = 10.0
"""For the caller to end the job after an error of this worker's own, before the other nodes notice
that it is gone, and say so."""

_LONGEST_CHAIN = 20


@dataclass(frozen=True)
class CallReply:
    """What goes back: ``header`` says which kind, ``body`` is a value or an exception."""

    header: dict[str, Any]
    body: bytes = b""

    @property
    def failed(self) -> bool:
        return bool(self.header["kind"] != "value")


def main(arguments: list[str] | None = None) -> int:
    """Serve the calls; return the exit code."""
    directory_name, mode = sys.argv[1:] if arguments is None else arguments
    directory = Path(directory_name)
    rank = int(os.environ["DMLC_TASK_ID"])
    try:
        parcels.check_directory(directory)
    except parcels.NotReadable as error:  # an answer would not reach the caller either
        print(error, file=sys.stderr, flush=True)
        return EXIT_FAILED
    if mode == "once":
        answer = _joined_call(directory, 1)
        _leave_answer(directory, 1, rank, answer)
        if answer.failed and not answer.header["blames"]:
            time.sleep(TO_BE_ENDED_S)
        return _end(failed=answer.failed)
    failure = _join()
    _leave_answer(directory, 0, rank, failure or _value(None))
    if failure is not None:
        return _end(failed=True)
    for call in _orders(directory, rank):
        _leave_answer(directory, call, rank, _call(directory, call))
        _mark_output(call)
    return 0


def _joined_call(directory: Path, call: int) -> CallReply:
    """Load the function first: what it imports may take longer than the others wait."""
    loaded = _load(directory, call)
    if isinstance(loaded, CallReply):
        return loaded
    return _join() or _apply_to_the_end(*loaded)


def _apply_to_the_end(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallReply:
    """The only call: what it has pushed is applied, or that is the answer."""
    from kvstore.stores.dist.node import worker_node

    answer = _apply(function, args, kwargs)
    if not answer.failed:
        try:
            worker_node().close()
        except Exception as error:
            return _error(error)
    return answer


def _call(directory: Path, call: int) -> CallReply:
    loaded = _load(directory, call)
    return loaded if isinstance(loaded, CallReply) else _apply(*loaded)


def _join() -> CallReply | None:
    """Become a node of the job; the error when that fails."""
    from kvstore.stores.dist.node import worker_node

    try:
        worker_node()
    except PSError as error:
        # Another process has more to say about the cause.
        return _error(error, blames_another=True)
    return None


def _load(directory: Path, call: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | CallReply:
    """The function of a call and its arguments, or the error that stands in the way."""
    try:
        header, body = parcels.read(parcels.call_path(directory, call))
        _check_python(header)
        _extend_path(header["path"])
        function, args, kwargs = parcels.load(body)
    except parcels.NotReadable as error:
        return _refusal(str(error))
    except ModuleNotFoundError as error:
        advice = f"install it for {sys.executable}, or add its directory to PYTHONPATH"
        return _refusal(f"the function needs the module {error.name}, which is not here: {advice}")
    except Exception as error:  # whatever the classes in it raise
        return _error(error)
    return function, args, kwargs


def _check_python(header: dict[str, Any]) -> None:
    own = parcels.python_version()
    if header["by_value"] and header["python"] != own:
        theirs = ".".join(map(str, header["python"]))
        raise parcels.NotReadable(
            f"this worker has Python {'.'.join(map(str, own))} and the caller {theirs}: functions "
            f"of a notebook need the same; give python= a Python {theirs} of this host"
        )


def _extend_path(entries: list[str]) -> None:
    """Make what the caller could import importable here, its own modules before libraries."""
    new = [entry for entry in entries if entry not in sys.path and os.path.exists(entry)]
    sys.path[:0] = new


def _apply(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallReply:
    try:
        result = function(*args, **kwargs)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return _error(error)
    try:
        return _value(result)
    except parcels.NotSendable as error:
        return _refusal(f"what the function returned cannot be sent back: {error}")


def _value(result: Any) -> CallReply:
    body = parcels.dump(result, f"a value of type {type(result).__name__}")
    return CallReply({"kind": "value"}, body)


def _refusal(text: str) -> CallReply:
    return CallReply({"kind": "refusal", "text": text, "blames": False, "at_s": time.time()})


def _error(error: BaseException, *, blames_another: bool = False) -> CallReply:
    """The exception itself where it survives a journey, and its traceback as text anyhow."""
    header = {
        "kind": "error",
        "type": type(error).__name__,
        "text": _traceback(error),
        "blames": blames_another or _blames_another(error),
        "at_s": time.time(),
    }
    if not isinstance(error, Exception):  # SystemExit must not end the caller
        return CallReply(header)
    try:
        body = parcels.dump(error, "the exception")
        parcels.load(body)
    except Exception:  # an exception of the user's may refuse in any way
        return CallReply(header)
    return CallReply(header, body)


def _traceback(error: BaseException) -> str:
    """From the function on: the lines of this file say nothing."""
    own = os.path.abspath(__file__)
    found = error.__traceback__
    while found is not None and os.path.abspath(found.tb_frame.f_code.co_filename) == own:
        found = found.tb_next
    text = "".join(traceback.format_exception(type(error), error, found)).rstrip()
    return text.encode("utf-8", "backslashreplace").decode()


def _blames_another(error: BaseException | None) -> bool:
    for _ in range(_LONGEST_CHAIN):
        if error is None or isinstance(error, NodeLostError):
            return error is not None
        error = error.__cause__ or error.__context__
    return False


def _leave_answer(directory: Path, call: int, rank: int, answer: CallReply) -> None:
    _flush()
    parcels.write(parcels.answer_path(directory, call, rank), answer.header, answer.body)
    parcels.ring(directory)


def _orders(directory: Path, rank: int) -> Iterator[int]:
    """The numbers of the calls; ends when the caller closes the pipe or is gone."""
    with open(parcels.orders_path(directory, rank), encoding="ascii") as pipe:
        for line in pipe:
            if line == parcels.END:
                return
            yield int(line)


def _mark_output(call: int) -> None:
    """Tell the caller that all lines of this call have come."""
    _flush()
    for descriptor in (1, 2):
        try:
            os.write(descriptor, f"{marker(call)}\n".encode())
        except OSError:  # the function has closed it
            continue


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):  # replaced, unreadable or closed
            continue


def _end(*, failed: bool) -> int:
    """Let the node leave without a goodbye after a failure, as after any uncaught exception."""
    if failed:
        sys.last_value = RuntimeError("a call has failed")
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
