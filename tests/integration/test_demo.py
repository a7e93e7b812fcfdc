"""`fpga-plugin demo` as a newcomer runs it: a process, its output, its exit code."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import nursery
import pytest
import yaml
from doubles.bitstreams import gbs
from doubles.samples import copy_samples
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from fpga_plugin.demo import node, story
from fpga_plugin.demo import run as demo
from fpga_plugin.demo.double import KubeletDouble

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "deploy" / "examples"
LIMIT = 60

IF = "ce48969398f05f33946d560708be108a"
OTHER_IF = "38d782e3b6125343b9342433e348ac4c"
REGIONS, CARDS = f"fpga.intel.com/region-{IF}", f"fpga.intel.com/fpga-{IF}"
OTHER_REGIONS = f"fpga.intel.com/region-{OTHER_IF}"
COMPRESS = "18b79ffa2ee54aa096ef4230dafacb5f"
HELLO = "850adcc26ceb4b229722d43375b61c66"
NLB = "f7df405cbd7acf7222f144b0b93acd18"
BLANK = "4cc434ceb4374bd69d69b7e3fdc04577"
CARD = "0000-10-00.0"
P0, P1, P2 = (f"{CARD}-p{port}" for port in range(3))

# As the KEP has it, `env` as a mapping included.
KEP = f"""\
apiVersion: v1
kind: Pod
metadata:
  name: intel-fpga-demo-compress
spec:
  containers:
  - name: intel-fpga-demo-compress
    image: intel-fpga-demo-compress:devel
    imagePullPolicy: IfNotPresent
    command: ["sh", "/opt/intel/intel-fpga-demo-compress/demo/demo.sh"]
    securityContext:
      capabilities:
        add:
          [IPC_LOCK]
    resources:
      limits:
        {REGIONS}: 1
        cpu: 1
        hugepages-2Mi: 20Mi
    env:
      FPGA_BITSTREAM_ID_1: {COMPRESS}
      FPGA_REGION_1: {IF}
      FPGA_DRIVER_PARAMS_1: clock=1000,debug=1
  restartPolicy: Never
"""

VALUE_FROM = KEP.replace(
    f"    env:\n      FPGA_BITSTREAM_ID_1: {COMPRESS}\n      FPGA_REGION_1: {IF}\n"
    "      FPGA_DRIVER_PARAMS_1: clock=1000,debug=1\n",
    "    env:\n    - name: FPGA_REGION_1\n      valueFrom: {configMapKeyRef: {name: a, key: b}}\n",
)

SIX_REGIONS_AND_A_CARD = f"""\
apiVersion: v1
kind: Pod
metadata: {{name: greedy}}
spec:
  containers:
  - {{name: regions, resources: {{limits: {{{REGIONS}: 6}}}}}}
  - {{name: card, resources: {{limits: {{{CARDS}: 1}}}}}}
"""

MIXED = f"""\
apiVersion: v1
kind: Pod
metadata: {{name: mixed}}
spec:
  containers:
  - {{name: app, resources: {{limits: {{{REGIONS}: 1, {CARDS}: 1}}}}}}
"""

SIDECAR = f"""\
apiVersion: v1
kind: Pod
metadata: {{name: sidecar}}
spec:
  initContainers:
  - name: once
    resources: {{limits: {{{REGIONS}: 1}}}}
    env: [{{name: FPGA_REGION_a, value: {IF}}}, {{name: FPGA_AFU_a, value: {NLB}}}]
  - name: beside
    restartPolicy: Always
    resources: {{limits: {{{REGIONS}: 1}}}}
    env: [{{name: FPGA_REGION_a, value: {IF}}}, {{name: FPGA_AFU_a, value: {HELLO}}}]
  containers:
  - name: app
    resources: {{limits: {{{REGIONS}: "2"}}, requests: {{{REGIONS}: 2}}}}
    env: [{{name: FPGA_REGION_a, value: {IF}}}, {{name: FPGA_AFU_a, value: {COMPRESS}}}]
"""

NO_ENV = f"""\
apiVersion: v1
kind: Pod
metadata: {{name: no-env}}
spec:
  containers:
  - {{name: app, resources: {{limits: {{{REGIONS}: 1}}}}}}
"""

MANIFESTS = {
    "no-env": NO_ENV,
    "kep-verbatim": KEP,
    "unknown-bitstream": KEP.replace(f"ID_1: {COMPRESS}", f"ID_1: {BLANK[::-1]}"),
    "mismatched-region": KEP.replace(f"FPGA_REGION_1: {IF}", f"FPGA_REGION_1: {OTHER_IF}"),
    "bad-parameter": KEP.replace("debug=1", "speed=1"),
    "clock-too-high": KEP.replace("clock=1000", "clock=1001"),
    "bad-id": KEP.replace(f"FPGA_REGION_1: {IF}", "FPGA_REGION_1: ../../etc"),
    "too-many": KEP.replace(f"{REGIONS}: 1", f"{REGIONS}: 7"),
    "no-such-interface": KEP.replace(f"region-{IF}", f"region-{IF[::-1]}"),
    "admission": SIX_REGIONS_AND_A_CARD,
    "mixed": MIXED,
    "sidecar": SIDECAR,
    "misspelt": KEP.replace("FPGA_BITSTREAM_ID_1", "FPGA_BITSTREAM_1")
    .replace("FPGA_REGION_1", "FPGA_REGON_1")
    .replace("FPGA_DRIVER_PARAMS_1", "FPGA_DRIVER_PARAM_1"),
    "wrong-version": KEP.replace("kind: Pod", "kind: Deployment"),
    "bad-yaml": "a: [",
    "no-fpga": KEP.replace(f"        {REGIONS}: 1\n", ""),
    "value-from": VALUE_FROM,
}

BOTH = (
    "sidecar",
    "init-and-app",
    "two-resources",
    "whole-card",
    "misspelt",
    "unknown-bitstream",
    "mixed",
    "admission",
)
"""Played by both kubelets."""

EXAMPLE_FILES = sorted(
    path.stem for path in EXAMPLES.glob("*.yaml") if "limits:" in path.read_text()
)
"""Those of pods that ask by resources; the demo's kubelet knows no allocations."""


def pod_of_the_deployment() -> str:
    """The Pod that the example's Deployment makes."""
    (deployment,) = yaml.safe_load_all((EXAMPLES / "deployment.yaml").read_text())
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "compress-1"}}
    return yaml.safe_dump(pod | {"spec": deployment["spec"]["template"]["spec"]})


@dataclass
class Run:
    """One run of the demo that has ended."""

    code: int
    out: str
    err: str
    left: list[str]
    events: list[dict] = field(default_factory=list)

    def of(self, kind: str) -> list[dict]:
        return [event for event in self.events if event["event"] == kind]

    def programmed(self) -> list[tuple[str, str]]:
        """What came onto which region, in order."""
        afus = []
        last = {}
        for event in self.of("region"):
            key, state = event["region"], (event["condition"], event["afu_id"])
            if event["condition"] == "PROGRAMMED" and last.get(key) != state:
                afus.append((key, event["afu_id"]))
            last[key] = state
        return afus

    def lists(self, resource: str) -> list[list[str]]:
        """The resource's device lists, each change of which."""
        lists = []
        for event in self.of("advertised"):
            if event["resource"] == resource and lists[-1:] != [event["devices"]]:
                lists.append(event["devices"])
        return lists

    def calls(self, *methods: str) -> list[str]:
        return [e["method"] for e in self.of("call") if e["method"] in methods]

    def error(self) -> dict:
        (error,) = self.of("error")
        return error


def start(folder: Path, *arguments: str) -> subprocess.Popen:
    """A demo whose temporary folder is made below `folder`."""
    temporary = folder / "tmp"
    temporary.mkdir(parents=True)
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "fpga_plugin", "demo", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(temporary),
    )


def environment(temporary: Path) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "TMPDIR": str(temporary),
        "FPGA_PLUGIN_BACKEND": "none of the demo's business",
    }


def finish(process: subprocess.Popen, folder: Path) -> Run:
    try:
        out, err = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    return Run(process.returncode, out, err, os.listdir(folder / "tmp"))


KINDS = {"advertised", "call", "region", "program", "scrub", "warning", "error"}


def parse(run: Run) -> Run:
    """Each line is an event, in order of time."""
    run.events = [json.loads(line) for line in run.out.splitlines()]
    times = [event["t"] for event in run.events]
    assert times == sorted(times)
    assert {event["event"] for event in run.events} <= KINDS
    return run


class Runs:
    """Every run, by name: each begins when a test first asks for it."""

    def __init__(self, base: Path, commands: dict[str, list[str]]) -> None:
        self._base = base
        self._commands = commands
        self._done: dict[str, Run] = {}

    def __getitem__(self, name: str) -> Run:
        if name not in self._done:
            self._done[name] = self._run(name)
        return self._done[name]

    def _run(self, name: str) -> Run:
        arguments = self._commands[name]
        # A path so deep that no socket's path would fit.
        folder = self._base / name / ("d" * 120)
        if name == "default":  # one of them is a program of its own
            run = finish(start(folder, *arguments), folder)
        else:
            temporary = folder / "tmp"
            temporary.mkdir(parents=True)
            env = environment(temporary) | {"PYTHONWARNINGS": "error"}
            done = nursery.run(["demo", *arguments], env, str(ROOT), timeout=LIMIT)
            run = Run(done.returncode, done.stdout, done.stderr, os.listdir(temporary))
        return parse(run) if "--json" in arguments else run


OWN_IF = "aaaabbbbccccddddeeeeffff00001111"
OWN_AFU, OWN_BLANK = "2" * 31 + "a", "b" * 32
OWN_POD = KEP.replace(IF, OWN_IF).replace(COMPRESS, OWN_AFU)


def own_store(root: Path, image: bytes | None = None) -> None:
    """A store of one AFU and a blank, for an interface id of its own."""
    (root / OWN_IF).mkdir(parents=True)
    for file, afu in ((OWN_AFU, OWN_AFU), ("blank", OWN_BLANK)):
        packed = gbs(image or bytes.fromhex(afu) + b"rest", afu, interface=OWN_IF)
        (root / OWN_IF / f"{file}.gbs").write_bytes(packed)


def named_store(path: Path) -> None:
    """The samples, and a manifest that calls one of them something."""
    copy_samples(path)
    file = f"{IF}/{COMPRESS}.gbs"
    data = (path / file).read_bytes()
    said = {"path": file, "sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    document = {"format": 2, "version": 1, "files": [said | {"alias": "compress-2"}]}
    (path / "manifest.json").write_text(json.dumps(document))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All with --json but those that people read."""
    base = tmp_path_factory.mktemp("demo")
    commands: dict[str, list[str]] = {
        "default": ["--json"],
        "text": ["-v", "--kubelet", "extended"],
        "text-stock": ["-v"],
        "brief": [],
        "stock": ["--json", "--kubelet", "stock"],
        "extended": ["--json", "--kubelet", "extended"],
        "alveo": ["--json", "--kubelet", "stock", "--cards", "alveo"],
        "missing-file": ["--json", "--pod", str(base / "nothing.yaml")],
        "missing-store": ["--json", "--bitstreams", str(base / "nowhere")],
        "no-blank": ["--json", "--bitstreams", str(base / "store")],
    }
    (base / "store" / IF).mkdir(parents=True)
    own_store(base / "own")
    own_store(base / "real", b"a circuit for a real card")
    (base / "own.yaml").write_text(OWN_POD)
    for name in ("own", "real"):
        pod, store = str(base / "own.yaml"), str(base / name)
        commands[name] = ["--json", "--pod", pod, "--bitstreams", store]
    for name, manifest in MANIFESTS.items():
        path = base / f"{name}.yaml"
        path.write_text(manifest)
        commands[name] = ["--json", "--pod", str(path)]
    named_store(base / "named")
    commands["named"] = ["-v", "--bitstreams", str(base / "named")]
    commands["named-brief"] = ["--bitstreams", str(base / "named")]
    commands["quiet"] = ["-q"]
    commands["real-quiet"] = ["-q", *commands["real"][1:]]
    commands["logged-quiet"] = ["-q", "--log"]
    commands["refused-text"] = ["--pod", str(base / "unknown-bitstream.yaml")]
    commands["no-blank-text"] = commands["no-blank"][1:]
    commands["misspelt-quiet"] = ["-q", "--pod", str(base / "misspelt.yaml")]
    commands["refused-quiet"] = ["-q", "--pod", str(base / "unknown-bitstream.yaml")]
    commands["stuck-quiet"] = ["--quiet", "--pod", str(base / "no-such-interface.yaml")]
    (base / "pod.yaml").write_text(pod_of_the_deployment())
    commands["deployment-pod"] = ["--json", "--pod", str(base / "pod.yaml")]
    for name in EXAMPLE_FILES:
        commands[name] = ["--json", "--pod", str(EXAMPLES / f"{name}.yaml")]
    for name in BOTH:
        commands[f"{name}-stock"] = [*commands[name], "--kubelet", "stock"]
    return Runs(base / "runs", commands)


SUCCESSES = (
    "default",
    "text",
    "text-stock",
    "brief",
    "stock",
    "extended",
    "alveo",
    "kep-verbatim",
    "sidecar",
    "no-env",
    "misspelt",
    "deployment-pod",
    *EXAMPLE_FILES,
)
INPUT_ERRORS = (
    "wrong-version",
    "bad-yaml",
    "no-fpga",
    "value-from",
    "missing-file",
    "missing-store",
)


@pytest.mark.parametrize("name", SUCCESSES)
def test_a_demo_that_goes_well_exits_with_0_and_leaves_nothing(runs, name):
    run = runs[name]
    note = "one of its 2 Pods is shown\n" if name == "deployment" else ""
    assert run.err.endswith(note)
    code = 3 if name == "misspelt" else 0  # served, and a request of its means nothing
    assert (run.code, bool(run.err), run.left, run.of("error")) == (code, bool(note), [], [])


@pytest.mark.parametrize("name", sorted({*MANIFESTS, "missing-file"} - {*SUCCESSES}))
def test_a_demo_that_fails_exits_with_1_and_leaves_nothing(runs, name):
    run = runs[name]
    assert (run.code, run.left) == (1, [])
    assert "Traceback" not in run.err
    assert bool(run.err) == (name in INPUT_ERRORS)


def test_several_at_the_same_time_do_not_disturb_each_other(tmp_path):
    folders = [tmp_path / name for name in "abc"]
    begun = [start(folder, "--json") for folder in folders]
    for process, folder in zip(begun, folders, strict=True):
        run = parse(finish(process, folder))
        assert (run.code, run.left) == (0, [])


@pytest.mark.parametrize("name", ["default", "kep-pod", "kep-verbatim"])
def test_the_keps_pod_is_programmed_at_each_start_and_scrubbed_at_the_end(runs, name):
    run = runs[name]
    assert run.programmed() == [(P0, COMPRESS)] * 2
    assert run.calls("Allocate", "PreStartContainer", "PostStopContainer", "Deallocate") == [
        "Allocate",
        "PreStartContainer",
        "PreStartContainer",
        "PostStopContainer",
        "PostStopContainer",
        "Deallocate",
    ]
    last = [event for event in run.of("region") if event["region"] == P0][-1]
    assert (last["ownership"], last["condition"], last["afu_id"]) == ("FREE", "BLANK", BLANK)
    scrub = [event for event in run.of("scrub") if event["region"] == P0][-1]
    steps = [step["name"] for step in scrub["steps"]]
    assert steps[:5] == ["quiesce", "clear errors", "restore defaults", "program blank", "verify"]
    assert scrub["afu_id"] == BLANK
    assert 0.2 < scrub["seconds"] < 5
    assert run.events.index(last) > run.events.index(run.of("call")[-2])


def test_a_stock_kubelets_pod_is_programmed_and_released_without_a_call_for_it(runs):
    run = runs["stock"]
    assert run.programmed() == [(P0, COMPRESS)] * 2
    assert {event["method"] for event in run.of("call")} == {
        "GetDevicePluginOptions",
        "GetPreferredAllocation",
        "Allocate",
        "PreStartContainer",
    }
    states = [
        (event["ownership"], event["condition"])
        for event in run.of("region")
        if event["region"] == P0
    ]
    assert states[-3:] == [("FREE", "DIRTY"), ("FREE", "SCRUBBING"), ("FREE", "BLANK")]


def test_nobody_waits_for_two_of_the_plugins_usual_intervals(runs):
    """A stock kubelet's pod is released after two Lists, 2 s apart unless set otherwise."""
    started = runs["stock"].of("call")[-1]["t"]
    released = [e["t"] for e in runs["stock"].of("region") if e["ownership"] == "FREE"]
    assert min(t for t in released if t > started) - started < 2


def test_programs_read_an_extended_kubelets_calls_unless_they_ask_for_a_stock_ones(runs):
    def calls(name):
        return [(event["method"], event["devices"]) for event in runs[name].of("call")]

    assert calls("default") == calls("extended")


@pytest.mark.parametrize("name", BOTH)
def test_what_becomes_of_a_pod_is_the_same_on_either_kubelet(runs, name):
    extended, stock = runs[name], runs[f"{name}-stock"]
    assert stock.code == extended.code
    assert stock.programmed() == extended.programmed()
    assert stock.left == []
    # What comes after these words depends on whether kubelet has the newest list by then.
    said, stock_said = (
        [
            event["message"].partition("Allocate failed due to")[0]
            for kind in ("warning", "error")
            for event in run.of(kind)
        ]
        for run in (extended, stock)
    )
    assert stock_said == said
    assert {event["method"] for event in stock.of("call")}.isdisjoint(
        {"PostStopContainer", "Deallocate"}
    )
    states = {e["region"]: (e["ownership"], e["condition"]) for e in stock.of("region")}
    assert {owner for owner, _ in states.values()} == {"FREE"}


def test_an_alveo_cards_region_is_programmed_and_given_back(runs):
    run = runs["alveo"]
    (region,) = {region for region, _ in run.programmed()}
    assert region == "0000-12-00.0-p0"
    last = [event for event in run.of("region") if event["region"] == region][-1]
    assert (last["ownership"], last["condition"]) == ("FREE", "BLANK")


def test_a_call_tells_resource_devices_status_and_time(runs):
    (allocate,) = [e for e in runs["default"].of("call") if e["method"] == "Allocate"]
    assert allocate["resource"] == REGIONS
    assert allocate["devices"] == [P0]
    assert allocate["status"] == "OK"
    assert 0 < allocate["seconds"] < 1
    assert "message" not in allocate


def test_a_claimed_region_hides_its_card_and_a_claimed_card_its_regions(runs):
    both = [CARD, "0000-11-00.0"]
    six = [f"{card}-p{port}" for card in both for port in range(3)]
    assert runs["default"].lists(CARDS) == [both, both[1:], both]
    assert runs["default"].lists(REGIONS) == [six]
    assert runs["whole-card"].lists(CARDS) == [both]
    assert runs["whole-card"].lists(REGIONS) == [six, six[3:], six]


def test_a_pod_without_a_request_gets_its_regions_blank(runs):
    run = runs["no-env"]
    assert run.calls("PreStartContainer") == ["PreStartContainer"] * 2
    assert run.programmed() == []


@pytest.mark.parametrize("name", ["default", "whole-card", "two-resources", "unknown-bitstream"])
def test_what_is_advertised_at_the_end_is_what_was_before_the_pod(runs, name):
    run = runs[name]
    claimed = next(i for i, e in enumerate(run.events) if e.get("method") == "Allocate")
    before = {e["resource"]: e for e in run.events[:claimed] if e["event"] == "advertised"}
    after = {e["resource"]: e for e in run.events if e["event"] == "advertised"}
    assert before
    for resource, event in before.items():
        assert event["healthy"] == event["devices"]
        assert after[resource]["devices"] == event["devices"]
        assert after[resource]["healthy"] == event["healthy"]


def test_a_whole_cards_requests_go_to_its_regions_in_order_and_the_rest_stays_blank(runs):
    run = runs["whole-card"]
    assert run.programmed() == [(P0, COMPRESS), (P1, HELLO)] * 2
    owned = {e["region"]: e["condition"] for e in run.of("region") if e["ownership"] == "STARTED"}
    assert set(owned) == {P0, P1, P2}


def test_an_init_container_and_the_app_share_a_region_with_a_bitstream_each(runs):
    assert runs["init-and-app"].programmed() == [(P0, NLB), (P0, COMPRESS), (P0, COMPRESS)]


def test_a_sidecar_takes_over_the_init_containers_region_and_keeps_it(runs):
    first = [(P0, NLB), (P0, HELLO), (P1, COMPRESS)]
    assert runs["sidecar"].programmed() == [*first, *first[1:]]


def test_a_store_of_ones_own_gets_cards_of_its_own(runs):
    run = runs["own"]
    assert run.code == 0
    assert run.programmed() == [(P0, OWN_AFU)] * 2
    assert {event["resource"] for event in run.of("advertised")} == {
        f"fpga.intel.com/{kind}-{OWN_IF}" for kind in ("region", "fpga")
    }


def test_bitstreams_for_real_cards_are_recognised_and_fail_at_once(runs):
    run = runs["real"]
    assert run.code == 1
    assert "made for real cards" in run.err
    assert "where " + OWN_BLANK in run.error()["message"]
    verdict = runs["real-quiet"].out
    assert verdict.endswith("; simulated cards cannot run an image for real cards\n")
    assert run.events[-1]["t"] < 20


def test_two_resources_are_programmed_each_with_its_own(runs):
    other = "0000-12-00.0-p0"
    starts = [(P0, COMPRESS), (P1, HELLO), (other, NLB)]
    assert runs["two-resources"].programmed() == starts * 2
    assert {e["resource"] for e in runs["two-resources"].of("advertised")} >= {
        REGIONS,
        OTHER_REGIONS,
    }


PRESTART = "Error: device plugin PreStartContainer rpc failed with err: rpc error: code = "


@pytest.mark.parametrize(
    ("name", "status", "code", "words"),
    [
        ("unknown-bitstream", "NOT_FOUND", "NotFound", BLANK[::-1]),
        ("mismatched-region", "INVALID_ARGUMENT", "InvalidArgument", OTHER_IF),
        ("bad-parameter", "INVALID_ARGUMENT", "InvalidArgument", "'speed'"),
        ("clock-too-high", "INVALID_ARGUMENT", "InvalidArgument", "clock=1001"),
        ("bad-id", "INVALID_ARGUMENT", "InvalidArgument", "FPGA_REGION_1='../../etc'"),
        ("mixed", "FAILED_PRECONDITION", "FailedPrecondition", "whole cards"),
    ],
)
def test_a_refused_start_shows_the_pods_event_and_gives_the_devices_back(
    runs, name, status, code, words
):
    run = runs[name]
    error = run.error()
    assert error["message"].startswith(f"{PRESTART}{code} desc = ")
    assert words in error["message"]
    assert error["status"] == status
    assert run.programmed() == []
    assert run.calls("Deallocate")
    states = {e["region"]: (e["ownership"], e["condition"]) for e in run.of("region")}
    assert set(states.values()) == {("FREE", "BLANK")}
    (refused,) = [e for e in run.of("call") if e["status"] != "OK"]
    assert refused["message"] in error["message"]


def test_devices_that_the_pod_itself_hides_fail_its_admission(runs):
    run = runs["admission"]
    message = run.error()["message"]
    assert message.startswith("UnexpectedAdmissionError: Pod was rejected: Allocate failed due to ")
    # Kubelet may or may not have the new list by then, as in a cluster.
    assert (
        f"requested number of devices unavailable for {CARDS}. Requested: 1, Available: 0"
        in message
        or "code = FailedPrecondition desc = card 0000-1" in message
    )
    cards = run.lists(CARDS)
    assert [] in cards
    assert cards[-1] == [CARD, "0000-11-00.0"]
    assert run.calls("PreStartContainer") == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("too-many", f"1 Insufficient {REGIONS}: the pod asks for 7"),
        ("no-such-interface", f"no plugin advertises fpga.intel.com/region-{IF[::-1]}"),
        ("no-blank", "no-blank-image: no blank bitstream at "),
    ],
)
def test_a_pod_that_fits_no_node_says_why(runs, name, words):
    run = runs[name]
    message = run.error()["message"]
    assert message.startswith("FailedScheduling: 0/1 nodes are available: 1 Insufficient ")
    assert words in message
    assert run.calls("Allocate") == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wrong-version", "apiVersion is 'v1'"),
        ("bad-yaml", "bad-yaml.yaml, line 1, column 5: not valid YAML"),
        ("no-fpga", "asks for no FPGA"),
        ("value-from", "'FPGA_REGION_1' has valueFrom"),
        ("missing-file", "cannot be read: No such file"),
        ("missing-store", "no bitstream store at "),
    ],
)
def test_wrong_input_is_one_error_and_is_told_on_standard_error_too(runs, name, words):
    run = runs[name]
    (event,) = run.events
    assert event["event"] == "error"
    assert words in event["message"]
    assert words in run.err


def test_people_see_what_the_stores_manifest_calls_an_accelerator(runs):
    held = [line for line in runs["named"].out.splitlines() if "PROGRAMMED" in line]
    assert any("compress-2" in line for line in held)
    assert not any(COMPRESS in line for line in held)


def test_by_default_people_see_a_stock_kubelets_pod_in_a_screenful(runs):
    lines = runs["brief"].out.splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines[:-1])) <= 80, "the verdict alone may be longer"
    assert "\x1b" not in runs["brief"].out
    steps = [line.split(maxsplit=2)[2] for line in lines if re.match(r" +[0-9.]+ s  ", line)]
    kinds = [re.sub(r"[0-9]+ ms", "# ms", step) for step in steps]
    steps = [re.sub(r" +", " ", step) for step in kinds]
    # The list and Allocate's answer come on two connections.
    steps.remove(f"plugin hides card {CARD}: a region is taken")
    assert steps == [
        "plugin finds 2 cards with 6 regions",
        "plugin has scrubbed 6 of them, and advertises",
        f"kubelet Allocate {P0}: OK in # ms",
        f"plugin programs {P0} in # ms, and reads back",
        f"kubelet PreStartContainer {P0}: OK in # ms",
        "pod container intel-fpga-demo-compress runs. It sees",
        "pod ends, and no call tells the plugin",
        f"plugin takes {P0} back: no pod has it any more",
        f"plugin scrubs {P0} in # ms; it is blank",
        "plugin advertises what it did before the pod",
    ]
    more = [line.strip() for line in lines if line.startswith(" " * 20)]
    assert more == [f"2 x {CARDS}", f"6 x {REGIONS}", COMPRESS, "/dev/dfl-port.0"]


def test_the_readme_shows_the_screenful_as_it_is(runs):
    def steps(text):
        return [re.sub(r" +[0-9.]+ (m?s)\b", r" # \1", line) for line in text.splitlines()]

    readme = (ROOT / "README.md").read_text()
    (shown,) = re.findall(r"```text\n(.*?)```", readme, re.DOTALL)
    assert len(shown.splitlines()) > 10
    *_, played, _ = runs["brief"].out.split("\n\n")
    assert sorted(steps(shown)) == sorted(steps(played))


def test_the_screenful_shows_what_the_pod_asks_for_and_how_to_see_more(runs):
    lines = runs["brief"].out.splitlines()
    begin = lines.index("Pod default/intel-fpga-demo-compress asks for")
    assert lines[begin + 1 : begin + 6] == [
        f"  1 x {REGIONS}",
        f"  FPGA_BITSTREAM_ID_1={COMPRESS}",
        f"  FPGA_REGION_1={IF}",
        "  FPGA_DRIVER_PARAMS_1=clock=1000,debug=1",
        "",
    ]
    assert lines[-2].startswith("-v shows each call")


def test_the_screenful_names_an_accelerator_as_the_stores_manifest_does(runs):
    assert runs["named-brief"].out.count(COMPRESS) == 1  # what the pod asks for
    assert "compress-2\n" in runs["named-brief"].out


def test_the_screenful_says_what_is_not_offered_and_why(runs):
    out = runs["no-blank-text"].out
    assert "has scrubbed 0 of them" in out
    assert f"0 x {REGIONS} of 6, the others are Unhealthy" in out
    assert "not offered: no-blank-image: " in out


def test_the_timeline_of_a_stock_kubelet_explains_the_release(runs):
    out = runs["text-stock"].out
    assert "No call reports the end of the pod." in out
    assert "PostStopContainer" not in out
    assert "Deallocate" not in out
    assert out.count(" crashes\n") == 1
    assert "programmed twice" in out


def test_people_get_a_timeline_without_colours_in_a_pipe(runs):
    out = runs["text"].out
    assert "\x1b" not in out
    for words in (
        "PreStartContainer",
        "PostStopContainer",
        "Deallocate",
        f"hidden: {CARD}",
        f"AFU id reads {COMPRESS}",
        "program blank",
        f"shown again: {CARD}",
        "programmed twice",
    ):
        assert words in out, words
    assert "Error" not in out


@pytest.mark.parametrize(
    ("name", "example"), [("kep-pod", "kep-pod.yaml"), ("alveo-pod", "alveo/pod.yaml")]
)
def test_a_packaged_pod_is_the_one_in_the_examples(name, example):
    packaged = ROOT / "fpga_plugin" / "demo" / f"{name}.yaml"
    assert packaged.read_bytes() == (EXAMPLES / example).read_bytes()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_in_the_middle_clears_up(tmp_path, number, code):
    process = start(tmp_path, "--json")
    assert process.stdout is not None
    for line in process.stdout:
        if '"SCRUBBING"' in line:
            break
    process.send_signal(number)
    run = finish(process, tmp_path)
    assert (run.code, run.err, run.left) == (code, "fpga-plugin: interrupted\n", [])


def test_a_reader_that_goes_away_ends_it_quietly(tmp_path):
    process = start(tmp_path)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(LIMIT) == 0
    with process.stderr as stderr:
        assert stderr.read() == ""
    assert os.listdir(tmp_path / "tmp") == []


@pytest.fixture
def in_process(monkeypatch, capsys):
    """Runs the demo in this process, without waiting, with `start` in PreStart's place."""

    def run(start):
        original = KubeletDouble.start_container
        monkeypatch.setattr(node, "PR_SECONDS", 0)
        monkeypatch.setattr(story, "RETRY_SECONDS", 0)
        monkeypatch.setattr(KubeletDouble, "start_container", lambda *args: start(original, *args))
        code = demo.run(demo.Options(pod=None, bitstreams=None, json=True))
        captured = capsys.readouterr()
        return parse(Run(code, captured.out, captured.err, []))

    return run


def test_programming_is_told_step_by_step(runs):
    programs = runs["default"].of("program")
    assert [step["name"] for step in programs[-1]["steps"]][-2:] == ["program", "verify"]
    assert all(one["seconds"] > 0 and one["condition"] == "PROGRAMMED" for one in programs)


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("brief", "Served: default/intel-fpga-demo-compress had what it asks for"),
        ("text", "Served: default/intel-fpga-demo-compress had what it asks for"),
        ("refused-text", "Refused: Error: device plugin PreStartContainer rpc failed with err:"),
        ("refused-quiet", "Refused: Error: device plugin PreStartContainer rpc failed with err:"),
        ("stuck-quiet", "Failed: "),
        ("logged-quiet", "Served: default/intel-fpga-demo-compress had what it asks for"),
        ("quiet", "Served: default/intel-fpga-demo-compress had what it asks for"),
        ("misspelt-quiet", "Served, but default/"),
    ],
)
def test_the_last_line_is_the_verdict(runs, name, verdict):
    run = runs[name]
    lines = run.out.splitlines()
    assert lines[-1].startswith(verdict)
    assert (len(lines) == 1) == name.endswith("quiet")
    codes = {"Served:": 0, "Served,": 3}
    assert run.code == codes.get(verdict.split()[0], 1)


def test_the_plugins_log_is_there_for_who_asks_for_it(runs):
    assert "kubelet no longer knows the allocation" in runs["logged-quiet"].err
    assert runs["quiet"].err == ""


def test_misspelt_variables_are_told_with_what_was_meant(runs):
    run = runs["misspelt"]
    assert run.code == 3
    warning, *_ = run.of("warning")
    for right in ("FPGA_BITSTREAM_ID_1", "FPGA_REGION_1", "FPGA_DRIVER_PARAMS_1"):
        assert f"did you mean {right}?" in warning["message"]
    kinds = [(one["event"], one.get("method")) for one in run.events]
    assert kinds.index(("warning", None)) < kinds.index(("call", "PreStartContainer"))


def test_an_unfinished_preparation_is_tried_again(in_process):
    answers = iter([Status.UNAVAILABLE, Status.UNAVAILABLE])

    async def start(original, *args):
        if (status := next(answers, None)) is not None:
            raise GRPCError(status, "not finished")
        return await original(*args)

    run = in_process(start)
    assert run.code == 0
    messages = [error["message"] for error in run.of("error")]
    assert messages == [f"{PRESTART}Unavailable desc = not finished"] * 2
    assert [afu for _, afu in run.programmed()] == [COMPRESS] * 2
    assert run.lists(CARDS)[-1] == [CARD, "0000-11-00.0"]


def test_an_unfinished_preparation_is_not_tried_for_ever(in_process):
    tries = 0

    async def start(*_):
        nonlocal tries
        tries += 1
        raise GRPCError(Status.UNAVAILABLE, "not finished")

    run = in_process(start)
    assert run.code == 1
    assert tries == story.TRIES
    assert run.calls("Deallocate")
    assert run.lists(CARDS)[-1] == [CARD, "0000-11-00.0"]
