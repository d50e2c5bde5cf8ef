"""RPC servers: find out whether one answers before llama.cpp does, which would end the process if not.

llama.cpp aborts when a server cannot be reached, speaks another protocol, or goes away (ggml-rpc.cpp,
``RPC_STATUS_ASSERT``). So we say hello first; and once connected, silence is limited on the socket itself, so
that a stopped server ends in an abort that ``ggufmoe.native.aborts`` turns into an error.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from ..errors import NativeAbort, NativeError, UsageError
from . import declarations as c
from .aborts import past_aborts
from .devices import Device, find_device, register_rpc_devices
from .library import require_rpc

CONNECT_TIMEOUT_S = 5.0
SILENCE_LIMIT_S = 8.0


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """``HOST:PORT`` -> (host, port); IPv4 only, as in llama.cpp. Raises: UsageError."""
    match = re.fullmatch(r"([A-Za-z0-9._-]+):([0-9]{1,5})", endpoint)
    if match is None or not 0 < int(match[2]) < 65536:
        raise UsageError(f"{endpoint!r} is not the address of an RPC server, for example 192.168.1.7:50052")
    return match[1], int(match[2])


def add_rpc_server(endpoint: str) -> tuple[Device, ...]:
    """Make the devices of an RPC server known by name (``RPC0``, ``RPC1``, ...).

    Raises: UsageError for a malformed address; NativeError, within ``CONNECT_TIMEOUT_S`` seconds, if nothing
    answers there, or something else does, or a server of another version; NativeAbort if it answers at first
    and then no more.
    """
    parse_endpoint(endpoint)
    require_rpc()
    _say_hello(endpoint)
    if any("ggml-rpc" in message for message in past_aborts):
        # The parked thread holds the lock of ggml's list of connections, or the connection itself.
        raise NativeError(
            f"{endpoint}: an RPC server was lost before, and llama.cpp cannot connect again in this process.",
            hint="Start the program again.",
        )
    with connecting(endpoint):
        return register_rpc_devices(endpoint)


def _say_hello(endpoint: str) -> None:
    """The first exchange of ggml's RPC protocol, in Python: ``RPC_CMD_HELLO`` in ggml-rpc.cpp."""
    host, port = parse_endpoint(endpoint)
    request = struct.pack("<BQ", c.RPC_CMD_HELLO, c.RPC_CONN_CAPS_SIZE) + bytes(c.RPC_CONN_CAPS_SIZE)
    expected = 4 + c.RPC_CONN_CAPS_SIZE
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    try:
        with socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S) as connection:
            connection.sendall(request)
            reply = b""
            while len(reply) < 8 + expected:
                connection.settimeout(max(deadline - time.monotonic(), 0.001))
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
            f"{endpoint}: no answer within {CONNECT_TIMEOUT_S:g} s.",
            hint="Is the address right, and is no other program using the server? It serves one at a time.",
        ) from error
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that cannot be one, such as "a..b"
        raise NativeError(
            f"{endpoint}: no RPC server can be reached there ({getattr(error, 'strerror', None) or error}).",
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
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))  # struct timeval
    for connection in _connections(endpoint):
        with connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


@contextmanager
def connecting(*endpoints: str) -> Iterator[None]:
    """Hang up if connecting to these servers inside the block takes longer than ``CONNECT_TIMEOUT_S``.

    For calls that connect and wait for the answer at once, so that no limit can be set in between.
    Raises: NativeAbort that names the servers, if one is lost inside the block.
    """
    timer = threading.Timer(CONNECT_TIMEOUT_S, _hang_up, endpoints)
    timer.daemon = True
    timer.start()
    try:
        yield
    except NativeAbort as error:
        servers = ", ".join(endpoints)
        raise NativeAbort(f"{servers}: the RPC server was lost. {error}", hint=error.hint) from error
    finally:
        timer.cancel()


def _hang_up(*endpoints: str) -> None:
    for endpoint in endpoints:
        for connection in _connections(endpoint):
            with connection, suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _connections(endpoint: str) -> Iterator[socket.socket]:
    """This process's connections to ``endpoint``, each as another handle to the same socket."""
    if sys.platform == "win32":
        return
    host, port = parse_endpoint(endpoint)
    peers = {info[4][0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr and connection.raddr.port == port and connection.raddr.ip in peers:
            yield socket.socket(fileno=os.dup(connection.fd))


def serve_rpc(host: str, port: int, device_name: str, n_threads: int) -> None:
    """Serve a device of this machine to others, until Ctrl-C.

    The protocol has no password and trusts its clients: keep it to networks you trust.
    Raises: UsageError if there is no such device, or ``host`` has no IPv4 address; NativeError if the port cannot
    be used.
    """
    functions = require_rpc()
    device = find_device(device_name)
    devices = (ctypes.c_void_p * 1)(device.address)
    try:
        address = socket.gethostbyname(host)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{host!r} is not an IPv4 address of this machine, nor the name of one.") from error
    try:  # ggml says neither what is wrong nor that something is
        socket.create_server((address, port)).close()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise NativeError(
            f"{host}:{port} cannot be used for a server ({reason}).",
            hint="Choose another --port, or a --host that is an address of this machine.",
        ) from error
    if threading.current_thread() is threading.main_thread():
        # Python's handler would wait for ggml to return, which goes on with the next client instead.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    functions.ggml_backend_rpc_start_server(f"{address}:{port}".encode(), None, n_threads, 1, devices)
    raise NativeError(f"The RPC server on {host}:{port} stopped.")
