"""Mistakes in PyTorch's optimizers over the servers."""

from __future__ import annotations

from tests.planted.bug import Bug

_DISTRIBUTED = "tests/inproc/test_torch_distributed_optimizer.py"
_ON_SERVERS = "tests/inproc/test_torch_server_optimizer.py"
_FOLDER = "kvstore/frameworks/torch"

BUGS = [
    Bug(
        "gradients leave in the first of several passes",
        f"{_FOLDER}/backward_passes.py",
        "if self._only_adds or self._count + 1 < self._per_exchange:",
        "if self._only_adds:",
        f"{_ON_SERVERS}::test_gradients_of_several_passes_are_added_up",
    ),
    Bug(
        "gradients that are added to an average stay those of one rank",
        f"{_FOLDER}/distributed_optimizer.py",
        "        self.is_done = False\n\n    def begin",
        "\n    def begin",
        f"{_DISTRIBUTED}::test_gradients_that_are_added_to_those_of_all_ranks_are_combined_again",
    ),
    Bug(
        "a gradient that a rank lacks is what the bucket had before",
        f"{_FOLDER}/gradient_buckets.py",
        "            view.zero_()\n",
        "            pass\n",
        f"{_DISTRIBUTED}::test_a_rank_whose_pass_reaches_no_parameter_takes_part_in_step",
    ),
    Bug(
        "a parameter that no rank uses gets a gradient of zeros",
        f"{_FOLDER}/gradient_buckets.py",
        "and not unit.somebody_has(place)",
        "and False",
        f"{_DISTRIBUTED}::test_a_layer_without_gradient_counts_as_zeros_and_stays_without_where_no_rank_has_one",
    ),
    Bug(
        "a parameter that no rank uses is updated on the servers",
        f"{_FOLDER}/pushed_gradients.py",
        'has = self._kv.wait(group.all_reduce(mine, "max"))',
        'has = self._kv.wait(group.all_reduce(mine, "max")) | 1',
        f"{_ON_SERVERS}::test_a_layer_counts_as_zeros_unless_no_rank_uses_it",
    ),
    Bug(
        "a weight that came back does not count up its version",
        f"{_FOLDER}/pushed_gradients.py",
        "torch.autograd.graph.increment_version(self._weights[place])",
        "pass",
        f"{_ON_SERVERS}::test_what_still_needs_an_old_weight_gets_pytorchs_error",
    ),
    Bug(
        "another learning rate does not reach the servers",
        f"{_FOLDER}/server_optimizer.py",
        "        if self._present() != self._numbers:\n            self._sent",
        "        if False:\n            self._sent",
        f"{_ON_SERVERS}::test_groups_have_rates_and_decays_of_their_own",
    ),
    Bug(
        "weights that were loaded meanwhile are overwritten",
        f"{_FOLDER}/server_optimizer.py",
        "changed = self._held.changed()",
        "changed: list[str] = []",
        f"{_ON_SERVERS}::test_what_would_be_wrong_silently_is_refused",
    ),
]
