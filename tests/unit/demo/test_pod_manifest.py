"""Pods as people write them: what the demo reads, and what it refuses as the API server would."""

import pytest
import yaml

from fpga_plugin.demo.pod import DemoContainer, DemoPod
from fpga_plugin.demo.pod_manifest import ManifestError, read_manifest
from fpga_plugin.demo.scheduling import UnschedulableError, effective_requests, schedule
from fpga_plugin.kubernetes.names import ResourceName

PREFIX = "fpga.intel.com"
REGIONS = ResourceName(f"{PREFIX}/region-ce48969398f05f33946d560708be108a")
CARDS = ResourceName(f"{PREFIX}/fpga-ce48969398f05f33946d560708be108a")

POD = f"""\
apiVersion: v1
kind: Pod
metadata:
  name: one
spec:
  containers:
  - name: app
    resources:
      limits: {{{REGIONS}: 2, {CARDS}: "1", cpu: 500m, nvidia.com/gpu: 1}}
    env:
    - {{name: FPGA_REGION_1, value: "1"}}
    - {{name: OTHER}}
"""


@pytest.fixture
def read(tmp_path):
    def read_text(text):
        path = tmp_path / "pod.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_manifest(str(path), PREFIX)

    return read_text


def test_devices_and_environment_are_taken_and_the_rest_is_not(read):
    manifest = read(POD)
    (app,) = manifest.pod.containers
    assert app.devices == {REGIONS: 2, CARDS: 1}
    assert app.env == {"FPGA_REGION_1": "1", "OTHER": ""}
    assert (manifest.pod.namespace, manifest.pod.name) == ("default", "one")
    assert manifest.restart_policy == "Always"


def test_json_is_yaml_and_other_documents_are_passed_over(read):
    assert (
        read('{"apiVersion": "v1", "kind": "ConfigMap"}\n---\n' + POD + "---\n").pod.name == "one"
    )


def test_a_pod_that_asks_by_claims_is_refused_as_that(read):
    pod = yaml.safe_load(POD)
    pod["spec"]["resourceClaims"] = [{"name": "fpga", "resourceClaimTemplateName": "one"}]
    assert read(yaml.safe_dump(pod)).pod.containers[0].devices, "this one has limits, too"
    del pod["spec"]["containers"][0]["resources"]
    with pytest.raises(ManifestError, match="asks by resourceClaims") as caught:
        read(yaml.safe_dump(pod))
    assert "docs/dra.md" in caught.value.hint


def test_a_pod_that_waits_for_a_blank_bitstream_is_told_how_to_install_one(read):
    problem = "no-blank-image: no blank bitstream at /store/x/blank.gbs"
    with pytest.raises(UnschedulableError) as caught:
        schedule(read(POD).pod, {}, [problem])
    assert problem in caught.value.hint
    assert "`fpga-plugin bitstream install --dir STORE --blank FILE`" in caught.value.hint
    with pytest.raises(UnschedulableError) as caught:
        schedule(read(POD).pod, {}, ["port deaf"])
    assert "install" not in caught.value.hint


def of_kind(kind: str, version: str, *way: str, **more: object) -> str:
    pod = yaml.safe_load(POD)
    inner: dict[str, object] = {"spec": pod["spec"]}
    for name in reversed(way):
        inner = {name: inner}
    inner.setdefault("spec", {}).update(more)  # type: ignore[attr-defined]
    named = {"apiVersion": version, "kind": kind, "metadata": {"name": "many"}}
    return yaml.safe_dump({**named, **inner})


@pytest.mark.parametrize(
    ("kind", "version", "way"),
    [
        ("Deployment", "apps/v1", ("spec", "template")),
        ("StatefulSet", "apps/v1", ("spec", "template")),
        ("DaemonSet", "apps/v1", ("spec", "template")),
        ("ReplicaSet", "apps/v1", ("spec", "template")),
        ("Job", "batch/v1", ("spec", "template")),
        ("CronJob", "batch/v1", ("spec", "jobTemplate", "spec", "template")),
    ],
)
def test_of_what_makes_pods_the_template_is_taken(read, kind, version, way):
    pod = read(of_kind(kind, version, *way)).pod
    assert pod.name == "many"
    assert [c.devices for c in pod.containers] == [{REGIONS: 2, CARDS: 1}]
    wrong = of_kind(kind, version, *way).replace("limits", "requests")
    with pytest.raises(ManifestError, match=rf"{'.'.join(way)}.spec.containers\[0\]"):
        read(wrong)


def test_a_mapping_where_a_word_belongs_is_one_clear_error(read):
    with pytest.raises(ManifestError, match="has no Pod"):
        read(POD.replace("kind: Pod", "kind: {a: b}"))
    with pytest.raises(ManifestError, match="restartPolicy"):
        read(POD.replace("spec:\n", "spec:\n  restartPolicy: {a: b}\n", 1))


def test_that_one_of_several_pods_is_shown_is_said(read):
    text = of_kind("Deployment", "apps/v1", "spec", "template", replicas=3)
    assert read(text).notes == ("one of its 3 Pods is shown",)


@pytest.mark.parametrize("template", ["7", "[]", "{spec: 7}", "{}"])
def test_a_template_that_is_none_is_one_clear_error(read, template):
    head = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: a}\n"
    text = f"{head}spec: {{template: {template}}}"
    with pytest.raises(ManifestError, match=r"spec\.template"):
        read(text)


def test_of_several_documents_the_first_that_asks_for_an_fpga_is_shown(read):
    plain = POD.replace("one", "plain").replace(str(REGIONS), "x/y").replace(str(CARDS), "x/z")
    two = of_kind("Deployment", "apps/v1", "spec", "template")
    manifest = read(f"{plain}---\n{POD}---\n{two}")
    assert manifest.pod.name == "one"
    assert manifest.notes == ("one is shown; many asks for an FPGA too",)
    items = yaml.safe_dump(
        {"kind": "List", "items": [yaml.safe_load(plain), yaml.safe_load(POD), 7]}
    )
    assert read(items).pod.name == "one"
    assert read(plain).pod.name == "plain"


def test_every_pod_read_is_another(read):
    assert read(POD).pod.uid != read(POD).pod.uid


def test_init_containers_are_apart_and_sidecars_known(read):
    text = POD + "  initContainers:\n  - {name: a}\n  - {name: b, restartPolicy: Always}\n"
    pod = read(text).pod
    assert [(c.name, c.restartable) for c in pod.init_containers] == [("a", False), ("b", True)]
    assert [c.name for c in pod.all_containers] == ["a", "b", "app"]


def test_the_keps_mapping_of_variables_is_read_too(read):
    text = POD[: POD.index("    - {name: FPGA")] + "      FPGA_REGION_1: abc\n"
    assert read(text).pod.containers[0].env == {"FPGA_REGION_1": "abc"}


def test_variables_that_need_a_cluster_are_left_out_and_named(read):
    text = POD + (
        "    - {name: NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}\n"
        "    envFrom: [{configMapRef: {name: c}}]\n"
    )
    manifest = read(text)
    assert "NODE" not in manifest.pod.containers[0].env
    assert len(manifest.notes) == 2


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("kind: Pod", "kind: Service", "has no Pod, but 'Service'"),
        ("kind: Pod", "kind: Job", "apiVersion is 'v1': a Job's is batch/v1"),
        ("apiVersion: v1", "apiVersion: v2", "apiVersion is 'v2'"),
        ("apiVersion: v1\n", "", "apiVersion is 'None'"),
        ("name: one", "name: One", "metadata.name is 'One'"),
        ("  name: one\n", "", "metadata.name is missing"),
        ("metadata:\n  name: one", "metadata: one", "metadata is a string, not a mapping"),
        ("name: app", "name: app/../x", "spec.containers[0].name is 'app/../x'"),
        ("name: app", "name: 7", "spec.containers[0].name is '7'"),
        (f"{REGIONS}: 2", f"{REGIONS}: 1.5", "'1.5'"),
        (f"{REGIONS}: 2", f"{REGIONS}: -1", "'-1'"),
        (f"{REGIONS}: 2", f"{REGIONS}: true", "'True'"),
        (f"{REGIONS}: 2", f"{REGIONS}: 1k", "'1k'"),
        ("      limits:", "      requests:", "limits must be set"),
        ('value: "1"', "value: 1", "is the number '1', not a string"),
        ('value: "1"', 'value: "$(OTHER)"', "refers to other variables"),
        ("{name: OTHER}", "{name: FPGA_AFU_1, valueFrom: {}}", "'FPGA_AFU_1' has valueFrom"),
        ("{name: OTHER}", "{value: x}", "env[1].name is 'None'"),
        ("{name: OTHER}", "OTHER", "env[1] is a string, not a mapping"),
        (
            "  containers:",
            "  restartPolicy: Sometimes\n  containers:",
            "restartPolicy is 'Sometimes'",
        ),
        ("  containers:", "  others:", "spec.containers is missing or empty"),
        ("    env:\n", "  - name: app\n    env:\n", "the container 'app' is there twice"),
        ("metadata:", "metadata: {", "not valid YAML"),
        ("name: one", "name: one\n  stamp: 2024-99-99", "not valid YAML"),
    ],
)
def test_what_the_api_server_would_refuse_is_refused_with_its_place(read, old, new, words):
    assert old in POD
    with pytest.raises(ManifestError) as caught:
        read(POD.replace(old, new, 1))
    assert words in str(caught.value)
    assert "pod.yaml" in caught.value.message


@pytest.mark.parametrize(
    "text",
    ["", "7", "[]", "- a", "\x00", b"\xff\xff", "[" * 100_000, "a: b: c", "kind: List\nitems: 7"],
)
def test_anything_else_is_one_clear_error(read, text):
    with pytest.raises(ManifestError) as caught:
        read(text)
    assert "\n" not in caught.value.message


def test_a_file_beyond_the_api_servers_limit_is_not_read(read):
    with pytest.raises(ManifestError, match="larger than"):
        read("#" * (2 * 1024 * 1024))


def container(name: str, count: int, *, restartable: bool = False) -> DemoContainer:
    return DemoContainer(name=name, devices={REGIONS: count}, restartable=restartable)


@pytest.mark.parametrize(
    ("init", "app", "expected"),
    [
        ((), (1, 2), 3),
        ((container("a", 5),), (1, 2), 5),
        ((container("a", 2), container("b", 3)), (1,), 3),
        ((container("a", 2, restartable=True),), (1,), 3),
        ((container("a", 1, restartable=True), container("b", 4)), (1,), 5),
        ((container("a", 4), container("b", 1, restartable=True)), (1,), 4),
    ],
)
def test_the_scheduler_counts_the_most_that_run_at_a_time(init, app, expected):
    containers = tuple(container(f"c{n}", count) for n, count in enumerate(app))
    pod = DemoPod(name="p", containers=containers, init_containers=init)
    assert effective_requests(pod) == {REGIONS: expected}
    schedule(pod, {REGIONS: expected})
    with pytest.raises(UnschedulableError):
        schedule(pod, {REGIONS: expected - 1})
