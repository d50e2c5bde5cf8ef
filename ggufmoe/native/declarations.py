"""ctypes declarations for llama.cpp 0c1e57098 (ggml 0.25.3, GGML_BACKEND_API_VERSION 2), and nothing else.

C names stay as they are, in this file only. Every structure is compared with the pinned headers by a
compiled ``offsetof`` probe (``tests/native/test_abi.py``). Function prototypes stand in ``PROTOTYPES``;
``ggufmoe.native.library`` binds them to the handle that llama-cpp-python opened.
"""

from __future__ import annotations

import ctypes
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_bool,
    c_char,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)

GGML_BACKEND_API_VERSION = 2
GGML_MAX_DIMS = 4
GGML_MAX_SRC = 10
GGML_MAX_NAME = 64
GGML_MAX_OP_PARAMS = 64

# enum ggml_status (ggml.h)
GGML_STATUS_SUCCESS = 0
GGML_STATUS_FAILED = -1

# enum ggml_type (ggml.h): the types of activations and of routing ids
GGML_TYPE_F32 = 0
GGML_TYPE_I32 = 26
GGML_TYPE_COUNT = 43

# enum ggml_backend_dev_type (ggml-backend.h)
GGML_BACKEND_DEVICE_TYPE_CPU = 0
GGML_BACKEND_DEVICE_TYPE_GPU = 1
GGML_BACKEND_DEVICE_TYPE_IGPU = 2
GGML_BACKEND_DEVICE_TYPE_ACCEL = 3

# enum ggml_log_level (ggml.h)
GGML_LOG_LEVEL_WARN = 3
GGML_LOG_LEVEL_ERROR = 4
GGML_LOG_LEVEL_CONT = 5

# enum llama_load_mode (llama.h)
LLAMA_LOAD_MODE_NONE = 0
LLAMA_LOAD_MODE_MMAP = 1

# enum llama_split_mode (llama.h)
LLAMA_SPLIT_MODE_LAYER = 1


class ggml_tensor(Structure):
    """ggml/include/ggml.h. Pointers are plain addresses: a POINTER field read through ctypes aliases its slot."""

    _fields_ = [
        ("type", c_int32),
        ("buffer", c_void_p),
        ("ne", c_int64 * GGML_MAX_DIMS),
        ("nb", c_size_t * GGML_MAX_DIMS),
        ("op", c_int32),
        ("op_params", c_int32 * (GGML_MAX_OP_PARAMS // 4)),
        ("flags", c_int32),
        ("src", c_void_p * GGML_MAX_SRC),
        ("view_src", c_void_p),
        ("view_offs", c_size_t),
        ("data", c_void_p),
        ("name", c_char * GGML_MAX_NAME),
        ("extra", c_void_p),
        ("padding", c_char * 8),
    ]


class ggml_type_traits(Structure):
    """ggml/include/ggml.h"""

    _fields_ = [
        ("type_name", c_char_p),
        ("blck_size", c_int64),
        ("blck_size_interleave", c_int64),
        ("type_size", c_size_t),
        ("is_quantized", c_bool),
        ("to_float", CFUNCTYPE(None, c_void_p, c_void_p, c_int64)),  # NULL for types that are no weights
        ("from_float_ref", c_void_p),
    ]


class ggml_init_params(Structure):
    """ggml/include/ggml.h"""

    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


class ggml_hash_set(Structure):
    """ggml/src/ggml-impl.h"""

    _fields_ = [("size", c_size_t), ("used", c_void_p), ("keys", c_void_p)]


class ggml_cgraph(Structure):
    """ggml/src/ggml-impl.h"""

    _fields_ = [
        ("size", c_int),
        ("n_nodes", c_int),
        ("n_leafs", c_int),
        ("nodes", c_void_p),
        ("grads", c_void_p),
        ("grad_accs", c_void_p),
        ("leafs", c_void_p),
        ("use_counts", c_void_p),
        ("visited_hash_set", ggml_hash_set),
        ("order", c_int),
        ("uid", c_uint64),
    ]


# ggml/src/ggml-backend-impl.h ------------------------------------------------------------------------

# char * results are c_void_p: ctypes leaks a c_char_p that a callback returns
get_name_t = CFUNCTYPE(c_void_p, c_void_p)
free_t = CFUNCTYPE(None, c_void_p)
graph_compute_t = CFUNCTYPE(c_int, c_void_p, c_void_p)
supports_op_t = CFUNCTYPE(c_bool, c_void_p, c_void_p)
init_backend_t = CFUNCTYPE(c_void_p, c_void_p, c_void_p)
get_buffer_type_t = CFUNCTYPE(c_void_p, c_void_p)


class ggml_backend_i(Structure):
    _fields_ = [
        ("get_name", get_name_t),
        ("free", free_t),
        ("set_tensor_async", c_void_p),  # optional
        ("get_tensor_async", c_void_p),  # optional
        ("set_tensor_2d_async", c_void_p),  # optional
        ("get_tensor_2d_async", c_void_p),  # optional
        ("cpy_tensor_async", c_void_p),  # optional
        ("synchronize", c_void_p),  # optional: we compute before we return
        ("graph_plan_create", c_void_p),  # optional
        ("graph_plan_free", c_void_p),  # optional
        ("graph_plan_update", c_void_p),  # optional
        ("graph_plan_compute", c_void_p),  # optional
        ("graph_compute", graph_compute_t),
        ("event_record", c_void_p),  # optional
        ("event_wait", c_void_p),  # optional
        ("graph_optimize", c_void_p),  # optional
    ]


class ggml_backend(Structure):
    _fields_ = [("guid", c_void_p), ("iface", ggml_backend_i), ("device", c_void_p), ("context", c_void_p)]


class ggml_backend_dev_caps(Structure):
    """ggml/include/ggml-backend.h"""

    _fields_ = [
        ("async_", c_bool),  # "async" is a keyword in Python
        ("host_buffer", c_bool),
        ("buffer_from_host_ptr", c_bool),
        ("events", c_bool),
        ("mmap_support", c_bool),
    ]


class ggml_backend_dev_props(Structure):
    """ggml/include/ggml-backend.h"""

    _fields_ = [
        ("name", c_void_p),
        ("description", c_void_p),
        ("memory_free", c_size_t),
        ("memory_total", c_size_t),
        ("type", c_int),
        ("device_id", c_void_p),
        ("caps", ggml_backend_dev_caps),
    ]


get_memory_t = CFUNCTYPE(None, c_void_p, POINTER(c_size_t), POINTER(c_size_t))
get_type_t = CFUNCTYPE(c_int, c_void_p)
get_props_t = CFUNCTYPE(None, c_void_p, POINTER(ggml_backend_dev_props))


class ggml_backend_device_i(Structure):
    _fields_ = [
        ("get_name", get_name_t),
        ("get_description", get_name_t),
        ("get_memory", get_memory_t),
        ("get_type", get_type_t),
        ("get_props", get_props_t),
        ("init_backend", init_backend_t),
        ("get_buffer_type", get_buffer_type_t),
        ("get_host_buffer_type", c_void_p),  # optional
        ("buffer_from_host_ptr", c_void_p),  # optional
        ("supports_op", supports_op_t),
        ("supports_buft", c_void_p),  # the CPU device's own function goes here, not a callback
        ("offload_op", c_void_p),  # optional
        ("event_new", c_void_p),  # optional
        ("event_free", c_void_p),  # optional
        ("event_synchronize", c_void_p),  # optional
    ]


class ggml_backend_device(Structure):
    _fields_ = [("iface", ggml_backend_device_i), ("reg", c_void_p), ("context", c_void_p)]


get_device_count_t = CFUNCTYPE(c_size_t, c_void_p)
get_device_t = CFUNCTYPE(c_void_p, c_void_p, c_size_t)
get_proc_address_t = CFUNCTYPE(c_void_p, c_void_p, c_char_p)


class ggml_backend_reg_i(Structure):
    _fields_ = [
        ("get_name", get_name_t),
        ("get_device_count", get_device_count_t),
        ("get_device", get_device_t),
        ("get_proc_address", get_proc_address_t),  # optional
    ]


class ggml_backend_reg(Structure):
    _fields_ = [("api_version", c_int), ("iface", ggml_backend_reg_i), ("context", c_void_p)]


# include/llama.h --------------------------------------------------------------------------------------


class llama_model_tensor_buft_override(Structure):
    _fields_ = [("pattern", c_char_p), ("buft", c_void_p)]


# ggml/include/gguf.h -----------------------------------------------------------------------------------


class gguf_init_params(Structure):
    _fields_ = [("no_alloc", c_bool), ("ctx", c_void_p)]


abort_callback_t = CFUNCTYPE(None, c_char_p)  # ggml_abort_callback_t, ggml.h
log_callback_t = CFUNCTYPE(None, c_int, c_void_p, c_void_p)  # ggml_log_callback, ggml.h

# name -> (result, argument types); structures are named by address, since we build most of them ourselves
PROTOTYPES: dict[str, tuple[object, tuple[object, ...]]] = {
    # ggml.h
    "ggml_version": (c_char_p, ()),
    "ggml_set_abort_callback": (c_void_p, (abort_callback_t,)),
    "ggml_op_name": (c_char_p, (c_int,)),
    "ggml_type_name": (c_char_p, (c_int,)),
    "ggml_type_size": (c_size_t, (c_int,)),
    "ggml_blck_size": (c_int64, (c_int,)),
    "ggml_row_size": (c_size_t, (c_int, c_int64)),
    "ggml_get_type_traits": (POINTER(ggml_type_traits), (c_int,)),
    "ggml_quantize_chunk": (
        c_size_t,
        (c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p),
    ),
    "ggml_validate_row_data": (c_bool, (c_int, c_void_p, c_size_t)),
    "ggml_init": (c_void_p, (ggml_init_params,)),
    "ggml_free": (None, (c_void_p,)),
    "ggml_tensor_overhead": (c_size_t, ()),
    "ggml_graph_overhead_custom": (c_size_t, (c_size_t, c_bool)),
    "ggml_new_tensor_3d": (c_void_p, (c_void_p, c_int, c_int64, c_int64, c_int64)),
    "ggml_view_3d": (
        c_void_p,
        (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_size_t, c_size_t, c_size_t),
    ),
    "ggml_mul_mat_id": (c_void_p, (c_void_p, c_void_p, c_void_p, c_void_p)),
    "ggml_glu": (c_void_p, (c_void_p, c_void_p, c_int, c_bool)),
    "ggml_glu_split": (c_void_p, (c_void_p, c_void_p, c_void_p, c_int)),
    "ggml_new_graph_custom": (c_void_p, (c_void_p, c_size_t, c_bool)),
    "ggml_build_forward_expand": (None, (c_void_p, c_void_p)),
    "ggml_graph_add_node": (None, (c_void_p, c_void_p)),
    # ggml-backend.h
    "ggml_backend_buft_alloc_buffer": (c_void_p, (c_void_p, c_size_t)),
    "ggml_backend_buft_get_alignment": (c_size_t, (c_void_p,)),
    "ggml_backend_buft_get_alloc_size": (c_size_t, (c_void_p, c_void_p)),
    "ggml_backend_buffer_free": (None, (c_void_p,)),
    "ggml_backend_buffer_get_base": (c_void_p, (c_void_p,)),
    "ggml_backend_tensor_alloc": (c_int, (c_void_p, c_void_p, c_void_p)),
    "ggml_backend_view_init": (c_int, (c_void_p,)),
    "ggml_backend_free": (None, (c_void_p,)),
    "ggml_backend_tensor_set": (None, (c_void_p, c_void_p, c_size_t, c_size_t)),
    "ggml_backend_tensor_set_async": (None, (c_void_p, c_void_p, c_void_p, c_size_t, c_size_t)),
    "ggml_backend_tensor_get_async": (None, (c_void_p, c_void_p, c_void_p, c_size_t, c_size_t)),
    "ggml_backend_synchronize": (None, (c_void_p,)),
    "ggml_backend_graph_compute": (c_int, (c_void_p, c_void_p)),
    "ggml_backend_graph_compute_async": (c_int, (c_void_p, c_void_p)),
    "ggml_backend_dev_count": (c_size_t, ()),
    "ggml_backend_dev_get": (c_void_p, (c_size_t,)),
    "ggml_backend_dev_by_type": (c_void_p, (c_int,)),
    "ggml_backend_dev_name": (c_char_p, (c_void_p,)),
    "ggml_backend_dev_description": (c_char_p, (c_void_p,)),
    "ggml_backend_dev_memory": (None, (c_void_p, POINTER(c_size_t), POINTER(c_size_t))),
    "ggml_backend_dev_type": (c_int, (c_void_p,)),
    "ggml_backend_dev_backend_reg": (c_void_p, (c_void_p,)),
    "ggml_backend_dev_init": (c_void_p, (c_void_p, c_void_p)),
    "ggml_backend_dev_buffer_type": (c_void_p, (c_void_p,)),
    "ggml_backend_dev_host_buffer_type": (c_void_p, (c_void_p,)),
    "ggml_backend_reg_dev_count": (c_size_t, (c_void_p,)),
    "ggml_backend_reg_dev_get": (c_void_p, (c_void_p, c_size_t)),
    "ggml_backend_register": (None, (c_void_p,)),
    # ggml-cpu.h
    "ggml_backend_cpu_set_n_threads": (None, (c_void_p, c_int)),
    "ggml_backend_cpu_buffer_type": (c_void_p, ()),
    # gguf.h
    "gguf_init_from_buffer": (c_void_p, (c_char_p, c_size_t, gguf_init_params)),
    "gguf_free": (None, (c_void_p,)),
    "gguf_get_version": (c_uint32, (c_void_p,)),
    "gguf_get_alignment": (c_size_t, (c_void_p,)),
    "gguf_get_data_offset": (c_size_t, (c_void_p,)),
    "gguf_get_n_kv": (c_int64, (c_void_p,)),
    "gguf_get_key": (c_char_p, (c_void_p, c_int64)),
    "gguf_get_kv_type": (c_int, (c_void_p, c_int64)),
    "gguf_get_arr_type": (c_int, (c_void_p, c_int64)),
    "gguf_get_val_data": (c_void_p, (c_void_p, c_int64)),
    "gguf_get_val_str": (c_char_p, (c_void_p, c_int64)),
    "gguf_get_arr_n": (c_size_t, (c_void_p, c_int64)),
    "gguf_get_arr_data": (c_void_p, (c_void_p, c_int64)),
    "gguf_get_arr_str": (c_char_p, (c_void_p, c_int64, c_size_t)),
    "gguf_get_n_tensors": (c_int64, (c_void_p,)),
    "gguf_get_tensor_name": (c_char_p, (c_void_p, c_int64)),
    "gguf_get_tensor_offset": (c_size_t, (c_void_p, c_int64)),
    "gguf_get_tensor_type": (c_int, (c_void_p, c_int64)),
    "gguf_get_tensor_ne": (POINTER(c_int64), (c_void_p, c_int64)),
    "gguf_get_tensor_size": (c_size_t, (c_void_p, c_int64)),
}

# Present only when llama.cpp was built with -DGGML_RPC=ON (ggml-rpc.h)
RPC_PROTOTYPES: dict[str, tuple[object, tuple[object, ...]]] = {
    "ggml_backend_rpc_add_server": (c_void_p, (c_char_p,)),
    "ggml_backend_rpc_start_server": (None, (c_char_p, c_char_p, c_size_t, c_size_t, POINTER(c_void_p))),
}

# ggml/include/ggml-rpc.h and ggml/src/ggml-rpc/transport.h
RPC_PROTO_VERSION = (7, 0)
RPC_CMD_HELLO = 14
RPC_CONN_CAPS_SIZE = 24

# enum gguf_type (gguf.h) -> ctypes scalar; strings and arrays have functions of their own
GGUF_TYPE_STRING = 8
GGUF_TYPE_ARRAY = 9
GGUF_SCALARS: dict[int, type[ctypes._SimpleCData]] = {  # type: ignore[type-arg]
    0: c_uint8,
    1: ctypes.c_int8,
    2: ctypes.c_uint16,
    3: ctypes.c_int16,
    4: c_uint32,
    5: c_int32,
    6: c_float,
    7: c_bool,
    10: c_uint64,
    11: c_int64,
    12: ctypes.c_double,
}
