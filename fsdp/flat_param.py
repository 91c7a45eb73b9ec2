"""Flat parameters and their handles under the module path users of torch's wrapper import them from."""

from .flat.handle import FlatParamHandle
from .flat.parameter import (
    FlatParameter,
    FlatParamShardMetadata,
    ParamInfo,
    SharedParamInfo,
)

__all__ = [
    "FlatParamHandle",
    "FlatParamShardMetadata",
    "FlatParameter",
    "ParamInfo",
    "SharedParamInfo",
]
