"""Gradient compression: codecs, error feedback, and rules by key.

This package works on arrays on the host, without sockets or stores. ``config.py`` checks the user's
parameters. ``chain.py`` encodes and decodes one part, with the header of ``header.py``. The codecs
are in ``codec.py``, ``value_codecs.py`` and ``sparsify.py``; ``residuals.py`` keeps the residuals.
Read next: ``config.py``.
"""

from kvstore.compression.chain import Chain
from kvstore.compression.config import Compression, Rule, make_chain
from kvstore.compression.residuals import Residual, Residuals, Statistics
from kvstore.compression.sparsify import Draw

__all__ = [
    "Chain",
    "Compression",
    "Draw",
    "Residual",
    "Residuals",
    "Rule",
    "Statistics",
    "make_chain",
]
