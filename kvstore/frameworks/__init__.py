"""Backends and layers for frameworks with distributed interfaces of their own.

Their public names are short: ``kvstore.torch`` is ``kvstore/frameworks/torch``. ``import kvstore``
imports none of them. Each imports its framework when it is first used.
"""

PYTORCH = (
    "PyTorch, which is not installed here: pip install torch, or for CPUs only pip install torch "
    "--index-url https://download.pytorch.org/whl/cpu"
)
"""The end of the error message of a module that could not import PyTorch."""
