"""Runs the demo: from the command line's options to the exit code, signals included."""

import asyncio
import io
import os
import signal
import sys
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from fpga_plugin.bitstreams.store import Store
from fpga_plugin.bitstreams.trust import Trust
from fpga_plugin.demo.brief import BriefOutput
from fpga_plugin.demo.double import EXTENDED, STOCK, Profile
from fpga_plugin.demo.events import Failure
from fpga_plugin.demo.node import (
    RESOURCE_PREFIX,
    XRT_RESOURCE_PREFIX,
    interface_ids,
    made_for_real_cards,
    running_node,
)
from fpga_plugin.demo.output import JsonOutput, Output, QuietOutput, TextOutput, ids
from fpga_plugin.demo.pod import DemoPod
from fpga_plugin.demo.pod_manifest import ManifestError, read_manifest
from fpga_plugin.demo.recorder import Recorder
from fpga_plugin.demo.story import Story
from fpga_plugin.demo.words import words
from fpga_plugin.errors import BitstreamNotFoundError, FpgaPluginError, WrongImageError
from fpga_plugin.settings.settings import DEFAULT_INTERFACE_ID, TrustMode

EXIT_FAILED = 1
EXIT_MEANS_NOTHING = 3
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it

_HERE = os.path.dirname(os.path.abspath(__file__))

_PODS = {
    "pac": os.path.join(_HERE, "kep-pod.yaml"),
    "alveo": os.path.join(_HERE, "alveo-pod.yaml"),
}
"""Shown unless another is asked for, by the kind of cards. The same files as in deploy/examples,
which an installed package does not have."""

_SAMPLES = (
    os.path.join(_HERE, "bitstreams"),
    os.path.join(os.path.dirname(os.path.dirname(_HERE)), "bitstreams"),
)
"""Where the sample store is: in an installed package, and in a clone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line says.

    Attributes:
        pod: a Pod manifest; None: the KEP's, or the like for other `cards`.
        bitstreams: a store; None: the repository's samples.
        json: events as JSON.
        kubelet: `stock` or `extended`; None: extended where programs read what happens, or
            `serve`, and else stock.
        verbose: every call and step, and a crash of each container.
        quiet: the verdict alone.
        log: the plugin's log on standard error.
        serve: where to serve the page while pods come and go; None: the story of one pod.
        trouble: cards fail and recover meanwhile.
    """

    pod: str | None
    bitstreams: str | None
    json: bool
    kubelet: str | None = None
    verbose: bool = False
    quiet: bool = False
    log: bool = False
    serve: str | None = None
    trouble: bool = False
    cards: str = "pac"

    @property
    def profile(self) -> Profile:
        """Which kubelet is played."""
        if self.kubelet is None:
            return EXTENDED if self.json or self.serve is not None else STOCK
        return {"stock": STOCK, "extended": EXTENDED}[self.kubelet]

    def output(self, stream: TextIO) -> Output:
        """What is shown, and how."""
        if self.json:
            return JsonOutput(stream)
        if self.quiet:
            return QuietOutput(stream)
        full = self.verbose or self.serve is not None
        return TextOutput(stream) if full else BriefOutput(stream)


def run(options: Options) -> int:
    """Run the demo; returns the exit code.

    Raises:
        FpgaPluginError: the input is wrong, or the plugin could not start.
    """
    stream = sys.stdout
    if isinstance(stream, io.TextIOWrapper):  # else somebody has put another one in its place
        stream.reconfigure(errors="backslashreplace")  # a path need not suit the locale
    output = options.output(stream)
    on_page = options.serve is not None and not options.json
    recorder = Recorder(None if on_page else output.event)
    try:
        code = asyncio.run(_interruptible(_demo(options, output, recorder), options))
    except FpgaPluginError as error:
        if options.json:
            recorder.emit(Failure(str(error)))
        raise
    if output.failed is not None:
        raise output.failed  # the command line knows what to do
    return code


async def _interruptible(demo: Coroutine[Any, Any, int], options: Options) -> int:
    """Run it; SIGTERM and Ctrl-C end it early, with everything cleared up."""
    task = asyncio.create_task(demo, name="demo")
    came: list[signal.Signals] = []

    def interrupt(number: signal.Signals) -> None:
        if not came:  # clearing up takes a moment, and is not to be interrupted
            task.cancel()
        came.append(number)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, interrupt, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not came:
            raise
        if options.serve is not None:
            return 0  # how it ends
        _note("interrupted")
        return 0 if came[0] is signal.SIGTERM else EXIT_INTERRUPTED


async def _serve(address: str, options: Options, output: Output, recorder: Recorder) -> int:
    """Until Ctrl-C."""
    from fpga_plugin.demo.rehearsal import trouble
    from fpga_plugin.demo.serve import pods_come_and_go, to_ask, url

    store = _store(options.bitstreams)
    entries = store.list()
    kind = DEFAULT_INTERFACE_ID
    async with running_node(
        store,
        (kind,),
        recorder,
        profile=options.profile,
        log=options.log,
        address=address,
    ) as node:
        where = await url(node)
        _note(f"page {where}  metrics {where}metrics  status {where}status.json  end with Ctrl-C")
        _note(f"try: {to_ask(node)} fpga-plugin status  (or card list, card show CARD)")

        def tell(line: str) -> None:
            output.text([line])
            if output.failed is not None:
                raise output.failed

        try:
            async with asyncio.TaskGroup() as group:
                if options.trouble:
                    group.create_task(trouble(node, tell))
                await pods_come_and_go(node, kind, entries, tell)
        except* OSError:
            if output.failed is None:
                raise
    return 0


async def _demo(options: Options, output: Output, recorder: Recorder) -> int:
    if options.serve is not None:
        return await _serve(options.serve, options, output, recorder)
    path = options.pod or _PODS[options.cards]
    manifest = read_manifest(path, RESOURCE_PREFIX, XRT_RESOURCE_PREFIX)
    for note in manifest.notes:
        _note(f"{path}: {note}")
    pod = manifest.pod
    if not any(container.devices for container in pod.all_containers):
        raise ManifestError(
            f"{path}: the Pod asks for no FPGA: there is nothing to show",
            hint=f"put {RESOURCE_PREFIX}/region-<interface id>: 1 into a container's"
            " resources.limits",
        )
    store = _store(options.bitstreams)
    entries = store.list()
    kinds = interface_ids(pod, entries)
    if real := made_for_real_cards(kinds, entries):
        _note(
            f"{ids(real)}: made for real cards. A simulated one shows the first 16 bytes of an"
            " image as its AFU id, so programming these will fail (bitstreams/README.md says how"
            " the samples are made)"
        )
    shown = options.pod or ("the KEP" if options.cards == "pac" else "the one for Alveo cards")
    profile = options.profile
    output.names = _names(store)
    output.introduce(manifest, shown, store.root, words(profile).kubelet)
    crash = not isinstance(output, BriefOutput)
    async with running_node(store, kinds, recorder, profile=profile, log=options.log) as node:
        try:
            good = await Story(manifest, node, recorder, output, crash).tell()
        except FpgaPluginError as error:
            recorder.emit(Failure(str(error), pod=pod.name))
            good = False
    # Work is reported when all of a card's is done, which may be after its regions failed.
    failure = None if good else recorder.failure
    warned, other = recorder.warnings, bool(real) and _showed_another(recorder)
    output.verdict(_verdict(pod, failure, warned, real=other), good=good and not warned)
    return EXIT_FAILED if not good else EXIT_MEANS_NOTHING if warned else 0


def _showed_another(recorder: Recorder) -> bool:
    """Whether a region showed another AFU id than that of the image programmed."""
    return any(work.report.failure == WrongImageError("").kind for work in recorder.work)


def _names(store: Store) -> Mapping[str, str]:
    """What the store's manifest calls accelerators, by AFU id; nothing where it cannot be used."""
    try:
        found = Trust(store.root, TrustMode.ANY, None, guarded=False).names().bitstreams
    except FpgaPluginError:
        return {}
    return {bitstream_id: alias for (_, alias), bitstream_id in found.items()}


def _verdict(pod: DemoPod, failure: Failure | None, warned: Sequence[str], *, real: bool) -> str:
    """What became of the pod, in a line; `real`: it was an image for real cards that failed."""
    name = f"{pod.namespace}/{pod.name}"
    if failure is None and warned:
        return f"Served, but {name} may not have had what it means: {warned[0]}"
    if failure is None:
        return f"Served: {name} had what it asks for, and gave it back clean."
    became = f"{'Refused' if failure.status else 'Failed'}: {failure.message}"
    if real:
        return f"{became}; simulated cards cannot run an image for real cards"
    return became


def _note(text: str) -> None:
    print(f"fpga-plugin: {text}", file=sys.stderr)  # noqa: T201  # a command prints


def _store(directory: str | None) -> Store:
    """The store to use.

    Raises:
        FpgaPluginError: it is not there.
    """
    if directory is None:
        samples = next(filter(os.path.isdir, _SAMPLES), None)
        if samples is None:
            raise BitstreamNotFoundError(
                f"the sample store is at none of {', '.join(_SAMPLES)}: the image has none",
                hint="run the demo in a clone or from the Python package, or name a store with"
                " --bitstreams DIR",
            )
        return Store(samples)
    if not os.path.isdir(directory):
        raise BitstreamNotFoundError(
            f"no bitstream store at {directory}",
            hint="--bitstreams takes a directory with <interface id>/<AFU id>.gbs and"
            " <interface id>/blank.gbs",
        )
    return Store(os.path.abspath(directory))
