"""What kv.set_gradient_compression may be given, which keys it is for, and its plain form."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from compression_cases import CHAINS

from kvstore.arrays.keys import KeySpec
from kvstore.compression import Compression
from kvstore.errors import ArgumentTypeError, ArgumentValueError
from pslite.errors import ProtocolError
from pslite.wire.codec import pack_value, unpack_value

F4 = np.dtype(np.float32)
SPEC = KeySpec((250,), F4)


def names(compression: Compression, *keys: Any, nbytes: int = 1000) -> list[str | None]:
    spec = KeySpec((nbytes // 4,), F4)
    found = [compression.rule_for(key, spec).chain for key in keys]
    return [None if chain is None else chain.name for chain in found]


def test_mxnets_dictionary_means_what_it_means_there() -> None:
    for given in ({"type": "2bit", "threshold": 0.5}, {"type": "2bit"}, {"type": "2bit",
                  "threshold": "0.5"}):  # fmt: skip
        assert Compression.of(given).plain() == [
            {
                "type": "2bit",
                "feedback": True,
                "threshold": 0.5,
                "pull": None,
                "only": None,
                "exclude": [],
                "min_bytes": 0,
            }
        ]


@pytest.mark.parametrize("given", CHAINS.values(), ids=CHAINS)
def test_the_plain_form_travels_and_means_the_same(given: dict[str, Any]) -> None:
    if "bf16" in given["type"]:
        pytest.importorskip("ml_dtypes")
    rules = [{**given, "exclude": ["*_bias", "gamma"], "pull": {"type": "fp16"}}, given]
    mine = Compression.of(rules)
    arrived = Compression.from_plain(unpack_value(pack_value(mine.plain())))
    assert arrived.plain() == mine.plain()


@pytest.mark.parametrize("given", [None, [], {"type": "none"}])
def test_no_compression_is_for_no_key(given: Any) -> None:
    compression = Compression.of(given)
    assert names(compression, "weight", 3) == [None, None]
    assert Compression.from_plain(compression.plain()).plain() == compression.plain()


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ("2bit", ArgumentTypeError, "compression must be a dictionary such as"),
        (7, ArgumentTypeError, "compression must be a dictionary such as"),
        (["2bit"], ArgumentTypeError, "compression must be a dictionary such as"),
        ({}, ArgumentValueError, "'type' is missing"),
        ({"threshold": 1.0}, ArgumentValueError, "'type' is missing"),
        ({"type": 2}, ArgumentTypeError, "one of '2bit', '1bit', 'fp16', 'bf16', 'int8', 'topk'"),
        (
            {"type": "3bit"},
            ArgumentValueError,
            "unknown codec '3bit'; known: '2bit', ",
        ),
        ({"type": "top_k"}, ArgumentValueError, "did you mean 'topk'"),
        ({"type": "fp16+topk"}, ArgumentValueError, "a chain of codecs must be .* got 'fp16.topk'"),
        ({"type": "2bit+fp16"}, ArgumentValueError, "a chain of codecs must be"),
        ({"type": "topk+fp16+int8"}, ArgumentValueError, "a chain of codecs must be"),
        ({"type": "topk+"}, ArgumentValueError, "unknown codec ''"),
        ({"type": "2bit", "treshold": 1}, ArgumentValueError, "did you mean 'threshold'"),
        (
            {"type": "2bit", "ratio": 0.1},
            ArgumentValueError,
            "does not have the parameter 'ratio'; known: ",
        ),
        (
            {"type": "none", "threshold": 1},
            ArgumentValueError,
            "'none' does not have the parameter",
        ),
        ({"type": "2bit", "threshold": 0}, ArgumentValueError, "greater than 0, got 0"),
        ({"type": "2bit", "threshold": -1.0}, ArgumentValueError, "greater than 0, got -1.0"),
        ({"type": "2bit", "threshold": 1e-60}, ArgumentValueError, "greater than 0, got 1e-60"),
        ({"type": "2bit", "threshold": 1e39}, ArgumentValueError, "3.4e38 .float32., got 1e[+]39"),
        ({"type": "2bit", "threshold": "nan"}, ArgumentValueError, "3.4e38 .float32., got 'nan'"),
        (
            {"type": "2bit", "threshold": float("inf")},
            ArgumentValueError,
            "3.4e38 .float32., got inf",
        ),
        ({"type": "2bit", "threshold": "half"}, ArgumentTypeError, "must be a number, got 'half'"),
        ({"type": "2bit", "threshold": True}, ArgumentTypeError, "must be a number, got True"),
        ({"type": "2bit", "threshold": [1]}, ArgumentTypeError, "must be a number"),
        (
            {"type": "2bit", "feedback": "yes"},
            ArgumentTypeError,
            "must be True or False, got 'yes'",
        ),
        ({"type": "int8", "block": 7}, ArgumentValueError, "from 8 to 65536, got 7"),
        ({"type": "int8", "block": 64.0}, ArgumentTypeError, "must be an integer, got 64.0"),
        ({"type": "topk", "ratio": 0}, ArgumentValueError, "greater than 0 and at most 1, got 0"),
        ({"type": "topk", "ratio": 100}, ArgumentValueError, "use 'k' to give a count"),
        ({"type": "topk", "k": 0}, ArgumentValueError, "from 1 to"),
        ({"type": "topk", "k": 5, "ratio": 0.1}, ArgumentValueError, "give one"),
        ({"type": "topk", "seed": 5}, ArgumentValueError, "does not have the parameter 'seed'"),
        ({"type": "randomk", "seed": -1}, ArgumentValueError, "from 0 to"),
        ({"type": "2bit", "min_bytes": -1}, ArgumentValueError, "from 0 to"),
        ({"type": "2bit", "only": 1.5}, ArgumentTypeError, "must be a list of keys or patterns"),
        (
            {"type": "2bit", "exclude": [None]},
            ArgumentTypeError,
            "must be a list of keys or patterns",
        ),
        ({"type": "2bit", "only": "a\ud800"}, ArgumentValueError, "remove the lone surrogate"),
        ({"type": "2bit", "pull": "fp16"}, ArgumentTypeError, "'pull' must be a dict"),
        ({"type": "2bit", "pull": {"type": "x"}}, ArgumentValueError, "unknown codec 'x'"),
        (
            {"type": "2bit", "pull": {"type": "int8", "feedback": True}},
            ArgumentValueError,
            "'pull' does not support error feedback",
        ),
        *(
            (
                {"type": "fp16", "pull": {"type": codec}},
                ArgumentValueError,
                f"one of the codecs 'fp16', 'bf16', 'int8', got '{re.escape(codec)}', which is",
            )
            for codec in ("2bit", "1bit", "topk", "randomk", "topk+fp16", "randomk+int8")
        ),
    ],
)
def test_what_makes_no_sense_is_said(given: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Compression.of(given)


def test_1bit_takes_any_threshold() -> None:
    for threshold in (0, -2.5, 3):
        rule = Compression.of({"type": "1bit", "threshold": threshold}).plain()[0]
        assert rule["threshold"] == float(threshold)


def test_keys_are_chosen_by_name_pattern_and_size() -> None:
    rule = {"type": "2bit", "exclude": ["*_bias", "beta"], "min_bytes": 1000}
    compression = Compression.of(rule)
    assert names(compression, "fc_weight", "fc_bias", "beta") == ["2bit", None, None]
    assert names(compression, "fc_weight", nbytes=999) == [None]
    assert names(Compression.of({"type": "2bit", "only": "fc_*"}), "fc_w", "conv") == ["2bit", None]
    assert names(Compression.of({"type": "2bit", "only": [3, 4]}), 3, 5) == ["2bit", None]


def test_the_first_rule_for_a_key_counts() -> None:
    compression = Compression.of(
        [
            {"type": "topk+fp16", "only": "embed*"},
            {"type": "none", "only": ["*_gamma", "*_beta"]},
            {"type": "2bit"},
        ]
    )
    keys = ["embedding", "bn_gamma", "fc_weight"]
    assert names(compression, *keys) == ["topk+fp16", None, "2bit"]
    rules = [compression.rule_for(key, SPEC) for key in keys]
    assert [compression.number_of(rule) for rule in rules] == [0, 1, 2]
    assert [compression.rule(number) for number in range(3)] == rules
    unchanged = compression.rule_for("fc_weight", KeySpec((250,), np.dtype("i4")))
    assert (unchanged.chain, unchanged.pull, compression.number_of(unchanged)) == (None, None, -1)
    assert compression.rule(-1) is unchanged


@pytest.mark.parametrize("dtype", ["i4", "i8", "?", "c8", "u1"])
def test_values_that_are_no_floats_travel_as_they_are(dtype: str) -> None:
    compression = Compression.of({"type": "2bit", "pull": {"type": "fp16"}})
    rule = compression.rule_for("w", KeySpec((250,), np.dtype(dtype)))
    assert (rule.chain, rule.pull) == (None, None)


def test_values_may_travel_back_by_other_codecs() -> None:
    compression = Compression.of({"type": "topk", "pull": {"type": "int8", "block": 64}})
    chain = compression.rule_for("w", SPEC).pull
    assert chain is not None
    assert (chain.name, chain.plain()["block"]) == ("int8", 64)


def test_one_table_of_statistics_has_all_chains() -> None:
    compression = Compression.of([{"type": "fp16", "only": "a"}, {"type": "topk"}])
    for key in ("a", "b"):
        chain = compression.rule_for(key, SPEC).chain
        assert chain is not None
        residual = np.zeros(100, np.float32) if chain.has_feedback else None
        chain.encode(np.ones(100, np.float32), residual=residual)
    assert sorted(compression.statistics.plain()) == ["fp16", "topk"]


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        [None],
        [{"type": "2bit"}],
        [{"type": "4bit"}],
        [{**Compression.of({"type": "2bit"}).plain()[0], "threshold": "0.5"}],
        [{**Compression.of({"type": "2bit"}).plain()[0], "threshold": 0.0}],
    ],
)
def test_what_is_no_plain_form_is_refused_when_it_arrives(data: Any) -> None:
    with pytest.raises(ProtocolError, match="the compression of a store"):
        Compression.from_plain(data)
