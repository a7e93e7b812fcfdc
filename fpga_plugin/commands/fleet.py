"""`fpga-plugin fleet`: every node's status in one table, through the API server."""
# ruff: noqa: T201  # a command prints

import argparse
import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from fpga_plugin.commands.arguments import Commands
from fpga_plugin.errors import FpgaPluginError

if TYPE_CHECKING:
    from fpga_plugin.observability.cluster import NodeStatus


FAILED: Final = 1

MOST_NAMED: Final = 8
"""Names in a note."""

_EPILOG: Final = """\
It takes FPGA_PLUGIN_STATUS_PAGE=true on the nodes, and the rights to list pods
and to get pods/proxy. One node's page: kubectl port-forward POD 9102:9102

exit code: 0 every node answered; 1 one did not, or there is none; 2 usage
"""


def add_fleet_parser(commands: Commands) -> None:
    """`fleet`."""
    fleet = commands.add_parser(
        "fleet",
        help="show the status of every node of a cluster",
        description="Show every node of a cluster: its cards and regions, and what needs\n"
        "somebody. Asks each plugin for its status through the API server.",
        epilog=_EPILOG,
    )
    fleet.set_defaults(run=run_fleet)
    fleet.add_argument(
        "--kubeconfig",
        metavar="FILE",
        help="credentials (default: $KUBECONFIG, ~/.kube/config, or the pod's service account)",
    )
    fleet.add_argument("-n", "--namespace", default="", help="of the plugins (default: all)")
    fleet.add_argument(
        "-l",
        "--selector",
        help="labels of the plugins' pods (default: those of chart and kustomize)",
    )
    fleet.add_argument("--json", action="store_true", help="every node's whole status as JSON")


def run_fleet(args: argparse.Namespace) -> int:
    """Ask all nodes; returns the exit code.

    Raises:
        FpgaPluginError: the API server cannot be asked.
    """
    nodes = asyncio.run(_ask(args))
    if args.json:
        print(json.dumps({"nodes": [_node(one) for one in nodes]}, indent=2))
    elif nodes:
        print(table(nodes))
    if not nodes:
        print("fpga-plugin: no plugin's pod was found", file=sys.stderr)
        print(
            "  -n and -l say where they are and which labels they have, --kubeconfig which cluster",
            file=sys.stderr,
        )
    return 0 if nodes and not any(one.error for one in nodes) else FAILED


async def _ask(args: argparse.Namespace) -> "Sequence[NodeStatus]":
    from fpga_plugin.kubernetes.apiserver.rest import session
    from fpga_plugin.observability.cluster import SELECTOR, plugins, statuses

    async with session(_kubeconfig(args.kubeconfig)) as opened:
        places = await plugins(opened, args.namespace, args.selector or SELECTOR)
        return await statuses(opened, places, _progress(len(places)))


def _kubeconfig(given: str | None) -> str | None:
    """As kubectl finds it, but for lists of files; None: the pod's service account.

    Raises:
        FpgaPluginError: there are no credentials at all.
    """
    if given or (given := os.environ.get("KUBECONFIG")):
        return given
    usual = os.path.expanduser("~/.kube/config")
    if os.path.exists(usual):
        return usual
    if "KUBERNETES_SERVICE_HOST" not in os.environ:  # which every pod has
        raise FpgaPluginError(
            f"no credentials for a cluster: there is no {usual}, and this is no pod",
            hint="name a kubeconfig: fpga-plugin fleet --kubeconfig FILE, or KUBECONFIG=FILE",
        )
    return None


def _progress(count: int) -> Callable[[int], None]:
    """Tells a terminal how many have answered; it is wiped at the end."""
    if not sys.stderr.isatty():
        return lambda _answered: None

    def told(answered: int) -> None:
        end = "\r\x1b[K" if answered == count else ""
        print(f"\r{answered} of {count} nodes{end}", end="", file=sys.stderr, flush=True)

    return told


def table(nodes: "Sequence[NodeStatus]") -> str:
    """A line a node, their sum, and why nodes are missing."""
    from fpga_plugin.host.columns import columns
    from fpga_plugin.observability.table import printable

    heads = ["NODE", "NAMESPACE", "STATE", "CARDS", "REGIONS", "USED", "FREE"]
    heads += ["FAILED", "UNUSABLE", "REFUSED", "DRAINED", "NEVER CLEARED", "KEPT", "VERSION"]
    rows = [heads]
    total = [0] * 10
    for one in nodes:
        name = printable(one.place.node or f"{one.place.namespace}/{one.place.pod}")
        space = printable(one.place.namespace)
        if (told := one.summary) is None:
            rows.append([name, space, "NO ANSWER", *["-"] * 11])
            continue
        trouble = told.trouble
        counts = [len(told.cards), told.regions, told.used, told.free]
        counts += [trouble.failed, sum(trouble.unusable.values()), trouble.refused]
        counts += [trouble.drained, trouble.never_cleared, trouble.kept]
        total = [a + b for a, b in zip(total, counts, strict=True)]
        state = "ready" if told.ready else "NOT READY"
        rows.append([name, space, state, *map(str, counts), printable(told.version)])
    answered = sum(one.summary is not None for one in nodes)
    rows.append([f"{answered} of {len(nodes)} nodes", "", "", *map(str, total), ""])
    lines = columns(rows)
    for one in nodes:
        name = one.place.node or f"{one.place.namespace}/{one.place.pod}"
        if one.error:
            lines.append(f"  ! {name}: {one.error}")
        elif one.summary is not None:
            unusable = one.summary.trouble.unusable
            lines += [f"  ! {name}: {n} unusable: {why}" for why, n in sorted(unusable.items())]
            if not one.summary.ready:
                lines += [f"  ! {name}: {reason}" for reason in one.summary.not_ready]
    lines += [f"  ! {doubt}" for doubt in _doubts(nodes)]
    return "\n".join(printable(line) for line in lines)


def _doubts(nodes: "Sequence[NodeStatus]") -> Iterator[str]:
    """Why not all of them may be the plugin's: any pod may carry its label."""
    spaces = sorted({one.place.namespace for one in nodes})
    if len(spaces) > 1:
        yield (
            f"pods of {len(spaces)} namespaces say that they are the plugin:"
            f" {', '.join(spaces[:MOST_NAMED])}{', ...' if len(spaces) > MOST_NAMED else ''};"
            " -n NAMESPACE asks only those that you trust"
        )
    pods = Counter(one.place.node for one in nodes if one.place.node)
    twice = sorted(node for node, count in pods.items() if count > 1)
    if twice:
        yield (
            "more than one pod says that it is the plugin of"
            f" {', '.join(twice[:MOST_NAMED])}{', ...' if len(twice) > MOST_NAMED else ''}:"
            " the sums count the node more than once"
        )


def _node(one: "NodeStatus") -> dict[str, object]:
    return {
        "node": one.place.node,
        "namespace": one.place.namespace,
        "pod": one.place.pod,
        "error": one.error,
        "status": one.status,
    }
