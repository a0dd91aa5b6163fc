"""Record the parameters of MXNet's public calls: run it with a Python that has MXNet 1.9.1.

::

    python tests/reference/record_signatures.py

writes ``signatures.json`` beside itself: for each name the parameters that may be given by
position, in order, ``name=`` where there is a default; then ``*`` and those by name only. The
tests compare them with this project's and need no MXNet.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PRIVATE = ("_set_updater", "_barrier", "_send_command_to_servers", "_create_kvstore")
"""Names with an underscore that scripts use."""

MODULES = (
    *("nd", "nd.random", "nd.sparse", "callback", "context", "gluon", "gluon.utils", "init"),
    *("io", "kvstore", "lr_scheduler", "metric", "model", "optimizer", "random"),
)


def main() -> None:
    import mxnet  # type: ignore[import-not-found]

    found: dict[str, list[str]] = {}
    seen: set[Any] = set()
    for path in MODULES:
        module = mxnet
        for part in path.split("."):
            module = getattr(module, part)
        found.update(calls_of(module, path, ("mxnet", "ndarray"), seen))
    for name, parameters in found.items():
        if name.startswith("nd.NDArray.") and parameters == ["*args", "**kwargs"]:
            # Such a method passes its arguments on to the function of its name.
            found[name] = found.get(name.replace("NDArray.", ""), parameters)[1:]
    lines = [f"{json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found)]
    path = Path(__file__).with_name("signatures.json")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{len(found)} calls of MXNet {mxnet.__version__} are in {path}")


def calls_of(
    module: Any, path: str, libraries: tuple[str, ...], seen: set[Any]
) -> Iterator[tuple[str, list[str]]]:
    """The public functions and classes of a module of a library, and the methods of the classes.

    ``seen`` are the classes that had their turn in another module.
    """
    for name, item in public(module):
        if not str(getattr(item, "__module__", "")).startswith(libraries) or item in seen:
            continue
        yield from described(f"{path}.{name}", item)
        if not inspect.isclass(item):
            continue
        seen.add(item)
        for method, call in public(item):
            is_static = isinstance(inspect.getattr_static(item, method), staticmethod)
            if inspect.isroutine(call):
                has_self = inspect.isfunction(call) and not is_static
                yield from described(f"{path}.{name}.{method}", call, has_self=has_self)


def public(item: Any) -> Iterator[tuple[str, Any]]:
    for name in dir(item):
        if not name.startswith("_") or name in PRIVATE:
            found = getattr(item, name, None)
            if callable(found):
                yield name, found


def described(name: str, call: Any, *, has_self: bool = False) -> Iterator[tuple[str, list[str]]]:
    """The name with the parameters as the file has them; nothing without a signature in Python."""
    try:
        parameters = list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError):
        return
    listed: list[str] = []
    for each in parameters[has_self:]:
        if each.kind == each.VAR_POSITIONAL:
            listed.append(f"*{each.name}")
        elif each.kind == each.VAR_KEYWORD:
            listed.append(f"**{each.name}")
        else:
            if each.kind == each.KEYWORD_ONLY and not any(one.startswith("*") for one in listed):
                listed.append("*")
            listed.append(shown(each))
    yield name, listed


def shown(parameter: inspect.Parameter) -> str:
    return parameter.name + ("" if parameter.default is parameter.empty else "=")


if __name__ == "__main__":
    main()
