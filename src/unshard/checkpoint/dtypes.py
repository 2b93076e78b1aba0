"""The dtypes that a checkpoint may hold, by the names they have in its manifest."""

from __future__ import annotations

import torch

from ..errors import CheckpointError

_NAMES = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex32 complex64 "
    "complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
)
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split()}
_BY_DTYPE = {dtype: name for name, dtype in DTYPES.items()}


def name_of_dtype(dtype: torch.dtype, where: str) -> str:
    if dtype not in _BY_DTYPE:
        raise CheckpointError(f"{where} has the dtype {dtype}, which a checkpoint cannot hold. Convert it before.")
    return _BY_DTYPE[dtype]
