"""RPC servers: find out whether one answers before llama.cpp does, which would end the process if not.

llama.cpp aborts when a server cannot be reached, speaks another protocol, or goes away (ggml-rpc.cpp,
``RPC_STATUS_ASSERT``). So we say hello first; and once connected, silence is limited on the socket itself, so
that a stopped server ends in an abort that ``ggufmoe.native.aborts`` turns into an error.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys

import psutil

from ..errors import NativeError, UsageError
from . import declarations as c
from .devices import Device, find_device, register_rpc_devices
from .library import require_rpc

CONNECT_TIMEOUT_S = 5.0
SILENCE_LIMIT_S = 8.0


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """``HOST:PORT`` -> (host, port). Raises: UsageError."""
    host, _, port = endpoint.rpartition(":")
    if not host or ":" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"{endpoint!r} is not the address of an RPC server, for example 192.168.1.7:50052")
    return host, int(port)


def add_rpc_server(endpoint: str) -> tuple[Device, ...]:
    """Make the devices of an RPC server known by name (``RPC0``, ``RPC1``, ...).

    Raises: UsageError for a malformed address; NativeError, within ``CONNECT_TIMEOUT_S`` seconds, if nothing
    answers there, or something else does, or a server of another version.
    """
    parse_endpoint(endpoint)
    require_rpc()
    _say_hello(endpoint)
    return register_rpc_devices(endpoint)


def _say_hello(endpoint: str) -> None:
    """The first exchange of ggml's RPC protocol, in Python: ``RPC_CMD_HELLO`` in ggml-rpc.cpp."""
    host, port = parse_endpoint(endpoint)
    request = struct.pack("<BQ", c.RPC_CMD_HELLO, c.RPC_CONN_CAPS_SIZE) + bytes(c.RPC_CONN_CAPS_SIZE)
    expected = 4 + c.RPC_CONN_CAPS_SIZE
    try:
        with socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S) as connection:
            connection.sendall(request)
            reply = b""
            while len(reply) < 8 + expected:
                part = connection.recv(8 + expected - len(reply))
                if not part:
                    raise NativeError(
                        f"{endpoint}: the connection was closed at the first message; no llama.cpp RPC server, "
                        "or one of another version.",
                        hint="Start it with the same llama.cpp: `ggufmoe rpc-server`.",
                    )
                reply += part
                if len(reply) >= 8 and struct.unpack_from("<Q", reply)[0] != expected:
                    raise NativeError(
                        f"{endpoint}: something answers there, but it is no llama.cpp RPC server."
                    )
    except TimeoutError as error:
        raise NativeError(
            f"{endpoint}: no answer within {CONNECT_TIMEOUT_S:.0f} s.",
            hint="Is the address right, and is no other program using the server? It serves one at a time.",
        ) from error
    except OSError as error:
        raise NativeError(
            f"{endpoint}: no RPC server can be reached there ({error.strerror or error}).",
            hint="Start one on that machine with `ggufmoe rpc-server`.",
        ) from error
    version = (reply[8], reply[9])
    if version != c.RPC_PROTO_VERSION:
        stated, known = (".".join(map(str, v)) for v in (version, c.RPC_PROTO_VERSION))
        raise NativeError(
            f"{endpoint}: the server speaks version {stated} of the RPC protocol, we speak {known}.",
            hint="Use the same llama.cpp on both machines: `ggufmoe rpc-server`.",
        )


def limit_silence(endpoint: str, seconds: float = SILENCE_LIMIT_S) -> None:
    """Let our connections to ``endpoint`` fail after ``seconds`` without a byte in either direction.

    llama.cpp sets no time limit of its own: a server that is stopped, or whose cable is pulled, would hang us.
    Not on Windows, where a socket cannot be found by its peer; there the limit is the system's own.
    """
    if sys.platform == "win32":
        return
    host, port = parse_endpoint(endpoint)
    peers = {info[4][0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))  # struct timeval
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr and connection.raddr.port == port and connection.raddr.ip in peers:
            with socket.socket(fileno=os.dup(connection.fd)) as shared:
                shared.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                shared.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def serve_rpc(host: str, port: int, device_name: str, n_threads: int) -> None:
    """Serve a device of this machine to others; returns only if the port cannot be used.

    The protocol has no password and trusts its clients: keep it to networks you trust.
    """
    functions = require_rpc()
    device = find_device(device_name)
    devices = (ctypes.c_void_p * 1)(device.address)
    functions.ggml_backend_rpc_start_server(f"{host}:{port}".encode(), None, n_threads, 1, devices)
