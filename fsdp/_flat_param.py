"""Flat parameters and their handles under the underscored path that tools import them from."""

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
