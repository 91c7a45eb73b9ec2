"""What the collectives of an accelerator's backend ask of it, seen on a group that only writes it down."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fsdp.comm.collectives import Gather, Reduce
from fsdp.comm.process_group import NativeCollectives
from fsdp.optim.exchange import _NativeWire

KNOWN_TO_NCCL = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8,
    torch.bool,
)  # fmt: skip


class Group:
    """Rank 1 of 3; runs everything on the current stream, so it hands back no work."""

    def __init__(self):
        self.log = []

    def rank(self):
        return 1

    def size(self):
        return 3

    def _allgather_base(self, output, own, options):
        assert output.dtype is own.dtype in KNOWN_TO_NCCL
        assert output.numel() == 3 * own.numel()
        assert own.data_ptr() == output.data_ptr() + own.nbytes
        self.log.append(("gather", output.numel(), options.asyncOp))

    def _reduce_scatter_base(self, output, whole, options):
        assert output.dtype is whole.dtype in KNOWN_TO_NCCL
        self.log.append(("reduce", whole.numel(), options.asyncOp, options.reduceOp))

    def broadcast(self, tensors, options):
        assert tensors[0].dtype in KNOWN_TO_NCCL
        self.log.append(("broadcast", tensors[0].numel(), options.rootRank))

    def allreduce(self, tensors, options):
        assert tensors[0].dtype in KNOWN_TO_NCCL
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


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.complex64, torch.float8_e5m2])
def test_what_nccl_has_no_name_for_is_moved_as_bytes(on_gpu, dtype):
    group, collectives = on_gpu
    whole = torch.empty(6, dtype=dtype)
    collectives.all_gather([Gather(whole, whole.split(2))]).wait()
    collectives.broadcast([whole.view(3, 2), whole[0]], source=2)
    nbytes = dtype.itemsize
    assert group.log == [
        ("gather", 6 * nbytes, False),
        ("broadcast", 6 * nbytes, 2),
        ("broadcast", nbytes, 2),
    ]


def test_complex_numbers_are_summed_as_pairs(on_gpu):
    group, collectives = on_gpu
    whole, out = torch.empty(6, dtype=torch.complex64), torch.empty(2, dtype=torch.complex64)
    collectives.reduce_scatter([Reduce(whole, whole.split(2), out)]).wait()
    collectives.all_reduce([out]).wait()
    assert group.log == [
        ("reduce", 12, False, dist.ReduceOp.SUM),
        ("all-reduce", 4, False),
    ]


def test_a_lone_state_tensor_is_sent_like_several(on_gpu, monkeypatch):
    """Its receiver may get others from other ranks, in one launch (see ``NativeCollectives.exchange``)."""
    group, _ = on_gpu
    monkeypatch.setattr(_NativeWire, "_to_device", lambda _, tensor: tensor)
    _NativeWire(group, torch.device("cuda")).send_to(0, [[], [torch.ones(2)], []]).wait()
    assert group.log == ["[", ("send", 0), "]"]
