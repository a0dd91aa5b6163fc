"""Blocks and the order of their stages, checked by what a stream may and may not do."""

from __future__ import annotations

import random
import threading

import pytest

from kvstore.arrays.gpu.pipeline import BufferPool, RowSpan, Step, cut, steps


def test_keys_that_have_room_share_a_block() -> None:
    assert cut([3, 4, 2], 9, 10) == [[RowSpan(0, 0, 3), RowSpan(1, 0, 4), RowSpan(2, 0, 2)]]


def test_a_key_that_has_no_room_is_cut_and_the_next_one_follows_it() -> None:
    assert cut([3, 7, 2], 4, 10) == [
        [RowSpan(0, 0, 3), RowSpan(1, 0, 1)],
        [RowSpan(1, 1, 5)],
        [RowSpan(1, 5, 7), RowSpan(2, 0, 2)],
    ]


def test_a_block_has_no_more_spans_than_a_launch_has_rows() -> None:
    assert cut([1, 1, 1, 1, 1], 100, 2) == [
        [RowSpan(0, 0, 1), RowSpan(1, 0, 1)],
        [RowSpan(2, 0, 1), RowSpan(3, 0, 1)],
        [RowSpan(4, 0, 1)],
    ]


def test_empty_keys_are_in_no_block() -> None:
    assert cut([0, 0], 4, 2) == []
    assert cut([], 4, 2) == []
    assert cut([0, 2, 0, 2, 0], 4, 2) == [[RowSpan(1, 0, 2), RowSpan(3, 0, 2)]]


@pytest.mark.parametrize("seed", range(20))
def test_every_element_is_in_one_block_and_none_is_too_large(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.choice([0, 1, 5, 40, 300]) for _ in range(rng.randrange(30))]
    most_elements, most_spans = rng.randrange(1, 60), rng.randrange(1, 8)
    blocks = cut(lengths, most_elements, most_spans)
    assert all(1 <= len(block) <= most_spans for block in blocks)
    assert all(sum(span.stop - span.start for span in block) <= most_elements for block in blocks)
    covered = [(span.row, at) for block in blocks for span in block for at in range(*span[1:])]
    assert covered == [(row, at) for row, length in enumerate(lengths) for at in range(length)]


def test_a_copy_of_one_block_follows_its_sum_and_frees_the_slot_for_the_next_but_one() -> None:
    assert steps(4, [2]) == [
        Step(0, 0, ()),
        Step(0, 1, ()),
        Step(1, 0, ((0, 0),)),
        Step(0, 2, ((1, 0),)),
        Step(1, 1, ((0, 1),)),
        Step(0, 3, ((1, 1),)),
        Step(1, 2, ((0, 2),)),
        Step(1, 3, ((0, 3),)),
    ]


def test_a_single_stage_waits_for_nothing() -> None:
    assert steps(3, []) == [Step(0, 0, ()), Step(0, 1, ()), Step(0, 2, ())]


def finished_orders(plan: list[Step], seed: int) -> list[tuple[int, int]]:
    """An order in which streams that keep to the plan may end the steps, at random.

    A stage is a stream: its steps end in the order of the list. A step may end once those that
    it comes after have ended, and those alone.
    """
    rng = random.Random(seed)
    stages = sorted({step.stage for step in plan})
    queues = {stage: [step for step in plan if step.stage == stage] for stage in stages}
    ended: list[tuple[int, int]] = []
    while any(queues.values()):
        ready = [
            queue
            for queue in queues.values()
            if queue and all(earlier in ended for earlier in queue[0].after)
        ]
        assert ready, "the streams wait for each other"
        step = rng.choice(ready).pop(0)
        ended.append((step.stage, step.block))
    return ended


@pytest.mark.parametrize("slots", [[2], [3], [2, 3], [3, 2, 2]])
@pytest.mark.parametrize("num_blocks", [0, 1, 2, 9])
def test_no_slot_is_overwritten_before_it_is_read_however_streams_run(
    slots: list[int], num_blocks: int
) -> None:
    plan = steps(num_blocks, slots)
    for seed in range(30):
        # What lies in each slot between two stages: the block, once it is written.
        memory: dict[tuple[int, int], int] = {}
        for stage, block in finished_orders(plan, seed):
            if stage > 0:
                assert memory.pop((stage - 1, block % slots[stage - 1])) == block
            if stage < len(slots):
                assert (stage, block % slots[stage]) not in memory
                memory[stage, block % slots[stage]] = block
        assert not memory


@pytest.mark.parametrize("slots", [[2], [3, 3], [2, 2, 2]])
def test_what_a_step_waits_for_was_begun_before_it(slots: list[int]) -> None:
    begun: set[tuple[int, int]] = set()
    for step in steps(8, slots):
        assert begun.issuperset(step.after)
        begun.add((step.stage, step.block))
    assert len(begun) == 8 * (len(slots) + 1)


def test_while_the_thread_waits_for_a_block_the_next_copy_is_under_way() -> None:
    # The last stage is the thread's own: whatever it waits for, the copy after it has begun.
    begun: set[tuple[int, int]] = set()
    for step in steps(6, [3, 3]):
        if step.stage == 2 and step.block < 5:
            assert {(1, step.block + 1), (0, min(step.block + 2, 5))} <= begun
        begun.add((step.stage, step.block))


def test_a_pool_makes_a_buffer_only_when_none_is_free() -> None:
    made: list[bytearray] = []

    def allocate() -> bytearray:
        made.append(bytearray(4))
        return made[-1]

    pool = BufferPool(allocate, most_kept=2)
    first, second = pool.take(), pool.take()
    assert first is not second
    pool.give(first)
    assert pool.take() is first
    assert len(made) == 2


def test_a_pool_lets_go_of_what_it_has_no_room_for() -> None:
    pool = BufferPool(bytearray, most_kept=1)
    first, second = pool.take(), pool.take()
    pool.give(first)
    pool.give(second)
    assert pool.take() is first
    assert pool.take() is not second


def test_an_allocation_that_fails_raises_and_the_pool_goes_on() -> None:
    answers: list[MemoryError | bytes] = [MemoryError("no page-locked memory"), b"buffer"]

    def allocate() -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, MemoryError):
            raise answer
        return answer

    pool = BufferPool(allocate, most_kept=1)
    with pytest.raises(MemoryError):
        pool.take()
    assert pool.take() == b"buffer"


def test_threads_never_hold_the_same_buffer() -> None:
    pool: BufferPool[list[int]] = BufferPool(list, most_kept=4)
    faults: list[int] = []

    def work() -> None:
        for _ in range(500):
            buffer = pool.take()
            buffer.append(1)
            faults.extend(buffer[1:])
            buffer.clear()
            pool.give(buffer)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
