"""The worker's side of compression: how values of a distributed store are encoded.

``DistCompression`` encodes the values that a call pushes, part by part for each key, adds the
positions of the encoded parts to plans (``plan.py``), and decodes the values that servers send
encoded. The rules and codecs are in ``compression/``; servers handle encoded parts in
``server/memory.py`` and ``server/part_table.py``. Calls may come from any thread; nothing here
waits. Read next: ``compression/config.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from kvstore.arrays.cpu.sums import Flat
from kvstore.arrays.keys import Key, KeySpec
from kvstore.checkpoint.residuals import StoreCompression
from kvstore.compression import Chain, Compression, Draw
from kvstore.compression.config import rows_refused, value_refused
from kvstore.errors import ArgumentValueError, NotSupportedError, UnknownKeyError
from kvstore.protocol.requests import KeyEntry
from kvstore.stores.dist.plan import Bucket, Bytes, Decoder, Group, PushedData, Slice
from pslite.errors import ProtocolError


class _EncodedParts(NamedTuple):
    """The positions of the parts of an encoded key."""

    chain: Chain
    first_part: int
    stops: Sequence[int]
    """The byte at which each encoded part ends; the first begins at 0."""
    chunks: Sequence[tuple[int, int]]
    """The element range of each part."""

    def place(self, part: int) -> tuple[int, int]:
        index = part - self.first_part
        return (self.stops[index - 1] if index else 0), self.stops[index]


class DistCompression(StoreCompression):
    """The encoding of one store on one worker."""

    def __init__(
        self, compression: Compression, entries: Mapping[Key, KeyEntry], num_workers: int
    ) -> None:
        """``entries`` are the store's current keys; the store changes this mapping."""
        super().__init__(compression, num_workers)
        self._entries = entries
        # The base class's lock guards these, too.
        self._layouts: dict[int, _EncodedParts | None] = {}
        #: First part of a key -> how many times the key was pushed.
        self._rounds: Counter[int] = Counter()

    def layout(self, key: Key) -> _EncodedParts | None:
        """Return the positions of a key's encoded parts; None if it is not encoded."""
        entry = self._entries[key]
        if entry.first_part not in self._layouts:
            self._layouts[entry.first_part] = self._layout(entry)
        return self._layouts[entry.first_part]

    def _layout(self, entry: KeyEntry) -> _EncodedParts | None:
        dtype = entry.spec.dtype
        chain = self.compression.rule_for(entry.key, entry.spec).chain
        if chain is None or entry.is_row_sparse:
            return None
        chunks = entry.chunks()
        sizes = [chain.encoded_bytes(stop - start, dtype) for start, stop in chunks]
        return _EncodedParts(chain, entry.first_part, list(accumulate(sizes)), chunks)

    def concerns(self, keys: Sequence[Key]) -> bool:
        """Return whether pushes of any of these keys are encoded."""
        return any(self.layout(key) is not None for key in keys)

    def refuse_rows(self, keys: Iterable[Key]) -> None:
        """Raise ``NotSupportedError`` if a key that pushes rows is compressed."""
        for key in keys:
            if self.compression.rule_for(key, self._entries[key].spec).chain is not None:
                raise NotSupportedError(rows_refused(key))

    def forget(self, entries: Sequence[KeyEntry]) -> None:
        """Drop the residuals of deleted keys."""
        with self.lock:
            self.residuals.forget(entry.key for entry in entries)
            for entry in entries:
                self._layouts.pop(entry.first_part, None)
                self._rounds.pop(entry.first_part, None)

    def specs(self) -> dict[Key, KeySpec]:
        return {key: entry.spec for key, entry in self._entries.items()}

    # -- pushed values -----------------------------------------------------------------

    def encode(
        self, keys: Bucket, sources: Sequence[Bytes], buffer: Callable[[int], Bytes]
    ) -> tuple[list[Bytes], bool]:
        """Return the data to send, and whether none of it is the caller's memory.

        ``buffer(nbytes)`` returns memory for the encoded data. If a codec cannot encode NaN or
        infinity, raises ``ArgumentValueError`` for them before anything changes.
        """
        layouts = [self.layout(key) for key in keys.keys]
        typed = [source.view(spec.dtype) for source, spec in zip(sources, keys.specs, strict=True)]
        for layout, values in zip(layouts, typed, strict=True):
            if layout is not None:
                layout.chain.check(values)
        sizes = [
            0 if layout is None or not layout.stops else layout.stops[-1] for layout in layouts
        ]
        memory = buffer(sum(sizes))
        stops = list(accumulate(sizes))
        found = list(sources)
        with self.lock:
            self._check_known(keys.keys, layouts)
            for index, layout in enumerate(layouts):
                if layout is not None:
                    encoded = memory[stops[index] - sizes[index] : stops[index]]
                    self._encode(keys.keys[index], layout, typed[index], encoded)
                    found[index] = encoded
        return found, all(layout is not None for layout in layouts)

    def _check_known(self, keys: Sequence[Key], layouts: Sequence[_EncodedParts | None]) -> None:
        """Raise ``UnknownKeyError`` if another thread has meanwhile deleted a key."""
        for key, layout in zip(keys, layouts, strict=True):
            entry = self._entries.get(key)
            if layout is not None and (entry is None or entry.first_part != layout.first_part):
                raise UnknownKeyError(
                    f"the key {key!r} was deleted during the call; create it again by init"
                )

    def _encode(self, key: Key, layout: _EncodedParts, values: Flat, memory: Bytes) -> None:
        chain = layout.chain
        residual = None
        if chain.has_feedback:
            residual = self.residuals.of(key, len(values), values.dtype)
        self._rounds[layout.first_part] += 1
        draw = Draw(round=self._rounds[layout.first_part])
        for index, (start, stop) in enumerate(layout.chunks):
            place = slice(*layout.place(layout.first_part + index))
            chain.encode(
                values[start:stop],
                memory[place],
                residual=None if residual is None else residual[start:stop],
                draw=draw._replace(stream=layout.first_part + index),
            )

    # -- plans -------------------------------------------------------------------------

    def applied(self, group: Group, keys: Sequence[Key]) -> Group:
        """Return a message's group with the encoding of pushed and pulled parts added."""
        to_push, decoders = self._to_push(group, keys), self._decoders(group, keys)
        pairs = zip(decoders, group.sizes, strict=True)
        sizes = tuple(size if each is None else each.nbytes for each, size in pairs)
        some = decoders if any(decoders) else None
        return group._replace(to_push=to_push, pull_sizes=sizes, decoders=some)

    def _to_push(self, group: Group, keys: Sequence[Key]) -> PushedData:
        layouts = {piece.position: self.layout(keys[piece.position]) for piece in group.slices}
        slices = []
        for part, piece in zip(group.parts, group.slices, strict=True):
            layout = layouts[piece.position]
            slices.append(piece if layout is None else Slice(piece.position, *layout.place(part)))
        sizes = tuple(stop - start for _, start, stop in slices)
        return PushedData(sizes, tuple(slices), sum(sizes))

    def _decoders(self, group: Group, keys: Sequence[Key]) -> tuple[Decoder | None, ...]:
        decoders: list[Decoder | None] = []
        for piece, size in zip(group.slices, group.sizes, strict=True):
            key = keys[piece.position]
            spec = self._entries[key].spec
            chain = self.compression.rule_for(key, spec).pull
            if chain is None:
                decoders.append(None)
            else:
                nbytes = chain.encoded_bytes(size // spec.dtype.itemsize, spec.dtype)
                decoders.append(Decoder(nbytes, partial(_decode, key, chain, spec.dtype)))
        return tuple(decoders)

    # -- rules for servers -------------------------------------------------------------

    def rule_of(self, entry: KeyEntry) -> int:
        """Return the number of a key's rule, or -1 if it has no rule."""
        return self.compression.number_of(self.compression.rule_for(entry.key, entry.spec))


def _decode(
    key: Key, chain: Chain, dtype: np.dtype[np.generic], came: Bytes, values: Bytes
) -> None:
    into = values.view(dtype)
    try:
        chain.decode(came, into)
    except ProtocolError as error:
        if chain.is_of_non_finite(came, len(into), dtype):
            raise ArgumentValueError(value_refused(key, chain)) from None
        raise ProtocolError(f"key {key!r}: {error}") from error
