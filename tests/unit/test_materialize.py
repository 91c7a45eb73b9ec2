"""Meta tensors of one unit: they get memory and values, keep identity and ties, and nothing uninitialised gets by."""

from __future__ import annotations

import re
import warnings
import weakref

import pytest
import torch
from torch import nn

from fsdp.errors import ConfigError, FsdpWarning
from fsdp.init.materialize import materialize_unit

CPU = torch.device("cpu")


def on_meta(make):
    with torch.device("meta"):
        return make()


def materialize(root, param_init_fn=None, **kwargs):
    materialize_unit(list(root.named_modules()), CPU, param_init_fn, **kwargs)
    return root


def tensors(root):
    return [*root.parameters(), *root.buffers()]


class Holder(nn.Module):
    """Holds what it is given and initialises what its function writes."""

    def __init__(self, reset=None, params=(), **buffers):
        super().__init__()
        for name, param in dict(params).items():
            self.register_parameter(name, nn.Parameter(param, param.is_floating_point()))
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=name != "table")
        self.reset = reset

    def reset_parameters(self):
        if self.reset is not None:
            self.reset(self)


def ones_(module):
    for tensor in tensors(module):
        tensor.fill_(1)


# -- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(3, 2),
        lambda: nn.Embedding(5, 3, padding_idx=0),
        lambda: nn.BatchNorm1d(3),
        lambda: nn.LayerNorm(3),
        lambda: nn.Conv2d(2, 3, 3),
        lambda: nn.LSTM(3, 2, num_layers=2),
        lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True),
        lambda: nn.TransformerEncoderLayer(4, 2, 8),
        nn.PReLU,
        lambda: nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.GroupNorm(1, 2)),
    ],
    ids=lambda make: type(make()).__name__,
)
def test_modules_of_torch_materialise_to_trainable_values_of_the_same_shapes(make):
    expected = make().state_dict()

    root = materialize(on_meta(make))

    state = root.state_dict()
    assert list(expected) == list(state)
    for name, value in state.items():
        assert (value.shape, value.dtype) == (expected[name].shape, expected[name].dtype)
        assert not value.is_meta
        assert not value.isnan().any()
    assert all(param.is_leaf and param.requires_grad for param in root.parameters())


def test_values_are_those_of_the_same_module_built_off_the_meta_device():
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(3, 2), nn.Embedding(4, 3), nn.Conv1d(2, 3, 2))
    root = on_meta(lambda: nn.Sequential(nn.Linear(3, 2), nn.Embedding(4, 3), nn.Conv1d(2, 3, 2)))

    torch.manual_seed(0)
    materialize(root)

    for ours, theirs in zip(root.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_module_without_meta_tensors_is_not_touched():
    module = Holder(lambda module: pytest.fail("initialised again"), {"w": torch.ones(2)})

    materialize(module, lambda module: pytest.fail("initialised again"))
    materialize(module)

    assert module.w.tolist() == [1, 1]


def test_tensors_of_a_module_that_are_not_on_meta_keep_their_values_and_their_memory():
    module = Holder(ones_, {"w": torch.empty(2, device="meta"), "kept": torch.full((2,), 5.0)})
    module.register_buffer("table", torch.full((2,), 7))
    kept, pointer = module.kept, module.kept.data_ptr()

    materialize(module)

    assert module.w.tolist() == [1, 1]
    assert module.kept is kept
    assert (kept.tolist(), kept.data_ptr()) == ([5, 5], pointer)
    assert module.table.tolist() == [7, 7]


def test_strides_are_kept():
    module = Holder(ones_, {"w": torch.empty(2, 3, device="meta").t()})

    assert materialize(module).w.stride() == (1, 3)


# -- identity ------------------------------------------------------------------------------------------------------


def to_empty_and_reset(module):
    """The usual ``param_init_fn``: it looks for meta tensors itself."""
    if any(tensor.is_meta for tensor in (*module.parameters(False), *module.buffers(False))):
        module.to_empty(device=CPU, recurse=False)
        module.reset_parameters()


INITS = pytest.mark.parametrize("init", [None, to_empty_and_reset], ids=["reset", "fn"])


@INITS
def test_parameters_and_buffers_stay_the_same_objects_with_their_attributes(init):
    module = on_meta(lambda: nn.BatchNorm1d(3))
    before = dict([*module.named_parameters(), *module.named_buffers()])
    module.weight.note, module.running_mean.note = "a", "b"
    module.bias.requires_grad_(False)

    materialize(module, init)

    for name, tensor in before.items():
        assert getattr(module, name) is tensor
        assert not tensor.is_meta
    assert (module.weight.note, module.running_mean.note) == ("a", "b")
    assert (module.weight.requires_grad, module.bias.requires_grad) == (True, False)


@INITS
def test_tied_tensors_stay_tied_and_are_initialised_once(init):
    root = on_meta(lambda: nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4), nn.BatchNorm1d(3)))
    root[1].weight = root[0].weight
    root[0].register_buffer("shared", root[2].running_mean)
    called = []

    def remembering(module):
        called.append(type(module).__name__)
        init(module)

    if init is None:
        root[0].reset_parameters = lambda: (root[0].weight.fill_(3), root[0].shared.fill_(4))
    torch.manual_seed(0)
    materialize(root, None if init is None else remembering)
    torch.manual_seed(0)

    assert root[1].weight is root[0].weight
    assert root[0].shared is root[2].running_mean
    if init is None:
        assert root[0].weight[0, 0] == 3  # not again when the linear layer initialises its bias
        assert root[0].shared[0] == 4
    else:
        assert called == ["Embedding", "Linear", "BatchNorm1d"]


def test_an_optimizer_built_before_keeps_its_parameters():
    module = on_meta(lambda: nn.Linear(3, 2))
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)

    materialize(module)
    module(torch.ones(1, 3)).sum().backward()
    before = module.bias.tolist()
    optimizer.step()

    assert torch.allclose(torch.tensor(before) - 1, module.bias.detach())


@INITS
def test_a_tensor_that_something_refers_to_weakly_is_replaced_in_all_places(init):
    root = on_meta(lambda: nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4)))
    root[1].weight = root[0].weight
    root[0].weight.note = "a"
    reference = weakref.ref(root[0].weight)
    root[0].reset_parameters = lambda: root[0].weight.fill_(3)

    materialize(root, init)

    assert root[0].weight is root[1].weight
    assert root[0].weight[0, 0] == 3  # not again when the linear layer initialises its bias
    assert not root[0].weight.is_meta
    assert root[0].weight.note == "a"
    del reference


class Scaled(nn.Parameter):
    """A user's own kind of parameter."""


def test_a_subclass_of_parameter_stays_one():
    module = Holder(ones_)
    module.w = Scaled(torch.empty(2, device="meta"))

    materialize(module)

    assert type(module.w) is Scaled
    assert module.w.tolist() == [1, 1]


# -- what is forgotten ---------------------------------------------------------------------------------------------

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)], ids=str)
def test_a_tensor_that_nothing_writes_is_an_error_that_names_it_whatever_its_dtype(dtype, shape):
    make = lambda: torch.empty(shape, dtype=dtype, device="meta")  # noqa: E731
    root = nn.Sequential(Holder(None, table=make()))
    param = nn.Sequential(Holder(None, {"w": make()}))

    with pytest.raises(ConfigError, match=r"'0\.table'"):
        materialize(root)
    with pytest.raises(ConfigError, match=r"'0\.w'"):
        materialize(param)
    materialize(nn.Sequential(Holder(lambda module: module.table.zero_(), table=make())))


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.itemsize > 2 or d.is_floating_point])
def test_a_tensor_that_is_written_only_in_part_is_an_error_too(dtype):
    if dtype is torch.float8_e4m3fn:
        pytest.skip("every byte is a value")

    def partly(module):
        module.w[:-1] = 0

    with pytest.raises(ConfigError, match="'w'"):
        materialize(Holder(partly, {"w": torch.empty(4, dtype=dtype, device="meta")}))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int64])
def test_every_value_that_an_integer_can_take_is_a_value(dtype):
    low = torch.iinfo(dtype).min

    def every(module):
        module.table.copy_(torch.arange(module.table.numel()).add(low).to(dtype))

    numel = 2 ** min(dtype.itemsize * 8, 16)
    materialize(Holder(every, table=torch.empty(numel, dtype=dtype, device="meta")))


def test_a_nan_that_initialisation_writes_is_a_value():
    module = Holder(lambda module: module.w.fill_(float("nan")), {"w": torch.ones(2).to("meta")})

    assert materialize(module).w.isnan().all()


def test_an_empty_tensor_needs_no_value():
    materialize(Holder(None, {"w": torch.empty(0, 3, device="meta")}))


def test_the_error_names_everything_forgotten_the_classes_and_the_remedies():
    class Forgetful(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))
            self.register_buffer("table", torch.ones(2), persistent=False)

    root = on_meta(lambda: nn.Sequential(nn.Linear(1, 1), nn.Sequential(Forgetful())))

    with pytest.raises(ConfigError) as caught:
        materialize(root)

    message = str(caught.value)
    assert "'1.0.scale', '1.0.table'" in message
    assert "'Forgetful'" in message
    assert "weight" not in message
    for remedy in ("param_init_fn", "reset_parameters", "sync_module_states"):
        assert remedy in message


def test_a_tied_tensor_may_be_initialised_by_any_of_its_modules():
    root = nn.Sequential(
        Holder(None, {"w": torch.empty(2, device="meta")}), Holder(ones_), nn.ReLU()
    )
    root[1].w = root[0].w

    materialize(root)

    assert root[0].w.tolist() == [1, 1]
    assert root[0].w is root[1].w


def test_values_may_stay_undefined_where_a_broadcast_follows_but_memory_is_there():
    root = on_meta(lambda: Holder(None, {"w": torch.empty(2)}, table=torch.empty(64).bool()))

    materialize(root, allow_uninitialized=True)

    assert [tensor.device for tensor in tensors(root)] == [CPU, CPU]
    assert (
        not root.table.any()
    )  # bytes that are neither true nor false would be undefined behaviour


def test_a_failure_of_initialisation_says_in_which_module():
    def fails(module):
        raise KeyError("no such value")

    root = nn.Sequential(Holder(fails, {"w": torch.empty(2, device="meta")}))

    with pytest.raises(KeyError, match="no such value") as caught:
        materialize(root)
    assert caught.value.__notes__ == ["while initialising '0' (Holder)"]


# -- param_init_fn -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("param_init_fn", [3, "reset", nn.init])
def test_a_function_that_can_not_be_called_is_refused(param_init_fn):
    with pytest.raises(ConfigError, match=r"to be callable") as caught:
        materialize(on_meta(lambda: nn.Linear(1, 1)), param_init_fn)

    assert isinstance(caught.value, ValueError)


def test_the_function_is_called_with_each_module_that_holds_meta_tensors_and_no_other():
    root = on_meta(
        lambda: nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Sequential(nn.Linear(1, 1)))
    )
    root[0].to_empty(device=CPU)
    called = []

    def remembering(module):
        called.append(module)
        assert all(param.is_meta for param in module.parameters())
        to_empty_and_reset(module)

    materialize(root, remembering)

    assert called == [root[2][0]]


def test_the_function_may_make_parameters_of_its_own():
    module = on_meta(lambda: nn.Linear(3, 2))
    before = module.weight

    def replace(module):
        module.weight = nn.Parameter(torch.full((2, 3), 7.0), requires_grad=False)
        module.weight.note = "new"
        module.bias = None

    materialize(module, replace)

    assert module.weight is before
    assert module.weight.tolist() == [[7] * 3] * 2
    assert not module.weight.requires_grad
    assert module.weight.note == "new"
    assert module.bias is None


def test_what_the_function_leaves_on_meta_is_an_error():
    with pytest.raises(ConfigError, match="'weight', 'bias'"):
        materialize(on_meta(lambda: nn.Linear(1, 1)), lambda module: None)


def test_what_the_function_makes_and_leaves_empty_is_a_warning_and_not_a_number():
    def to_empty(module):
        module.to_empty(device=CPU, recurse=False)

    def to_empty_and_bias(module):
        to_empty(module)
        module.bias.zero_()

    with pytest.warns(FsdpWarning, match=re.escape("left them empty: '0.weight'. ")):
        root = materialize(on_meta(lambda: nn.Sequential(nn.Linear(3, 2))), to_empty_and_bias)
    assert root[0].weight.isnan().all()
    assert root[0].bias.tolist() == [0, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        materialize(on_meta(lambda: nn.Linear(1, 1)), to_empty, allow_uninitialized=True)


def test_the_function_runs_without_recording_gradients():
    def scale(module):
        to_empty_and_reset(module)
        module.weight.mul_(2)

    assert materialize(on_meta(lambda: nn.Linear(1, 1)), scale).weight.is_leaf
