"""Several forwards and backwards in any order, on every model (oracle: dense copies, one a rank)."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy
from fsdp.errors import FsdpError, UnsupportedError, UsageError
from tests.support.compare import GRADIENTS, Tolerance, assert_close
from tests.support.models import build_gan_pair, entry
from tests.support.oracles import full_grads, mean_grads, wrap_entry
from tests.support.ranks import run_kept_ranks
from tests.support.scripts import (
    Block,
    Net,
    assert_same_gradients,
    batch,
    build,
    check_script,
    dense_grads,
    wrap,
)

EXPOSURES = (False, True)
# Two or three backwards add up: a few more roundings than one has.
SUMS = Tolerance(GRADIENTS.rtol * 5, GRADIENTS.atol * 5)


def losses(item, model, rank, count=2):
    return [item.loss(model, item.make_batch(rank, step)) for step in range(count)]


def first_in_first_out(item, model, rank):
    for loss in losses(item, model, rank):
        loss.backward()


def last_in_first_out(item, model, rank):
    for loss in reversed(losses(item, model, rank, 3)):
        loss.backward()


def one_backward_of_two(item, model, rank):
    torch.stack(losses(item, model, rank)).sum().backward()


def autograd_backward_of_a_list(item, model, rank):
    torch.autograd.backward(losses(item, model, rank))


def retained(item, model, rank):
    (loss,) = losses(item, model, rank, 1)
    for _ in range(2):
        loss.backward(retain_graph=True)
    loss.backward()


def interleaved(item, model, rank):
    first, second = losses(item, model, rank)
    second.backward()
    third = item.loss(model, item.make_batch(rank, 2))
    first.backward()
    third.backward()


def dropped(item, model, rank):
    """A forward whose backward never comes."""
    losses(item, model, rank)
    item.loss(model, item.make_batch(rank, 2)).backward()


def in_another_thread(item, model, rank):
    (loss,) = losses(item, model, rank, 1)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    item.loss(model, item.make_batch(rank, 1)).backward()


def hidden_loss_first(item, model, rank):
    """An auxiliary loss on the input side, whose backward reaches no parameter."""
    x = torch.ones(2, requires_grad=True)
    (x.sum() * item.loss(model, item.make_batch(rank, 0)).detach()).backward()
    item.loss(model, item.make_batch(rank, 0)).backward()


SCRIPTS = [
    first_in_first_out,
    last_in_first_out,
    one_backward_of_two,
    autograd_backward_of_a_list,
    retained,
    interleaved,
    dropped,
    in_another_thread,
    hidden_loss_first,
]
MODELS = ("gpt_tied", "shared", "outputs", "lora", "root_only", "conv")


def run_model(name, strategy):
    item = entry(name)
    for script in SCRIPTS:
        if name == "conv" and script in (last_in_first_out, retained):
            continue  # running statistics are not what this is about
        expected = mean_grads(
            item.build(), lambda m, r, s=script: s(item, m, r), range(dist.get_world_size())
        )
        for orig in EXPOSURES:
            model = wrap_entry(
                item,
                item.build(),
                sharding_strategy=ShardingStrategy[strategy],
                use_orig_params=orig,
            )
            print(script.__name__, "orig" if orig else "flat", flush=True)
            script(item, model, dist.get_rank())
            try:
                assert_close(expected, full_grads(model), SUMS, none_is_zero=not orig)
            except AssertionError as error:
                raise AssertionError(f"{script.__name__}, orig={orig}: {error}") from None


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_every_order_gives_the_gradients_of_the_plain_model(name, strategy):
    run_kept_ranks(run_model, 2, name, strategy)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("world_size", "strategy"), [(1, "FULL_SHARD"), (3, "FULL_SHARD")])
def test_every_order_at_other_world_sizes(name, world_size, strategy):
    run_kept_ranks(run_model, world_size, name, strategy)


def noise(step, rank):
    rng = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 3, generator=rng), torch.randn(4, 5, generator=rng)


def train_gan(generator, discriminator, ranks):
    """In turns: the discriminator on samples made without grad, then the generator with the other side frozen."""
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.2) for part in (generator, discriminator)]
    for step in range(3):
        optimizers[1].zero_grad()
        for rank in ranks:
            z, real = noise(step, rank)
            with torch.no_grad():
                fake = generator(z)
            loss = discriminator(fake).mean() - discriminator(real).mean()
            (loss / len(ranks)).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        discriminator.requires_grad_(False)
        for rank in ranks:
            loss = -discriminator(generator(noise(step, rank)[0])).mean()
            (loss / len(ranks)).backward()
        discriminator.requires_grad_(True)
        optimizers[0].step()


def adversaries(orig, strategy):
    settings = {
        "use_orig_params": orig,
        "sharding_strategy": ShardingStrategy[strategy],
        "auto_wrap_policy": {nn.Linear},
    }
    pair = [FSDP(part, **settings) for part in build_gan_pair()]
    train_gan(*pair, [dist.get_rank()])
    dense = build_gan_pair()
    train_gan(*dense, range(dist.get_world_size()))
    for plain, model in zip(dense, pair, strict=True):
        assert_close(dict(plain.state_dict()), dict(model.state_dict()), SUMS)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("orig", EXPOSURES, ids=["flat", "orig"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_two_wrapped_models_trained_in_turns(world_size, orig, strategy):
    run_kept_ranks(adversaries, world_size, orig, strategy)


def one_loss_of_two_models():
    """Both wrapped models in one graph, used twice each."""
    for orig in EXPOSURES:

        def script(pair, rank):
            generator, discriminator = pair
            z = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))
            fake = generator(z)
            (discriminator(fake) * discriminator(generator(-z))).sum().backward()

        dense = nn.ModuleList(build_gan_pair())
        expected = mean_grads(dense, script, range(dist.get_world_size()))
        pair = tuple(
            FSDP(part, auto_wrap_policy={nn.Linear}, use_orig_params=orig)
            for part in build_gan_pair()
        )
        script(pair, dist.get_rank())
        got = {
            f"{index}.{name}": grad
            for index, part in enumerate(pair)
            for name, grad in full_grads(part).items()
        }
        assert_close(expected, got, SUMS)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_two_wrapped_models_in_one_loss(world_size):
    run_kept_ranks(one_loss_of_two_models, world_size)


def preference(policy, rank, step, frozen):
    """Chosen and rejected rows through a policy and its frozen reference (DPO)."""
    ratios = []
    for part in (0, 1):
        x = batch(rank, 2 * step + part)
        with torch.no_grad():
            target = frozen(x)
        ratios.append((policy(x) - target).mean())
    (-nn.functional.logsigmoid(ratios[0] - ratios[1])).backward()


def two_views(policy, rank, step, frozen):
    """Two resolutions of the same data in one loss, one side of each pair without gradient (SwAV)."""
    large, small = policy(batch(rank, step, rows=6)), policy(batch(rank, step, rows=6)[:3])
    (large[:3].softmax(-1).detach() * small.log_softmax(-1)).sum().neg().backward(retain_graph=True)
    (small.softmax(-1).detach() * large[:3].log_softmax(-1)).sum().neg().backward()


def distilled(policy, rank, step, frozen):
    """A student learns from a teacher through a hidden layer of it, whose input has a gradient too."""
    x = batch(rank, step).requires_grad_()
    (policy(x) - frozen(x)).square().sum().backward()
    assert x.grad is not None


class Recomputing(Net):
    """Recomputes its blocks in the backward."""

    def features(self, x):
        x = self.inp(x)
        for part in self.blocks:
            x = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False)
        return x


def recipes(strategy):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for recipe in (preference, two_views, distilled):
        for make in (Net, Recomputing):
            dense, frozen = build(make), build(make, seed=1).requires_grad_(False)
            reference = torch.optim.SGD(dense.parameters(), lr=0.1, momentum=0.9)
            for step in range(3):
                script = functools.partial(recipe, step=step, frozen=frozen)
                grads = dense_grads(dense, script, world_size)
                for name, param in dense.named_parameters():
                    param.grad = grads[name]
                reference.step()
            for orig in EXPOSURES:
                settings = {"use_orig_params": orig, "sharding_strategy": strategy}
                model = wrap(build(make), **settings)
                teacher = wrap(build(make, seed=1).requires_grad_(False), **settings)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
                for step in range(3):
                    optimizer.zero_grad()
                    recipe(model, rank, step, teacher)
                    optimizer.step()
                assert_close(dict(dense.state_dict()), dict(model.state_dict()), SUMS)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_preferences_two_views_and_distillation_train_as_in_one_process(world_size, strategy):
    run_kept_ranks(recipes, world_size, ShardingStrategy[strategy])


def bypassed():
    """Where autograd does not accumulate on the leaves the answer is right or an error; never a local gradient."""
    item = entry("mlp")
    rank = dist.get_rank()
    ranks = range(dist.get_world_size())

    def backward(model, who):
        item.loss(model, item.make_batch(who, 0)).backward()

    expected = mean_grads(item.build(), backward, ranks)
    for orig in EXPOSURES:
        model = wrap_entry(item, item.build(), use_orig_params=orig)
        params = list(model.parameters())
        loss = item.loss(model, item.make_batch(rank, 0))
        try:
            got = torch.autograd.grad(loss, params)
        except (FsdpError, RuntimeError):
            pass
        else:
            shown = {name: param.grad for name, param in model.named_parameters()}
            raise AssertionError(f"autograd.grad returned {[g.shape for g in got]}, {shown}")
        model = wrap_entry(item, item.build(), use_orig_params=orig)
        loss = item.loss(model, item.make_batch(rank, 0))
        try:
            loss.backward(create_graph=True)
        except (FsdpError, RuntimeError):
            model = wrap_entry(item, item.build(), use_orig_params=orig)
        else:
            assert_close(expected, full_grads(model), GRADIENTS)
        backward(model, rank)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_asked_for_in_other_ways_are_never_local(world_size):
    run_kept_ranks(bypassed, world_size)


class Inner(nn.Module):
    """Its loss comes from a middle layer; two layers get no gradient."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))

    def forward(self, x):
        hidden = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            hidden.append(x)
        return hidden


def partial(strategy):
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(dist.get_rank()))

    def script(model, rank):
        rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))
        model(rows)[1].square().sum().backward()

    torch.manual_seed(0)
    dense = Inner()
    expected = mean_grads(dense, script, range(dist.get_world_size()))
    for orig in EXPOSURES:
        for policy in ({nn.Linear}, None):
            torch.manual_seed(0)
            model = FSDP(
                Inner(),
                auto_wrap_policy=policy,
                use_orig_params=orig,
                sharding_strategy=ShardingStrategy[strategy],
            )
            script(model, dist.get_rank())
            grads = full_grads(model)
            assert_close(expected, grads, GRADIENTS, none_is_zero=not orig and policy is None)
            if policy is not None:
                assert [name for name, grad in grads.items() if grad is None] == [
                    f"layers.{index}.{part}" for index in (2, 3) for part in ("weight", "bias")
                ]
            model(x)[3].sum().backward()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parameters_that_no_rank_used_have_no_gradient(strategy, world_size):
    run_kept_ranks(partial, world_size, strategy)


def undecayed():
    """AdamW leaves a parameter alone that had no gradient, decay included."""
    item = entry("experts")
    for orig, wrapping in ((True, "root"), (True, "blocks"), (False, "blocks")):
        model = wrap_entry(item, item.build(), wrapping, use_orig_params=orig)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        item.loss(model, item.make_batch(dist.get_rank(), 1)).backward()  # expert 1 only
        optimizer.step()
        before, after = item.build().state_dict(), model.state_dict()
        for name in before:
            untouched = name.startswith(("experts.0", "experts.2"))
            assert torch.equal(before[name], after[name]) == untouched, name


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_optimizer_leaves_unused_parameters_alone(world_size):
    run_kept_ranks(undecayed, world_size)


def penalised_inputs():
    """A gradient penalty on the inputs: the second backward wants the parameters that the first one used."""

    def script(model, rank):
        for step in range(2):
            x = batch(rank, step).requires_grad_()
            loss = model(x).tanh().square().sum()
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + slope.square().sum()).backward()

    check_script(script)
    check_script(script, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_penalty_on_the_gradient_of_the_inputs(world_size):
    run_kept_ranks(penalised_inputs, world_size)


def transformed(use_orig_params):
    model = wrap(build(), use_orig_params=use_orig_params)
    before = model.state_dict()
    x = batch(dist.get_rank())
    for transform in (lambda: torch.func.vjp(model, x), lambda: torch.vmap(model)(x)):
        with pytest.raises(UnsupportedError, match="unwrapped module"):
            transform()
    zeros = {name: torch.zeros_like(value) for name, value in before.items()}
    with pytest.raises(UsageError, match="functional_call"):
        torch.func.functional_call(model, zeros, (x,))
    model(x).sum().backward()
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def lent(use_orig_params, classes):
    """Parameters look like an assignment of the user's; of all units or of one."""

    def script(model, rank):
        model(batch(rank)).sum().backward()

    expected = dense_grads(build(), script, dist.get_world_size())
    model = wrap(build(), classes, use_orig_params=use_orig_params)
    before = model.state_dict()
    for kind in (nn.Parameter, torch.clone):
        for part in ("", "inp.", "blocks.1.", "blocks.2.down", "out.bias"):
            values = {
                name: kind(torch.full_like(value, 0.5))
                for name, value in before.items()
                if name.startswith(part)
            }
            with pytest.raises(UsageError, match="functional_call") as caught:
                torch.func.functional_call(model, values, (batch(dist.get_rank()),))
            assert caught.value.fqn.startswith(part)
            model.zero_grad()
            script(model, dist.get_rank())
            assert_same_gradients(expected, full_grads(model), none_is_zero=False)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert list(model.state_dict()) == [name for name, _ in build().named_parameters()]


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("classes", [{Block}, {nn.Linear}], ids=["blocks", "layers"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_lent_parameters_are_refused_and_leave_the_own_ones_alone(
    world_size, classes, use_orig_params
):
    run_kept_ranks(lent, world_size, use_orig_params, classes)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_functional_transforms_are_refused_and_leave_the_parameters_alone(
    world_size, use_orig_params
):
    run_kept_ranks(transformed, world_size, use_orig_params)


def step_in_place(model):
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.5)


def summon_and_write(model):
    with FSDP.summon_full_params(model):
        step_in_place(model)


def load(model):
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def train_again(model):
    model(batch(0, 1))


def evaluate(model):
    with torch.no_grad():
        model(batch(0, 1))


def run_stale_graphs(strategy):
    for orig in EXPOSURES:
        for change in (step_in_place, summon_and_write, load):
            for between in (None, train_again, evaluate):
                model = wrap(build(), use_orig_params=orig, sharding_strategy=strategy)
                model(batch(0)).sum().backward()
                loss = model(batch(0)).square().sum()
                change(model)
                if between is not None:
                    between(model)
                with pytest.raises(RuntimeError, match=r"modified (in place|by an inplace)"):
                    loss.backward()
                # What nobody has written to is as good as ever.
                model.zero_grad()
                first, second = model(batch(0)).sum(), model(batch(0, 1)).sum()
                with FSDP.summon_full_params(model):
                    pass
                evaluate(model)
                (first + second).backward()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("strategy", list(ShardingStrategy)[:3], ids=lambda s: s.name)
def test_a_backward_over_values_that_were_written_over_is_refused_as_autograd_does(
    world_size, strategy
):
    """By a step, a load or in ``summon_full_params``, with other forwards after it or none."""
    run_kept_ranks(run_stale_graphs, world_size, strategy)


def run_checkpointed_in_turns():
    for orig in EXPOSURES:
        model = wrap(build(), use_orig_params=orig)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, reentrant in enumerate((True, None, True, False, True)):
            x = batch(dist.get_rank(), step).requires_grad_()
            if reentrant is None:
                out = model(x)
            else:
                out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)
            out.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("world_size", [2, 3])
def test_checkpointed_and_plain_forwards_of_the_model_may_take_turns(world_size):
    """A reentrant checkpoint's forward runs without gradients, and the one before it was over older values."""
    run_kept_ranks(run_checkpointed_in_turns, world_size)
