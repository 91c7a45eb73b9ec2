"""What users choose: names, defaults and field order of the reference; wrong values are refused when given."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from torch import nn

import fsdp
from fsdp import config
from fsdp.errors import ConfigError, ConfigTypeError

BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
FIELDS = {
    config.MixedPrecision: {
        "param_dtype": None,
        "reduce_dtype": None,
        "buffer_dtype": None,
        "keep_low_precision_grads": False,
        "cast_forward_inputs": False,
        "cast_root_forward_inputs": True,
        "_module_classes_to_ignore": BATCH_NORMS,
    },
    config.CPUOffload: {"offload_params": False},
    config.StateDictConfig: {"offload_to_cpu": False},
    config.FullStateDictConfig: {"offload_to_cpu": False, "rank0_only": False},
    config.LocalStateDictConfig: {"offload_to_cpu": False},
    config.ShardedStateDictConfig: {"offload_to_cpu": False, "_use_dtensor": False},
    config.OptimStateDictConfig: {"offload_to_cpu": True},
    config.FullOptimStateDictConfig: {"offload_to_cpu": True, "rank0_only": False},
    config.LocalOptimStateDictConfig: {"offload_to_cpu": False},
    config.ShardedOptimStateDictConfig: {"offload_to_cpu": True, "_use_dtensor": False},
}
OURS = {  # fields the reference has not come after its own
    config.CPUOffload: {"offload_optimizer": False, "folder": None},
    config.MixedPrecision: {
        "rules": None,
        "output_dtype": None,
        "master_dtype": None,
        "full_precision_in_eval": False,
    },
}
MEMBERS = {
    config.ShardingStrategy: [
        "FULL_SHARD",
        "SHARD_GRAD_OP",
        "NO_SHARD",
        "HYBRID_SHARD",
        "_HYBRID_SHARD_ZERO2",
    ],
    config.BackwardPrefetch: ["BACKWARD_PRE", "BACKWARD_POST"],
    config.StateDictType: ["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"],
    config.OptimStateKeyType: ["PARAM_NAME", "PARAM_ID"],
    config.TrainingState: ["IDLE", "FORWARD_BACKWARD", "SUMMON_FULL_PARAMS"],
}
FLAGS = [
    (kind, name)
    for kind, defaults in FIELDS.items()
    for name, default in defaults.items()
    if isinstance(default, bool)
]


def ids(values):
    return getattr(values, "__name__", str(values))


@pytest.mark.parametrize("kind", FIELDS, ids=ids)
def test_fields_come_in_the_order_and_with_the_defaults_of_the_reference(kind):
    built, expected = kind(), {**FIELDS[kind], **OURS.get(kind, {})}

    assert expected == {item.name: getattr(built, item.name) for item in dataclasses.fields(kind)}
    assert list(expected) == [item.name for item in dataclasses.fields(kind)]


@pytest.mark.parametrize("kind", MEMBERS, ids=ids)
def test_enums_have_exactly_the_members_of_the_reference(kind):
    assert MEMBERS[kind] == [member.name for member in kind]


@pytest.mark.parametrize("name", sorted(set(config.__all__) - {"TrainingState"}))
def test_every_name_can_be_imported_from_the_package(name):
    assert getattr(fsdp, name) is getattr(config, name)


def test_settings_default_to_whole_state_dicts():
    settings = config.StateDictSettings()

    assert settings.state_dict_type is config.StateDictType.FULL_STATE_DICT
    assert settings.state_dict_config == config.FullStateDictConfig()
    assert settings.optim_state_dict_config == config.FullOptimStateDictConfig()
    assert settings.state_dict_config is not config.StateDictSettings().state_dict_config


@pytest.mark.parametrize(
    "value",
    [
        config.MixedPrecision(param_dtype=torch.bfloat16, _module_classes_to_ignore=(nn.Linear,)),
        config.CPUOffload(offload_params=True),
        config.FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        config.StateDictSettings(config.StateDictType.SHARDED_STATE_DICT),
        config.ShardingStrategy._HYBRID_SHARD_ZERO2,
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_survive_pickling_and_deep_copies(value):
    assert value == pickle.loads(pickle.dumps(value))
    assert value == copy.deepcopy(value)


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype", "buffer_dtype"])
@pytest.mark.parametrize("value", ["bfloat16", 16, float])
def test_a_dtype_of_another_type_is_a_type_error_that_names_it(name, value):
    with pytest.raises(ConfigTypeError, match=rf"MixedPrecision\.{name}") as caught:
        config.MixedPrecision(**{name: value})

    assert isinstance(caught.value, TypeError)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype", "buffer_dtype"])
@pytest.mark.parametrize("value", [torch.int32, torch.bool, torch.complex64])
def test_a_dtype_that_is_not_floating_is_a_value_error_that_names_it(name, value):
    with pytest.raises(ConfigError, match=rf"MixedPrecision\.{name} is {value}") as caught:
        config.MixedPrecision(**{name: value})

    assert isinstance(caught.value, ValueError)
    assert not isinstance(caught.value, TypeError)


@pytest.mark.parametrize(("kind", "name"), FLAGS, ids=ids)
@pytest.mark.parametrize("value", ["False", None, 2, []])
def test_a_flag_that_is_no_truth_value_is_a_type_error_that_names_it(kind, name, value):
    with pytest.raises(ConfigTypeError, match=rf"{kind.__name__}\.{name}"):
        kind(**{name: value})


@pytest.mark.parametrize(("kind", "name"), FLAGS, ids=ids)
def test_a_flag_may_be_given_as_a_number(kind, name):
    assert kind(**{name: 1}) == kind(**{name: True})


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([nn.Linear], (nn.Linear,)),
        ((), ()),
        (None, ()),
        (nn.Linear, (nn.Linear,)),
    ],
    ids=str,
)
def test_classes_that_are_not_cast_are_kept_as_a_tuple(given, kept):
    assert kept == config.MixedPrecision(_module_classes_to_ignore=given)._module_classes_to_ignore


@pytest.mark.parametrize("given", [["BatchNorm1d"], [int], [nn.Linear(1, 1)]], ids=str)
def test_classes_that_are_not_cast_have_to_be_module_classes(given):
    with pytest.raises(ConfigTypeError, match="_module_classes_to_ignore"):
        config.MixedPrecision(_module_classes_to_ignore=given)


@pytest.mark.parametrize("kind", [config.MixedPrecision, config.CPUOffload], ids=ids)
def test_what_the_constructor_has_folded_can_not_be_assigned_to(kind):
    built = kind()

    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(built, dataclasses.fields(kind)[0].name, True)
    assert hash(built) == hash(kind())


def test_state_dict_configs_can_be_assigned_to_as_accelerate_does():
    built = config.FullStateDictConfig()

    built.offload_to_cpu = built.rank0_only = True

    assert built == config.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)


def test_printing_shows_what_differs_from_the_defaults():
    assert repr(config.MixedPrecision()) == "MixedPrecision()"
    assert repr(config.CPUOffload(True)) == "CPUOffload(offload_params=True)"
    assert (
        repr(config.MixedPrecision(torch.float16, cast_root_forward_inputs=False))
        == "MixedPrecision(param_dtype=torch.float16, cast_root_forward_inputs=False)"
    )
    assert repr(config.FullStateDictConfig(rank0_only=True)) == (
        "FullStateDictConfig(rank0_only=True)"
    )
