"""Gradient compression: codecs, error feedback, and rules by key.

The pure core, on arrays of the host: no sockets, no stores. ``config.py`` checks what a user asks
for, with ``config.py`` and ``codec.py``; ``chain.py`` encodes and decodes one part;
``codec.py``, ``bits.py``, ``casts.py``, ``int8.py`` and ``sparsify.py`` are the codecs;
``header.py`` is the header of an encoded part; ``residuals.py`` keeps what was lost;
``residuals.py`` counts. Read next: ``config.py``.
"""

from kvstore.compression.chain import Chain, Encoded
from kvstore.compression.config import Compression, Rule, make_chain
from kvstore.compression.residuals import Residual, Residuals, Statistics
from kvstore.compression.sparsify import Draw

__all__ = [
    "Chain",
    "Compression",
    "Draw",
    "Encoded",
    "Residual",
    "Residuals",
    "Rule",
    "Statistics",
    "make_chain",
]
