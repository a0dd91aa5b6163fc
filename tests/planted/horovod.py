"""Mistakes in the layer on Horovod's interface: names, shares, gradients, objects."""

from __future__ import annotations

from tests.planted.bug import Bug

_ARRAYS = "tests/inproc/test_horovod.py"
_TENSORS = "tests/inproc/test_horovod_torch.py"
_LAYER = "kvstore/frameworks/horovod"

BUGS = [
    Bug(
        "calls of Horovod's interface are matched by their order",
        f"{_LAYER}/calls.py",
        'call(None if name is None else f"{kind}.{name}")',
        "call(None)",
        f"{_ARRAYS}::test_calls_are_matched_by_name_and_not_by_their_order",
    ),
    Bug(
        "rows of a reducescatter that are left go to the last ranks",
        f"{_LAYER}/calls.py",
        "[share + (rank < more) for rank",
        "[share + (rank >= group.size - more) for rank",
        f"{_ARRAYS}::test_the_first_ranks_get_the_rows_of_a_reducescatter_that_are_left",
    ),
    Bug(
        "the root of a process set is taken for its number within the set",
        f"{_LAYER}/calls.py",
        "return members.index(root)",
        "return root",
        f"{_ARRAYS}::test_calls_of_a_process_set_are_among_its_ranks",
    ),
    Bug(
        "the text of an object that was refused is taken for the object",
        f"{_LAYER}/objects.py",
        "if kind == _REFUSED:",
        "if kind == 0:",
        f"{_ARRAYS}::test_an_object_that_cannot_be_sent_is_an_error_on_all_ranks",
    ),
    Bug(
        "a bucket of gradients leaves with its first one",
        f"{_LAYER}/torch/optimizer.py",
        "if len(bucket.ready) == len(bucket.parameters):",
        "if len(bucket.ready) == 1:",
        f"{_TENSORS}::test_two_ranks_train_like_one_with_both_batches",
    ),
    Bug(
        "each rank takes rank 0's rows of the gradient of a gather",
        f"{_LAYER}/torch/gradients.py",
        "of_ranks[: calls.rank_in(ctx.process_set)]",
        "of_ranks[:0]",
        f"{_TENSORS}::test_gradients_are_those_of_horovod",
    ),
    Bug(
        "running variances are those of the batch, not of what it was drawn from",
        f"{_LAYER}/torch/batch_norm.py",
        "(variance * num / (num - 1)).detach()",
        "variance.detach()",
        f"{_TENSORS}::test_batch_normalization_is_that_of_the_whole_batch",
    ),
]
