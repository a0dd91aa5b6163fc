"""Suggest names in errors: replacements for MXNet's, and likely misspellings.

Modules call ``missing`` for a name that they lack, so that a script that moves from MXNet gets
advice and not a bare ``AttributeError``. The error stays an ``AttributeError``, so that ``hasattr``
works; for ``from kvstore import name`` and ``import kvstore.name`` it is an ``ImportError``.
``docs/migration.md`` lists the same names, and a test compares the two. ``did_you_mean`` returns
the end of an error message. Pure; called only before an error is raised. Any thread may call. Read
next: ``kvstore/__init__.py``.
"""

from __future__ import annotations

import dis
import itertools
import sys
from collections.abc import Iterable
from types import FrameType

_IMPORT_FROM = dis.opmap["IMPORT_FROM"]

_NETWORKS = (
    "networks are not built here: compute gradients with PyTorch, JAX or NumPy, and train with "
    "mx.model.FeedForward or mx.gluon.Trainer"
)
_GRAPHS = (
    "there are no symbolic graphs: write the network as an object with three methods for "
    "mx.model.FeedForward, or compute gradients with PyTorch or JAX"
)
_GRADIENTS = (
    "gradients are computed by other libraries, such as torch.autograd or jax.grad; push them "
    "with kv.pushpull, or train with mx.gluon.Trainer"
)
_READERS = (
    "data are read by other libraries, such as torch.utils.data; arrays in memory go through "
    "mx.io.NDArrayIter, and kv.shard deals samples out among the workers"
)
_FILES = (
    "files of MXNet are neither read nor written; use numpy.savez and numpy.load with "
    "array.asnumpy(), or kv.save_checkpoint and mx.model.save_checkpoint"
)
_PROFILE = (
    "use a profiler for Python, such as cProfile or py-spy, and kv.stats() for the store's counters"
)
_MONITOR = "use an eval_metric and the callbacks of mx.model.FeedForward.fit"
_SPARSE = (
    "row-sparse arrays are made by mx.nd.sparse.row_sparse_array or mx.RowSparseArray(indices, "
    "values, shape); others are SciPy's or PyTorch's, which stores take"
)
_OPERATORS = (
    "use NumPy on array.asnumpy(), PyTorch or JAX; mx.nd has only the arithmetic that a script "
    "around a store needs"
)
_HOROVOD = {
    "elastic": "a loop over kv.steps survives the loss of a rank; any other job ends with an error "
    "that names it: start it with kvstore-launch --restarts, and load your checkpoint at its start"
}

INSTEAD: dict[str, dict[str, str]] = {
    "kvstore": {
        **dict.fromkeys(("mod", "module"), _NETWORKS),
        **dict.fromkeys(
            ("sym", "symbol", "Symbol", "AttrScope", "executor", "viz", "visualization"), _GRAPHS
        ),
        "autograd": _GRADIENTS,
        **dict.fromkeys(("rnn", "operator", "contrib"), _NETWORKS),
        **dict.fromkeys(("np", "npx", "numpy"), "import numpy; stores take NumPy's arrays as is"),
        **dict.fromkeys(("image", "img", "recordio"), _READERS),
        "profiler": _PROFILE,
        **dict.fromkeys(("mon", "monitor", "Monitor"), _MONITOR),
        "cpu_pinned": "use mx.cpu(); CuPy pins memory itself where it helps",
        "gpu_memory_info": "ask CuPy: cupy.cuda.runtime.memGetInfo()",
        "kvstore_server": "servers run python -m kvstore.server, which kvstore-launch starts",
        "engine": "nothing needs to be set: pulls into mx.nd arrays are lazy, and "
        "mx.nd.waitall() waits for them",
        "test_utils": "use numpy.testing",
    },
    "kvstore.gluon": {
        **dict.fromkeys(
            (
                *("nn", "rnn", "loss", "model_zoo", "contrib"),
                *("Block", "HybridBlock", "SymbolBlock", "ParameterDict", "Constant"),
            ),
            "use another library's, such as those of torch.nn: mx.gluon.Trainer trains a network "
            "of any library from its net.named_parameters()",
        ),
        "data": _READERS,
    },
    "kvstore.nd": {
        **dict.fromkeys(("save", "load"), _FILES),
        "CSRNDArray": _SPARSE,
        **dict.fromkeys(
            ("linalg", "contrib", "image", "op", "Custom", "FullyConnected", "Convolution"),
            _OPERATORS,
        ),
        **dict.fromkeys(("Activation", "softmax", "relu", "sigmoid", "one_hot"), _OPERATORS),
    },
    "kvstore.io": dict.fromkeys(
        ("ImageRecordIter", "MNISTIter", "CSVIter", "LibSVMIter", "DataIter", "PrefetchingIter"),
        _READERS,
    ),
    "kvstore.context": {
        "cpu_pinned": "use mx.cpu(); CuPy pins memory itself where it helps",
        "gpu_memory_info": "ask CuPy: cupy.cuda.runtime.memGetInfo()",
    },
    "kvstore.horovod": _HOROVOD,
    "kvstore.horovod.torch": _HOROVOD,
}
"""For each module, the names that a script may look for in it, and what to use instead."""


def missing(module: str, name: str, known: Iterable[str]) -> AttributeError | ImportError:
    """Return the error for a name that ``module`` lacks; ``known`` are its names.

    Only a module's own ``__getattr__`` may call it.
    """
    if name in INSTEAD.get(module, {}):
        text = sentence(module, name)
    else:
        text = f"module {module!r} has no attribute {name!r}{did_you_mean(name, known)}"
    if _is_import(sys._getframe(2)):
        return ImportError(text, name=f"{module}.{name}")
    return AttributeError(text, name=name)


def _is_import(frame: FrameType) -> bool:
    """Return whether a frame is in the middle of ``from module import name``.

    There Python replaces an ``AttributeError`` by an ``ImportError`` without its message; it does
    not replace other errors.
    """
    return frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == _IMPORT_FROM


def sentence(module: str, name: str) -> str:
    """Return the advice for a name in ``INSTEAD``."""
    return f"there is no {shown(module, name)} here: {INSTEAD[module][name]}"


def shown(module: str, name: str) -> str:
    """Return the user's name: ``mx.gluon.nn`` for ``nn`` of ``kvstore.gluon``."""
    if module.startswith("kvstore.horovod"):
        return f"hvd.{name}"
    return ".".join(["mx", *module.split(".")[1:], name])


MOST_NAMES = 2000
"""How many names are compared at most, which takes about 10 ms."""


def nearest(name: object, known: Iterable[object]) -> str | None:
    """Return the known name most similar to ``name``, or None."""
    if not isinstance(name, str):
        return None
    import difflib  # not at the start of every process

    names = (each for each in known if isinstance(each, str))
    found = difflib.get_close_matches(name, itertools.islice(names, MOST_NAMES), n=1)
    return found[0] if found else None


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """Return ``"; did you mean 'weight'?"``, or an empty string."""
    found = nearest(name, known)
    return "" if found is None else f"; did you mean {found!r}?"
