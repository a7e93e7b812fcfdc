"""Which names in a store matter to its watcher: bitstreams, signatures, the manifest, and keys.

Files are verified when they arrive, and a card without a blank bitstream is Unhealthy until the
file is there; that needs no restart of the plugin. On a network file system, where
inotify does not see everything, a PreStart finds the change, since it looks itself.
"""

import os
import re

from fpga_plugin.bitstreams.manifest import MANIFEST
from fpga_plugin.bitstreams.places import ENDINGS
from fpga_plugin.host.watcher import Look

KEYS = "keys"
"""What stands for the directory of keys, where paths from the store's root are reported."""

_INTERFACE_DIRECTORY = re.compile(r"[0-9a-f]{32}", re.ASCII)
_ROOT_NAME = re.compile(r"[0-9a-f]{32}|" + re.escape(MANIFEST) + r"(\.sig)?", re.ASCII)
_BITSTREAM_NAME = re.compile(rf"[^.].*\.({ENDINGS})(\.sig)?", re.ASCII | re.DOTALL)
_KEY_NAME = re.compile(r"[^.].*\.pem", re.ASCII | re.DOTALL)


def look_at_store(look: Look, root: str, keys_dir: str | None) -> None:
    """Watch a store and the keys; neither need exist yet.

    Args:
        look: gets what to watch. Files are reported by their path from the root, keys as
            `KEYS`.
        root: of the store.
        keys_dir: the directory of the keys, if they matter.
    """
    root = os.path.abspath(root)
    resolved_root, names = look.inside(root, _ROOT_NAME)
    for name in names:
        if not _INTERFACE_DIRECTORY.fullmatch(name):
            look.file(resolved_root, name, name)
            continue
        resolved, files = look.inside(os.path.join(root, name), _BITSTREAM_NAME)
        for file in files:
            look.file(resolved, file, f"{name}/{file}")
    if keys_dir is not None:
        resolved, files = look.inside(os.path.abspath(keys_dir), _KEY_NAME)
        for file in files:
            look.file(resolved, file, KEYS)
