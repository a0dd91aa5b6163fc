"""A worker of ``kvstore.run``: ``python -m kvstore.launch.run.worker``.

Its arguments are the directory of the call files and a mode: with ``once``, it makes call 0 and
then ends like any script; with ``serve``, it also makes the calls whose numbers arrive through its
pipe, until the caller tells it to end. It joins the job before the first function runs, so that no
timeout passes while a function computes or a notebook is idle. An error of a function is sent to
the caller. Runs on the main thread. Read ``call_files.py`` first; the other side is ``job.py``.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvstore.launch.run import call_files
from kvstore.launch.run.call_files import WorkerAnswer, python_version
from kvstore.stores.dist.node import worker_node
from pslite.errors import NodeLostError, PSError, UsageError

EXIT_FAILED = 1
TO_BE_ENDED_S = 10.0
"""The wait for the caller to end the job after an error of this worker, before the other nodes
notice the loss and report it."""

_LONGEST_CHAIN = 20


def main(arguments: list[str] | None = None) -> int:
    """Serve the calls; return the exit code."""
    directory_name, mode = sys.argv[1:] if arguments is None else arguments
    directory = Path(directory_name)
    rank = int(os.environ["DMLC_TASK_ID"])
    try:
        call_files.check_directory(directory)
    except call_files.NotReadable as error:  # an answer would not reach the caller either
        print(error, file=sys.stderr, flush=True)
        return EXIT_FAILED
    streams = [os.dup(1), os.dup(2)]  # a function may close or replace the usual ones
    for call in _calls(directory, rank):
        answer = make_call(directory, call)
        if mode == "once" and not answer.failed:
            try:
                worker_node().close()  # wait until its pushes are applied; an error is the answer
            except Exception as error:
                answer = error_answer(error)
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # replaced, unreadable or closed
                stream.flush()
        call_files.write_answer(call_files.answer_path(directory, call, rank), answer)
        _announce(call, streams)
        if answer.failed and (mode == "once" or call == 0):  # not joined after a failed call 0
            if not answer.blames_another:
                time.sleep(TO_BE_ENDED_S)
            # End without a goodbye, as after any uncaught exception.
            sys.last_value = RuntimeError("a call has failed")
            return EXIT_FAILED
        if mode == "once":
            break
    return 0


def _calls(directory: Path, rank: int) -> Iterator[int]:
    """Yield the numbers of the calls; call 0 needs no order."""
    yield 0
    with open(call_files.orders_path(directory, rank), encoding="ascii") as pipe:
        for line in pipe:
            if line.strip() == call_files.END:
                return
            yield int(line)


def make_call(directory: Path, call: int) -> WorkerAnswer:
    """Load and run the function of a call; return its result or error."""
    # Load before joining: imports may take longer than the other nodes wait for this one.
    try:
        function, args, kwargs = _load(call_files.call_path(directory, call))
    except call_files.NotReadable as error:
        return _refusal(str(error))
    except ModuleNotFoundError as error:
        advice = f"install it for {sys.executable}, or add its directory to PYTHONPATH"
        return _refusal(f"the function needs the module {error.name}, which is not here: {advice}")
    except Exception as error:  # whatever the classes in it raise
        return error_answer(error)
    try:
        worker_node()
    except PSError as error:  # another process knows more about the cause
        return error_answer(error, blames_another=True)
    try:
        result = function(*args, **kwargs)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return error_answer(error)
    try:
        return WorkerAnswer(
            "value", call_files.dump(result, f"a value of type {type(result).__name__}")
        )
    except UsageError as error:
        return _refusal(f"cannot send back the function's result: {error}")


def _load(path: Path) -> Any:
    """Return a call's function, positional arguments and keyword arguments."""
    header, body = call_files.read(path)
    own, theirs = (".".join(map(str, one)) for one in (python_version(), header["python"]))
    if header["by_value"] and own != theirs:
        raise call_files.NotReadable(
            f"this worker has Python {own}, but the caller has {theirs}; functions of a notebook "
            f"need the same version: pass python= with a Python {theirs} of this host"
        )
    # Modules of the caller can be imported here; its own come before libraries.
    new = [one for one in header["path"] if one not in sys.path and os.path.exists(one)]
    sys.path[:0] = new
    return call_files.load(body)


def _refusal(text: str) -> WorkerAnswer:
    return WorkerAnswer("refusal", text=text, at_s=time.time())


def error_answer(error: BaseException, *, blames_another: bool = False) -> WorkerAnswer:
    """Return the exception, if it can be pickled, and its traceback as text."""
    body = b""
    if isinstance(error, Exception):  # SystemExit must not end the caller
        try:
            body = call_files.dump(error, "the exception")
            call_files.load(body)
        except Exception:  # a user's exception may fail in any way
            body = b""
    return WorkerAnswer(
        "error",
        body,
        type=type(error).__name__,
        text=_traceback(error),
        at_s=time.time(),
        blames_another=blames_another or _blames_another(error),
    )


def _traceback(error: BaseException) -> str:
    """Return the traceback without the first frames, which are of this file."""
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


def _announce(call: int, streams: list[int]) -> None:
    """Tell the caller that the answer and all lines of this call are complete."""
    for own, usual in zip(streams, (1, 2), strict=True):
        for descriptor in (own, usual):
            try:
                os.write(descriptor, f"{call_files.MARK}{call}\n".encode())
                break
            except OSError:  # the function has closed it
                continue


if __name__ == "__main__":
    sys.exit(main())
