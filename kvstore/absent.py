"""Names of MXNet that are not in this project, and what to use instead.

Modules ask here when a name is missing, so that a script that moves over ends in a sentence and
not in a bare ``AttributeError``. It stays an ``AttributeError``: ``hasattr`` works. Pure, and
called on the way to an error only. ``docs/migration.md`` lists the same names, and a test
compares. Read next: ``kvstore/__init__.py``.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.suggest import did_you_mean

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
    "row-sparse arrays are mx.RowSparseArray(indices, values, shape), also by "
    "mx.nd.sparse.row_sparse_array; others are SciPy's or PyTorch's, which stores take"
)
_OPERATORS = (
    "use NumPy on array.asnumpy(), PyTorch or JAX; mx.nd has only the arithmetic that a script "
    "around a store needs"
)
_DEVICES = "give every array its context: mx.cpu() or mx.gpu(i); mx.cpu() is where nothing is said"

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
        "current_context": _DEVICES,
        "cpu_pinned": "use mx.cpu(); CuPy pins memory itself where it helps",
        "gpu_memory_info": "ask CuPy: cupy.cuda.runtime.memGetInfo()",
        "kvstore_server": "servers run python -m kvstore.server, which kvstore-launch starts",
        "engine": "nothing needs to be set: pulls into mx.nd arrays are lazy, and "
        "mx.nd.waitall() waits for them",
        "test_utils": "use numpy.testing",
        "MXNetError": "catch pslite.errors.PSError, the base of all errors raised on purpose",
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
        **dict.fromkeys(("CSRNDArray", "RowSparseNDArray"), _SPARSE),
        **dict.fromkeys(
            ("linalg", "contrib", "image", "op", "Custom", "FullyConnected", "Convolution"),
            _OPERATORS,
        ),
        **dict.fromkeys(("Activation", "softmax", "relu", "sigmoid", "one_hot"), _OPERATORS),
    },
    "kvstore.io": dict.fromkeys(
        (
            *("ImageRecordIter", "MNISTIter", "CSVIter", "LibSVMIter"),
            *("DataIter", "DataDesc", "ResizeIter", "PrefetchingIter"),
        ),
        _READERS,
    ),
    "kvstore.context": {
        "current_context": _DEVICES,
        "cpu_pinned": "use mx.cpu(); CuPy pins memory itself where it helps",
        "gpu_memory_info": "ask CuPy: cupy.cuda.runtime.memGetInfo()",
    },
}
"""What to use instead of a name, by the module in which a script would look for it."""


def missing(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """The error for a name that ``module`` does not have; ``known`` are those that it has."""
    instead = INSTEAD.get(module, {}).get(name)
    if instead is None:
        text = f"module {module!r} has no attribute {name!r}{did_you_mean(name, known)}"
    else:
        text = f"there is no {shown(module, name)} here: {instead}"
    return AttributeError(text, name=name)


def shown(module: str, name: str) -> str:
    """``mx.gluon.nn`` for the name ``nn`` of ``kvstore.gluon``."""
    return ".".join(["mx", *module.split(".")[1:], name])
