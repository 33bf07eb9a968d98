"""Names dtypes as safetensors does, and says in which of those a tensor of another dtype is kept."""

from __future__ import annotations

import torch

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""What safetensors calls the dtypes that it has."""
DTYPES = {name: dtype for dtype, name in NAMES.items()}

KEPT_AS = {
    torch.complex128: torch.float64,
    torch.complex32: torch.float16,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
}
"""Dtypes that safetensors has no name for, and those that hold the same bytes; the header notes which they are."""
NOTE = "autovaruna.dtypes"
"""Where the header notes them, as JSON: by the name of the tensor."""


def kept(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
    """Returns the name of the dtype that a tensor is kept in, and its shape in that; None: it cannot be kept."""
    if dtype in NAMES:
        return NAMES[dtype], shape
    if dtype not in KEPT_AS:
        return None
    as_dtype = KEPT_AS[dtype]
    numbers = dtype.itemsize // as_dtype.itemsize
    return NAMES[as_dtype], (*shape, numbers) if numbers > 1 else shape


def original(name: str, shape: tuple[int, ...], noted: str | None) -> tuple[torch.dtype, tuple[int, ...]]:
    """Returns dtype and shape of a tensor, given those that it is kept in and what the header notes.

    Raises:
        ValueError: there is no such dtype, or the note does not fit.
    """
    if name not in DTYPES:
        raise ValueError(f"a tensor in it is of dtype {name!r}; expected one of {', '.join(DTYPES)}")
    if noted is None:
        return DTYPES[name], shape
    dtype = getattr(torch, noted, None)
    if dtype not in KEPT_AS or KEPT_AS[dtype] != DTYPES[name]:
        raise ValueError(f"its header notes {noted!r} of a tensor of {name}")
    return dtype, shape[:-1] if dtype.itemsize > KEPT_AS[dtype].itemsize else shape


def can_become(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Says whether numbers of a dtype may be read as another: floating point as any floating point, rounded."""
    return dtype == other or (dtype.is_floating_point and other.is_floating_point)
