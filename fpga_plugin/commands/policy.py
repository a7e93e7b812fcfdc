"""The command line of `fpga-plugin policy`: try a policy, and render it as an admission policy.

Exit codes: 0 done or allowed, 1 refused or wrong, 2 usage.
"""
# ruff: noqa: T201  # a command prints

import argparse
import json
import os
import sys
from typing import Any

from fpga_plugin.commands.arguments import Commands, argument
from fpga_plugin.ids import (
    BitstreamId,
    ResourceKind,
    parse_afu_id,
    parse_bitstream_id,
    parse_interface_id,
)
from fpga_plugin.policy.rules import Ask, Policy
from fpga_plugin.settings.settings import Settings, load_settings

ALLOWED, REFUSED = 0, 1


def add_policy_parser(subparsers: Commands, settings: Settings) -> None:
    """Add `policy` and its subcommands to the command line.

    Args:
        subparsers: of the main command.
        settings: the policy and the prefix that are meant where options do not name others.
    """
    prefix = settings.resource_prefix
    parser = subparsers.add_parser(
        "policy",
        help="say who may load what",
        description="Try a policy file, and make the cluster's admission policy of it.",
    )
    commands = parser.add_subparsers(dest="policy_command", metavar="COMMAND", required=True)
    check = commands.add_parser(
        "check",
        help="read the file; with --namespace: may it?",
        description="Read a policy file and say what is wrong with it. With a namespace: say\n"
        "whether its pods may have a device, and which rule decides. Exit code 1: no, or\n"
        "the file is wrong.",
        epilog="example:\n  fpga-plugin policy check --file policy.yaml --namespace team-a \\\n"
        "    --interface ce48969398f05f33946d560708be108a"
        " --bitstream 18b79ffa2ee54aa096ef4230dafacb5f",
    )
    _file_option(check, settings)
    check.add_argument("--namespace", metavar="NAME", help="of the pod")
    check.add_argument(
        "--interface", type=argument(parse_interface_id), metavar="ID", help="interface id"
    )
    check.add_argument(
        "--bitstream",
        type=argument(parse_bitstream_id),
        metavar="ID",
        help="what the container asks for; without: devices without a bitstream",
    )
    check.add_argument("--whole", action="store_true", help="a whole card instead of a region")
    check.add_argument(
        "--function",
        type=argument(parse_afu_id),
        metavar="ID",
        help="a preprogrammed function (af-...) of this AFU id instead of a region",
    )
    check.add_argument("--json", action="store_true", help="one JSON object")
    admission = commands.add_parser(
        "admission",
        help="make a ValidatingAdmissionPolicy of the file",
        description="Print a ValidatingAdmissionPolicy and its binding, which refuse the pods\n"
        "that the policy does not allow when they are created (Kubernetes 1.30 and\n"
        "later). The plugin checks again; make it again whenever the policy changes.",
        epilog="example:\n  fpga-plugin policy admission --file policy.yaml | kubectl apply -f -",
    )
    _file_option(admission, settings)
    admission.add_argument("--name", default="fpga-plugin-policy", help="of both objects")
    admission.add_argument("--prefix", default=prefix, help=f"of the resources ({prefix})")


def _file_option(parser: argparse.ArgumentParser, settings: Settings) -> None:
    parser.set_defaults(run=run_policy)
    parser.add_argument(
        "--file",
        default=settings.policy_file,
        required=settings.policy_file is None,
        metavar="FILE",
        help="the policy; default: FPGA_PLUGIN_POLICY_FILE",
    )


def run_policy(args: argparse.Namespace, settings: Settings) -> int:
    """Run the subcommand that `args` names; returns the exit code.

    Raises:
        FpgaPluginError: the file is wrong.
    """
    from fpga_plugin.policy.file import read_policy  # imports YAML
    from fpga_plugin.policy.parse import PolicyError

    if args.file != settings.policy_file and not os.path.lexists(args.file):
        raise PolicyError(f"--file {args.file}: no such file", hint="check the path")
    policy = read_policy(args.file)
    if args.policy_command == "admission":
        return _admission(args, policy)
    if args.namespace is None and args.interface is None:
        return _describe(args, policy)
    return _check(args, policy)


def _admission(args: argparse.Namespace, policy: Policy) -> int:
    import yaml

    from fpga_plugin.policy.admission import admission_policy, not_applied

    # The prefix goes into expressions: it is checked by the rules of its setting.
    prefix = load_settings({"FPGA_PLUGIN_RESOURCE_PREFIX": args.prefix}).resource_prefix
    print(f"# Made by `fpga-plugin policy admission` from {json.dumps(args.file)}.")
    if left_out := not_applied(policy):
        note = (
            f"devices: [af] of rule {', '.join(left_out)} is not in it: pods with preprogrammed"
            " functions are judged by the plugin alone, at PreStart"
        )
        print(f"# {note}.")
        print(f"fpga-plugin: {note}", file=sys.stderr)
    objects = admission_policy(policy, prefix=prefix, name=args.name)
    print(yaml.safe_dump_all(objects, sort_keys=False, width=100), end="")
    return ALLOWED


def _describe(args: argparse.Namespace, policy: Policy) -> int:
    if args.json:
        told: dict[str, Any] = {
            "default": policy.default.value,
            "rules": [{"name": r.name, "action": r.action.value} for r in policy.rules],
        }
        print(json.dumps(told))
        return ALLOWED
    for rule in policy.rules:
        print(f"{rule.action.value:5}  {rule.name}")
    print(f"{policy.default.value:5}  (default)")
    return ALLOWED


def _check(args: argparse.Namespace, policy: Policy) -> int:
    if args.namespace is None or args.interface is None:
        print("name both --namespace and --interface")
        return 2
    if args.function is not None and (args.whole or args.bitstream is not None):
        print("--function is a device and what is on it: leave out --whole and --bitstream")
        return 2
    bitstream: BitstreamId | None = args.bitstream
    kind = ResourceKind.WHOLE if args.whole else ResourceKind.REGION
    if args.function is not None:
        kind, bitstream = ResourceKind.AF, BitstreamId(args.function)
    ask = Ask(
        kind=kind,
        interface_id=args.interface,
        bitstream_id=bitstream,
    )
    verdict = policy.judge(args.namespace, ask)
    if args.json:
        print(json.dumps({"allowed": verdict.allowed, "rule": verdict.rule or None}))
    else:
        by = f"rule {verdict.rule}" if verdict.rule else "the default"
        print(f"{'allowed' if verdict.allowed else 'refused'} by {by}: {ask}")
    return ALLOWED if verdict.allowed else REFUSED
