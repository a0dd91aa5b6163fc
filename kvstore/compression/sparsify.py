"""The codecs ``topk`` and ``randomk``: send only some of the numbers.

Of n numbers they send k: max(1, floor(ratio * n)), or the user's count, at most n. n is the size of
an encoded part; a large key has several parts, and each sends its own k numbers.

**topk** sends the numbers of the largest magnitude and their ids (Aji and Heafield, EMNLP 2017).
Of equal magnitudes it sends those with lower ids, and it treats NaN as the largest, so the choice
is the same on every processor. Ids are unsigned and ascending, with 32 bits (64 beyond 2^32
elements).

**randomk** sends numbers at random ids. All workers draw the same ids from a seed, a stream (the
part) and the round, so they need not send ids (Stich et al., NeurIPS 2018). The codec cuts the part
into k stretches of nearly equal length and draws one element of each. So the probability of an
element is 1 / (length of its stretch). Without error feedback, numbers are multiplied by that
length, so that the expected value is right (unbiased; Wangni et al., NeurIPS 2018). Draws come from
SplitMix64 (Steele et al., OOPSLA 2014), so they do not depend on the version of a library.

A payload has the ids (topk only), then the numbers as the next codec encodes them.

Pure; any thread may call. Read next: ``chain.py``.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

import numpy as np

from kvstore.arrays.cpu.sums import Flat
from kvstore.compression.codec import CodecParameter, Coder, Payload, count, ratio, size
from pslite.errors import ProtocolError

Ids = np.ndarray[Any, Any]
"""Indices of elements: unsigned, ascending, distinct."""

_SMALL = np.dtype("<u4")
_LARGE = np.dtype("<u8")
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_SAMPLE = 4096


class Draw(NamedTuple):
    """The inputs of a random choice apart from the seed; equal on all workers."""

    stream: int = 0
    """The number of the part."""
    round: int = 0


class Pick(Coder):
    """A codec that selects the numbers to send. Immutable; any thread may use it."""

    draws: ClassVar[bool] = False
    """Whether the choice depends on the seed, the stream and the round."""
    has_feedback = True

    def __init__(self, ratio: float, k: int | None) -> None:
        self.ratio = ratio
        self.k = k

    def count(self, num_elements: int) -> int:
        """Return how many numbers to send of a part of this size."""
        wanted = max(int(self.ratio * num_elements), 1) if self.k is None else self.k
        return min(wanted, num_elements)

    @abstractmethod
    def ids_bytes(self, num_elements: int) -> int:
        """Return how many bytes of a payload are ids."""

    @abstractmethod
    def choose(self, wide: Flat, draw: Draw) -> Ids:
        """Return the indices to send; ``wide`` (float32 or float64) is only read."""

    @abstractmethod
    def read_ids(self, payload: Payload, num_elements: int, draw: Draw) -> Ids:
        """Return the indices that a payload of the right length stands for.

        Raises ``ProtocolError`` if this codec cannot have written them.
        """

    def check_ids(self, payload: Payload, num_elements: int) -> None:
        """Check the indices in a payload; raises the errors of ``read_ids``."""

    def weights(self, ids: Ids, num_elements: int) -> Flat | None:
        """Return the factors of numbers sent without feedback; None means 1."""
        return None


class TopK(Pick):
    """A codec that sends the numbers of the largest magnitude."""

    name = "topk"
    code = 16
    parameters = {"ratio": CodecParameter(ratio, 0.01), "k": CodecParameter(count, None)}

    def ids_bytes(self, num_elements: int) -> int:
        return self.count(num_elements) * _ids_dtype(num_elements).itemsize

    def choose(self, wide: Flat, draw: Draw) -> Ids:
        wanted = self.count(len(wide))
        if wanted == len(wide):
            return np.arange(wanted, dtype=_ids_dtype(wanted))
        # Without the sign bit, floats sort by magnitude when compared as integers.
        if wide.dtype.itemsize == 4:
            magnitudes = wide.view(np.uint32) & np.uint32((1 << 31) - 1)
        else:
            magnitudes = wide.view(np.uint64) & np.uint64((1 << 63) - 1)
        return largest(magnitudes, wanted).astype(_ids_dtype(len(wide)))

    def read_ids(self, payload: Payload, num_elements: int, draw: Draw) -> Ids:
        dtype = _ids_dtype(num_elements)
        ids: Ids = payload[: self.ids_bytes(num_elements)].view(dtype)
        if len(ids) and not (ids[-1] < num_elements and (ids[1:] > ids[:-1]).all()):
            raise ProtocolError(
                f"the ids of a topk payload must increase and be below {num_elements}, got {ids}"
            )
        return ids

    def check_ids(self, payload: Payload, num_elements: int) -> None:
        self.read_ids(payload, num_elements, Draw())


class RandomK(Pick):
    """A codec that sends numbers at random positions."""

    name = "randomk"
    code = 17
    parameters = {**TopK.parameters, "seed": CodecParameter(size, 0)}
    in_header = ("seed",)
    format = "Q"
    draws = True

    def __init__(self, ratio: float, k: int | None, seed: int) -> None:
        super().__init__(ratio, k)
        self.seed = seed

    def ids_bytes(self, num_elements: int) -> int:
        return 0

    def choose(self, wide: Flat, draw: Draw) -> Ids:
        return self._ids(len(wide), draw)

    def read_ids(self, payload: Payload, num_elements: int, draw: Draw) -> Ids:
        return self._ids(num_elements, draw)

    def weights(self, ids: Ids, num_elements: int) -> Flat | None:
        borders = _borders(len(ids), num_elements)
        return np.diff(borders).astype(np.float64)

    def _ids(self, num_elements: int, draw: Draw) -> Ids:
        wanted = self.count(num_elements)
        borders = _borders(wanted, num_elements)
        state = self.seed
        for number in draw:
            state = _mixed(state ^ _mixed(number + _GOLDEN & _MASK))
        words = split_mix(state, wanted)
        ids: Ids = borders[:-1] + words % np.diff(borders)
        return ids.astype(_ids_dtype(num_elements))


def largest(magnitudes: Ids, wanted: int) -> Ids:
    """Return ascending indices of the ``wanted`` largest numbers.

    Of equal numbers, it chooses the first. A sample gives a bound that most numbers are below, so
    only the others need to be compared. The result does not depend on the sample.
    """
    candidates = _candidates(magnitudes, wanted)
    values = magnitudes if candidates is None else magnitudes[candidates]
    bound = np.partition(values, len(values) - wanted)[len(values) - wanted]
    above = np.flatnonzero(values > bound)
    equal = np.flatnonzero(values == bound)[: wanted - len(above)]
    places = np.concatenate([above, equal])
    places.sort()
    found: Ids = places if candidates is None else candidates[places]
    return found


def _candidates(magnitudes: Ids, wanted: int) -> Ids | None:
    """Return indices of all numbers above some bound, at least ``wanted``; None: all."""
    step = len(magnitudes) // _SAMPLE
    if step < 2 or wanted > len(magnitudes) // 4:
        return None
    sample = magnitudes[::step]
    share = min(int(len(sample) * wanted / len(magnitudes) * 1.5) + 16, len(sample))
    bound = np.partition(sample, len(sample) - share)[len(sample) - share]
    found = np.flatnonzero(magnitudes >= bound)
    return found if wanted <= len(found) else None


def split_mix(state: int, length: int) -> Ids:
    """Return the first ``length`` numbers of SplitMix64 from this state: uint64."""
    words: Ids = np.arange(1, length + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(state)
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def _mixed(word: int) -> int:
    """Return SplitMix64's first number from this state."""
    return int(split_mix(word & _MASK, 1)[0])


def _borders(stretches: int, num_elements: int) -> Ids:
    """Return the start of each stretch, and the end of the last, as uint64."""
    if stretches == 0:
        return np.zeros(1, np.uint64)
    each, more = divmod(num_elements, stretches)
    numbers: Ids = np.arange(stretches + 1, dtype=np.uint64)
    borders: Ids = numbers * np.uint64(each) + np.minimum(numbers, np.uint64(more))
    return borders


def _ids_dtype(num_elements: int) -> np.dtype[Any]:
    return _SMALL if num_elements <= 1 << 32 else _LARGE
