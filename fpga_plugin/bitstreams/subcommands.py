"""What the subcommands of `fpga-plugin bitstream` do.

These functions print: results to standard output for people and scripts, errors to standard error
on two lines, what happened and what to do. Each returns its exit code.
"""
# ruff: noqa: T201 - a command prints

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace

from fpga_plugin.bitstreams.contents import Contents
from fpga_plugin.bitstreams.facts import FOREIGN, StoredView, facts_of, inspected, lines_of
from fpga_plugin.bitstreams.files import Content, Progress, no_progress
from fpga_plugin.bitstreams.id_names import Names
from fpga_plugin.bitstreams.install import install, remove
from fpga_plugin.bitstreams.kinds import BLANK
from fpga_plugin.bitstreams.manifest import Manifest, in_utc, manifest_path
from fpga_plugin.bitstreams.places import is_blank
from fpga_plugin.bitstreams.pod_manifest import pod_manifest
from fpga_plugin.bitstreams.seen_manifests import SeenManifests
from fpga_plugin.bitstreams.signatures import ENDING
from fpga_plugin.bitstreams.signing import (
    path_in_store,
    place_of,
    renew_manifest,
    sign_file,
    statement_of,
)
from fpga_plugin.bitstreams.store import Store, StoreEntry, look
from fpga_plugin.bitstreams.trust import Trust, check_signed
from fpga_plugin.errors import (
    BitstreamError,
    BitstreamNotFoundError,
    FpgaPluginError,
    NotPermittedError,
    quote,
)
from fpga_plugin.host.columns import columns
from fpga_plugin.settings.settings import TrustMode

_LARGE = 64 << 20
"""Bytes from which on a file's progress is shown: less takes no time."""

DONE = 0
FAILED = 1


def _store(args: argparse.Namespace) -> Store:
    """The store of the command line; errors name `--dir` where that chose it.

    Raises:
        BitstreamNotFoundError: `--dir` names none.
    """
    if args.dir != args.bitstream_default and not os.path.isdir(args.dir):
        wrong = "a file, not a directory" if os.path.lexists(args.dir) else "no such directory"
        raise BitstreamNotFoundError(
            f"--dir {args.dir}: {wrong}",
            hint="name a directory with <interface id>/<bitstream id>.gbs, .aocx or .xclbin",
        )
    return Store(args.dir)


def show_store(args: argparse.Namespace) -> int:
    """Show the store."""
    store = _store(args)
    names = _names(store, args)
    files = [_stored(*_judged(store, entry, args), names) for entry in store.list()]
    if args.json:
        print(json.dumps(files, indent=2))
        return DONE
    if not files:
        print(f"{_plain(args.dir)}: no bitstreams")
        return DONE
    rows = [("INTERFACE ID", "BITSTREAM", "BYTES", "NAME", "TRUST")]
    rows += [_row(file) for file in files if file["problem"] is None]
    if len(rows) > 1:
        print("\n".join(columns(rows)))
    for problem in filter(None, (file["problem"] for file in files)):
        print(f"problem: {_plain(problem['message'])}")
        if problem["hint"]:
            print(f"         {_plain(problem['hint'])}")
    return DONE


def show_file(args: argparse.Namespace) -> int:
    """Show a file."""
    contents, content = look(args.file, _progress(args.file))
    view = inspected(args.file, contents, content)
    if args.json:
        print(json.dumps(view, indent=2))
        return DONE
    facts = {name: value for name, value in view.items() if not isinstance(value, list)}
    width = max(map(len, facts))
    for name, value in facts.items():
        foreign = name in FOREIGN and value is not None
        shown = quote(value) if foreign else "-" if value is None else _plain(str(value))
        print(f"{name.replace('_', ' ').ljust(width)}  {shown}")
    for what, line in lines_of(contents):
        print(f"{what.ljust(width)}  {_plain(line)}")
    return DONE


def show_pod(args: argparse.Namespace) -> int:
    """Print a pod that asks for a file."""
    contents, _ = look(args.file, _progress(args.file))
    prefix = args.bitstream_prefix_of(contents.kind.family)
    print(pod_manifest(contents, prefix=prefix, image=args.image), end="")
    return DONE


def verify(args: argparse.Namespace) -> int:
    """Check files, or the store."""
    if args.trust is TrustMode.SIGNED and args.keys is None:
        raise FpgaPluginError(
            "there are no keys to check signatures with",
            hint="name the directory of the public keys (*.pem): --keys DIR, or"
            " FPGA_PLUGIN_KEYS_DIR",
        )
    _tell_of_record(args, args.dir)
    worst = DONE
    for found in _verified_files(args) if args.files else _verified_store(_store(args), args):
        if isinstance(found, FpgaPluginError):
            complain(found)
            worst = FAILED
        else:
            print(found)
    return worst


def _verified_files(args: argparse.Namespace) -> Iterator[str | FpgaPluginError]:
    """What is to be said of each file of the command line."""
    for file in args.files:
        try:
            contents, content = look(file, _progress(file))
            if (place := path_in_store(file)) is not None:
                place.check(contents, file)
            _check_wanted(file, contents, args)
            yield _good(file, _check_trust(file, contents, content, args))
        except FpgaPluginError as error:
            yield error


def _verified_store(store: Store, args: argparse.Namespace) -> Iterator[str | FpgaPluginError]:
    """What is to be said of each file that is in the store, or should be."""
    found = set()
    for entry in store.list():
        found.add(store.relative(entry.path))
        try:
            judged, trust = _judged(store, entry, args)
            if judged.problem is not None:
                raise judged.problem
            if entry.contents is not None:
                _check_wanted(entry.path, entry.contents, args)
            yield _good(entry.path, trust)
        except FpgaPluginError as error:
            yield error
    try:
        named = _trust(store, args).named()
    except FpgaPluginError as error:
        yield error
        return
    for missing in sorted(named - found):
        yield BitstreamError(
            f"{os.path.join(store.root, missing)}: the manifest names it, and it is not there",
            hint="put it there, or renew the manifest with `fpga-plugin bitstream sign --manifest`",
        )


def _good(file: str, trust: str) -> str:
    return f"{_plain(file)}: good{f' ({trust})' if trust else ''}"


def _judged(store: Store, entry: StoreEntry, args: argparse.Namespace) -> tuple[StoreEntry, str]:
    """An entry as the plugin would judge it; and why it is trusted."""
    if entry.problem is not None:
        return entry, ""
    try:
        trust = _trust(store, args).check_file(
            store.relative(entry.path), progress=_progress(entry.path)
        )
    except (BitstreamError, BitstreamNotFoundError, NotPermittedError) as error:
        return replace(entry, contents=None, problem=error), ""
    return entry, trust


def _trust(store: Store, args: argparse.Namespace) -> Trust:
    """Judges as the plugin would: by what this node has seen, where the store is its own."""
    own = _is_own(store.root, args)
    seen = SeenManifests(args.bitstream_state, owner=False) if own else None
    return Trust(
        store.root, args.trust, args.keys, guarded=own and args.bitstream_guarded, seen=seen
    )


def _check_trust(file: str, contents: Contents, content: Content, args: argparse.Namespace) -> str:
    """Judge a file on the command line: by its store's manifest, and by its signature."""
    path = os.path.abspath(file)
    place = path_in_store(path)
    trust = []
    if place is not None:
        store = Store(os.path.dirname(os.path.dirname(path)))
        trust.append(_trust(store, args).check(place.path, content))
    if args.trust is TrustMode.SIGNED:
        by_itself = place is None
    else:  # with keys, a wrong signature is reported even where none is needed
        by_itself = bool(args.keys) and os.path.lexists(path + ENDING)
    if by_itself:
        trust.append(check_signed(path, place_of(path, contents).path, content, args.keys))
    return ", ".join(filter(None, trust))


def _tell_of_record(args: argparse.Namespace, root: str) -> None:
    """Say what a check on this computer cannot tell."""
    seen = SeenManifests(args.bitstream_state, owner=False)
    known = _is_own(root, args) and seen.version() is not None
    if args.trust is TrustMode.SIGNED and not known:
        print(
            "note: nothing is known here of the manifests that nodes have seen:"
            " an older manifest looks as good as the newest",
            file=sys.stderr,
        )


def _is_own(root: str, args: argparse.Namespace) -> bool:
    """Whether a store is that of this node's plugin."""
    return bool(os.path.realpath(root) == os.path.realpath(args.bitstream_default))


def _progress(path: str) -> Progress:
    """Shows on a terminal how far a large file is."""
    if not sys.stderr.isatty():
        return no_progress
    name = _plain(os.path.basename(path))

    def show(done: int, size: int) -> None:
        if size >= _LARGE:
            end = "\r\x1b[K" if done >= size else ""
            print(f"\r{name}: {100 * done // size} %{end}", end="", file=sys.stderr, flush=True)

    return show


def _check_wanted(file: str, contents: Contents, args: argparse.Namespace) -> None:
    """Compare a file with the ids that the command line asks for."""
    for what, wanted, found in (
        ("interface id", args.interface_id, contents.interface_id),
        ("AFU id", args.afu_id, contents.afu_id),
    ):
        if wanted not in {None, found}:
            raise BitstreamError(f"{file}: has the {what} {found}, not {wanted}")


def install_file(args: argparse.Namespace) -> int:
    """Put a file into the store."""
    store = Store(args.dir)
    installed = install(
        store,
        args.file,
        trust=_trust(store, args),
        blank=args.blank,
        force=args.force,
        progress=_progress(args.file),
    )
    what = "installed" if installed.changed else "was there already"
    print(f"{_plain(installed.path)}: {what}")
    if installed.untrusted is not None:
        complain(installed.untrusted)
        return FAILED
    return DONE


def remove_file(args: argparse.Namespace) -> int:
    """Take a file out of the store."""
    bitstream_id = None if args.bitstream_id == BLANK else args.bitstream_id
    path = remove(_store(args), args.interface_id, bitstream_id)
    print(f"{_plain(path)}: removed")
    return DONE


def sign_files(args: argparse.Namespace) -> int:
    """Sign files, or write the manifest."""
    if not args.files and not args.manifest:
        args.bitstream_usage("name the files to sign, or say --manifest")
    if args.statement:
        if args.manifest or len(args.files) != 1:
            args.bitstream_usage("--statement goes with one FILE")
        _, text = statement_of(args.files[0], _progress(args.files[0]))
        sys.stdout.buffer.write(text)
        return DONE
    if args.files and args.key is None:
        args.bitstream_usage("--key names the private key to sign with")
    of_manifest = (args.manifest_version, args.expires, args.alias, args.interface_alias)
    if not args.manifest and any(value is not None for value in of_manifest):
        args.bitstream_usage(
            "--manifest-version, --expires, --alias and --interface-alias go with --manifest"
        )
    for file in args.files:
        place = sign_file(file, args.key, _progress(file))
        print(f"{_plain(file)}{ENDING}: written, for {place}")
        if is_blank(place):
            print(
                f"note: {place} is a blank bitstream: it needs a signed manifest that names it",
                file=sys.stderr,
            )
    if args.manifest:
        store = _store(args)
        manifest, changed = renew_manifest(
            store,
            key=args.key,
            version=args.manifest_version,
            expires=args.expires,
            aliases=dict(args.alias or ()),
            interfaces=dict(args.interface_alias or ()),
            progress=_progress(args.dir),
        )
        path = _plain(manifest_path(store.root))
        print(f"{path}: {_said(manifest)}{'' if changed else ', unchanged'}")
        if args.key is not None:
            print(f"{path}{ENDING}: written")
    return DONE


def _said(manifest: Manifest) -> str:
    words = [f"names {len(manifest.files)} files", f"version {manifest.version}"]
    if manifest.revoked:
        words.append(f"revokes {len(manifest.revoked)}")
    if manifest.expires is not None:
        words.append(f"expires {in_utc(manifest.expires)}")
    if manifest.aliases:
        words.append(f"gives {len(manifest.aliases)} aliases")
    if manifest.interfaces:
        words.append(f"names {len(manifest.interfaces)} interface ids")
    return ", ".join(words)


def forget_manifests(args: argparse.Namespace) -> int:
    """Forget which manifests this node has seen."""
    manifests = SeenManifests(args.bitstream_state, owner=False)
    seen = manifests.forget()
    what = f"version {seen.version} forgotten" if seen.version else "no manifest to forget"
    print(f"{_plain(manifests.path or '')}: {what}")
    return DONE


def _names(store: Store, args: argparse.Namespace) -> Names:
    """What the manifest calls ids; nothing where it cannot be used, as the list reports."""
    try:
        return _trust(store, args).names()
    except FpgaPluginError:
        return Names()


def _row(file: StoredView) -> tuple[str, str, str, str, str]:
    title = quote(file["metadata"]["name"]) if file["metadata"] else ""
    return (
        file["interface_alias"] or file["interface_id"] or "",
        BLANK if file["blank"] else file["bitstream_id"] or "",
        str(file["bytes"]),
        file["alias"] or title,
        file["trust"] or "-",
    )


def _stored(entry: StoreEntry, trust: str, names: Names) -> StoredView:
    problem = entry.problem
    interface_id, bitstream_id = entry.interface_id, entry.bitstream_id
    return {
        "path": entry.path,
        "interface_id": interface_id,
        "bitstream_id": bitstream_id,
        "blank": entry.blank,
        "bytes": entry.size,
        "metadata": facts_of(entry.contents) if entry.contents else None,
        "problem": {"message": problem.message, "hint": problem.hint} if problem else None,
        "alias": names.by_id.get((interface_id, bitstream_id))
        if interface_id and bitstream_id
        else None,
        "interface_alias": names.interfaces.get(interface_id) if interface_id else None,
        "trust": trust,
    }


def complain(error: FpgaPluginError) -> None:
    """Print an error: what happened, and what to do about it."""
    print(f"fpga-plugin: {_plain(error.message)}", file=sys.stderr)
    if error.hint:
        print(f"  {_plain(error.hint)}", file=sys.stderr)


def _plain(text: str) -> str:
    """A text with a file's name in it, for a terminal: names may hold any byte."""
    return "".join(c if c.isprintable() else "?" for c in text)
