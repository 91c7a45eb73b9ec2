"""Comparisons that name the parameter and say how far off it is, with tolerances that have a reason."""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = [
    "GRADIENTS",
    "TRAINED",
    "Tolerance",
    "assert_bitwise",
    "assert_close",
    "assert_same_names",
]

_WORST_SHOWN = 5


class Tolerance:
    """``|actual - expected| <= atol + rtol * |expected|``."""

    def __init__(self, rtol: float, atol: float) -> None:
        self.rtol = rtol
        self.atol = atol


# One backward in float32.  Sums over ranks and over rows are taken in another order than by the dense model: a few
# dozen roundings of 2**-24, on values of order one that may cancel.
GRADIENTS = Tolerance(rtol=2e-5, atol=2e-6)

# Four AdamW steps of 1e-2.  A step is lr * m / (sqrt(v) + eps): a relative error d of the gradient moves the parameter
# by lr * d, so 4 steps move parameters of order 0.1 by 4e-2 * 1e-4 where gradients agree to 1e-4 (the smallest ones).
TRAINED = Tolerance(rtol=2e-4, atol=4e-6)


def assert_same_names(expected: Mapping[str, object], actual: Mapping[str, object]) -> None:
    """Equal keys in equal order."""
    missing = [name for name in expected if name not in actual]
    extra = [name for name in actual if name not in expected]
    assert not missing, f"missing {missing}, unexpected {extra}"
    assert not extra, f"unexpected {extra}"
    assert list(actual) == list(expected), f"order is {list(actual)}, expected {list(expected)}"


def assert_close(
    expected: Mapping[str, torch.Tensor | None],
    actual: Mapping[str, torch.Tensor | None],
    tolerance: Tolerance,
    *,
    none_is_zero: bool = False,
) -> None:
    """Equal names, shapes, dtypes and values; None where expected (or zeros, if that counts)."""
    assert_same_names(expected, actual)
    wrong = []
    for name, want in expected.items():
        problem = _difference(want, actual[name], tolerance, none_is_zero=none_is_zero)
        if problem:
            wrong.append(f"{name}: {problem}")
    shown = "\n  ".join(wrong[:_WORST_SHOWN])
    assert not wrong, f"{len(wrong)} of {len(expected)} tensors differ:\n  {shown}"


def assert_bitwise(
    expected: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor]
) -> None:
    """Equal names and bits."""
    assert_close(expected, actual, Tolerance(0.0, 0.0))


def _difference(
    want: torch.Tensor | None,
    got: torch.Tensor | None,
    tolerance: Tolerance,
    *,
    none_is_zero: bool,
) -> str:
    if want is None or got is None:
        other = got if want is None else want
        if other is None or (none_is_zero and not other.any()):
            return ""
        return f"expected {_kind(want)}, got {_kind(got)}"
    if want.shape != got.shape or want.dtype != got.dtype:
        return f"expected {_kind(want)}, got {_kind(got)}"
    if want.is_complex():
        want, got = (torch.view_as_real(tensor.resolve_conj()) for tensor in (want, got))
    if want.dtype.is_floating_point:
        off = (got.double() - want.double()).abs()
        bound = tolerance.atol + tolerance.rtol * want.double().abs()
        bad = ~(off <= bound)  # a NaN is bad
    else:
        off = (got.long() - want.long()).abs()
        bad = off != 0
    if not bad.any():
        return ""
    return f"{int(bad.sum())} of {bad.numel()} elements differ, by at most {off.max().item():.3g}"


def _kind(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
