"""A directory that goes on from the state of another one answers as that would have done."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from store_requests import Asked

from kvstore.arrays.keys import KeySpec
from kvstore.protocol.requests import CLOSING, Declared, DirectoryCall, pack, pack_specs
from kvstore.server.directory import Directory
from pslite.wire.codec import pack_value, unpack_value

SPEC = KeySpec((5,), np.dtype(np.float32))
OPTIMIZERS: list[list[Any]] = [["sgd", {"learning_rate": 0.1}], ["adam", {}]]


class Copied:
    """Two directories that get the same calls; ``copy`` makes the second one anew."""

    def __init__(self) -> None:
        self.live = [0, 1]
        self.first = self._make()
        self.second = self._make()
        self.num_copies = 0
        self._asked: list[tuple[Asked, Asked]] = []

    def _make(self) -> Directory:
        return Directory(2, 16, lambda: self.live)

    def copy(self) -> None:
        state = self.first.state()
        if state is not None:
            self.second = self._make()
            self.second.resume(unpack_value(pack_value(state)))
            self.num_copies += 1

    def ask(self, rank: int, call: int, *fields: Any) -> Asked:
        pair = Asked(rank, call, pack(*fields)), Asked(rank, call, pack(*fields))
        for directory, asked in zip((self.first, self.second), pair, strict=True):
            try:
                directory.handle(asked.incoming)
            except Exception as error:
                asked.incoming.fail(error)
        self._asked.append(pair)
        return pair[0]

    def check(self) -> None:
        """The same was answered."""
        for one, other in self._asked:
            assert one.answer == other.answer
        assert self.first.state() == self.second.state()


def play(seed: int) -> Copied:
    """Calls of two ranks, one behind the other, with deletions, failures and a loss."""
    both, chance, done = Copied(), random.Random(seed), [0, 0]
    names = [f"k{number}" for number in range(6)]
    specs = {name: pack_specs([Declared(name, SPEC, False)]) for name in names}
    joint = optimizers = 0
    for _ in range(60):
        kind = chance.choice(["init", "optimizer", "delete", "skip", "fail"])
        if kind == "init":
            name = chance.choice(names)
            for rank in both.live:
                both.ask(rank, DirectoryCall.DECLARE, 1, "sync", "element", specs[name])
            both.ask(min(both.live), DirectoryCall.INITIALISED, 1, [name], "", "")
        elif kind in ("optimizer", "fail"):
            optimizers += 1
            plain = chance.choice(OPTIMIZERS)
            error = ("UsageError", "no") if kind == "fail" else ("", "")
            decider = min(both.live)
            both.ask(decider, DirectoryCall.OPTIMIZER_IS_SET, 1, "sync", optimizers, plain, *error)
            done[decider] += 1
            for rank in both.live:
                if rank != decider and chance.random() < 0.8:
                    done[rank] += 1
                    theirs = plain if chance.random() < 0.8 else chance.choice(OPTIMIZERS)
                    both.ask(rank, DirectoryCall.SAME_OPTIMIZER, 1, "sync", done[rank], theirs)
        elif kind == "delete":
            joint += 1
            gone = chance.sample(names, 2)
            for rank in both.live:
                both.ask(rank, DirectoryCall.TOGETHER, 1, "sync", joint, f"delete({gone})", "", "")
            both.ask(
                min(both.live), DirectoryCall.DONE_TOGETHER, 1, joint, gone, f"said {joint}", "", ""
            )
        for rank in both.live:
            both.ask(rank, DirectoryCall.OPTIMIZER_OF, 1)
        if len(both.live) > 1 and chance.random() < 0.02:
            both.live.remove(0)
            for directory in (both.first, both.second):
                directory.departed()
        both.copy()
        both.check()
    return both


def test_a_copy_answers_as_the_original() -> None:
    for seed in range(20):
        assert play(seed).num_copies > 5, f"seed {seed}"


def test_nothing_is_copied_while_a_request_waits() -> None:
    both = Copied()
    specs = pack_specs([Declared("w", SPEC, False)])
    waiting = both.ask(1, DirectoryCall.DECLARE, 1, "sync", "element", specs)
    assert (waiting.answer, both.first.state()) == (None, None)
    both.ask(0, DirectoryCall.DECLARE, 1, "sync", "element", specs)
    both.ask(0, DirectoryCall.INITIALISED, 1, ["w"], "", "")
    assert waiting.answer is not None
    assert both.first.state() is not None
    both.ask(1, DirectoryCall.TOGETHER, 1, "sync", 1, CLOSING, "", "")
    assert both.first.state() is None
