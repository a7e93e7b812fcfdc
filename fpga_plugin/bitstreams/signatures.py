"""Detached Ed25519 signatures (RFC 8032), and the keys that they are checked against.

`<file>.sig` beside a file has the 64 raw bytes of a signature, as `openssl pkeyutl -sign -rawin`
writes it. What is signed is not the file but a statement of what it is for:

    fpga-plugin signed statement 1
    role: accelerator
    interface id: ce48969398f05f33946d560708be108a
    path: ce48969398f05f33946d560708be108a/18b79ffa2ee54aa096ef4230dafacb5f.gbs
    sha256: <64 lower-case hex digits>
    size: 4482

So a signature is good at one place of a store only, and nothing that was signed for another purpose
is a statement. The role is accelerator, blank or manifest; a manifest's statement has no interface
id. Each line ends with a line feed, the last one too. The checker makes the statement itself
from the path and the bytes that it has: nothing of it is parsed.

The only module that uses `cryptography`, and it imports it when there is something to check: 45 ms
and 12 MiB, which installations without signatures do not pay.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fpga_plugin.bitstreams.files import Content, read_bytes
from fpga_plugin.bitstreams.manifest import MANIFEST
from fpga_plugin.bitstreams.places import find_place
from fpga_plugin.errors import BitstreamError
from fpga_plugin.host.trusted_files import read_small

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

SIGNATURE_BYTES = 64
"""Of every Ed25519 signature."""

ENDING = ".sig"
"""What a signature's file name has after the name of the file that it signs."""

MAX_KEY_BYTES = 16 << 10
_MAX_KEYS = 100


def statement(path: str, content: Content) -> bytes:
    """What a signature of a file signs.

    Args:
        path: of the file from the store's root; it gives role and interface id.
        content: what is in it.

    Raises:
        ValueError: nothing at that path can be signed.
    """
    lines = ["fpga-plugin signed statement 1"]
    if path == MANIFEST:
        lines.append("role: manifest")
    elif place := find_place(path):
        lines.append(f"role: {'blank' if place.bitstream_id is None else 'accelerator'}")
        lines.append(f"interface id: {place.interface_id}")
    else:
        raise ValueError("no path of a bitstream or manifest in a store")
    lines += [f"path: {path}", f"sha256: {content.sha256}", f"size: {content.size}"]
    return "".join(f"{line}\n" for line in lines).encode()


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a directory.

    Attributes:
        keys: those that can be used, by their files' names, in order.
        problems: what is wrong with the others, or with the directory.
    """

    keys: "Mapping[str, Ed25519PublicKey]" = field(default_factory=dict, repr=False)
    problems: Sequence[str] = ()


def key_files(directory: str) -> list[str]:
    """Paths of a directory's `*.pem`, in order.

    Raises:
        OSError: it cannot be read.
    """
    names = sorted(os.listdir(directory))
    return [
        os.path.join(directory, name)
        for name in names
        if name.endswith(".pem") and not name.startswith(".")
    ][:_MAX_KEYS]


def load_keys(directory: str, *, guarded: bool) -> Keys:
    """Read all public keys of a directory; one that cannot be used does not spoil the others.

    Args:
        directory: has them as `*.pem`.
        guarded: leave out those that others than root and this process's user may write: a writer
            of keys may sign anything.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        files = key_files(directory)
    except OSError as error:
        return Keys(problems=(f"{directory}: the keys cannot be read: {error.strerror}",))
    keys = {}
    problems = []
    for path in files:
        try:
            public = load_pem_public_key(
                read_small(path, inside=None, guarded=guarded, limit=MAX_KEY_BYTES)
            )
        except (BitstreamError, OSError) as error:
            problems.append(str(error))
            continue
        except (ValueError, TypeError, UnsupportedAlgorithm):
            problems.append(f"{path}: not a public key in PEM form")
            continue
        if isinstance(public, Ed25519PublicKey):
            keys[os.path.basename(path)] = public
        else:
            problems.append(f"{path}: not an Ed25519 key, but another kind")
    return Keys(keys, problems)


def signer(keys: "Mapping[str, Ed25519PublicKey]", signature: bytes, data: bytes) -> str | None:
    """The name of the key that made this signature; None: none of them did.

    Args:
        keys: to try, by name.
        signature: what the file `.sig` has.
        data: all that was signed.
    """
    from cryptography.exceptions import InvalidSignature

    for name, public in keys.items():
        with contextlib.suppress(InvalidSignature):
            public.verify(signature, data)
            return name
    return None


def sign(key_file: str, data: bytes) -> bytes:
    """Sign with a private key in PEM form, without a password.

    Raises:
        BitstreamNotFoundError: there is no key.
        BitstreamError: it cannot be used.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    hint = "make one with `openssl genpkey -algorithm ed25519 -out private.pem`"
    try:
        private = load_pem_private_key(read_bytes(key_file, limit=MAX_KEY_BYTES), password=None)
    except TypeError:
        raise BitstreamError(
            f"{key_file}: the key has a password",
            hint="take it off for signing: `openssl pkey -in KEY -out PLAIN`",
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise BitstreamError(f"{key_file}: not a private key in PEM form", hint=hint) from None
    if not isinstance(private, Ed25519PrivateKey):
        raise BitstreamError(f"{key_file}: not an Ed25519 key", hint=hint)
    return private.sign(data)
