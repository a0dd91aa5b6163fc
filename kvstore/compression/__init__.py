"""Gradient compression: codecs, error feedback, and which keys are compressed how.

The pure core, on arrays of the host: no sockets, no stores. ``choice.py`` checks what a user asks
for, with ``making.py`` and ``parameters.py``; ``chain.py`` encodes and decodes one part;
``codec.py``, ``bits.py``, ``casts.py``, ``int8.py`` and ``picks.py`` are the codecs; ``layout.py``
is the header of an encoded part; ``residuals.py`` keeps what was lost; ``statistics.py`` counts.
Read next: ``choice.py``.
"""

from kvstore.compression.chain import Chain, Encoded
from kvstore.compression.choice import Compression, Rule
from kvstore.compression.making import make_chain
from kvstore.compression.picks import Draw
from kvstore.compression.residuals import Residual, Residuals
from kvstore.compression.statistics import Statistics

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
