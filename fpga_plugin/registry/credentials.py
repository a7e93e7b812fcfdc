"""Who one is to a registry: a file as `docker login` and a pull secret's `.dockerconfigjson` have.

    {"auths": {"<host>": {"auth": "<base64 of user:password>"}}}

Credentials belong to the host that the file names, and go nowhere else.
"""

import base64
import binascii
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from fpga_plugin.errors import FpgaPluginError, quote

_MAX_BYTES: Final = 1 << 20


class CredentialsError(FpgaPluginError):
    """The file cannot be used. Nothing of what is in it is told."""


class _Entry(msgspec.Struct, frozen=True):
    auth: str = ""
    username: str = ""
    password: str = ""
    identitytoken: str = ""


class _File(msgspec.Struct, frozen=True):
    auths: dict[str, _Entry] = {}


_FILE: Final = msgspec.json.Decoder(_File)


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who one is to one registry.

    Attributes:
        user: name.
        password: or token; not shown.
    """

    user: str
    password: str = field(repr=False)


def read_credentials(path: str) -> Mapping[str, Credentials]:
    """Everything that a file has, by host.

    Raises:
        CredentialsError: it cannot be read, or is no such file.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise CredentialsError(
            f"{path}: cannot be read: {error.strerror}",
            hint="--auth takes a file as `docker login` writes it, or a mounted pull secret's"
            " .dockerconfigjson",
        ) from error
    try:
        if len(data) > _MAX_BYTES:
            msg = f"more than {_MAX_BYTES} bytes"
            raise ValueError(msg)  # noqa: TRY301  # one message for all that is wrong with it
        entries = _FILE.decode(data).auths
        return {_host(key): _credentials(key, entry) for key, entry in entries.items()}
    except (ValueError, RecursionError) as error:
        raise CredentialsError(
            f"{path}: is no file of registry credentials: {error}",
            hint=f'it is JSON: {{"auths": {{"<host>": {{"auth": "<base64>"}}}}}}'
            f" (of {os.path.basename(path)} only the hosts are told here)",
        ) from None


def _host(key: str) -> str:
    """Older tools write a URL in place of the host."""
    return key.removeprefix("https://").removeprefix("http://").split("/", 1)[0].lower()


def _credentials(key: str, entry: _Entry) -> Credentials:
    if entry.identitytoken:
        msg = f"{quote(key)} has an identity token, which is not supported: use user and password"
        raise ValueError(msg)
    if not entry.auth:
        return Credentials(entry.username, entry.password)
    try:
        user, colon, password = base64.b64decode(entry.auth, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        colon = ""
    if not colon:
        msg = f"the auth of {quote(key)} is no base64 of user:password"
        raise ValueError(msg)
    return Credentials(user, password)
