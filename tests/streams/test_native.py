"""What the collectives of an accelerator's backend ask of it, seen on a group that only writes it down."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fsdp.comm.collectives import Gather, Reduce
from fsdp.comm.process_group import NativeCollectives


class Group:
    """Rank 1 of 3; runs everything on the current stream, so it hands back no work."""

    def __init__(self):
        self.log = []

    def rank(self):
        return 1

    def size(self):
        return 3

    def _allgather_base(self, output, own, options):
        self.log.append(("gather", output.numel(), options.asyncOp))

    def _reduce_scatter_base(self, output, whole, options):
        self.log.append(("reduce", whole.numel(), options.asyncOp, options.reduceOp))

    def allreduce(self, tensors, options):
        self.log.append(("all-reduce", tensors[0].numel(), options.asyncOp))

    def send(self, tensors, peer, tag):
        self.log.append(("send", peer))

    def recv(self, tensors, peer, tag):
        self.log.append(("recv", peer))

    def _start_coalescing(self, device):
        self.log.append("[")

    def _end_coalescing(self, device):
        self.log.append("]")


@pytest.fixture
def on_gpu(monkeypatch):
    """A group and its collectives, for a device that need not be there."""
    make = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *sizes, **_: make(*sizes))
    group = Group()
    return group, NativeCollectives(group, torch.device("cuda"))


def test_collectives_run_on_the_current_stream_and_several_are_one_launch(on_gpu):
    group, collectives = on_gpu
    whole = torch.empty(6)
    slices = whole.split(2)
    collectives.all_gather([Gather(whole, slices)]).wait()
    collectives.all_gather([Gather(whole, slices)] * 2).wait()
    collectives.reduce_scatter([Reduce(whole, slices, torch.empty(2))]).wait()
    collectives.all_reduce([whole]).wait()
    assert group.log == [
        ("gather", 6, False),
        "[",
        ("gather", 6, False),
        ("gather", 6, False),
        "]",
        ("reduce", 6, False, dist.ReduceOp.SUM),
        ("all-reduce", 6, False),
    ]


def test_a_lone_message_is_carried_like_several_and_after_everyone_has_met(on_gpu):
    group, collectives = on_gpu
    nothing, some = torch.empty(0, dtype=torch.uint8), torch.empty(3, dtype=torch.uint8)
    collectives.exchange([some, nothing, nothing], [nothing, nothing, nothing]).wait()
    assert group.log == [("all-reduce", 1, False), "[", ("send", 0), "]"]
    group.log.clear()
    collectives.exchange([nothing] * 3, [nothing] * 3).wait()
    assert not group.log
