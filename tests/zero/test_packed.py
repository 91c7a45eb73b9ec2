"""Packed storage keeps values and strides."""

from __future__ import annotations

import pytest
import torch

from fsdp.optim.packed import Packed, flat_view, is_dense, like_storage_of


def parameters():
    torch.manual_seed(0)
    return [
        torch.randn(3, 4),
        torch.randn(()),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 6).t(),
        torch.randn(6, 4)[::2],
        torch.empty(0, 3),
    ]


def test_packing_keeps_values_and_the_strides_of_dense_parameters():
    params = parameters()
    before = [(param.clone(), param.stride(), is_dense(param)) for param in params]
    packed = Packed(params, torch.float32, torch.device("cpu"))

    assert sum(param.numel() for param in params) == packed.flat.numel()
    for param, (values, stride, dense), (start, _) in zip(
        params, before, packed.spans(), strict=True
    ):
        assert torch.equal(values, param)
        assert param.stride() == stride or not dense
        if param.numel():
            assert packed.flat[start:].data_ptr() == param.data_ptr()


def test_writing_the_packed_tensor_writes_the_parameters():
    params = parameters()
    Packed(params, torch.float32, torch.device("cpu")).flat.fill_(3.0)

    for param in params:
        assert torch.equal(torch.full_like(param, 3.0), param)


def test_a_parameter_whose_data_was_replaced_is_brought_back_with_its_new_values():
    params = parameters()
    packed = Packed(params, torch.float32, torch.device("cpu"))
    params[0].data = torch.full((3, 4), 9.0)
    packed.restore()

    assert torch.equal(torch.full((12,), 9.0), packed.flat[:12])
    assert params[0].data_ptr() == packed.flat.data_ptr()


@pytest.mark.parametrize("index", [0, 2, 3])
def test_values_follow_the_storage_order_of_their_model(index):
    model = parameters()[index]
    values = torch.arange(model.numel()).reshape(model.shape)

    ordered = torch.empty_like(model, dtype=values.dtype)
    flat_view(ordered).copy_(like_storage_of(values, model))
    assert torch.equal(values, ordered)


def test_only_tensors_without_gaps_are_dense():
    assert [True, True, True, True, False, True] == [is_dense(param) for param in parameters()]
