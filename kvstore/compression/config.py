"""Check the parameters of gradient compression, and build the chain of codecs.

``kv.set_gradient_compression`` takes a dictionary as in MXNet, ``{"type": "2bit", "threshold":
0.5}``, or a list of such rules; for each key the first matching rule is used. ``make_chain`` turns
the codecs' parameters into a chain. A rule may also have

``only``, ``exclude``
    keys, or patterns of names such as ``"*_bias"``, that the rule includes or leaves out;
``min_bytes``
    the size in bytes of the smallest values that are compressed (default 0);
``pull``
    how servers send values to workers: a dictionary of the same kind with ``type`` (fp16, bf16
    or int8) and its parameters but no feedback, or None (the default) for unchanged values.

Values of keys without a rule are sent unchanged, and so are values that are not floats. ``plain``
returns the rules as plain data for messages and comparison; all workers of a job must have equal
rules.
Pure; any thread may call. Read next: ``chain.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from kvstore.arrays.keys import Key, KeySpec
from kvstore.compression.chain import Chain
from kvstore.compression.codec import CodecParameter, ValueCodec, flag, size
from kvstore.compression.header import can_encode
from kvstore.compression.residuals import Statistics
from kvstore.compression.sparsify import Pick, RandomK, TopK
from kvstore.compression.value_codecs import Bf16, Fp16, Int8, OneBit, TwoBit
from kvstore.errors import ArgumentTypeError, ArgumentValueError
from kvstore.errors.hints import did_you_mean
from pslite.errors import ProtocolError, UsageError, check_unicode, unexpected

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
    """Build a chain from parameters such as ``{"type": "topk+fp16", "ratio": 0.01}``.

    ``type`` holds the names of codecs, joined by ``+``; all other entries are their parameters.
    Errors list the known parameters and ``others``.

    Raises ``ArgumentValueError`` for unknown codecs and parameters and for invalid values, and
    ``ArgumentTypeError`` for values of a wrong type.
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
                f"the compression {name!r} does not have the parameter {parameter!r}; known: "
                f"{', '.join(map(repr, names))}{did_you_mean(parameter, names)}"
            )
    # With a count, the ratio is not used; its plain form is then 1.
    if given.get("k") is not None and given.setdefault("ratio", 1.0) != 1.0:
        raise ArgumentValueError(
            "the compression parameters 'ratio' and 'k' both set how many numbers are sent; "
            "give one"
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
            "the compression parameter 'type' must be the name of a codec, one of "
            f"{', '.join(map(repr, known))}, got {name!r}"
        )
    names = name.split("+")
    for each in names:
        if each not in known:
            raise ArgumentValueError(
                f"unknown codec {each!r}; known: "
                f"{', '.join(map(repr, known))}{did_you_mean(each, known)}"
            )
    if len(names) == 1:
        return PICKS.get(name), VALUE_CODECS.get(name)
    if len(names) != 2 or names[0] not in PICKS or names[1] not in VALUE_CODECS:
        raise ArgumentValueError(
            f"a chain of codecs must be one of {', '.join(map(repr, PICKS))}, then one of "
            f"{', '.join(map(repr, VALUE_CODECS))}, as in 'topk+fp16'; got {name!r}"
        )
    return PICKS[names[0]], VALUE_CODECS[names[1]]


_NONE = "none"
_OWN = ("only", "exclude", "min_bytes", "pull")
_FOR_VALUES = ("fp16", "bf16", "int8")
"""The codecs of ``pull``. They send every number, since error feedback cannot repair values."""
_ALLOWED = "a dictionary such as {'type': '2bit', 'threshold': 0.5}, or a list of such dictionaries"


@dataclass(frozen=True, slots=True)
class Rule:
    """The compression of some keys."""

    chain: Chain | None
    """The chain of gradients, from workers to servers; None: sent unchanged."""
    pull: Chain | None
    """The chain of values, from servers to workers; None: sent unchanged."""
    only: tuple[Key, ...] | None
    exclude: tuple[Key, ...]
    min_bytes: int

    def is_for(self, key: Key, nbytes: int) -> bool:
        """Return whether this rule applies to a key with a value of this many bytes."""
        if nbytes < self.min_bytes or _is_among(key, self.exclude):
            return False
        return self.only is None or _is_among(key, self.only)

    def plain(self) -> dict[str, Any]:
        """Return the whole rule as plain data, including defaults."""
        return {
            **(self.chain.plain() if self.chain is not None else {"type": _NONE}),
            "pull": None if self.pull is None else self.pull.plain(),
            "only": None if self.only is None else list(self.only),
            "exclude": list(self.exclude),
            "min_bytes": self.min_bytes,
        }


UNCHANGED = Rule(None, None, None, (), 0)
"""The rule of keys that no other rule matches: nothing is compressed."""


class Compression:
    """The rules of a store. Immutable except for statistics; any thread may use it."""

    def __init__(self, rules: Sequence[Rule] = (), statistics: Statistics | None = None) -> None:
        self.rules = tuple(rules)
        self.statistics = statistics or Statistics()

    @classmethod
    def of(cls, parameters: object) -> Compression:
        """Check a user's parameters and return the rules; None means no compression.

        Raises:
            ArgumentTypeError: not a dictionary or a list of these, or a value has a wrong type.
            ArgumentValueError: a codec, chain or parameter is unknown, or a value is invalid.
            MissingDependencyError: ``bf16`` is used, but ``ml_dtypes`` is not installed.
        """
        if parameters is None:
            return cls()
        given = [parameters] if isinstance(parameters, Mapping) else parameters
        if not isinstance(given, Sequence) or isinstance(given, str | bytes):
            raise ArgumentTypeError(f"compression must be {_ALLOWED}, got {parameters!r}")
        statistics = Statistics()
        return cls([_rule(each, statistics) for each in given], statistics)

    @classmethod
    def from_plain(cls, data: object) -> Compression:
        """Parse the output of ``plain``. Raises ``ProtocolError`` if it is malformed."""
        if type(data) is not list:
            raise unexpected("the compression of a store, a list of rules", data)
        try:
            made = cls.of(data)
        except UsageError as error:
            raise ProtocolError(f"the compression of a store is invalid: {error}") from error
        if made.plain() != data:
            raise unexpected(f"the compression of a store as {made.plain()}", data)
        return made

    def plain(self) -> list[dict[str, Any]]:
        """Return the rules as plain data; only equal rules give equal data."""
        return [rule.plain() for rule in self.rules]

    def rule_for(self, key: Key, spec: KeySpec) -> Rule:
        """Return the rule for a key: the first that matches, or ``UNCHANGED``."""
        if not can_encode(spec.dtype):
            return UNCHANGED
        nbytes = spec.nbytes
        return next((rule for rule in self.rules if rule.is_for(key, nbytes)), UNCHANGED)

    def number_of(self, rule: Rule) -> int:
        """Return the number that ``rule`` takes for a rule; -1 for ``UNCHANGED``."""
        return -1 if rule is UNCHANGED else self.rules.index(rule)

    def rule(self, number: object) -> Rule:
        """Return the rule with this number, which a message gave.

        Raises ``ProtocolError`` for other numbers.
        """
        if number == -1:
            return UNCHANGED
        if type(number) is not int or not 0 <= number < len(self.rules):
            raise unexpected(f"the number of one of {len(self.rules)} rules", number)
        return self.rules[number]


def _rule(parameters: object, statistics: Statistics) -> Rule:
    if not isinstance(parameters, Mapping):
        raise ArgumentTypeError(f"compression must be {_ALLOWED}, got {parameters!r}")
    if "type" not in parameters:
        raise ArgumentValueError(
            "the compression parameter 'type' is missing; pass the name of a codec, as in "
            "{'type': '2bit', 'threshold': 0.5}"
        )
    own = {name: parameters[name] for name in _OWN if name in parameters}
    rest = {name: value for name, value in parameters.items() if name not in _OWN}
    chain = None
    if rest["type"] != _NONE:
        chain = make_chain(rest, statistics, _OWN)
    elif len(rest) > 1:
        raise ArgumentValueError(
            f"the compression 'none' does not have the parameter {list(rest)[1]!r}; remove it"
        )
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
            "the compression parameter 'pull' must be a dict such as {'type': 'fp16'}, got "
            f"{parameters!r}"
        )
    if parameters.get("type") == _NONE:
        return None
    if parameters.get(FEEDBACK):
        raise ArgumentValueError(
            "the compression parameter 'pull' does not support error feedback, since servers "
            "send values and not gradients; remove 'feedback' from it"
        )
    chain = make_chain({**parameters, FEEDBACK: False}, statistics)
    if chain.name not in _FOR_VALUES:
        raise ArgumentValueError(
            "the compression parameter 'pull' must have one of the codecs "
            f"{', '.join(map(repr, _FOR_VALUES))}, got {chain.name!r}, which is for gradients "
            "only"
        )
    return chain


def _keys(name: str, value: object) -> tuple[Key, ...]:
    keys = [value] if isinstance(value, str | int) else value
    if not isinstance(keys, Sequence) or any(type(key) not in (str, int) for key in keys):
        raise ArgumentTypeError(
            f"the compression parameter {name!r} must be a list of keys or patterns, got {value!r}"
        )
    if any(isinstance(key, int) and not -(1 << 63) <= key < 1 << 63 for key in keys):
        raise ArgumentValueError(
            f"the compression parameter {name!r} must have keys of at most 64 bits, got {value!r}"
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
    """Return the error message for pushing rows of this key."""
    return (
        f"row-sparse values cannot be compressed; exclude key {key!r} with the compression "
        "parameter 'exclude'"
    )


def value_refused(key: Key, chain: Chain) -> str:
    """Return the error message for a value that ``chain`` cannot encode."""
    return (
        f"key {key!r} has NaN or infinity, which {chain.name} cannot encode; set the compression "
        "parameter 'pull' to fp16 or bf16, or remove it, to pull the values"
    )
