"""Which keys are compressed how: what ``kv.set_gradient_compression`` is given, checked.

A user gives a dictionary as for MXNet, ``{"type": "2bit", "threshold": 0.5}``, or a list of such
rules, of which the first that is for a key counts. Besides the parameters of its codecs
(``making.py``) a rule may have

``only``, ``exclude``
    keys, or patterns of names such as ``"*_bias"``, that the rule is for or is not for;
``min_bytes``
    keys with smaller values are not the rule's business (0 by default);
``pull``
    how values travel from servers to workers: a dictionary of the same kind with ``type``
    (fp16, bf16 or int8) and parameters but no feedback, or None (the default) for as they are.

A key that no rule is for travels as it is, and so do values that are no floats. ``plain`` is the
same in a form that can be packed and compared: all workers of a job must have the same one.
Pure; any thread may call. Read next: ``chain.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from kvstore.compression.chain import Chain
from kvstore.compression.layout import can_encode
from kvstore.compression.making import FEEDBACK, known_parameters, make_chain
from kvstore.compression.parameters import size
from kvstore.compression.statistics import Statistics
from kvstore.errors import ArgumentTypeError, ArgumentValueError
from kvstore.keys import Key
from kvstore.suggest import did_you_mean
from pslite.errors import ProtocolError, UsageError

_NONE = "none"
_OWN = ("only", "exclude", "min_bytes", "pull")
_FOR_VALUES = ("fp16", "bf16", "int8")
"""The codecs of ``pull``: of a value, which adds up to nothing, every number has to arrive."""
_ALLOWED = "a dictionary such as {'type': '2bit', 'threshold': 0.5}, or a list of such dictionaries"


@dataclass(frozen=True, slots=True)
class Rule:
    """Some keys, and what becomes of them."""

    chain: Chain | None
    """From workers to servers; None for as they are."""
    pull: Chain | None
    """From servers to workers."""
    only: tuple[Key, ...] | None
    exclude: tuple[Key, ...]
    min_bytes: int

    def is_for(self, key: Key, nbytes: int) -> bool:
        """Whether a key with a value of so many bytes is this rule's."""
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
        """What a user asked for; None and ``{"type": "none"}`` are no compression.

        Raises:
            ArgumentTypeError: this is no dictionary, or a value is of a wrong kind.
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
            raise ProtocolError(f"the compression of a store cannot be: {error}") from error
        if made.plain() != data:
            raise ProtocolError("the compression of a store is not in its plain form")
        return made

    def plain(self) -> list[dict[str, Any]]:
        """The rules as plain data (for msgpack, or JSON): equal for equal rules only."""
        return [rule.plain() for rule in self.rules]

    def chain_for(self, key: Key, nbytes: int, dtype: np.dtype[Any]) -> Chain | None:
        """How values of this key travel from workers to servers; None: as they are.

        ``nbytes`` are those of the whole value, in the key's dtype.
        """
        rule = self._rule_for(key, nbytes, dtype)
        return None if rule is None else rule.chain

    def pull_chain_for(self, key: Key, nbytes: int, dtype: np.dtype[Any]) -> Chain | None:
        """How values of this key travel from servers to workers; None: as they are."""
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
        _check_names(rest)
        chain = make_chain(rest, statistics)
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


def _check_names(parameters: Mapping[str, Any]) -> None:
    """Raise an error that names all that a rule can have, not only what its codecs can."""
    known = [*known_parameters(parameters["type"]), *_OWN]
    for name in parameters:
        if name != "type" and name not in known:
            raise ArgumentValueError(
                f"the compression {parameters['type']!r} has no parameter {name!r}; it has "
                f"{', '.join(map(repr, known))}{did_you_mean(name, known)}"
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
            f"the compression parameter 'pull' has a codec that carries values: one of "
            f"{', '.join(map(repr, _FOR_VALUES))}, got {chain.name!r}, which is for gradients: "
            "what it leaves out would be missing in the values"
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
    return tuple(keys)


def _is_among(key: Key, patterns: Sequence[Key]) -> bool:
    return any(
        fnmatchcase(key, each) if isinstance(key, str) and isinstance(each, str) else key == each
        for each in patterns
    )
