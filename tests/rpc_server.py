"""RPC servers for tests: real ones in processes of their own, and things that answer like none should."""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

HOST = "127.0.0.1"
START_LIMIT_S = 20.0
HELLO_REQUEST = struct.pack("<BQ", 14, 24) + bytes(24)  # RPC_CMD_HELLO, size, no capabilities


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class RpcServer:
    """A running ``ggufmoe rpc-server`` on the loopback address, with one CPU thread."""

    process: subprocess.Popen[bytes]
    port: int

    @property
    def endpoint(self) -> str:
        return f"{HOST}:{self.port}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """SIGSTOP: the system still accepts connections in its name, but nothing answers."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@contextmanager
def running_rpc_server(*, host: str = HOST) -> Iterator[RpcServer]:
    """A server that accepts connections; killed at the end, whatever became of it."""
    port = free_port()
    command = [sys.executable, "-m", "ggufmoe", "rpc-server", "--host", host, "--port", str(port)]
    command += ["--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        server = RpcServer(process, port)
        _wait_until_it_accepts(server)
        yield server
    finally:
        process.kill()
        process.wait()


def _wait_until_it_accepts(server: RpcServer) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise RuntimeError(f"the RPC server ended at once with status {server.process.returncode}")
        with suppress(OSError), socket.create_connection((HOST, server.port), timeout=1):
            return
        time.sleep(0.02)
    raise RuntimeError(f"the RPC server did not listen on {server.endpoint} within {START_LIMIT_S:.0f} s")


@contextmanager
def listener(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of something that accepts connections and does ``answer`` with each, in a thread of its own.

    A connection stays open until the end of the block, unless ``answer`` closes it.
    """
    with socket.create_server((HOST, 0)) as server:
        connections: list[socket.socket] = []

        def serve() -> None:
            with suppress(OSError):  # at the end, the listening socket is shut down under our feet
                while True:
                    connections.append(server.accept()[0])
                    threading.Thread(target=_quietly, args=(answer, connections[-1]), daemon=True).start()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"{HOST}:{server.getsockname()[1]}"
        finally:
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()


def _quietly(answer: Callable[[socket.socket], None], connection: socket.socket) -> None:
    with suppress(OSError):  # the other side may hang up whenever it likes
        answer(connection)


def says_nothing(connection: socket.socket) -> None:
    """Accepts, and is silent."""


def hangs_up(connection: socket.socket) -> None:
    connection.recv(len(HELLO_REQUEST))
    connection.shutdown(socket.SHUT_RDWR)


def speaks_http(connection: socket.socket) -> None:
    connection.recv(len(HELLO_REQUEST))
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    connection.shutdown(socket.SHUT_RDWR)


def greets_first(connection: socket.socket) -> None:
    """As SSH and mail servers do."""
    connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")


def echoes(connection: socket.socket) -> None:
    while data := connection.recv(4096):
        connection.sendall(data)


def hello(major: int, minor: int, patch: int = 0) -> bytes:
    """An RPC server's answer to HELLO: size, version, no capabilities."""
    return struct.pack("<QBBBB", 4 + 24, major, minor, patch, 0) + bytes(24)


def of_version(major: int, minor: int) -> Callable[[socket.socket], None]:
    """Says HELLO in that version, and nothing else."""

    def answer(connection: socket.socket) -> None:
        connection.recv(len(HELLO_REQUEST))
        connection.sendall(hello(major, minor))

    return answer


def trickles(connection: socket.socket) -> None:
    """The right answer, but a byte every two seconds: never silent for long, and never done."""
    connection.recv(len(HELLO_REQUEST))
    for byte in hello(7, 0):
        connection.sendall(bytes([byte]))
        time.sleep(2)


@contextmanager
def proxy(server: RpcServer, *, n_connections: int = 10**9, n_bytes: int = 10**12) -> Iterator[str]:
    """The address of what passes everything on to ``server`` and back, and fails at one point.

    It is silent on every connection after the first ``n_connections``, and hangs up on all of them when the
    client has sent ``n_bytes`` together.
    """
    lock = threading.Lock()
    ends: list[socket.socket] = []
    n_seen = n_sent = 0

    def answer(connection: socket.socket) -> None:
        nonlocal n_seen
        with lock:
            n_seen += 1
            if n_seen > n_connections:
                return
        with socket.create_connection((HOST, server.port)) as upstream:
            ends.extend((connection, upstream))
            for end in (connection, upstream):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=_quietly, args=(lambda end: back(upstream, end), connection)).start()
            while data := connection.recv(65536):
                there(data, upstream)
            upstream.shutdown(socket.SHUT_WR)

    def there(data: bytes, upstream: socket.socket) -> None:
        nonlocal n_sent
        with lock:
            n_sent += len(data)
            if n_sent > n_bytes:
                for end in ends:
                    with suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)
        upstream.sendall(data)

    def back(upstream: socket.socket, connection: socket.socket) -> None:
        while data := upstream.recv(65536):
            connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)

    with listener(answer) as endpoint:
        yield endpoint
