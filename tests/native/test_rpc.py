"""Real RPC servers on the loopback address: the same logits, and every way a server can fail.

ggml's RPC client is global to a process and never gives up a server, so each session has a process of its own.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rpc_server
from rpc_server import HELLO_REQUEST, HOST, RpcServer, free_port, hello, listener, running_rpc_server
from tiny_models import write_tiny_model

from ggufmoe.errors import NativeError, UsageError
from ggufmoe.native import rpc
from ggufmoe.native.rpc import add_rpc_server, parse_endpoint

PROMPT = "In the beginning"
SAME_KERNELS = ("--cold-store", "mmap", "--threads", "1", "--temperature", "0")
LIMIT_S = 10.0  # to name a server that does not answer; the start of the program included


@pytest.fixture(scope="module")
def server() -> Iterator[RpcServer]:
    """A server for tests that leave it as it was."""
    with running_rpc_server() as server:
        yield server


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ggufmoe", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


def run(*arguments: str, timeout: float = 30) -> tuple[int, str, str]:
    with start(*arguments) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        finally:
            process.kill()
    return process.returncode, stdout, stderr


def answer_command(*endpoints: str, max_tokens: int = 700) -> list[str]:
    command = ["run", "demo", "-p", PROMPT, "-n", str(max_tokens), *SAME_KERNELS]
    for endpoint in endpoints:
        command += ["--rpc", endpoint]
    return command + (["--resident-experts", "25%"] if endpoints else [])


@pytest.fixture(scope="module")
def answer_without_rpc() -> str:
    status, text, _ = run(*answer_command())
    assert status == 0
    return text


# The same numbers ----------------------------------------------------------------------------------------


def compare_with_stock(path: Path, *endpoints: str) -> dict[str, Any]:
    """In a program of its own: half of the experts and the dense weights on the servers, against stock."""
    code = """
        import dataclasses, json, sys
        from ggufmoe.gguf.model import open_model
        from ggufmoe.moe.residents import parse_residents
        from ggufmoe.run.setup import SessionOptions
        from ggufmoe.run.verify import verify

        options = SessionOptions(
            rpc_endpoints=tuple(sys.argv[2:]), residents=parse_residents("50%"), cold_store="mmap", threads=1
        )
        result = verify(open_model(sys.argv[1]), options, n_prompt=24, n_decode=12, seed=1)
        print(json.dumps(dataclasses.asdict(result)))
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), os.fspath(path), *endpoints],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.returncode, result.stderr) == (0, "")
    facts: dict[str, Any] = json.loads(result.stdout)
    return facts


# gpt-oss: biases between the matrices, so one split per matrix; gemma4: gate and up in one, and scales
@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss", "gemma4"])
def test_logits_are_stocks_bit_for_bit(arch: str, server: RpcServer, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", arch)
    facts = compare_with_stock(path, server.endpoint)
    assert (facts["max_difference"], facts["n_not_finite"], facts["top1_agreement"]) == (0.0, 0, 1.0)
    assert 0.2 < facts["decode_hit_rate"] < 0.8


def test_two_servers_at_once(server: RpcServer, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", "qwen3moe")
    with running_rpc_server() as second:
        facts = compare_with_stock(path, server.endpoint, second.endpoint)
        assert (facts["max_difference"], facts["n_not_finite"]) == (0.0, 0)
        status, text, stderr = run("devices", "--rpc", server.endpoint, "--rpc", second.endpoint, "--json")
        assert (status, stderr) == (0, "")
    names = [device["name"] for device in json.loads(text)["devices"]]
    assert len([name for name in names if name.startswith("RPC")]) == 2
    assert len(names) == len(set(names))


def test_both_of_two_servers_hold_experts(server: RpcServer) -> None:
    with running_rpc_server() as second:
        command = [*answer_command(server.endpoint, second.endpoint, max_tokens=8), "--json"]
        status, text, stderr = run(*command)
    assert status == 0, stderr
    assert json.loads(text)["text"]


def test_the_answer_is_the_one_without_rpc(server: RpcServer, answer_without_rpc: str) -> None:
    status, text, _ = run(*answer_command(server.endpoint, max_tokens=60))
    assert status == 0
    assert len(text) > 60 and answer_without_rpc.startswith(text.removesuffix("\n"))


# Lost in mid-answer --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lose", "within_s"), [(RpcServer.kill, 3.0), (RpcServer.stop, 12.0)])
def test_a_server_lost_in_mid_answer(
    lose: Callable[[RpcServer], None], within_s: float, answer_without_rpc: str
) -> None:
    with running_rpc_server() as server, start(*answer_command(server.endpoint)) as process:
        try:
            assert process.stdout is not None
            begun = process.stdout.read(40)
            lose(server)
            lost = time.monotonic()
            rest, stderr = process.communicate(timeout=within_s + 20)
            took = time.monotonic() - lost
        finally:
            process.kill()
    text = (begun + rest).rstrip("\n")
    assert process.returncode == 1
    assert len(text) < len(answer_without_rpc) / 2
    assert answer_without_rpc.startswith(text)
    [line] = stderr.strip().splitlines()
    assert line.startswith("Error: ") and server.endpoint in line and "RPC server" in line
    assert took < within_s


# Not there at start --------------------------------------------------------------------------------------


def refusal(endpoint: str) -> str:
    """What the command says of an address that cannot be used."""
    started = time.monotonic()
    status, stdout, stderr = run(*answer_command(endpoint, max_tokens=4))
    assert time.monotonic() - started < LIMIT_S
    assert (status, stdout) == (1, "")
    [line] = stderr.strip().splitlines()
    assert line.startswith("Error: ") and endpoint in line
    return line


def test_a_server_that_is_stopped() -> None:
    with running_rpc_server() as server:
        server.stop()
        assert "no answer within 5 s" in refusal(server.endpoint)
        server.go_on()
        status, text, _ = run(*answer_command(server.endpoint, max_tokens=4))
        assert status == 0 and text.strip()


def test_a_port_that_nobody_listens_on() -> None:
    assert "no RPC server can be reached there (Connection refused)" in refusal(f"{HOST}:{free_port()}")


def test_something_that_speaks_http() -> None:
    with listener(rpc_server.speaks_http) as endpoint:
        assert "it is no llama.cpp RPC server" in refusal(endpoint)


def test_a_server_of_another_version() -> None:
    with listener(rpc_server.of_version(3, 2)) as endpoint:
        assert "speaks version 3.2 of the RPC protocol, we speak 7.0" in refusal(endpoint)


def test_a_server_that_serves_somebody_else(server: RpcServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One at a time: the others wait in the system's queue, and are told so."""
    monkeypatch.setattr(rpc, "CONNECT_TIMEOUT_S", 0.5)
    with socket.create_connection((HOST, server.port)) as other:
        other.sendall(HELLO_REQUEST)
        assert other.recv(len(hello(7, 0)), socket.MSG_WAITALL) == hello(7, 0)
        with pytest.raises(NativeError, match=f"^{server.endpoint}: no answer") as raised:
            add_rpc_server(server.endpoint)
        assert raised.value.hint is not None and "serves one at a time" in raised.value.hint
    status, text, _ = run(*answer_command(server.endpoint, max_tokens=4))
    assert status == 0 and text.strip()


# Our own look at the server is the first connection. Then llama.cpp makes three: to list the devices, to describe
# one, and the one that stays.
@pytest.mark.parametrize("n_connections", [1, 3])
def test_a_server_that_falls_silent_between_two_connections(n_connections: int, server: RpcServer) -> None:
    """Stopped, or taken by somebody else, after it has answered at first."""
    with rpc_server.proxy(server, n_connections=n_connections) as endpoint:
        assert "the RPC server was lost" in refusal(endpoint)


@pytest.mark.parametrize("n_bytes", [40, 200, 5_000, 1_000_000])
def test_a_server_that_is_lost_while_the_model_is_loaded(n_bytes: int, server: RpcServer) -> None:
    with rpc_server.proxy(server, n_bytes=n_bytes) as endpoint:
        assert "the RPC server was lost" in refusal(endpoint)


def test_a_process_goes_on_without_the_server_it_lost(server: RpcServer) -> None:
    """As a library: sessions without RPC work on, and a new connection is refused instead of waited for."""
    code = """
        import os, signal, sys
        from ggufmoe import errors
        from ggufmoe.models import demo_model_path
        from ggufmoe.moe.residents import parse_residents
        from ggufmoe.native.llama import Sampling
        from ggufmoe.run.session import Session
        from ggufmoe.run.setup import SessionOptions

        def answer(*endpoints, lose=0):
            residents = parse_residents("25%")
            options = SessionOptions(rpc_endpoints=endpoints, residents=residents, cold_store="mmap", threads=1)
            with Session(demo_model_path(), options) as session:
                for number, piece in enumerate(session.generate("In the", Sampling(temperature=0), max_tokens=9)):
                    if lose and number == 4:
                        os.kill(lose, signal.SIGKILL)
                    yield piece

        expected = list(answer())
        try:
            list(answer(sys.argv[1], lose=int(sys.argv[2])))
        except errors.NativeAbort as error:
            assert sys.argv[1] in str(error), error
            assert list(answer()) == expected
            try:
                list(answer(sys.argv[3]))
            except errors.NativeError as refused:
                print(refused)
    """
    with running_rpc_server() as doomed:
        arguments = [doomed.endpoint, str(doomed.process.pid), server.endpoint]
        result = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), *arguments],
            capture_output=True,
            text=True,
            timeout=20,
        )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{server.endpoint}: an RPC server was lost before")


# The same checks in this process: they end before ggml is asked, and cost no start of a program.


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (rpc_server.hangs_up, "the connection was closed at the first message"),
        (rpc_server.greets_first, "it is no llama.cpp RPC server"),
        (rpc_server.echoes, "it is no llama.cpp RPC server"),
        (rpc_server.says_nothing, r"no answer within 0\.3 s"),
        (rpc_server.trickles, r"no answer within 0\.3 s"),
        (rpc_server.of_version(7, 1), r"speaks version 7\.1 of the RPC protocol, we speak 7\.0"),
        (rpc_server.of_version(8, 0), r"speaks version 8\.0 of the RPC protocol, we speak 7\.0"),
    ],
)
def test_what_is_no_server_of_ours(
    answer: Callable[[socket.socket], None], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "CONNECT_TIMEOUT_S", 0.3)
    started = time.monotonic()
    with listener(answer) as endpoint, pytest.raises(NativeError, match=f"^{endpoint}: .*{says}") as raised:
        add_rpc_server(endpoint)
    assert time.monotonic() - started < 2
    assert "\n" not in f"{raised.value}{raised.value.hint}"


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", "x" * 70])
def test_a_host_that_does_not_exist(host: str) -> None:
    with pytest.raises(NativeError, match=f"^{re.escape(host)}:50052: no RPC server can be reached"):
        add_rpc_server(f"{host}:50052")


# Addresses -----------------------------------------------------------------------------------------------

MALFORMED = [
    "",
    "localhost",
    "localhost:",
    ":50052",
    "localhost:port",
    "localhost:0",
    "localhost:65536",
    "localhost:-1",
    "localhost:1.5",
    "localhost:\u0665\u0660",  # digits, but not llama.cpp's
    "http://localhost:50052",
    "[::1]:50052",
    "::1:50052",
    "two words:50052",
    "本地:50052",
    "local\ud800host:50052",
    "local\0host:50052",
]


@pytest.mark.parametrize("endpoint", MALFORMED)
def test_malformed_addresses(endpoint: str) -> None:
    with pytest.raises(UsageError, match="is not the address of an RPC server, for example"):
        parse_endpoint(endpoint)
    with pytest.raises(UsageError):
        add_rpc_server(endpoint)


@pytest.mark.parametrize("endpoint", ["localhost:0", "nonsense"])
def test_a_malformed_address_is_a_usage_error(endpoint: str) -> None:
    status, stdout, stderr = run(*answer_command(endpoint, max_tokens=4))
    assert (status, stdout) == (2, "")
    [line] = stderr.strip().splitlines()
    assert endpoint in line and "for example 192.168.1.7:50052" in line


@pytest.mark.parametrize("endpoint", ["localhost:1", "gpu-box.lan:50052", "192.168.1.7:65535"])
def test_wellformed_addresses(endpoint: str) -> None:
    host, port = parse_endpoint(endpoint)
    assert f"{host}:{port}" == endpoint


# The server's own errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "status", "says"),
    [
        (["--host", "203.0.113.9", "--allow-network"], 1, "203.0.113.9:{port} cannot be used for a server"),
        (["--host", "::1"], 2, "'::1' is not an IPv4 address"),
        (
            ["--host", "no-such-host.invalid", "--allow-network"],
            2,
            "'no-such-host.invalid' is not an IPv4 address",
        ),
        (["--host", "0.0.0.0"], 2, "0.0.0.0 can be reached from other machines"),
        (["--device", "nonsense"], 2, "There is no device called 'nonsense'"),
    ],
)
def test_what_a_server_cannot_offer(options: list[str], status: int, says: str) -> None:
    port = free_port()
    result = run("rpc-server", "--port", str(port), *options)
    assert result[:2] == (status, "")
    [line] = result[2].strip().splitlines()
    assert says.format(port=port) in line


def test_a_port_that_is_taken(server: RpcServer) -> None:
    status, stdout, stderr = run("rpc-server", "--port", str(server.port))
    assert (status, stdout) == (1, "")
    assert f"{server.endpoint} cannot be used for a server (Address already in use)" in stderr


def test_a_server_on_the_name_of_this_machine() -> None:
    with running_rpc_server(host="localhost") as server:
        status, text, _ = run("devices", "--rpc", server.endpoint)
    assert status == 0 and "RPC0" in text


@pytest.mark.parametrize("connected", [False, True])
def test_ctrl_c_ends_a_server(connected: bool) -> None:
    with running_rpc_server() as server, socket.socket() as client:
        if connected:
            client.connect((HOST, server.port))
            client.sendall(HELLO_REQUEST)
            assert client.recv(1)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=5) == -signal.SIGINT
