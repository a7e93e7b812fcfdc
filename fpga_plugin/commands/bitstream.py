"""The command line of `fpga-plugin bitstream`: what an operator does with bitstreams.

Exit codes: 0 done, 1 refused or failed, 2 usage.
"""

import argparse
import re
import textwrap
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from fpga_plugin.bitstreams import subcommands
from fpga_plugin.bitstreams.kinds import BLANK
from fpga_plugin.bitstreams.manifest import MAX_VERSION
from fpga_plugin.bitstreams.places import find_place
from fpga_plugin.commands.arguments import Commands, argument
from fpga_plugin.errors import FpgaPluginError, quote
from fpga_plugin.ids import (
    Alias,
    BitstreamId,
    InterfaceId,
    parse_afu_id,
    parse_alias,
    parse_bitstream_id,
    parse_interface_id,
)
from fpga_plugin.settings.settings import BackendKind, Settings, TrustMode

T = TypeVar("T")

_OF_PATH = "PATH=NAME with PATH <interface id>/<bitstream id>.gbs, .aocx or .xclbin"

_WIDTH = 78  # of a description; of options it is the terminal's


def add_bitstream_parser(subparsers: Commands, settings: Settings) -> None:
    """Add `bitstream` and its subcommands to the command line.

    Args:
        subparsers: of the main command.
        settings: which store, trust and keys are meant where options do not name others.
    """
    parser = subparsers.add_parser(
        "bitstream",
        help="look after bitstreams and the store",
        description="Look after bitstreams and the store: the directory in which the plugin finds"
        " <interface id>/<bitstream id>.gbs, .aocx or .xclbin, and <interface id>/blank.gbs or"
        " blank.xclbin to deprogram a region.",
    )
    parser.set_defaults(
        run=lambda args, _settings: run_bitstream(args),
        bitstream_default=settings.bitstream_dir,
        # The plugin refuses what others may write in its store.
        bitstream_guarded=settings.backend is not BackendKind.SIMULATED,
        bitstream_state=settings.state_dir,
        bitstream_prefix_of=settings.prefix_of,
        trust=settings.trust.value,
        keys=settings.keys_dir,
    )
    commands = parser.add_subparsers(dest="bitstream_command", metavar="COMMAND", required=True)
    store = settings.bitstream_dir
    _add_list(commands, store)
    _add_inspect(commands)
    _add_manifest(commands)
    _add_verify(commands, store)
    _add_install(commands, store)
    _add_remove(commands, store)
    _add_sign(commands, store)
    _add_forget(commands)


def run_bitstream(args: argparse.Namespace) -> int:
    """Run the subcommand that `args` names; returns the exit code."""
    run: Callable[[argparse.Namespace], int] = args.bitstream_run
    args.trust = TrustMode(args.trust)
    try:
        return run(args)
    except FpgaPluginError as error:
        subcommands.complain(error)
        return subcommands.FAILED


def _add_list(commands: Commands, default_store: str) -> None:
    parser = _command(
        commands,
        "list",
        run=subcommands.show_store,
        summary="show what the store has",
        description="Show every bitstream of the store, why it is trusted, and what is wrong with"
        " those that the plugin would not use. Who may write the files is looked at where the"
        " store is the plugin's own (no --dir).",
        example="fpga-plugin bitstream list --json",
    )
    _dir_option(parser, default_store)
    _trust_options(parser)
    _json_option(parser)


def _add_inspect(commands: Commands) -> None:
    parser = _command(
        commands,
        "inspect",
        run=subcommands.show_file,
        summary="show what a file says of itself",
        description="Show what a GBS, AOCX or xclbin file says of itself: ids, the size of the"
        " image, every accelerator or kernel, an xclbin's memories, and which of them a scrub"
        " clears with this file as the blank bitstream, the sections of an AOCX or xclbin file,"
        " and the file's SHA-256.",
        example="fpga-plugin bitstream inspect hello_afu.gbs",
    )
    parser.add_argument("file", metavar="FILE")
    _json_option(parser)


def _add_manifest(commands: Commands) -> None:
    parser = _command(
        commands,
        "manifest",
        run=subcommands.show_pod,
        summary="print a pod that asks for a file",
        description="Print the manifest of a pod that asks for a bitstream file: the resource, and"
        " the variables that name the bitstream.",
        example="fpga-plugin bitstream manifest hello_afu.gbs --image example.com/hello:1 \\\n"
        "    | kubectl apply -f -",
    )
    parser.add_argument("file", metavar="FILE")
    parser.add_argument(
        "--image",
        default="example.com/app:1",
        type=argument(_image),
        help="the container's image (default: %(default)s, which is to be replaced)",
    )


def _add_verify(commands: Commands, default_store: str) -> None:
    parser = _command(
        commands,
        "verify",
        run=subcommands.verify,
        summary="check files, or the whole store",
        description="Check that files are bitstreams which the plugin can use. A file that lies in"
        " a directory named by an interface id must also be what its path says, and match the"
        " manifest.json of that store; where there are keys and FILE.sig, the signature must be"
        " good. Without FILE, check the whole store. The exit code is 1 if anything is wrong.",
        example="fpga-plugin bitstream verify \\\n"
        "    --interface-id ce489693-98f0-5f33-946d-560708be108a hello_afu.gbs",
    )
    parser.add_argument("files", metavar="FILE", nargs="*")
    parser.add_argument(
        "--interface-id",
        metavar="ID",
        type=argument(parse_interface_id),
        help="what the files must have been built for",
    )
    parser.add_argument(
        "--afu-id", metavar="ID", type=argument(parse_afu_id), help="the AFU id that they must have"
    )
    _dir_option(parser, default_store)
    _trust_options(parser)


def _add_install(commands: Commands, default_store: str) -> None:
    parser = _command(
        commands,
        "install",
        run=subcommands.install_file,
        summary="copy a file to its place in the store",
        description="Copy a GBS file to <store>/<interface id>/<AFU id>.gbs, an AOCX file to"
        " <store>/<interface id>/<hash>.aocx, or an xclbin to <store>/<interface id>/<uuid>.xclbin,"
        " the ids from what is in it, in one step for all that read the store. FILE.sig goes with"
        " it. A file that"
        " the store's manifest knows otherwise, or whose signature is wrong, is refused.",
        example="fpga-plugin bitstream install --blank null_a10.gbs",
    )
    parser.add_argument("file", metavar="FILE")
    _dir_option(parser, default_store)
    parser.add_argument(
        "--blank",
        action="store_true",
        help="install it as blank.gbs or blank.xclbin, with which regions of its interface id are"
        " deprogrammed",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace a different file that has the place; with --blank, install a file that the"
        " store has as an accelerator",
    )
    _trust_options(parser)


def _add_remove(commands: Commands, default_store: str) -> None:
    parser = _command(
        commands,
        "remove",
        run=subcommands.remove_file,
        summary="take a file out of the store",
        description="Take a bitstream out of the store. Regions that are programmed with it stay as"
        " they are; containers that ask for it do not start any more.",
        example="fpga-plugin bitstream remove ce48969398f05f33946d560708be108a \\\n"
        "    18b79ffa2ee54aa096ef4230dafacb5f",
    )
    parser.add_argument("interface_id", metavar="INTERFACE_ID", type=argument(parse_interface_id))
    parser.add_argument(
        "bitstream_id", metavar="BITSTREAM_ID", type=argument(_parse_name), help="an id, or: blank"
    )
    _dir_option(parser, default_store)


def _add_sign(commands: Commands, default_store: str) -> None:
    parser = _command(
        commands,
        "sign",
        run=subcommands.sign_files,
        summary="sign files, or write the store's manifest",
        description="Write FILE.sig beside each FILE: an Ed25519 signature of what is in it and of"
        " its place in the store, <interface id>/<name>. In a store the path of FILE shows the"
        " place, elsewhere the ids in it do. A blank bitstream's own signature does not suffice: it"
        " needs a signed manifest. With --manifest, write manifest.json of all that is in the"
        " store, and with --key its signature too. A new manifest revokes what the one before it"
        " named and it does not.",
        example="fpga-plugin bitstream sign --manifest --key private.pem",
    )
    parser.add_argument("files", metavar="FILE", nargs="*")
    parser.add_argument(
        "--key", metavar="PEM", help="the private key: openssl genpkey -algorithm ed25519 -out PEM"
    )
    parser.add_argument("--manifest", action="store_true", help="write the store's manifest.json")
    parser.add_argument(
        "--manifest-version",
        metavar="N",
        type=_version,
        help="its version, higher than every one before (default: the time, in milliseconds since"
        " 1970)",
    )
    parser.add_argument(
        "--expires",
        metavar="WHEN",
        type=_expiry,
        help="from when on nodes do not take the manifest any more: a date and time such as"
        " 2027-01-31T12:00:00Z, or a number of days such as 90d (default: never)",
    )
    parser.add_argument(
        "--alias",
        metavar="PATH=NAME",
        type=_named,
        action="append",
        help="what pods may ask for in place of an id: the bitstream's path from the store's root,"
        " and its name; without NAME it loses the one that it has. May be said several times; what"
        " has a name keeps it",
    )
    parser.add_argument(
        "--interface-alias",
        metavar="ID=NAME",
        type=_named_interface,
        action="append",
        help="what people call an interface id, and with FPGA_PLUGIN_INTERFACE_ALIASES what its"
        " resources are called (region-NAME); without NAME it loses the one that it has. May be"
        " said several times",
    )
    parser.add_argument(
        "--statement",
        action="store_true",
        help="print what would be signed for FILE: openssl pkeyutl -sign -rawin makes FILE.sig of"
        " it",
    )
    _dir_option(parser, default_store)


def _add_forget(commands: Commands) -> None:
    _command(
        commands,
        "forget",
        run=subcommands.forget_manifests,
        summary="forget which signed manifests this node has seen",
        description="Forget which signed manifests this node has seen, and what they named. The"
        " plugin of this node then believes the next signed manifest, whatever its version, and"
        " trusts signed files that an earlier one named. For a store that begins again: first put"
        " the right manifest there, or remove it, or the plugin notes the one that it finds.",
        example="fpga-plugin bitstream forget",
    )


def _named(text: str) -> tuple[str, Alias | None]:
    return _pair(text, _path, form=_OF_PATH)


def _path(text: str) -> str:
    if find_place(text) is None:
        raise ValueError(f"not {_OF_PATH}")
    return text


def _named_interface(text: str) -> tuple[InterfaceId, Alias | None]:
    return _pair(text, parse_interface_id, form="ID=NAME")


def _pair(text: str, parse: Callable[[str], T], *, form: str) -> tuple[T, Alias | None]:
    """An id and its new name; None: the name is removed."""
    what, separator, name = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{quote(text)}: not {form}")
    try:
        return parse(what), parse_alias(name) if name else None
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{quote(text)}: {error}") from None


def _version(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_VERSION):
        raise argparse.ArgumentTypeError(f"{quote(text)} is no number from 1 to {MAX_VERSION}")
    return int(text)


def _expiry(text: str) -> datetime:
    """A time to come, in UTC, in whole seconds."""
    now = datetime.now(UTC)
    try:
        if text.isascii() and text.endswith("d") and text[:-1].isdigit():
            when = now + timedelta(days=int(text[:-1]))
        else:
            when = datetime.fromisoformat(text)
            when = when.replace(tzinfo=UTC) if when.tzinfo is None else when.astimezone(UTC)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"{quote(text)} is neither a date and time nor a number of days such as 90d"
        ) from None
    if when <= now:
        raise argparse.ArgumentTypeError(f"{quote(text)} is past")
    return when.replace(microsecond=0)


def _trust_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust",
        choices=[mode.value for mode in TrustMode],
        default=argparse.SUPPRESS,
        help="how a file must be trusted (default: FPGA_PLUGIN_TRUST)",
    )
    parser.add_argument(
        "--keys",
        metavar="DIR",
        default=argparse.SUPPRESS,
        help="directory of public keys, *.pem (default: FPGA_PLUGIN_KEYS_DIR)",
    )


def _command(
    commands: Commands,
    name: str,
    *,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    description: str,
    example: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=textwrap.fill(description, _WIDTH),
        epilog=f"example:\n  {example}",
    )
    parser.set_defaults(bitstream_run=run, bitstream_usage=parser.error)
    return parser


def _dir_option(parser: argparse.ArgumentParser, default_store: str) -> None:
    parser.add_argument(
        "--dir", metavar="STORE", default=default_store, help="the store (default: %(default)s)"
    )


def _json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON for scripts")


def _image(text: str) -> str:
    """It is put into YAML: what a reference may have, and nothing else."""
    if not re.fullmatch(r"[\w./:@-]{1,512}", text, re.ASCII):
        raise ValueError("no reference of an image, such as example.com/app:1")
    return text


def _parse_name(text: str) -> BitstreamId:
    return BitstreamId(BLANK) if text == BLANK else parse_bitstream_id(text)
