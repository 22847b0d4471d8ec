"""The compiled library's functions and structures, as ctypes sees them. Field order follows the C++ headers."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any, ClassVar, TypeAlias

from sglite.kernels.native.build import BuildError, library

DENSE, INT8, INT4 = 0, 1, 2
"""Matrix formats."""

_Fields: TypeAlias = "list[tuple[str, Any]]"


class Matrix(Structure):
    _fields_: ClassVar[_Fields] = [
        ("format", c_int32),
        ("rows", c_int32),
        ("columns", c_int32),
        ("padded_columns", c_int32),
        ("codes", c_void_p),
        ("scale", c_void_p),
        ("minimum", c_void_p),
        ("sums", c_void_p),
        ("bias", c_void_p),
    ]


class Batch(Structure):
    _fields_: ClassVar[_Fields] = [
        ("tokens", c_int32),
        ("rows", c_int32),
        ("wanted", c_int32),
        ("pages_per_row", c_int32),
        ("page_size", c_int32),
        ("unused", c_int32),
        ("ids", c_void_p),
        ("positions", c_void_p),
        ("indptr", c_void_p),
        ("kv_lengths", c_void_p),
        ("page_table", c_void_p),
        ("write_slots", c_void_p),
        ("wanted_tokens", c_void_p),
    ]


class Pool(Structure):
    _fields_: ClassVar[_Fields] = [
        ("keys", c_void_p),
        ("values", c_void_p),
        ("positions", c_int64),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("blocked", c_int32),
        ("unused", c_int32),
    ]


class Attention(Structure):
    _fields_: ClassVar[_Fields] = [
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
    ]


class Layer(Structure):
    _fields_: ClassVar[_Fields] = [
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv", Matrix),
        ("o", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("window", c_int32),
        ("unused", c_int32),
    ]


class Decoder(Structure):
    _fields_: ClassVar[_Fields] = [
        ("layers", c_int32),
        ("hidden", c_int32),
        ("intermediate", c_int32),
        ("vocabulary", c_int32),
        ("eps", c_float),
        ("embedding_kind", c_int32),
        ("attention", Attention),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("layer", POINTER(Layer)),
    ]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "sglite_has_amx": (c_int32, []),
    "sglite_open": (c_void_p, [c_int32, c_int32]),
    "sglite_close": (None, [c_void_p]),
    "sglite_decoder": (c_void_p, [c_void_p, POINTER(Decoder)]),
    "sglite_decoder_free": (None, [c_void_p]),
    "sglite_decoder_run": (None, [c_void_p, POINTER(Batch), POINTER(Pool), c_void_p]),
    "sglite_linear": (None, [c_void_p, POINTER(Matrix), c_void_p, c_int64, c_int32, c_void_p, c_int32]),
    "sglite_rows": (None, [POINTER(Matrix), c_void_p, c_int32, c_void_p]),
    "sglite_write_kv": (
        None,
        [c_void_p, POINTER(Pool), c_int32, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int32],
    ),
    "sglite_attend": (
        None,
        [c_void_p, POINTER(Pool), c_int32, POINTER(Batch), POINTER(Attention), c_void_p, c_void_p],
    ),
    "sglite_choose": (
        None,
        [c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int32, c_int32, c_void_p, c_void_p],
    ),
}


@cache
def load() -> ctypes.CDLL:
    """The library with its signatures declared. Raises BuildError; the failure is not remembered."""
    try:
        loaded = ctypes.CDLL(str(library()))
    except OSError as error:
        raise BuildError(f"the compiled kernels cannot be loaded: {error}") from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded
