"""The pure part of ZeroRedundancyOptimizer: who owns what.  Oracle: the reference's rule, written out naively."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fsdp.optim.partition import assign_parameters, cut_elements, split_evenly

numels = st.lists(st.integers(0, 50), max_size=12)
worlds = st.integers(1, 6)


def naive(groups, world_size):
    loads = [0] * world_size
    owned = [[] for _ in range(world_size)]
    for sizes in groups:
        for rank in range(world_size):
            owned[rank].append([])
        order = sorted(enumerate(sizes), key=lambda pair: pair[1], reverse=True)
        for position, size in order:
            rank = loads.index(min(loads))
            owned[rank][-1].append(position)
            loads[rank] += size
    return owned


@given(st.lists(numels, max_size=4), worlds)
def test_assignment_is_the_references_sorted_greedy_one(groups, world_size):
    assert assign_parameters(groups, world_size) == naive(groups, world_size)


@given(st.lists(numels, min_size=1, max_size=4), worlds)
def test_a_later_group_never_moves_the_parameters_of_earlier_ones(groups, world_size):
    whole = assign_parameters(groups, world_size)
    before = assign_parameters(groups[:-1], world_size)

    assert [owned[:-1] for owned in whole] == before


@given(st.integers(0, 1000), worlds)
def test_even_spans_tile_the_line_and_differ_by_one_element(total, world_size):
    spans = split_evenly(total, world_size)

    assert [stop for _, stop in spans[:-1]] == [start for start, _ in spans[1:]]
    assert (spans[0][0], spans[-1][1]) == (0, total)
    lengths = [stop - start for start, stop in spans]
    assert max(lengths) - min(lengths) <= 1


@given(numels, worlds)
def test_element_slices_tile_every_parameter_in_rank_order_and_balance_ranks(sizes, world_size):
    cuts = cut_elements(sizes, world_size)

    for size, slices in zip(sizes, cuts, strict=True):
        covered = [element for part in slices for element in range(part.start, part.stop)]
        assert covered == list(range(size))
    ranks = [part.rank for slices in cuts for part in slices]
    assert ranks == sorted(ranks)
    loads = [sum(len(p) for c in cuts for p in c if p.rank == r) for r in range(world_size)]
    assert max(loads) - min(loads) <= 1


def test_verified_examples_of_the_reference():
    assert assign_parameters([[7], [5]], 2) == [[[0], []], [[], [0]]]
    assert assign_parameters([[3, 7], [7], [3]], 2) == [[[1], [], [0]], [[0], [0], []]]
