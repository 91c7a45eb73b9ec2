"""The race detector finds races, and nothing else."""

from __future__ import annotations

import torch

from tests.streams.simulator import Event, Machine


def test_operations_of_one_stream_are_ordered():
    machine = Machine()
    with machine.watching():
        x = torch.zeros(4)
        x.add_(1)
        x.sum()
    assert not machine.races
    assert machine.operations == 3


def test_a_read_on_another_stream_needs_an_event():
    machine = Machine()
    side = machine.Stream()
    with machine.watching():
        x = torch.zeros(4)
        with machine.stream(side):
            x.sum()
    (race,) = machine.races
    assert "read by aten::sum" in str(race)
    assert "write by aten::zeros" in str(race)


def test_an_event_orders_what_came_before_it_and_nothing_after():
    machine = Machine()
    side, event = machine.Stream(), Event()
    with machine.watching():
        x, y = torch.zeros(4), torch.zeros(4)
        event.record(machine.current_stream())
        side.wait_event(event)
        y.add_(1)
        with machine.stream(side):
            x.sum()
            assert not machine.races
            y.sum()
    assert len(machine.races) == 1


def test_two_reads_need_no_order_and_neither_do_different_bytes():
    machine = Machine()
    side = machine.Stream()
    with machine.watching():
        x = torch.zeros(8)
        side.wait_stream(machine.current_stream())
        x[:5].sum()
        with machine.stream(side):
            x[:5].sum()
            x[5:].add_(1)
        x[:5].add_(0)  # after the read on the other stream
        assert len(machine.races) == 1
        x[5:].sum()
    assert len(machine.races) == 2


def test_freed_memory_may_be_anyones_of_the_same_pool():
    machine = Machine()
    main, side = machine.current_stream(), machine.Stream()
    with machine.watching():
        x = torch.zeros(4)
        side.wait_stream(main)
        with machine.stream(side):
            x.sum()
        del x
        torch.zeros(4)  # on the stream that x was allocated on, which knows nothing of the sum
    (race,) = machine.races
    assert "another tensor" in race.what

    ordered = Machine()
    side = ordered.Stream()
    with ordered.watching():
        x = torch.zeros(4)
        side.wait_stream(ordered.current_stream())
        with ordered.stream(side):
            x.sum()
        del x
        ordered.current_stream().wait_stream(side)
        torch.zeros(4)
    assert not ordered.races


def test_a_storage_that_is_resized_is_freed_and_allocated():
    machine = Machine()
    side = machine.Stream()
    with machine.watching():
        x = torch.zeros(4)
        storage = x.untyped_storage()
        x.sum()
        storage.resize_(0)
        with machine.stream(side):  # the pool of another stream
            storage.resize_(16)
            x.zero_()
        assert not machine.races
        x.sum()
    assert machine.races


def test_what_the_host_has_seen_comes_before_what_it_launches():
    machine = Machine()
    side = machine.Stream()
    with machine.watching():
        x = torch.zeros(1)
        x.item()
        with machine.stream(side):
            x.sum()
    assert not machine.races
    assert machine.synchronisations == ["aten::_local_scalar_dense"]


def test_autograd_runs_a_node_where_its_forward_ran():
    machine = Machine()
    main, side = machine.current_stream(), machine.Stream()
    weight = torch.ones(4, requires_grad=True)
    seen = []
    with machine.watching(), machine.autograd():
        with machine.stream(side):
            product = weight * weight.detach()
        product.grad_fn.register_prehook(lambda _: seen.append(machine.current_stream()))
        main.wait_stream(side)
        product.sum().backward()
    assert seen == [side]
    assert machine.current_stream() is main
    assert not machine.races


def test_time_passes_where_operations_run():
    machine = Machine()
    machine.costs = {"aten::sum": 2.0}
    side = machine.Stream()
    with machine.watching():
        x = torch.zeros(4)
        side.wait_stream(machine.current_stream())
        x.sum()
        with machine.stream(side):
            x.sum()
            x.sum()
        assert machine.elapsed == 4.0
        machine.current_stream().wait_stream(side)
        x.sum()
    assert machine.elapsed == 6.0


def test_a_comparison_makes_the_host_wait():
    machine = Machine()
    with machine.watching():
        torch.equal(torch.zeros(2), torch.ones(2))
    assert machine.synchronisations == ["aten::equal"]
