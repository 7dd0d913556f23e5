"""What the flags of the endpoint say, checked before a model is loaded. Imports no torch."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from argparse import Namespace
from dataclasses import dataclass
from importlib.util import find_spec

from mindspeed_llm.errors import UserError

KEY_VARIABLE = "MINDSPEED_API_KEY"
_KEY = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where the endpoint listens, and the key that clients have to name."""

    host: str
    port: int
    api_key: str | None


def check_serve(args: Namespace) -> Address:
    """Check --host, --port and --api-key (or MINDSPEED_API_KEY), and that the port is free.

    Raises:
        UserError: the extra `serve` is not installed; the address cannot be listened on; it can be reached from other
            machines and no key is set; the key cannot stand in a header.
    """
    if find_spec("uvicorn") is None:
        raise UserError(
            "--serve: the package uvicorn, which speaks HTTP, is not installed; install the extra serve: "
            "pip install 'mindspeed_llm[serve]'"
        )
    if not 0 <= args.port <= 65535:
        raise UserError(f"--port {args.port}: expected a port from 1 to 65535, or 0 for any that is free")
    address = Address(host=args.host, port=args.port, api_key=_api_key(args.api_key))
    reachable = [found for found in _resolved(address) if not ipaddress.ip_address(found).is_loopback]
    if reachable and address.api_key is None:
        raise UserError(
            f"--host {address.host} ({', '.join(reachable)}) can be reached from other machines, and no key is set: "
            f"anybody there could use the model. Set the environment variable {KEY_VARIABLE} (or --api-key), or leave "
            "--host out to listen on this machine only"
        )
    # Of several ranks one listens; the others may be on the same machine.
    if os.environ.get("RANK", "0") == "0":
        listen(address).close()
    return address


def listen(address: Address) -> socket.socket:
    """A socket that is bound to the address. Raises UserError where that is not possible."""
    found = _resolved(address)
    # One address: `localhost` stands for two, and clients try both.
    host = next((item for item in found if ":" not in item), found[0])
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, address.port))
    except OSError as error:
        bound.close()
        raise UserError(
            f"--host {address.host} --port {address.port} cannot be listened on ({error.strerror}); choose another "
            "--port, or end what listens there"
        ) from error
    return bound


def url_of(bound: socket.socket) -> str:
    """The base address for clients of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


def _api_key(flag: str | None) -> str | None:
    key, name = (flag, "--api-key") if flag is not None else (os.environ.get(KEY_VARIABLE), KEY_VARIABLE)
    if key is not None and not _KEY.fullmatch(key):
        raise UserError(
            f"{name} cannot be a key: expected at least one character, all of them printable ASCII without white space"
        )
    return key


def _resolved(address: Address) -> list[str]:
    try:
        # An empty host would stand for all interfaces.
        found = socket.getaddrinfo(address.host or "0.0.0.0", address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(
            f"--host {address.host!r} is no address of this machine ({error.strerror}); leave it out for 127.0.0.1"
        ) from error
    # Link-local addresses carry the name of an interface.
    return list(dict.fromkeys(str(item[4][0]).partition("%")[0] for item in found))
