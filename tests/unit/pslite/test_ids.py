"""Node ids, groups and titles: the arithmetic that ps-lite's users know from its logs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pslite.ids import NodeInfo, Role, group_members, node_id, rank_of, role_of


@pytest.mark.parametrize(
    ("role", "rank", "number"),
    [
        (Role.SCHEDULER, 0, 1),
        (Role.SERVER, 0, 8),
        (Role.WORKER, 0, 9),
        (Role.SERVER, 1, 10),
        (Role.WORKER, 1, 11),
    ],
)
def test_node_ids_are_those_of_the_original(role: Role, rank: int, number: int) -> None:
    assert (node_id(role, rank), role_of(number), rank_of(number)) == (number, role, rank)


@given(st.sampled_from([Role.SERVER, Role.WORKER]), st.integers(0, 10**9))
def test_a_node_id_tells_role_and_rank(role: Role, rank: int) -> None:
    number = node_id(role, rank)
    assert (role_of(number), rank_of(number)) == (role, rank)


def test_more_nodes_than_eight_bits_can_number_have_ids_of_their_own() -> None:
    # Defect f of ps-lite: its resender cut ids to 8 bits, so from rank 124 on nodes collided.
    ids = {node_id(role, rank) for role in (Role.SERVER, Role.WORKER) for rank in range(5000)}
    assert len(ids | {node_id(Role.SCHEDULER, 0)}) == 10_001


@pytest.mark.parametrize(
    ("group", "members"),
    [
        (1, {1}),
        (2, {8, 10}),
        (4, {9, 11, 13}),
        (3, {1, 8, 10}),
        (6, {8, 10, 9, 11, 13}),
        (7, {1, 8, 10, 9, 11, 13}),
        (13, {13}),
        (0, set()),
    ],
)
def test_groups_are_sums_of_roles_or_single_nodes(group: int, members: set[int]) -> None:
    assert group_members(group, num_workers=3, num_servers=2) == members


@pytest.mark.parametrize(
    ("role", "number", "title"),
    [("worker", 11, "worker 1 (pid 47 on alpha)"), ("scheduler", 1, "scheduler (pid 47 on alpha)")],
)
def test_a_node_has_a_title_for_people(role: str, number: int, title: str) -> None:
    info = NodeInfo(role, 1, "uid", 5, "", "alpha", "kernel", 47)
    assert (info.node_id, info.title) == (number, title)


def test_roles_have_the_letters_of_the_originals_log() -> None:
    assert [role.letter for role in Role] == ["H", "S", "W"]
