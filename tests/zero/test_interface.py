"""Construction, groups, schedulers, errors: what users write, and what is said when it is wrong."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel as DDP

from fsdp.comm.collectives import DONE
from fsdp.errors import ConfigError, ConfigTypeError, FsdpWarning
from fsdp.optim import ZeroRedundancyOptimizer, hook_with_zero_step, reduce_scatter_hook
from tests.support.ranks import run_kept_ranks, run_ranks
from tests.zero.support import assert_same_everywhere, make_model, state_numel

SGD = functools.partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD, lr=0.1)


def accepted():
    model = make_model()
    params = list(model.parameters())
    for given in (
        params,
        iter(params),
        [{"params": iter(params)}],
        [{"params": params[:3]}, {"params": (param for param in params[3:]), "lr": 0.5}],
    ):
        zero = SGD(given)
        assert [id(p) for p in params] == [id(p) for g in zero.param_groups for p in g["params"]]
        assert isinstance(zero, torch.optim.Optimizer)
        assert isinstance(zero, Joinable)
    named = SGD(model.named_parameters())
    assert named.param_groups[0]["param_names"][0] == "0.weight"
    saved = named.state_dict(consolidate=True)
    assert saved["param_groups"][0]["param_names"][0] == "0.weight"
    named.load_state_dict(saved)
    SGD(params, group=dist.group.WORLD)


def test_params_may_be_tensors_pairs_or_groups_in_any_iterable():
    run_kept_ranks(accepted, 1)


def refused():
    param = nn.Parameter(torch.zeros(3))
    sparse = torch.sparse_coo_tensor(size=(2, 3))
    cases = [
        (param, TypeError, "params is a single Tensor"),
        (1.2, TypeError, "params is a float"),
        ([], ValueError, "empty parameter list"),
        ([{"params": []}], ValueError, "without any parameter"),
        ([param, 42], TypeError, r"params\[1\] is a int"),
        ([param, {"params": []}], TypeError, r"params\[0\] is a Tensor and params\[1\] a dict"),
        ([{"lr": 1.0}], ValueError, r"params\[0\] \(a parameter group\) has no 'params'"),
        ([param, sparse], ValueError, "parameter 1 is sparse"),
    ]
    for given, error, message in cases:
        with pytest.raises(error, match=message):
            SGD(given)
    zero = SGD([param])
    with pytest.raises(ValueError, match=r"params\[1\].*'params'"):
        zero.add_param_group({"lr": 1.0})
    with pytest.raises(ConfigError, match="partition='rows'"):
        SGD([param], partition="rows")
    with pytest.raises(ConfigTypeError, match="process_group is a int"):
        SGD([param], process_group=3)
    from torch.distributed.optim.utils import functional_optim_map

    for bad in (functional_optim_map[torch.optim.SGD], "SGD"):
        with pytest.raises(
            ConfigTypeError, match=r"optimizer_class is .*Functional optimizers"
        ) as i:
            ZeroRedundancyOptimizer([param], bad, lr=0.1)
        assert isinstance(i.value, ValueError)


def test_mistakes_in_arguments_are_named():
    run_kept_ranks(refused, 1)


def unsuitable():
    params = [nn.Parameter(torch.zeros(3, 3)) for _ in range(2)]
    for name in ("Adafactor", "LBFGS", "SparseAdam"):
        with pytest.raises(ConfigError, match=f"{name} .*partition='parameter'"):
            ZeroRedundancyOptimizer(params, getattr(torch.optim, name), partition="element")
    with pytest.raises(ConfigError, match="LBFGS looks at all parameters at once"):
        ZeroRedundancyOptimizer(params, torch.optim.LBFGS)
    zero = SGD(params, partition="element")
    for param in params:
        param.grad = torch.ones(3, 3).to_sparse()
    with pytest.raises(RuntimeError, match="sparse gradient"):
        zero.step()


def test_optimizers_that_cannot_work_on_a_part_are_refused_by_name():
    run_kept_ranks(unsuitable, 2)


def hook_errors():
    wrapped = DDP(make_model())
    plain = SGD(wrapped.parameters())
    with pytest.raises(ValueError, match="overlap_with_ddp=True"):
        hook_with_zero_step(None, wrapped, plain)
    stranger = nn.Parameter(torch.zeros(2))
    for build in (
        lambda zero: hook_with_zero_step(None, wrapped, zero),
        lambda zero: reduce_scatter_hook(wrapped, zero),
    ):
        zero = SGD([*wrapped.named_parameters(), ("head", stranger)], overlap_with_ddp=True)
        with pytest.raises(ConfigError, match="'head'"):
            build(zero)


def test_hooks_refuse_optimizers_that_do_not_fit_their_model():
    run_kept_ranks(hook_errors, 1)


def complete():
    param = nn.Parameter(torch.zeros(3))
    zero = ZeroRedundancyOptimizer([param], torch.optim.AdamW, lr=0.5)
    plain = torch.optim.AdamW([param], lr=0.5)
    zero.add_param_group({"params": nn.Parameter(torch.zeros(2)), "weight_decay": 0.0})
    plain.add_param_group({"params": nn.Parameter(torch.zeros(2)), "weight_decay": 0.0})
    assert zero.defaults == plain.defaults
    for ours, theirs in zip(zero.param_groups, plain.param_groups, strict=True):
        assert {**ours, "params": None} == {**theirs, "params": None}


def test_groups_and_defaults_are_complete_from_the_start():
    run_kept_ranks(complete, 2)


def shown_state(options):
    params = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    zero = ZeroRedundancyOptimizer(params, torch.optim.Adam, **options)
    for param in params:
        param.grad = torch.ones(3)
    zero.step()
    assert zero.state is zero.optim.state
    assert len(zero.state) == 1
    zero.load_state_dict(zero.state_dict(consolidate=True))
    assert zero.state is zero.optim.state


@pytest.mark.parametrize("options", [{}, {"partition": "element"}])
def test_state_is_that_of_the_local_optimizer(options):
    run_kept_ranks(shown_state, 2, options)


def rates():
    param = nn.Parameter(torch.zeros(1))
    zero = SGD([param])
    scheduler = torch.optim.lr_scheduler.StepLR(zero, 1, 0.1)
    param.grad = torch.ones(1)
    zero.step()
    scheduler.step()
    assert zero.optim.param_groups[0]["lr"] == zero.param_groups[0]["lr"] == pytest.approx(0.01)
    zero.step()
    zero.param_groups[0] = {**zero.param_groups[0], "lr": 1.0}  # a group replaced as a whole
    zero.step()
    assert param.item() == pytest.approx(-1.11)
    tensor = ZeroRedundancyOptimizer([param], torch.optim.Adam, lr=torch.tensor(0.5))
    tensor.param_groups[0]["lr"].fill_(0.25)
    assert tensor.optim.param_groups[0]["lr"].item() == 0.25


def test_a_change_of_the_learning_rate_is_seen_by_the_very_next_step():
    run_kept_ranks(rates, 1)


class Counting(torch.optim.SGD):
    """Writes into its group, takes an argument."""

    def step(self, closure=None, note=None):
        loss = super().step(closure)
        self.param_groups[0]["steps"] = self.param_groups[0].get("steps", 0) + 1
        if note is not None:
            note.append(self.param_groups[0]["steps"])
        return loss


def passed_on():
    param = nn.Parameter(torch.zeros(2))
    zero = ZeroRedundancyOptimizer([param], Counting, lr=0.1)
    notes = []

    def closure():
        zero.zero_grad()
        loss = (param - 1).square().sum()
        loss.backward()
        return loss

    assert zero.step(closure, note=notes).item() == 2.0
    assert zero.step(closure).item() < 2.0
    assert notes == [1]
    assert zero.param_groups[0]["steps"] == 2
    zero.zero_grad()
    assert param.grad is None


def test_closures_keywords_and_what_an_optimizer_writes_into_its_groups_pass_through():
    run_kept_ranks(passed_on, 2)


def callers_groups():
    groups = [{"params": [nn.Parameter(torch.zeros(2))], "lr": 0.2}]
    kept = copy.copy(groups[0])
    SGD(groups)
    assert groups == [kept]


def test_the_groups_that_were_passed_are_not_changed():
    run_kept_ranks(callers_groups, 1)


def replaced_data(layout):
    param = nn.Parameter(torch.zeros(4))
    zero = SGD([param], **layout)
    param.data = torch.full((4,), 5.0)
    param.grad = torch.ones(4)
    zero.step()
    torch.testing.assert_close(param.detach(), torch.full((4,), 4.9))
    assert param.data_ptr() == zero._buckets[0][0].data_ptr()


@pytest.mark.parametrize("layout", [{"parameters_as_bucket_view": True}, {"partition": "element"}])
def test_data_replaced_by_the_user_is_what_the_next_step_updates(layout):
    run_kept_ranks(replaced_data, 2, layout)


def frozen_buckets():
    params = [nn.Parameter(torch.ones(3)) for _ in range(4)]
    zero = SGD(params, parameters_as_bucket_view=True)
    assert sum(b.numel() for b in zero._buckets[0]) == 12
    params[0].requires_grad = False
    for param in params[1:]:
        param.grad = torch.ones(3)
    zero.step()
    assert sum(b.numel() for b in zero._buckets[0]) == 9
    assert torch.equal(params[0], torch.ones(3))
    assert params[0].untyped_storage().nbytes() == 12
    params[0].requires_grad = True
    zero.zero_grad()
    zero.step()
    assert sum(b.numel() for b in zero._buckets[0]) == 12


def test_freezing_and_thawing_rebuild_buckets():
    run_kept_ranks(frozen_buckets, 2)


def overlap_step():
    wrapped = DDP(make_model())
    zero = SGD(wrapped.parameters(), overlap_with_ddp=True)
    before = copy.deepcopy(list(wrapped.parameters()))
    wrapped(torch.ones(2, 5)).sum().backward()
    with pytest.warns(FsdpWarning, match="overlap_with_ddp=True"):
        assert zero.step() is None
    for ours, theirs in zip(wrapped.parameters(), before, strict=True):
        assert torch.equal(ours, theirs)


def test_step_warns_and_does_nothing_when_the_hook_steps():
    run_ranks(overlap_step, 2)


def compiled():
    torch._dynamo.config.suppress_errors = False
    model, dense = make_model(), make_model()
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    plain = torch.optim.Adam(dense.parameters(), lr=0.1)
    zero.optim.step = torch.compile(zero.optim.step, backend="eager")
    step = torch.compile(zero.step, backend="eager")
    for run in (zero.step, zero.step, step):
        for module, optimizer, update in ((model, zero, run), (dense, plain, plain.step)):
            optimizer.zero_grad()
            module(torch.ones(2, 5)).square().sum().backward()
            update()
    for ours, theirs in zip(model.parameters(), dense.parameters(), strict=True):
        # The compiler has Adam divide in another order, and the steps are of size 0.1.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_a_compiled_local_step_and_a_compiled_step_give_the_same_parameters():
    run_ranks(compiled, 2)


def variants(options):
    model, dense = make_model(), make_model()
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1, **options)
    plain = torch.optim.AdamW(dense.parameters(), lr=0.1, **options)
    for iteration in range(4):
        for module, optimizer in ((model, zero), (dense, plain)):
            optimizer.zero_grad()
            module(torch.ones(2, 5)).square().sum().backward()
            optimizer.step()
        if iteration == 1:
            zero.load_state_dict(plain.state_dict())
            steps = [entries["step"] for entries in zero.optim.state.values()]
            wanted = [entries["step"] for entries in plain.state.values()]
            assert {step.dtype for step in steps} == {step.dtype for step in wanted}
    for ours, theirs in zip(model.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_foreach_and_fused_optimizers(options):
    run_kept_ranks(variants, 2, options)


def scaled(overflow_on, param_index):
    wrapped = DDP(make_model())
    zero = SGD(wrapped.parameters())
    wrapped.register_comm_hook(None, reduce_scatter_hook(wrapped, zero))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = copy.deepcopy(list(wrapped.parameters()))
    changed = []
    for iteration in range(2):
        zero.zero_grad()
        loss = wrapped(torch.ones(2, 5)).sum()
        if iteration == 0 and dist.get_rank() == overflow_on:
            param = list(wrapped.parameters())[param_index]  # one rank's own, and no other
            param.register_hook(
                lambda grad, first=[True]: grad * torch.inf if first.pop() else grad
            )
        scaler.scale(loss).backward()
        if iteration == 0 and dist.get_rank() == overflow_on:
            param._backward_hooks.clear()
        scaler.step(zero)
        scaler.update()
        now = list(wrapped.parameters())
        changed.append(not all(torch.equal(a, b) for a, b in zip(now, before, strict=True)))
    return changed, scaler.get_scale()


@pytest.mark.parametrize("overflow_on", [0, 1])
@pytest.mark.parametrize("param_index", [0, 1])
def test_a_loss_scaler_skips_the_step_on_all_ranks_if_one_overflowed(overflow_on, param_index):
    assert [([False, True], 2.0)] * 2 == run_kept_ranks(scaled, 2, overflow_on, param_index)


def sixteen_bit(dtype, layout, options):
    model, dense = make_model(dtype=dtype), make_model(dtype=dtype)
    zero = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=0.1, **layout, **options
    )
    plain = torch.optim.AdamW(dense.parameters(), lr=0.1, **options)
    for iteration in range(4):
        for module, optimizer in ((model, zero), (dense, plain)):
            optimizer.zero_grad()
            module(torch.full((2, 5), 1.0 + iteration, dtype=dtype)).square().sum().backward()
            optimizer.step()
        if iteration == 1:
            zero.load_state_dict(zero.state_dict(consolidate=True))
    for ours, theirs in zip(model.parameters(), dense.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    saved, expected = zero.state_dict(consolidate=True), plain.state_dict()
    torch.testing.assert_close(saved["state"], expected["state"], rtol=0, atol=0)


@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str
)
@pytest.mark.parametrize(
    "layout", [{}, {"parameters_as_bucket_view": True}, {"partition": "element"}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_training_in_sixteen_bits_is_bitwise_that_of_the_plain_optimizer(dtype, layout, options):
    run_kept_ranks(sixteen_bit, 2, dtype, layout, options)


def capturable():
    """Capturable optimizers step on accelerators only; what they need of loading shows on any device."""
    model, dense = nn.Linear(3, 2), nn.Linear(3, 2)
    plain = torch.optim.Adam(dense.parameters(), lr=torch.tensor(0.1))
    dense(torch.ones(1, 3)).sum().backward()
    plain.step()
    saved = plain.state_dict()
    saved["param_groups"][0]["capturable"] = True
    zero = ZeroRedundancyOptimizer(
        model.to("meta").parameters(), torch.optim.Adam, lr=torch.tensor(0.1), capturable=True
    )
    zero.load_state_dict(saved)
    assert isinstance(zero.optim.param_groups[0]["lr"], torch.Tensor)
    return [
        (value.device.type, value.dtype)
        for entries in zero.optim.state.values()
        for value in entries.values()
    ]


def test_the_step_count_of_a_capturable_optimizer_is_loaded_to_its_parameters_device():
    for loaded in run_kept_ranks(capturable, 2):
        assert [("meta", torch.float32)] * 3 == loaded  # one of two parameters a rank


class Written:
    """A wire that writes down what it was asked to move."""

    def __init__(self):
        self.handed_out = []

    def hand_out(self, tensors_by_rank, tag=0):
        self.handed_out.append([[t.device.type for t in tensors] for tensors in tensors_by_rank])
        return DONE


def two_devices(layout):
    on_cpu, on_meta = nn.Linear(5, 7), nn.Linear(5, 7, device="meta")
    params = [*on_cpu.parameters(), *on_meta.parameters()]
    zero = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1, momentum=0.9, **layout)
    wire = Written()
    zero.handing_out._wires[torch.device("meta")] = wire  # no backend moves what has no memory
    for param in params:
        param.grad = torch.ones_like(param)
    zero.step()
    assert_same_everywhere(on_cpu.parameters())
    (by_rank,) = wire.handed_out
    assert {kind for kinds in by_rank for kind in kinds} == {"meta"}
    for held in zero.optim.state.values():
        assert held["momentum_buffer"].device.type in ("cpu", "meta")
    return state_numel(zero), [len(packs) for packs in zero._buckets]


@pytest.mark.parametrize(
    ("layout", "numels", "packs"),
    [
        ({}, [42, 42], []),
        ({"parameters_as_bucket_view": True}, [42, 42], [2, 2]),
        ({"partition": "element"}, [42, 42], [1, 1]),
    ],
    ids=str,
)
def test_parameters_of_several_devices_are_packed_and_travel_apart(layout, numels, packs):
    assert list(zip(numels, [packs] * 2, strict=True)) == run_kept_ranks(two_devices, 2, layout)
