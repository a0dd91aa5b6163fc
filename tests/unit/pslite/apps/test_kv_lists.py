"""Lists of keys that both ends remember: what is found, forgotten and refused."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from pslite.apps.kv_lists import (
    MAX_BYTES,
    MAX_LISTS,
    MIN_KEYS,
    NO_LIST,
    ListedKeys,
    ListName,
    ReceivedLists,
    RecentLists,
    SentLists,
)
from pslite.apps.kv_pairs import Keys
from pslite.errors import ProtocolError

WIRE_DOC = Path(__file__).resolve().parents[4] / "docs" / "wire.md"
WORKER, OTHER = 9, 11
ONE = ListName(5, 1)


def keys_of(*numbers: int) -> Keys:
    return np.array(numbers, np.uint64)


def small() -> RecentLists:
    return RecentLists(max_lists=2, max_bytes=40)


# -- what is remembered -----------------------------------------------------------------


def test_the_list_that_was_not_used_for_longest_makes_room() -> None:
    lists = small()
    for name in ("a", "b"):
        lists.add(name, ListedKeys(keys_of(1, 2)))
    assert lists.use("a") is not None
    lists.add("c", ListedKeys(keys_of(3)))
    assert [lists.use(name) is not None for name in "abc"] == [True, False, True]
    assert lists.nbytes == 24


def test_bytes_count_as_well_and_a_list_that_is_too_long_is_not_kept() -> None:
    lists = small()
    lists.add("a", ListedKeys(keys_of(1, 2, 3)))
    lists.add("b", ListedKeys(keys_of(1, 2, 3)))
    assert (len(lists), lists.nbytes, lists.use("a")) == (1, 24, None)
    lists.add("c", ListedKeys(keys_of(1, 2, 3, 4, 5, 6)))
    assert (len(lists), lists.nbytes) == (0, 0)


def test_the_document_names_these_limits() -> None:
    section = WIRE_DOC.read_text().split("\n## 14 ")[1]
    named = re.search(r"at most (\d+) and\s+at most (\d+) bytes in total", section)
    assert named is not None
    assert [int(number) for number in named.groups()] == [MAX_LISTS, MAX_BYTES]
    assert f"fewer than {MIN_KEYS} keys" in section


# -- a worker's -------------------------------------------------------------------------


def test_a_list_is_found_by_its_keys_not_by_its_array() -> None:
    lists = SentLists()
    first = lists.add(keys_of(1, 2, 3), [slice(0, 3)])
    second = lists.add(keys_of(1, 2, 4), [slice(0, 3)])
    assert lists.find(keys_of(1, 2, 3)) is first
    assert lists.find(keys_of(1, 2, 4)) is second
    assert lists.find(keys_of(1, 2)) is None
    assert (first.name.number, second.name.number) == (1, 2)


def test_numbers_go_on_when_lists_are_forgotten_and_other_workers_have_other_series() -> None:
    lists = SentLists()
    first = lists.add(keys_of(1), [slice(0, 1)])
    lists.forget()
    assert lists.find(keys_of(1)) is None
    assert lists.add(keys_of(1), [slice(0, 1)]).name == ListName(first.name.series, 2)
    assert SentLists().add(keys_of(1), [slice(0, 1)]).name.series != first.name.series


def test_a_list_that_is_found_again_and_again_outlives_newer_ones() -> None:
    lists = SentLists()
    loved = lists.add(keys_of(0), [slice(0, 1)])
    for key in range(1, 2 * MAX_LISTS):
        lists.add(keys_of(key), [slice(0, 1)])
        assert lists.find(keys_of(0)) is loved
    assert lists.find(keys_of(1)) is None


# -- a server's -------------------------------------------------------------------------


def test_a_name_brings_back_the_keys_that_came_with_it_though_their_memory_has_changed() -> None:
    lists = ReceivedLists()
    sent = keys_of(1, 2)
    kept = lists.resolve(WORKER, ONE, sent)
    sent[:] = 0
    assert kept is not None and kept.tolist() == [1, 2] and not kept.flags.writeable
    assert lists.resolve(WORKER, ONE, None) is kept


def test_keys_without_a_name_are_checked_and_not_kept() -> None:
    lists = ReceivedLists()
    sent = keys_of(1, 2)
    assert lists.resolve(WORKER, NO_LIST, sent) is sent
    with pytest.raises(ProtocolError, match="must be sorted"):
        lists.resolve(WORKER, NO_LIST, keys_of(2, 1))
    assert lists.nbytes == 0


def test_names_of_other_workers_numbers_and_series_bring_nothing() -> None:
    lists = ReceivedLists()
    lists.resolve(WORKER, ONE, keys_of(1, 2))
    assert lists.resolve(OTHER, ONE, None) is None
    assert lists.resolve(WORKER, ListName(5, 2), None) is None
    assert lists.resolve(WORKER, ListName(6, 1), None) is None  # it was started again


def test_a_name_cannot_mean_other_keys() -> None:
    lists = ReceivedLists()
    kept = lists.resolve(WORKER, ONE, keys_of(1, 2))
    assert lists.resolve(WORKER, ONE, keys_of(1, 2)) is kept
    with pytest.raises(ProtocolError, match="key list 1 already exists with other keys"):
        lists.resolve(WORKER, ONE, keys_of(1, 3))
    assert lists.resolve(WORKER, ONE, None) is kept


def test_keys_in_disorder_get_no_name() -> None:
    lists = ReceivedLists()
    with pytest.raises(ProtocolError, match="appears twice"):
        lists.resolve(WORKER, ONE, keys_of(1, 1))
    assert lists.resolve(WORKER, ONE, None) is None


def test_workers_with_the_same_keys_share_their_memory_and_forget_apart() -> None:
    lists = ReceivedLists(small)
    kept = lists.resolve(WORKER, ONE, keys_of(1, 2))
    assert lists.resolve(OTHER, ListName(8, 4), keys_of(1, 2)) is kept
    assert lists.nbytes == 16
    for number in (2, 3):
        lists.resolve(WORKER, ListName(5, number), keys_of(number))
    assert lists.resolve(WORKER, ONE, None) is None
    assert lists.resolve(OTHER, ListName(8, 4), None) is kept


def test_the_lists_of_a_worker_go_with_it() -> None:
    lists = ReceivedLists()
    lists.resolve(WORKER, ONE, keys_of(1, 2))
    lists.resolve(OTHER, ONE, keys_of(3))
    lists.forget([WORKER, 77])
    assert lists.resolve(WORKER, ONE, None) is None
    assert lists.nbytes == 8
