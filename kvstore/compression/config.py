"""Check the parameters of gradient compression, and build the chain of codecs.

``kv.set_gradient_compression`` takes a dictionary as in MXNet, ``{"type": "2bit", "threshold":
0.5}``, or a list of such rules, of which the first that matches a key counts. ``make_chain`` turns
the codecs' parameters into a chain. Besides these, a rule may have

``only``, ``exclude``
    keys, or patterns of names such as ``"*_bias"``, that the rule includes or leaves out;
``min_bytes``
    the size from which on values are compressed (default 0);
``pull``
    how values travel from servers to workers: a dictionary of the same kind with ``type``
    (fp16, bf16 or int8) and parameters but no feedback, or None (the default) for unchanged.

A key without a rule travels unchanged, and so do values that are not floats. ``plain`` is the
same in a form that can be packed and compared: all workers of a job must have the same one.
Pure; any thread may call. Read next: ``chain.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from kvstore.arrays.keys import Key
from kvstore.compression.bits import Bf16, Fp16, Int8, OneBit, TwoBit
from kvstore.compression.chain import Chain
from kvstore.compression.codec import CodecParameter, ValueCodec, flag, size
from kvstore.compression.header import can_encode
from kvstore.compression.residuals import Statistics
from kvstore.compression.sparsify import Pick, RandomK, TopK
from kvstore.errors import ArgumentTypeError, ArgumentValueError
from kvstore.errors.hints import did_you_mean
from pslite.errors import ProtocolError, UsageError, check_unicode

FEEDBACK = "feedback"

VALUE_CODECS: Mapping[str, type[ValueCodec]] = {
    codec.name: codec for codec in (TwoBit, OneBit, Fp16, Bf16, Int8)
}
PICKS: Mapping[str, type[Pick]] = {pick.name: pick for pick in (TopK, RandomK)}


def make_chain(
    parameters: Mapping[str, Any],
    statistics: Statistics | None = None,
    others: Sequence[str] = (),
) -> Chain:
    """The chain that ``{"type": "topk+fp16", "ratio": 0.01}`` means.

    ``type`` has the names of codecs, joined by ``+``; the rest are their parameters. ``others`` are
    named in errors as parameters that may be given, too.

    Raises ``ArgumentValueError`` for codecs, parameters and values that there are not, with those
    that there are, and ``ArgumentTypeError`` for values of a wrong kind.
    """
    name = parameters.get("type")
    classes = _classes(name)
    known = {FEEDBACK: CodecParameter(flag, None)}
    for each in classes:
        if each is not None:
            known.update(each.parameters)
    given: dict[str, Any] = {}
    for parameter, value in parameters.items():
        if parameter in known:
            given[parameter] = known[parameter].check(parameter, value)
        elif parameter != "type":
            names = [*known, *others]
            raise ArgumentValueError(
                f"the compression {name!r} has no parameter {parameter!r}; it has "
                f"{', '.join(map(repr, names))}{did_you_mean(parameter, names)}"
            )
    # A ratio of 1, which says nothing, is the plain form with a count.
    if given.get("k") is not None and given.setdefault("ratio", 1.0) != 1.0:
        raise ArgumentValueError(
            "the compression parameters 'ratio' and 'k' are two ways to say the same; give one"
        )
    made: list[Any] = [
        None
        if each is None
        else each(**{own: given.get(own, each.parameters[own].default) for own in each.parameters})
        for each in classes
    ]
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
                f"unknown compression {each!r}; the codecs are "
                f"{', '.join(map(repr, known))}{did_you_mean(each, known)}"
            )
    if len(names) == 1:
        return PICKS.get(name), VALUE_CODECS.get(name)
    if len(names) != 2 or names[0] not in PICKS or names[1] not in VALUE_CODECS:
        raise ArgumentValueError(
            f"{name!r} is not a chain of codecs: expected one of {', '.join(map(repr, PICKS))}, "
            f"then one of {', '.join(map(repr, VALUE_CODECS))}, as in 'topk+fp16'"
        )
    return PICKS[names[0]], VALUE_CODECS[names[1]]


_NONE = "none"
_OWN = ("only", "exclude", "min_bytes", "pull")
_FOR_VALUES = ("fp16", "bf16", "int8")
"""The codecs of ``pull``: of a value, which adds up to nothing, every number has to arrive."""
_ALLOWED = "a dictionary such as {'type': '2bit', 'threshold': 0.5}, or a list of such dictionaries"


@dataclass(frozen=True, slots=True)
class Rule:
    """Some keys, and what becomes of them."""

    chain: Chain | None
    """From workers to servers; None: unchanged."""
    pull: Chain | None
    """From servers to workers."""
    only: tuple[Key, ...] | None
    exclude: tuple[Key, ...]
    min_bytes: int

    def is_for(self, key: Key, nbytes: int) -> bool:
        """Whether this rule applies to a key with a value of this many bytes."""
        if nbytes < self.min_bytes or _is_among(key, self.exclude):
            return False
        return self.only is None or _is_among(key, self.only)

    def plain(self) -> dict[str, Any]:
        """All of it as plain data, with the values of what was not given."""
        return {
            **(self.chain.plain() if self.chain is not None else {"type": _NONE}),
            "pull": None if self.pull is None else self.pull.plain(),
            "only": None if self.only is None else list(self.only),
            "exclude": list(self.exclude),
            "min_bytes": self.min_bytes,
        }


class Compression:
    """The rules of a store. Immutable but for its statistics; any thread may use it."""

    def __init__(self, rules: Sequence[Rule] = (), statistics: Statistics | None = None) -> None:
        self.rules = tuple(rules)
        self.statistics = statistics or Statistics()

    @classmethod
    def of(cls, parameters: object) -> Compression:
        """What a user asked for; None and ``{"type": "none"}`` mean no compression.

        Raises:
            ArgumentTypeError: this is not a dictionary, or a value is of the wrong kind.
            ArgumentValueError: there is no such codec, chain, parameter or value.
            MissingDependencyError: ``bf16`` is asked for and ``ml_dtypes`` is not installed.
        """
        if parameters is None:
            return cls()
        given = [parameters] if isinstance(parameters, Mapping) else parameters
        if not isinstance(given, Sequence) or isinstance(given, str | bytes):
            raise ArgumentTypeError(f"compression is {_ALLOWED}, got {parameters!r}")
        statistics = Statistics()
        return cls([_rule(each, statistics) for each in given], statistics)

    @classmethod
    def from_plain(cls, data: object) -> Compression:
        """What ``plain`` wrote. Raises ``ProtocolError`` for anything else."""
        if type(data) is not list:
            raise ProtocolError("the compression of a store is malformed")
        try:
            made = cls.of(data)
        except UsageError as error:
            raise ProtocolError(f"the compression of a store is invalid: {error}") from error
        if made.plain() != data:
            raise ProtocolError("the compression of a store is not in its plain form")
        return made

    def plain(self) -> list[dict[str, Any]]:
        """The rules as plain data (for msgpack, or JSON): equal for equal rules only."""
        return [rule.plain() for rule in self.rules]

    def chain_for(self, key: Key, nbytes: int, dtype: np.dtype[Any]) -> Chain | None:
        """How values of this key travel from workers to servers; None: unchanged.

        ``nbytes`` are those of the whole value, in the key's dtype.
        """
        rule = self._rule_for(key, nbytes, dtype)
        return None if rule is None else rule.chain

    def pull_chain_for(self, key: Key, nbytes: int, dtype: np.dtype[Any]) -> Chain | None:
        """How values of this key travel from servers to workers; None: unchanged."""
        rule = self._rule_for(key, nbytes, dtype)
        return None if rule is None else rule.pull

    def rule_number(self, key: Key, nbytes: int, dtype: np.dtype[Any]) -> int:
        """Which of ``rules`` is for a key; -1: none."""
        rule = self._rule_for(key, nbytes, dtype)
        return -1 if rule is None else self.rules.index(rule)

    def _rule_for(self, key: Key, nbytes: int, dtype: np.dtype[Any]) -> Rule | None:
        if not can_encode(dtype):
            return None
        return next((rule for rule in self.rules if rule.is_for(key, nbytes)), None)


def _rule(parameters: object, statistics: Statistics) -> Rule:
    if not isinstance(parameters, Mapping):
        raise ArgumentTypeError(f"compression is {_ALLOWED}, got {parameters!r}")
    if "type" not in parameters:
        raise ArgumentValueError(
            "compression needs the parameter 'type', the name of a codec, as in "
            "{'type': '2bit', 'threshold': 0.5}"
        )
    own = {name: parameters[name] for name in _OWN if name in parameters}
    rest = {name: value for name, value in parameters.items() if name not in _OWN}
    chain = None
    if rest["type"] != _NONE:
        chain = make_chain(rest, statistics, _OWN)
    elif len(rest) > 1:
        raise ArgumentValueError(f"the compression 'none' has no parameter {list(rest)[1]!r}")
    only = own.get("only")
    return Rule(
        chain,
        _pull(own.get("pull"), statistics),
        None if only is None else _keys("only", only),
        _keys("exclude", own.get("exclude", ())),
        size("min_bytes", own.get("min_bytes", 0)),
    )


def _pull(parameters: object, statistics: Statistics) -> Chain | None:
    if parameters is None:
        return None
    if not isinstance(parameters, Mapping):
        raise ArgumentTypeError(
            "the compression parameter 'pull' is a dictionary such as {'type': 'fp16'}, "
            f"got {parameters!r}"
        )
    if parameters.get("type") == _NONE:
        return None
    if parameters.get(FEEDBACK):
        raise ArgumentValueError(
            "the compression parameter 'pull' has no feedback: what servers send are values, not "
            "gradients that add up"
        )
    chain = make_chain({**parameters, FEEDBACK: False}, statistics)
    if chain.name not in _FOR_VALUES:
        raise ArgumentValueError(
            f"the compression parameter 'pull' must have a codec for values, one of "
            f"{', '.join(map(repr, _FOR_VALUES))}, got {chain.name!r}, which is for gradients "
            "and would lose part of the values"
        )
    return chain


def _keys(name: str, value: object) -> tuple[Key, ...]:
    keys = [value] if isinstance(value, str | int) else value
    if not isinstance(keys, Sequence) or any(type(key) not in (str, int) for key in keys):
        raise ArgumentTypeError(
            f"the compression parameter {name!r} is a list of keys or patterns, got {value!r}"
        )
    if any(isinstance(key, int) and not -(1 << 63) <= key < 1 << 63 for key in keys):
        raise ArgumentValueError(
            f"the compression parameter {name!r} has a key beyond 64 bits, got {value!r}"
        )
    for key in keys:
        check_unicode(f"a key of the compression parameter {name!r}", str(key), ArgumentValueError)
    return tuple(keys)


def _is_among(key: Key, patterns: Sequence[Key]) -> bool:
    return any(
        fnmatchcase(key, each) if isinstance(key, str) and isinstance(each, str) else key == each
        for each in patterns
    )


def rows_refused(key: Key) -> str:
    """Why rows of this key are not pushed."""
    return (
        f"row-sparse values cannot be compressed: leave key {key!r} out of the compression with "
        "its parameter 'exclude'"
    )


def value_refused(key: Key, chain: Chain) -> str:
    """Why the value of this key is not pulled."""
    return (
        f"key {key!r} holds NaN or infinity, which {chain.name} cannot carry: set the compression "
        "parameter 'pull' to fp16 or bf16, or leave it out, to see the values as they are"
    )
