"""Tensors in nested values: all of them are found, in order, and mapping keeps everything else as it was."""

from __future__ import annotations

import collections
import dataclasses
import types
import typing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence
from torch.utils import _pytree as torch_pytree

from fsdp._pytree import iter_tensors, map_tensors

A, B, C = torch.zeros(2), torch.ones(3), torch.full((1,), 2.0)


class Named(typing.NamedTuple):
    x: object
    y: object


class Renewed(Named):
    """A named tuple that is not made from its fields."""

    def __new__(cls):
        return super().__new__(cls, A, B)


@dataclasses.dataclass
class Plain:
    x: object
    rest: object = None
    late: object = dataclasses.field(init=False)  # never set


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: object
    rest: object = None

    def __post_init__(self):
        object.__setattr__(self, "note", "kept")


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: object
    rest: object = None


class OutputBase(collections.OrderedDict):
    """What transformers' ModelOutput does: items and attributes are the same, None fields are no items."""

    def __post_init__(self):
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if value is not None:
                super().__setitem__(item.name, value)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __getitem__(self, key):
        return dict(self.items())[key] if isinstance(key, str) else tuple(self.values())[key]

    def update(self, *args, **kwargs):
        raise RuntimeError("not allowed")


@dataclasses.dataclass
class Output(OutputBase):
    logits: object  # required: the class can not be called without arguments
    loss: object = None
    hidden: object = None


class Tagged(dict):
    """A dict with an attribute and a constructor of its own."""

    def __init__(self, tag, items):
        super().__init__(items)
        self.tag = tag


class TaggedList(list):
    def __init__(self, tag, items):
        super().__init__(items)
        self.tag = tag


class Encoding(collections.UserDict):
    """As transformers' BatchEncoding."""


class Registered:
    def __init__(self, inner):
        self.inner = inner


torch_pytree.register_pytree_node(
    Registered, lambda tree: ([tree.inner], None), lambda children, _: Registered(*children)
)


class Opaque:
    """Not a container, though it has tensors."""

    def __init__(self):
        self.x = A


def defaults():
    made = collections.defaultdict(list)
    made["a"] = A
    return made


def tree_with(x, y):
    """One of each kind, all around the same two tensors."""
    return {
        "tensor": x,
        "tuple": (x, y),
        "list": [x, 1, y],
        "dict": {"x": x, "y": [y], "n": None},
        "named": Named(x, {"y": y}),
        "renewed": Renewed(),
        "ordered": collections.OrderedDict(x=x, y=y),
        "default": defaults(),
        "user dict": Encoding({"x": x}),
        "tagged": Tagged("t", {"x": x}),
        "tagged list": TaggedList("t", [x]),
        "deque": collections.deque([x, y]),
        "dataclass": Plain(x, [y]),
        "frozen": Frozen(x, (y,)),
        "slotted": Slotted(x, (y,)),
        "output": Output(logits=x, hidden=(y, y)),
        "registered": Registered([x]),
        "proxy": types.MappingProxyType({"x": x}),
        "returned": torch.max(torch.eye(2), 0),
        "packed": pack_sequence([torch.ones(2, 1), torch.ones(1, 1)]),
        "nothing": (None, True, 1, 2.0, "a", b"b", torch.float32, Opaque(), Plain, range(3)),
    }


KINDS = list(tree_with(A, B))
CHANGING = [kind for kind in KINDS if kind != "nothing"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_in_which_nothing_changes_stays_the_same_object(kind):
    tree = tree_with(A, B)[kind]

    assert map_tensors(lambda tensor: tensor, tree) is tree


@pytest.mark.parametrize("kind", CHANGING)
def test_what_mapping_visits_is_what_iteration_finds(kind):
    tree = tree_with(A, B)[kind]
    found = iter_tensors(tree)
    visited = []

    map_tensors(lambda tensor: visited.append(tensor) or tensor, tree)

    assert found
    assert [id(tensor) for tensor in found] == [id(tensor) for tensor in visited]


@pytest.mark.parametrize("kind", CHANGING)
def test_mapping_changes_every_tensor_once_and_keeps_the_class(kind):
    tree = tree_with(A, B)[kind]
    before = iter_tensors(tree)

    mapped = map_tensors(lambda tensor: tensor + 1, tree)

    assert type(mapped) is type(tree)
    assert mapped is not tree
    after = iter_tensors(mapped)
    assert len(before) == len(after)
    assert all(torch.equal(old + 1, new) for old, new in zip(before, after, strict=True))
    assert all(old is new for old, new in zip(before, iter_tensors(tree), strict=True))


def test_tensors_come_in_order_and_as_often_as_they_occur():
    tree = {"b": B, "a": [A, (C, B)], "end": A}

    assert [id(t) for t in (B, A, C, B, A)] == [id(t) for t in iter_tensors(tree)]


def test_a_bare_tensor_is_one_tensor():
    assert len(iter_tensors(A)) == 1
    assert iter_tensors(A)[0] is A
    assert map_tensors(lambda tensor: B, A) is B


@pytest.mark.parametrize(
    "tree",
    [None, 3, "abc", [], {}, (), Opaque(), Plain, range(2)],
    ids=lambda tree: type(tree).__name__,
)
def test_anything_else_holds_no_tensor_and_is_left_alone(tree):
    assert [] == iter_tensors(tree)
    assert map_tensors(torch.neg, tree) is tree


def test_a_generator_is_not_consumed():
    tree = (tensor for tensor in (A, B))

    assert [] == iter_tensors(tree)
    assert map_tensors(torch.neg, tree) is tree
    assert len(list(tree)) == 2


def test_parts_that_do_not_change_stay_the_same_objects():
    kept, other = {"x": A}, [B]

    mapped = map_tensors(lambda tensor: tensor + 1 if tensor is B else tensor, (kept, other))

    assert mapped[0] is kept
    assert mapped[1] is not other


def test_a_set_is_mapped_to_a_set():
    mapped = map_tensors(lambda tensor: tensor + 1, {A, 3})

    assert isinstance(mapped, set)
    assert 3 in mapped
    assert [1.0, 1.0] == iter_tensors(mapped)[0].tolist()


def test_a_mapping_keeps_its_order_its_attributes_and_its_default():
    tagged = map_tensors(torch.neg, Tagged("t", {"b": B, "n": 1, "a": A}))
    assert tagged.tag == "t"
    assert list(tagged) == ["b", "n", "a"]
    assert map_tensors(torch.neg, TaggedList("u", [B])).tag == "u"
    assert map_tensors(torch.neg, defaults())["missing"] == []


def test_dataclasses_keep_what_is_no_field_and_what_was_never_set():
    mapped = map_tensors(torch.neg, Frozen(B))
    assert mapped.note == "kept"
    assert not hasattr(map_tensors(torch.neg, Plain(B)), "late")


def test_a_dataclass_that_is_a_dict_changes_items_and_attributes_alike():
    tree = Output(logits=A, hidden=(B, None))

    mapped = map_tensors(lambda tensor: tensor + 1, tree)

    assert mapped.logits is mapped["logits"] is mapped[0]
    assert mapped.hidden is mapped["hidden"]
    assert list(mapped) == ["logits", "hidden"]
    assert mapped.loss is None
    assert tree.logits is tree["logits"] is A


def test_a_packed_sequence_keeps_its_batch_sizes():
    lengths = torch.tensor([1, 3])
    packed = pack_padded_sequence(torch.ones(2, 3, 1), lengths, True, enforce_sorted=False)

    mapped = map_tensors(lambda t: t.double() if t.is_floating_point() else t.clone(), packed)

    assert mapped.data.dtype == torch.float64
    assert mapped.batch_sizes is packed.batch_sizes
    assert mapped.sorted_indices is not packed.sorted_indices
    assert torch.equal(mapped.unsorted_indices, packed.unsorted_indices)


leaves = st.sampled_from([A, B, C, None, 1, "a"])
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        | st.builds(Named, inner, inner)
        | st.builds(Frozen, inner, inner)
        | st.builds(Registered, inner)
    ),
    max_leaves=12,
)


@given(trees)
def test_any_nesting_is_mapped_tensor_by_tensor(tree):
    before = iter_tensors(tree)

    mapped = map_tensors(lambda tensor: tensor + 1, tree)

    after = iter_tensors(mapped)
    assert len(before) == len(after)
    assert all(torch.equal(old + 1, new) for old, new in zip(before, after, strict=True))
    assert (mapped is tree) == (not before)
    assert map_tensors(lambda tensor: tensor, mapped) is mapped
