"""What a file of a store is worth, for people who ask: the daemon's rules, no copies."""

import os

from fpga_plugin.bitstream.files import Progress, no_progress, open_file
from fpga_plugin.bitstream.trust import Content, Trust
from fpga_plugin.config.settings import TrustMode
from fpga_plugin.errors import BitstreamNotFoundError, NotPermittedError

_PIECE = 1 << 20


def digest_of(
    path: str, *, inside: str | None, guarded: bool, progress: Progress = no_progress
) -> Content:
    """Hash a file.

    Raises:
        BitstreamNotFoundError: there is none.
        BitstreamError: it must not be used, or changed while it was read.
    """
    import hashlib  # libcrypto comes with it, 4 MiB, which the daemon that only looks does without

    digest = hashlib.sha256()
    try:
        with open_file(path, inside=inside, guarded=guarded) as original:
            done = 0
            while piece := original.file.read(_PIECE):
                digest.update(piece)
                done += len(piece)
                progress(done, original.size)
            original.check_read(done)
    except (FileNotFoundError, NotADirectoryError):
        raise BitstreamNotFoundError(f"{path}: no such file", hint="check the path") from None
    return Content(digest.hexdigest(), done)


def check_trust(
    root: str,
    relative: str,
    trust: Trust,
    *,
    guarded: bool,
    progress: Progress = no_progress,
) -> str:
    """Judge a file of a store; returns why it is trusted, empty where nothing was asked.

    Raises:
        BitstreamNotFoundError: there is none.
        BitstreamError: it must not be used, or changed while it was read.
        NotPermittedError: it is not trusted.
    """
    path = os.path.join(root, relative)
    content = digest_of(path, inside=root, guarded=guarded, progress=progress)
    return trust.check(relative, content)


def check_signed(path: str, place: str, content: Content, keys_dir: str | None) -> str:
    """Check the signature beside a file, wherever it lies; returns by whom it is signed.

    Args:
        path: the file.
        place: its path in a store, for which it has to be signed.
        content: what is in it.
        keys_dir: where the public keys are.

    Raises:
        NotPermittedError: it is not good.
    """
    trust = Trust(os.path.dirname(path), TrustMode.SIGNED, keys_dir, guarded=False)
    name, reason = trust.check_signature(path, place, content)
    if not name:
        raise NotPermittedError(
            f"{path}: {reason}",
            hint="sign it with `fpga-plugin bitstream sign --key PEM FILE`, or take the right file",
        )
    return f"signed with {name}"
