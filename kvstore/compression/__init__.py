"""Gradient compression: codecs, error feedback, and rules by key.

The pure core, on arrays of the host: no sockets, no stores. ``config.py`` checks what a user asks
for; ``chain.py`` encodes and decodes one part, with the header of ``header.py``; ``codec.py``,
``value_codecs.py`` and ``sparsify.py`` are the codecs; ``residuals.py`` keeps the errors.
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
