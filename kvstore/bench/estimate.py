"""Estimate the cost of a model's exchange from measured times.

Pure: it turns times into numbers and sentences, and measures nothing. The cost of an exchange (one
call that pushes all gradients and pulls all weights) is the sum of three parts: one for the call,
one for each tensor, one for each megabyte. ``__main__.py`` measures them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.errors import ArgumentValueError

#: Sizes of the measured keys in bytes, and the number of small keys in a list.
SMALL_BYTES = 4
MIDDLE_BYTES = 4 << 20
LARGE_BYTES = 32 << 20
LIST_KEYS = 100

#: Savings below this part of a step are noise.
WORTH_TELLING = 0.05


@dataclass(frozen=True)
class Model:
    """The size of a training step's exchange: number of float32 values and of tensors."""

    name: str
    parameters: int
    tensors: int

    @property
    def megabytes(self) -> float:
        return 4 * self.parameters / 1e6


#: Well-known models. ResNet: He et al. 2015 (arXiv:1512.03385); VGG-16: Simonyan and Zisserman
#: 2014 (arXiv:1409.1556); BERT base: Devlin et al. 2018 (arXiv:1810.04805).
MODELS = {
    model.name: model
    for model in (
        Model("lenet", 431_080, 8),
        Model("resnet110", 1_727_952, 328),
        Model("resnet50", 25_557_032, 161),
        Model("bert-base", 109_482_240, 199),
        Model("vgg16", 138_357_544, 32),
    )
}


def model_from_shapes(text: str, name: str) -> Model:
    """Return a model from lines with one shape each: ``64, 3`` or ``64x3``.

    Brackets around a shape, empty lines and text after ``#`` are ignored. Raises
    ``ArgumentValueError``, which names the line that is not a shape.
    """
    sizes = []
    for number, line in enumerate(text.splitlines(), 1):
        shape = line.partition("#")[0].strip().strip("()[]").strip(" ,")
        if not shape:
            continue
        parts = re.split(r"\s*[,x]\s*|\s+", shape)
        if not all(part.isdecimal() for part in parts):
            raise ArgumentValueError(
                f"line {number} of {name} is not a shape: {line.strip()!r}; write one shape per "
                "line, such as 64, 3, 7, 7"
            )
        sizes.append(math.prod(int(part) for part in parts))
    if not sizes:
        raise ArgumentValueError(
            f"{name} does not contain a shape; write one per line, such as 64, 3, 7, 7"
        )
    return Model(name, sum(sizes), len(sizes))


@dataclass(frozen=True)
class Costs:
    """The measured times of one cluster, in milliseconds."""

    setup: str
    """The cluster in words: ``2 workers, 1 server, shared memory``."""
    call_ms: float
    """One exchange of one tiny key."""
    key_ms: float
    """Each further key of the same call."""
    mb_ms: float
    """Each megabyte (1,000,000 bytes) of a worker."""
    empty_mb_ms: float
    """The same with arrays of ``kv.empty()``."""
    loop_key_ms: float
    """Each key of a loop that pushes and pulls key by key."""
    barrier_ms: float

    def step_ms(self, model: Model) -> float:
        """Return the time of an exchange by one call with all keys."""
        return self.call_ms + self.key_ms * (model.tensors - 1) + self.mb_ms * model.megabytes

    def empty_step_ms(self, model: Model) -> float:
        """Return the same with gradients and weights in arrays of ``kv.empty()``."""
        return self.step_ms(model) + (self.empty_mb_ms - self.mb_ms) * model.megabytes

    def loop_step_ms(self, model: Model) -> float:
        """Return the same by a loop over the keys."""
        return self.loop_key_ms * model.tensors + self.mb_ms * model.megabytes


def costs_from(setup: str, times_ms: Mapping[str, float]) -> Costs:
    """Turn measured times into costs.

    ``times_ms`` has ``small`` (one key of ``SMALL_BYTES``), ``list`` and ``loop`` (``LIST_KEYS``
    of them), ``middle``, ``large``, ``empty_middle`` and ``empty_large`` (one key of
    ``MIDDLE_BYTES`` or ``LARGE_BYTES``), and ``barrier``. Costs that noise makes negative are 0.
    """
    megabytes = (LARGE_BYTES - MIDDLE_BYTES) / 1e6
    small = times_ms["small"]
    return Costs(
        setup,
        call_ms=small,
        key_ms=max(0.0, (times_ms["list"] - small) / (LIST_KEYS - 1)),
        mb_ms=max(0.0, (times_ms["large"] - times_ms["middle"]) / megabytes),
        empty_mb_ms=max(0.0, (times_ms["empty_large"] - times_ms["empty_middle"]) / megabytes),
        loop_key_ms=times_ms["loop"] / LIST_KEYS,
        barrier_ms=times_ms["barrier"],
    )


class Alternative(NamedTuple):
    """Another measured setting."""

    advice: str
    """What to do, as in ``use 2 servers``."""
    costs: Costs


class Advice(NamedTuple):
    saving_ms: float
    text: str


def advise(model: Model, costs: Costs, alternatives: Sequence[Alternative]) -> list[Advice]:
    """Return the changes that would shorten a step, the most helpful first.

    Leaves out changes that save less than ``WORTH_TELLING`` of the step.
    """
    step_ms = costs.step_ms(model)
    wanted = [("keep gradients and weights in arrays of kv.empty()", costs.empty_step_ms(model))]
    wanted += [(other.advice, other.costs.step_ms(model)) for other in alternatives]
    found = [
        Advice(step_ms - ms, f"{what}: {_ms(ms)} instead of {_ms(step_ms)}") for what, ms in wanted
    ]
    worth = [advice for advice in found if advice.saving_ms >= WORTH_TELLING * step_ms]
    return sorted(worth, key=lambda advice: -advice.saving_ms)


BUSY = 0.1
"""Above this share of the processors, other programs affect the measurement."""


def busy_share(before: str, after: str) -> float:
    """Return the busy share of all processors between two ``/proc/stat`` reads.

    It is 0 if it cannot be computed.
    """
    (idle_before, all_before), (idle_after, all_after) = map(_idle_and_all, (before, after))
    total = all_after - all_before
    return 1 - (idle_after - idle_before) / total if total > 0 else 0.0


def _idle_and_all(text: str) -> tuple[int, int]:
    """Return the ticks in which the processors were idle, and all ticks."""
    words = text.partition("\n")[0].split()
    ticks = [int(word) for word in words[1:9]] if words[:1] == ["cpu"] else []
    return sum(ticks[3:5]), sum(ticks)


def load_text(load: float, busy: float, processors: int) -> str:
    """Describe the machine's other load before the measurement; warn if it is high."""
    text = f"before: load {load:.2f}, others use {busy:.0%} of {processors} processors"
    if busy < BUSY:
        return text
    return (
        f"{text}\nwarning: the machine is busy, and everything below is slower than it would be "
        "alone: end what runs there, or wait, and measure again"
    )


def costs_text(costs: Costs) -> str:
    """Return the measured costs as readable text."""
    plain, empty = _ms(costs.mb_ms), _ms(costs.empty_mb_ms)
    return "\n".join(
        [
            f"{costs.setup}, push and pull:",
            f"  a call, however small     {_ms(costs.call_ms)}",
            f"  each further key in it    {_ms(costs.key_ms)}",
            f"  each megabyte             {plain} ({empty} with arrays of kv.empty())",
            f"  each key of a loop        {_ms(costs.loop_key_ms)}",
            f"  an empty barrier          {_ms(costs.barrier_ms)}",
        ]
    )


def estimate_text(model: Model, costs: Costs, alternatives: Sequence[Alternative]) -> str:
    """Return text with the cost of a step, its parts, and the most helpful changes."""
    bytes_ms = costs.mb_ms * model.megabytes
    keys_ms = costs.key_ms * (model.tensors - 1)
    tensors = f"{model.tensors:,} tensor{'' if model.tensors == 1 else 's'}"
    lines = [
        f"{model.name} ({tensors}, {model.megabytes:.1f} MB), one step, estimated:",
        f"  {_ms(costs.step_ms(model))} by one call with all keys: {_ms(bytes_ms)} for its bytes, "
        f"{_ms(keys_ms)} for the number of its tensors, {_ms(costs.call_ms)} for the call",
        f"  {_ms(costs.loop_step_ms(model))} by a loop that pushes and pulls key by key",
    ]
    found = advise(model, costs, alternatives)
    if not found:
        lines.append(f"  nothing else that was tried saves {WORTH_TELLING:.0%} of it")
    for place, advice in enumerate(found):
        lines.append(f"  {'helps most' if place == 0 else 'helps too'}: {advice.text}")
    return "\n".join(lines)


def _ms(value: float) -> str:
    """Format milliseconds with about three significant digits."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f} ms"
