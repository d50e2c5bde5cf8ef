"""``ggufmoe devices`` and ``ggufmoe rpc-server``: what slots can be put on, here and on other machines."""

from __future__ import annotations

import ipaddress
from dataclasses import asdict
from typing import Any

import click

from .options import json_option
from .output import bytes_text, print_json, print_table


@click.command()
@click.option(
    "--rpc", "rpc_endpoints", multiple=True, metavar="HOST:PORT", help="Ask an RPC server too; repeatable."
)
@json_option("Print the devices as JSON.")
def devices(rpc_endpoints: tuple[str, ...], as_json: bool) -> None:
    """List the devices that dense weights and slots can be put on.

    \b
    Examples:
      ggufmoe devices
      ggufmoe devices --rpc 192.168.1.7:50052
    """
    from ..native.devices import list_devices
    from ..native.rpc import add_rpc_server

    for endpoint in rpc_endpoints:
        add_rpc_server(endpoint)
    found = list_devices()
    if as_json:
        print_json({"devices": [_facts(device) for device in found]})
        return
    rows = [
        [
            device.name,
            device.kind,
            bytes_text(device.free_bytes),
            bytes_text(device.total_bytes),
            device.description,
        ]
        for device in found
    ]
    print_table(["device", "kind", "free", "total", "description"], rows)


def _facts(device: Any) -> dict[str, Any]:
    facts = asdict(device)
    del facts["address"]
    return facts


@click.command("rpc-server")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(1, 65535), default=50052, show_default=True)
@click.option(
    "--device", default="cpu", show_default=True, help="Device to offer, by its name in `ggufmoe devices`."
)
@click.option("--threads", type=click.IntRange(1, 1024), help="CPU threads. Default: physical cores.")
@click.option("--allow-network", is_flag=True, help="Needed to listen on another address than loopback.")
def rpc_server(host: str, port: int, device: str, threads: int | None, allow_network: bool) -> None:
    """Offer a device of this machine to ggufmoe on another one, until Ctrl-C.

    llama.cpp's RPC protocol has no password and trusts whoever connects: use it in networks you trust only.

    \b
    Examples:
      ggufmoe rpc-server --device CUDA0 --host 192.168.1.7 --allow-network
      ggufmoe run model.gguf -p "Hello" --rpc 192.168.1.7:50052      (on the other machine)
    """
    import psutil

    from ..errors import UsageError
    from ..native.rpc import serve_rpc

    if not allow_network and not _is_loopback(host):
        raise UsageError(
            f"{host} can be reached from other machines, and the RPC protocol has no password.",
            hint="Add --allow-network if everybody who can reach it may use this machine.",
        )
    serve_rpc(host, port, device, threads or psutil.cpu_count(logical=False) or 1)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
