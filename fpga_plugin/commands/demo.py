"""`fpga-plugin demo`: its place on the command line.

What the demo needs is imported when it runs: other commands should not pay for it.
"""

import argparse
from dataclasses import fields

from fpga_plugin.commands.arguments import Commands
from fpga_plugin.errors import quote
from fpga_plugin.settings.values import parse_http_address

_DESCRIPTION = """\
Show a pod's life with an FPGA: what is advertised, how devices are granted,
programmed before each start of a container, scrubbed afterwards and given back.

It is the real plugin, on simulated cards and with a stand-in for kubelet. No
root, no cluster, no network; one temporary folder, removed at the end.
"""

_EPILOG = """\
examples:
  fpga-plugin demo                                  the pod of the KEP, in brief
  fpga-plugin demo -v                               each call, and a crash
  fpga-plugin demo -v --kubelet extended            with the calls of both KEPs
  fpga-plugin demo --pod deploy/examples/whole-card.yaml
  fpga-plugin demo --pod mine.yaml --bitstreams my-store
  fpga-plugin demo --cards alveo                    the like with an Alveo card
  fpga-plugin demo --serve                          pods come and go on a page
  fpga-plugin demo --serve --trouble                and cards fail and recover
  fpga-plugin demo --json | jq -c 'select(.event == "region")'

A stock kubelet is one as released: the plugin reads the pod's spec, and finds
the end of a pod in kubelet's records. An extended one has both KEPs: it sends
the environment with PreStartContainer, and calls PostStopContainer and
Deallocate.

A pod asks for devices in its limits and for bitstreams in its environment:
  resources:
    limits: {fpga.intel.com/region-<interface id>: 1}     a region, or
            {fpga.intel.com/fpga-<interface id>: 1}       a whole card
  env:
  - {name: FPGA_REGION_1, value: <interface id>}
  - {name: FPGA_BITSTREAM_ID_1, value: <AFU id>}
  - {name: FPGA_DRIVER_PARAMS_1, value: "clock=400,debug=1"}   optional

There are two simulated cards of three regions for the interface id
ce48969398f05f33946d560708be108a, and as many for each other one that the pod
asks for and the store has.

A store has <interface id>/<AFU id>.gbs and <interface id>/blank.gbs. A
simulated card shows the first 16 bytes of an image as its AFU id: bitstreams
for real cards fail to verify.

With --json each line is an object with "t" (seconds since the start) and
"event": advertised, call, region, program, scrub, warning or error.

The last line is the verdict: `Served: ...`, `Served, but ...`, `Refused: ...`
or `Failed: ...`.

exit code: 0 all went well; 1 the pod was refused, as its event would say, or
the input is wrong; 3 it was served, and a request of its means nothing; 130
Ctrl-C (with --serve 0)
"""


def add_demo_parser(subparsers: Commands) -> None:
    """Add `demo` to the command line."""
    parser = subparsers.add_parser(
        "demo",
        help="show a pod's life with an FPGA, without hardware",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--pod",
        metavar="FILE",
        help="a manifest with a Pod, Deployment, StatefulSet, DaemonSet, Job or CronJob (default:"
        " the pod of the KEP)",
    )
    parser.add_argument(
        "--cards",
        choices=("pac", "alveo"),
        default="pac",
        help="whose pod is shown where none is named: one for a PAC, or for an Alveo card",
    )
    parser.add_argument(
        "--bitstreams",
        metavar="DIR",
        help="a store of bitstreams (default: the sample store)",
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="events as JSON, one object a line")
    shown.add_argument("-q", "--quiet", action="store_true", help="the verdict alone")
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="each call and step, and each container crashes once",
    )
    parser.add_argument(
        "--kubelet",
        choices=("stock", "extended"),
        help="which kubelet is played (default: stock; with --json or --serve: extended)",
    )
    what.add_argument(
        "--serve",
        metavar="ADDRESS",
        nargs="?",
        type=_address,
        const="127.0.0.1:0",
        help="serve the status page and metrics while pods come and go, until Ctrl-C"
        " (default: a free port of this computer)",
    )
    parser.add_argument(
        "--trouble",
        action="store_true",
        help="with --serve: cards fail and recover meanwhile, one fault after the other",
    )
    parser.add_argument("--log", action="store_true", help="the plugin's own log on standard error")
    parser.set_defaults(run=run_demo)


def _address(text: str) -> str:
    try:
        parse_http_address(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{quote(text)} is not host:port or :port") from None
    return text


def run_demo(args: argparse.Namespace) -> int:
    """Run the demo; returns the exit code.

    Raises:
        FpgaPluginError: the input is wrong, or the plugin could not start.
    """
    from fpga_plugin.demo.run import Options, run

    if args.trouble and args.serve is None:
        args.parser.error("--trouble needs --serve")
    return run(Options(**{field.name: getattr(args, field.name) for field in fields(Options)}))
