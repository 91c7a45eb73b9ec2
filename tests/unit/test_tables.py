"""Parameter tables that are exchanged: what each shows, and that what users register reaches all of them."""

import copy
import pickle

import pytest
import torch
from torch import nn

from fsdp.flat.tables import (
    ALWAYS,
    NOTHING,
    Guard,
    ModuleTables,
    Notice,
    Pending,
    ShardedTable,
)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_parameter("bias", None)


def made(guard=ALWAYS, pending=NOTHING):
    """A module, its tables, a leaf and a stand-in; the parameter is registered while sharded unless ``guard`` is on."""
    module = Scaled()
    tables = ModuleTables(module, ["weight"])
    leaf, stand_in = torch.zeros(3), torch.full((3,), 7.0)
    leaves = tables.of_leaves({"weight": leaf})
    registered = {"weight": None if guard is ALWAYS else module.weight}
    sharded = tables.while_sharded(registered, {"weight": stand_in}, guard, Notice(), pending)
    return module, tables, leaves, sharded


def test_a_sharded_table_yields_what_is_registered_and_finds_the_stand_in_while_guarded():
    guard = Guard()
    module, tables, _, sharded = made(guard)
    param = module.weight
    tables.place[ModuleTables.KEY] = sharded
    assert module.weight is param
    guard.on = True
    assert module.weight is not param
    assert float(module.weight.detach().sum()) == 21
    assert [p is param for p in module.parameters()] == [True]
    assert module.bias is None


@pytest.mark.parametrize(
    "read",
    [
        lambda module: module.weight,
        lambda module: module._parameters["weight"],
        lambda module: module._parameters.get("weight"),
        lambda module: next(iter(module._parameters.values())),
        lambda module: next(iter(module._parameters.items()))[1],
        lambda module: module.get_parameter("weight"),
        lambda module: next(module.parameters()),
        lambda module: dict(module.named_parameters())["weight"],
    ],
)
@pytest.mark.parametrize("guard", [ALWAYS, Guard()])
def test_whoever_reads_a_table_while_leaves_are_pending_finds_them_exposed(read, guard):
    pending = Pending(lambda: tables.place.update({ModuleTables.KEY: leaves}))
    module, tables, leaves, sharded = made(guard, pending)
    leaves["weight"] = nn.Parameter(leaves["weight"])
    tables.place[ModuleTables.KEY] = sharded
    pending.on = True
    assert read(module) is leaves["weight"]
    assert not pending.on
    assert module._parameters is leaves


def test_an_exchange_and_back_by_name_leaves_what_was_registered():
    _, tables, _, sharded = made()
    tables.place[ModuleTables.KEY] = sharded
    found = sharded["weight"]
    sharded["weight"] = torch.ones(1)
    assert sharded.get("weight") is not None
    sharded["weight"] = found
    assert sharded.get("weight") is None


@pytest.mark.parametrize("how", [copy.deepcopy, lambda table: pickle.loads(pickle.dumps(table))])
def test_a_copy_is_a_plain_table_without_stand_ins(how):
    _, _, _, sharded = made()
    copied = how(sharded)
    assert type(copied) is dict
    assert copied == {"weight": None, "bias": None}


@pytest.mark.parametrize("found", ["sharded", "leaves", "own"])
def test_what_is_registered_in_one_table_is_in_all_of_them_and_what_is_deleted_in_none(found):
    module, tables, leaves, sharded = made()
    all_tables = {"sharded": sharded, "leaves": leaves, "own": tables.own}
    tables.place[ModuleTables.KEY] = all_tables[found]
    module.register_parameter("extra", nn.Parameter(torch.ones(1), requires_grad=False))
    tables.follow()
    assert all("extra" in table for table in all_tables.values())
    assert dict.get(sharded, "weight") is None
    tables.place[ModuleTables.KEY] = sharded
    del module.extra
    tables.follow()
    assert not any("extra" in table for table in all_tables.values())


def test_a_value_that_replaces_none_beside_the_managed_ones_is_followed():
    module, tables, leaves, sharded = made()
    tables.place[ModuleTables.KEY] = sharded
    module.bias = nn.Parameter(torch.ones(3), requires_grad=False)
    tables.follow()
    assert leaves["bias"] is module.bias is tables.own["bias"]


def test_dissolved_tables_leave_the_modules_own_dictionary_with_what_is_registered():
    guard = Guard()
    module, tables, leaves, sharded = made(guard)
    own, param = tables.own, module.weight
    tables.place[ModuleTables.KEY] = leaves
    tables.place[ModuleTables.KEY] = sharded
    del module.bias
    tables.dissolve()
    assert module._parameters is own
    assert own == {"weight": param}


def test_modules_with_parameters_of_others_or_hidden_ones_do_not_fit():
    module = Scaled()
    assert ModuleTables.fit(module, ["weight"])
    assert not ModuleTables.fit(module, [])
    vars(module)["bias"] = torch.ones(1)  # a stand-in of another handle's
    assert not ModuleTables.fit(module, ["weight"])
    module = Scaled()
    vars(module)["_parameters"] = ShardedTable(
        module._parameters, {}, ALWAYS, Notice(), vars(module), NOTHING
    )
    assert not ModuleTables.fit(module, ["weight"])


@pytest.mark.parametrize(
    "write",
    [
        lambda table: table.__setitem__("weight", None),
        lambda table: table.__delitem__("weight"),
        lambda table: table.__ior__({"weight": None}),
        lambda table: table.pop("weight"),
        lambda table: table.pop("other", None),
        lambda table: table.popitem(),
        lambda table: table.clear(),
        lambda table: table.setdefault("weight"),
        lambda table: table.update(weight=None),
        lambda table: table.update({"weight": None}),
    ],
)
def test_every_way_to_write_into_a_sharded_table_gives_notice(write):
    notice = Notice()
    table = ShardedTable({"weight": torch.ones(1)}, {}, ALWAYS, notice, {}, NOTHING)
    notice.given = False
    assert "weight" in table
    assert len(list(table.values())) == 1
    assert not notice.given
    write(table)
    assert notice.given


def test_a_sharded_table_has_no_way_to_write_that_a_plain_dictionary_got_since():
    ours = {name for name in vars(ShardedTable) if callable(getattr(dict, name, None))}
    reads = {
        "__class_getitem__", "__contains__", "__eq__", "__format__", "__ge__", "__getattribute__", "__gt__", "__hash__",
        "__iter__", "__le__", "__len__", "__lt__", "__ne__", "__new__", "__or__", "__reduce__", "__repr__",
        "__reversed__", "__ror__", "__sizeof__", "__str__", "__subclasshook__", "copy", "fromkeys", "get", "items",
        "keys", "values", "__delattr__", "__dir__", "__init_subclass__", "__setattr__", "__class__", "__getstate__",
    }  # fmt: skip
    assert {name for name in dir(dict) if callable(getattr(dict, name))} <= ours | reads
