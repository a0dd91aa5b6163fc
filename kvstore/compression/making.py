"""From parameters to a chain: ``make_chain({"type": "topk+fp16", "ratio": 0.01})``.

Pure; any thread may call. Read next: ``chain.py`` for what is made, ``choice.py`` for who asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore.compression.chain import Chain
from kvstore.compression.codec import ValueCodec
from kvstore.compression.layout import PICKS, VALUE_CODECS
from kvstore.compression.parameters import Parameter, flag
from kvstore.compression.picks import Pick
from kvstore.compression.statistics import Statistics
from kvstore.errors import ArgumentTypeError, ArgumentValueError
from kvstore.suggest import did_you_mean

FEEDBACK = "feedback"


def known_parameters(name: object) -> Mapping[str, Parameter]:
    """The parameters of a chain of this name, checked to be one. Raises as ``make_chain``."""
    pick, codec = _classes(name)
    found = {FEEDBACK: Parameter(flag, None)}
    for each in (pick, codec):
        if each is not None:
            found.update(each.parameters)
    return found


def make_chain(parameters: Mapping[str, Any], statistics: Statistics | None = None) -> Chain:
    """The chain that ``{"type": "topk+fp16", "ratio": 0.01}`` means.

    ``type`` has the names of codecs, joined by ``+``; the rest are their parameters.

    Raises ``ArgumentValueError`` for codecs, parameters and values that there are not, with those
    that there are, and ``ArgumentTypeError`` for values of a wrong kind.
    """
    name = parameters.get("type")
    known = known_parameters(name)
    given: dict[str, Any] = {}
    for each, value in parameters.items():
        if each == "type":
            continue
        if each not in known:
            raise ArgumentValueError(
                f"the compression {name!r} has no parameter {each!r}; it has "
                f"{', '.join(map(repr, sorted(known)))}{did_you_mean(each, known)}"
            )
        given[each] = known[each].check(each, value)
    # A ratio of 1, which says nothing, is the plain form with a count.
    if given.get("k") is not None and given.setdefault("ratio", 1.0) != 1.0:
        raise ArgumentValueError(
            "the compression parameters 'ratio' and 'k' are two ways to say the same; give one"
        )
    pick, codec = _classes(name)
    made: list[Any] = [
        None if each is None else each(**{
            parameter: given.get(parameter, each.parameters[parameter].default)
            for parameter in each.parameters
        })
        for each in (pick, codec)
    ]  # fmt: skip
    return Chain(*made, has_feedback=given.get(FEEDBACK), statistics=statistics)


def _classes(name: object) -> tuple[type[Pick] | None, type[ValueCodec] | None]:
    known = [*VALUE_CODECS, *PICKS]
    if not isinstance(name, str):
        raise ArgumentTypeError(
            f"the compression parameter 'type' is the name of a codec, one of "
            f"{', '.join(map(repr, known))}, got {name!r}"
        )
    names = name.split("+")
    for each in names:
        if each not in known:
            raise ArgumentValueError(
                f"there is no compression {each!r}; the codecs are "
                f"{', '.join(map(repr, known))}{did_you_mean(each, known)}"
            )
    if len(names) == 1:
        return PICKS.get(name), VALUE_CODECS.get(name)
    if len(names) != 2 or names[0] not in PICKS or names[1] not in VALUE_CODECS:
        raise ArgumentValueError(
            f"{name!r} is no chain of codecs: it is one of {', '.join(map(repr, PICKS))}, then "
            f"one of {', '.join(map(repr, VALUE_CODECS))}, as in 'topk+fp16'"
        )
    return PICKS[names[0]], VALUE_CODECS[names[1]]
