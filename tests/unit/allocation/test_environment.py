"""What a container asks for, made of a pod's spec; and which of a pod's containers starts."""

import base64
import json
import random
import tracemalloc

import msgspec
import pytest
from grpclib.const import Status

from fpga_plugin.allocation.requests.environment import (
    ContainerRequests,
    container_requests,
    request_variables,
)
from fpga_plugin.deviceplugin.turn import Start, first, follows, refused
from fpga_plugin.errors import InvalidRequestError
from fpga_plugin.kubernetes.apiserver import pods as apiserver
from fpga_plugin.kubernetes.apiserver.pods import ApiPod
from fpga_plugin.kubernetes.kubelet import podsapi
from fpga_plugin.kubernetes.messages import core_v1
from fpga_plugin.kubernetes.names import PodUid
from fpga_plugin.kubernetes.pod import (
    UNKNOWN_REFERENCE,
    Container,
    ContainerState,
    Phase,
    Pod,
    Reference,
    Run,
    Variable,
    config_map_key,
    file_key,
    resource_field,
    secret_key,
)

UID = PodUid("0f1c2d3e-0000-4000-8000-000000000001")
REGION, AFU = "FPGA_REGION_1", "FPGA_AFU_1"


def pod(**fields):
    given = {"namespace": "tenant", "name": "compress", "uid": UID, "node": "node-a"}
    return Pod(**(given | {"service_account": "robot"} | fields))


def field(path):
    return Reference(field=path)


def env_of(*variables, env_from=(), **fields):
    env = tuple(
        Variable(name, value) if isinstance(value, str) else Variable(name, "", value)
        for name, value in variables
    )
    return request_variables(pod(**fields), Container("app", env, tuple(env_from)))


def refusal(*variables, **fields):
    with pytest.raises(InvalidRequestError) as caught:
        env_of(*variables, **fields)
    assert caught.value.status is Status.INVALID_ARGUMENT
    return str(caught.value)


# -------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        pytest.param([(REGION, "a")], "a", id="a literal"),
        pytest.param([(REGION, "a"), (REGION, "b")], "b", id="the later one overrides"),
        pytest.param([(REGION, "")], "", id="empty"),
        pytest.param([("A", "x"), (REGION, "$(A)-$(A)")], "x-x", id="references"),
        pytest.param(
            [("A", "x"), ("B", "$(A)y"), (REGION, "$(B)")], "xy", id="a reference in a reference"
        ),
        pytest.param(
            [("A", "$$(B)"), ("B", "x"), (REGION, "$(A)")], "$(B)", id="it is not expanded again"
        ),
        pytest.param([("A", "x"), (REGION, "$$(A)")], "$(A)", id="an escaped reference"),
        pytest.param([("A", "x"), (REGION, "$$$(A)")], "$x", id="an escape before a reference"),
        pytest.param([(REGION, "$$$$")], "$$", id="escapes"),
        pytest.param([(REGION, "a$")], "a$", id="a dollar at the end"),
        pytest.param([(REGION, "$")], "$", id="a dollar alone"),
        pytest.param([(REGION, "$a$b")], "$a$b", id="no reference"),
        pytest.param([(REGION, "$é$é")], "$é$é", id="no reference, not ASCII"),
        pytest.param([(REGION, "$(A")], "$(A", id="never closed"),
        pytest.param([("A", "x"), (REGION, "$(A) $(A")], "x $(A", id="closed, then never closed"),
        pytest.param([("", "x"), (REGION, "$()")], "x", id="a name without characters"),
        pytest.param([("a.b-c d", "x"), (REGION, "$(a.b-c d)")], "x", id="any characters"),
        pytest.param([("$(A", "x"), (REGION, "$($(A)")], "x", id="dollars in a name"),
        pytest.param([(REGION, "a"), (REGION, "$(FPGA_REGION_1)b")], "ab", id="itself, before"),
        pytest.param([(REGION, "a"), ("A", secret_key("s", "k"))], "a", id="others' secrets"),
        pytest.param(
            [("A", secret_key("s", "k")), ("A", "x"), (REGION, "$(A)")], "x", id="overridden"
        ),
        pytest.param([(REGION, secret_key("s", "k")), (REGION, "x")], "x", id="itself overridden"),
        pytest.param([("A", "$(B)"), ("A", "x"), (REGION, "$(A)")], "x", id="unknown, overridden"),
        pytest.param([(REGION, field("metadata.name"))], "compress", id="name"),
        pytest.param([(REGION, field("metadata.namespace"))], "tenant", id="namespace"),
        pytest.param([(REGION, field("metadata.uid"))], UID, id="uid"),
        pytest.param([(REGION, field("spec.nodeName"))], "node-a", id="node"),
        pytest.param([(REGION, field("spec.host"))], "node-a", id="node by its old name"),
        pytest.param([(REGION, field("spec.serviceAccountName"))], "robot", id="account"),
        pytest.param(
            [("A", field("metadata.name")), (REGION, "$(A)!")], "compress!", id="a field, referred"
        ),
    ],
)
def test_a_value_is_what_kubelet_makes_of_it(variables, expected):
    found = env_of(*variables)
    assert found.env == {REGION: expected}
    assert not found.volatile


def test_only_variables_that_begin_as_the_plugins_are_kept():
    found = env_of(
        ("PASSWORD", "hunter2"),
        (AFU, "a"),
        ("FPGA_BITSTREAM_ID_x", "b"),
        ("FPGA_DRIVER_PARAMS_1", "c"),
        ("FPGA_DEVICE_0000_10_00_0_P0", "/dev/dfl-port.7"),
        ("fpga_region_1", "d"),
    )
    assert found.env == {
        AFU: "a",
        "FPGA_BITSTREAM_ID_x": "b",
        "FPGA_DRIVER_PARAMS_1": "c",
        "FPGA_DEVICE_0000_10_00_0_P0": "/dev/dfl-port.7",
    }


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("metadata.labels['afu']", "l"),
        ("metadata.annotations['example.com/afu']", "a"),
        ("metadata.annotations['a['b']']", "brackets"),
        ("metadata.labels['missing']", ""),
    ],
)
def test_labels_and_annotations_may_change(path, expected):
    known = {
        "labels": {"afu": "l"},
        "annotations": {"example.com/afu": "a", "a['b']": "brackets"},
    }
    found = env_of((REGION, field(path)), **known)
    assert (found.env, found.volatile) == ({REGION: expected}, True)
    through = env_of(("A", field(path)), ("B", "$(A)"), (REGION, "x$(B)"), **known)
    assert (through.env, through.volatile) == ({REGION: f"x{expected}"}, True)
    beside = env_of(("A", field(path)), (REGION, "x"), **known)
    assert not beside.volatile


def test_the_uid_of_a_static_pod_is_kubelets():
    found = env_of((REGION, field("metadata.uid")), uid=PodUid("static-uid"), static=True)
    assert found.env == {REGION: "static-uid"}


def test_no_annotation_changes_the_uid():
    annotations = {"kubernetes.io/config.mirror": "static-uid"}
    found = env_of((REGION, field("metadata.uid")), annotations=annotations)
    assert found.env == {REGION: UID}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (secret_key("s", "k"), ["key 'k' of Secret 's'", "write the value itself"]),
        (config_map_key("c", "k"), ["key 'k' of ConfigMap 'c'"]),
        (resource_field("limits.cpu"), ["resource field 'limits.cpu'"]),
        (file_key("v", "p", "k"), ["key 'k' of file 'p' in volume 'v'"]),
        (UNKNOWN_REFERENCE, ["does not know"]),
        (field("status.podIP"), ["field 'status.podIP'", "only when the container starts"]),
        (field("status.hostIP"), ["field 'status.hostIP'"]),
        (field("metadata.labels"), ["field 'metadata.labels'"]),
        (field("spec.labels['a']"), ["field 'spec.labels['a']'"]),
        (field("\n" * 1000), ["field '????"]),
    ],
)
def test_a_request_made_of_what_is_not_known_is_refused(source, words):
    for variables in (
        [(REGION, source)],
        [("A", source), (REGION, "$(A)")],
        [("A", source), ("B", "x$(A)"), (REGION, "$(B)")],
        [(REGION, "a"), (REGION, source)],
    ):
        said = refusal(*variables)
        for word in [*words, "'FPGA_REGION_1'", "container app"]:
            assert word in said
        assert "\n" not in said
        assert len(said) < 1000


def test_unknown_values_in_other_variables_do_not_matter():
    found = env_of(
        ("A", secret_key("s", "k")), ("B", "$(A)$(C)"), ("FPGA_OTHER", "$(B)"), (REGION, "x")
    )
    assert found.env == {"FPGA_OTHER": "", REGION: "x"}


@pytest.mark.parametrize("reference", ["$(UNDEFINED)", "$(FPGA_REGION_1)", "$(A$(B)", "$()"])
def test_a_reference_to_what_env_does_not_define_is_refused(reference):
    assert "which env does not define before it" in refusal((REGION, f"x{reference}"))


# -------------------------------------------------------------------- envFrom


@pytest.mark.parametrize("prefix", ["", "F", "FPGA_", "FPGA_REGION_", "FPGA_AFU_1_"])
def test_envfrom_is_refused_where_it_may_hide_the_only_request(prefix):
    said = refusal(("A", "x"), env_from=["P_", prefix])
    for word in ("container app", "envFrom", "FPGA_REGION_<n>", "write the FPGA_* variables"):
        assert word in said


@pytest.mark.parametrize("prefix", ["P_", "fpga_", "FPGA_X", "FPGB", " "])
def test_envfrom_that_cannot_define_a_request_is_no_matter(prefix):
    assert env_of(("A", "x"), env_from=[prefix]).env == {}


def test_a_request_in_env_overrides_whatever_envfrom_has():
    assert env_of((REGION, "x"), env_from=[""]).env == {REGION: "x"}


# -------------------------------------------------------------------- hostile specs


def test_values_made_of_each_other_stay_small():
    chain = [("A0", "x" * 100)]
    chain += [(f"A{n}", f"$(A{n - 1})" * 10) for n in range(1, 60)]
    assert "more than 4096 characters" in refusal(*chain, (REGION, "$(A59)"))


def test_a_value_of_many_references_stays_small():
    assert "more than 4096" in refusal(("A", "x" * 4000), (REGION, "$(A)" * 300_000))
    assert "more than 4096" in refusal((REGION, "x" * 5000))


@pytest.mark.parametrize("piece", ["$(", "$", "$$", "$()", "()", "$(A)"])
def test_no_value_takes_long(piece):
    found = env_of(("A", ""), ("", ""), ("B", piece * 500_000), (REGION, "x"))
    assert found.env == {REGION: "x"}


def kubelets_expansion(text, values):
    """Kubelet's algorithm in other words: one character after the other."""
    result, i = "", 0
    while i < len(text):
        if text[i] != "$" or i + 1 == len(text):
            result += text[i]
            i += 1
        elif text[i + 1] == "$":
            result += "$"
            i += 2
        elif text[i + 1] == "(" and ")" in text[i + 2 :]:
            end = text.index(")", i + 2)
            name = text[i + 2 : end]
            if name not in values:
                return None
            result += values[name]
            i = end + 1
        else:
            result += text[i : i + 2]
            i += 2
    return result


def test_expansion_is_kubelets_for_any_text():
    chance = random.Random(1)
    values = {"A": "1", "B": "$(A)", "": "3", "$": "4", "(": "5"}
    for _ in range(5000):
        text = "".join(chance.choices("$()AB", k=chance.randint(1, 12)))
        expected = kubelets_expansion(text, values)
        # `$$` so that the values themselves are taken as they are.
        given = [(name, value.replace("$", "$$")) for name, value in values.items()]
        if expected is None:
            refusal(*given, (REGION, text))
        else:
            assert env_of(*given, (REGION, text)).env == {REGION: expected}, text


# -------------------------------------------------------------------- decoding

# A pod with every field that is read, and many that are not, as Go writes it (k8s.io/api v0.37.2:
# Pod.Marshal, and encoding/json).
GO_POD = """
CoEBCghjb21wcmVzcxIBZxoGdGVuYW50IgAqJDBmMWMyZDNlLTAwMDAtNDAwMC04MDAwLTAwMDAwMDAwMDAwMTIBNzgAQggI
gOLPqgYQAFoPCgNhcHASCGNvbXByZXNzYiIKG2t1YmVybmV0ZXMuaW8vY29uZmlnLnNvdXJjZRIDYXBpEq8DCgkKAXYSBBIC
CgASkgIKA2FwcBIBaRoBYyoAOg4KBVBMQUlOEgV4JChZKToJCgVFTVBUWRIAOikKBUZJRUxEEgAaHgocCgJ2MRIWbWV0YWRh
dGEubGFiZWxzWydhcHAnXTomCghSRVNPVVJDRRIAGhgSFgoDYXBwEgpsaW1pdHMuY3B1GgMKATE6GQoGQ09ORklHEgAaDRoL
CgQKAmNtEgFrGAE6FgoGU0VDUkVUEgAaCiIICgMKAXMSAWs6FQoERklMRRIAGgsqCQoBdhIBcBoBa0IgCh4KF2ZwZ2EuaW50
ZWwuY29tL3JlZ2lvbi14EgMKATFqAHIAgAEAiAEAkAEAmgEMCgJQXxIGCgQKAmNtmgEJCgAaBQoDCgFzogEAGgZBbHdheXMy
AEIFcm9ib3RKAFIGbm9kZS1hWAFgAGgAggEAigEAmgEAogE0Cgd3YXJtLXVwEgFpKgA6EgoNRlBHQV9SRUdJT05fMRIBckIA
agByAIABAIgBAJABAKIBAKIBKAoHc2lkZWNhchIAKgBCAGoAcgCAAQCIAQCQAQCiAQDCAQZBbHdheXPCAQAa3AIKB1BlbmRp
bmcSJgoLSW5pdGlhbGl6ZWQSBUZhbHNlGgAiCAiB4s+qBhAAKgAyADgAEisKGVBvZFJlYWR5VG9TdGFydENvbnRhaW5lcnMS
BFRydWUaACIAKgAyADgAGgAiACoIMTAuMC4wLjEyCDEwLjAuMC4yQk8KA2FwcBIjCiEKGkNyZWF0ZUNvbnRhaW5lckNvbmZp
Z0Vycm9yEgN3aHkaGRoXCIkBEAAaACIAKggIheLPqgYQADIAOgAgACgDMgA6AEIASglCdXJzdGFibGVSTgoHd2FybS11cBI3
GjUIABAAGglDb21wbGV0ZWQiACoICILiz6oGEAAyCAiD4s+qBhAAOg5jb250YWluZXJkOi8vYRoAIAEoADIAOgBCAFIlCgdz
aWRlY2FyEgwSCgoICITiz6oGEAAaACAAKAAyADoAQgBIAVoAYgoKCDEwLjAuMC4ycgCIAQA=
"""
GO_JSON = """
{"kind":"Pod","apiVersion":"v1","metadata":{"name":"compress","generateName":"g",
"namespace":"tenant","uid":"0f1c2d3e-0000-4000-8000-000000000001","resourceVersion":"7",
"creationTimestamp":"2023-11-14T22:13:20Z","labels":{"app":"compress"},
"annotations":{"kubernetes.io/config.source":"api"}},"spec":{"volumes":[{"name":"v",
"emptyDir":{}}],"initContainers":[{"name":"warm-up","image":"i","env":[{"name":"FPGA_REGION_1",
"value":"r"}],"resources":{}},{"name":"sidecar","resources":{},"restartPolicy":"Always"}],
"containers":[{"name":"app","image":"i","command":["c"],"envFrom":[{"prefix":"P_",
"configMapRef":{"name":"cm"}},{"secretRef":{"name":"s"}}],"env":[{"name":"PLAIN",
"value":"x$(Y)"},{"name":"EMPTY"},{"name":"FIELD","valueFrom":{"fieldRef":{"apiVersion":"v1",
"fieldPath":"metadata.labels['app']"}}},{"name":"RESOURCE","valueFrom":{"resourceFieldRef":{"containerName":"app",
"resource":"limits.cpu","divisor":"1"}}},{"name":"CONFIG","valueFrom":{"configMapKeyRef":{"name":"cm",
"key":"k","optional":true}}},{"name":"SECRET","valueFrom":{"secretKeyRef":{"name":"s",
"key":"k"}}},{"name":"FILE","valueFrom":{"fileKeyRef":{"volumeName":"v",
"path":"p","key":"k"}}}],"resources":{"limits":{"fpga.intel.com/region-x":"1"}}}],
"restartPolicy":"Always","serviceAccountName":"robot","nodeName":"node-a",
"hostNetwork":true},"status":{"phase":"Pending","conditions":[{"type":"Initialized",
"status":"False","lastProbeTime":null,"lastTransitionTime":"2023-11-14T22:13:21Z"},
{"type":"PodReadyToStartContainers","status":"True","lastProbeTime":null,
"lastTransitionTime":null}],"hostIP":"10.0.0.1","podIP":"10.0.0.2","podIPs":[{"ip":"10.0.0.2"}],
"initContainerStatuses":[{"name":"warm-up","state":{"terminated":{"exitCode":0,
"reason":"Completed","startedAt":"2023-11-14T22:13:22Z","finishedAt":"2023-11-14T22:13:23Z",
"containerID":"containerd://a"}},"lastState":{},"ready":true,"restartCount":0,
"image":"","imageID":""},{"name":"sidecar","state":{"running":{"startedAt":"2023-11-14T22:13:24Z"}},
"lastState":{},"ready":false,"restartCount":0,"image":"","imageID":"","started":true}],
"containerStatuses":[{"name":"app","state":{"waiting":{"reason":"CreateContainerConfigError",
"message":"why"}},"lastState":{"terminated":{"exitCode":137,"startedAt":"2023-11-14T22:13:25Z",
"finishedAt":null}},"ready":false,"restartCount":3,"image":"","imageID":""}],
"qosClass":"Burstable"}}
"""


@pytest.mark.parametrize(
    "told",
    [
        lambda: podsapi.decode(base64.b64decode(GO_POD)),
        lambda: apiserver.convert(msgspec.json.decode(GO_JSON, type=ApiPod)),
    ],
)
def test_both_encodings_are_read_as_go_writes_them(told):
    assert told() == pod(
        labels={"app": "compress"},
        annotations={"kubernetes.io/config.source": "api"},
        init=(
            Container("warm-up", (Variable(REGION, "r"),)),
            Container("sidecar", restartable=True),
        ),
        containers=(
            Container(
                "app",
                (
                    Variable("PLAIN", "x$(Y)"),
                    Variable("EMPTY"),
                    Variable("FIELD", "", field("metadata.labels['app']")),
                    Variable("RESOURCE", "", resource_field("limits.cpu")),
                    Variable("CONFIG", "", config_map_key("cm", "k")),
                    Variable("SECRET", "", secret_key("s", "k")),
                    Variable("FILE", "", file_key("v", "p", "k")),
                ),
                ("P_", ""),
            ),
        ),
        states={
            "warm-up": ContainerState(Phase.TERMINATED, ended=Run(0, 1700000002)),
            "sidecar": ContainerState(Phase.RUNNING, started=1700000004),
            "app": ContainerState(Phase.WAITING, "why", Run(137, 1700000005)),
        },
        sandbox=True,
    )


def test_a_pod_without_a_valid_name_and_uid_is_not_understood():
    with pytest.raises(ValueError, match="is no name"):
        podsapi.decode(b"")
    with pytest.raises(ValueError, match="is no name"):
        apiserver.convert(ApiPod())
    with pytest.raises(ValueError, match="is no pod uid"):
        apiserver.convert(
            msgspec.convert(
                {"metadata": {"namespace": "a", "name": "b", "uid": "../c"}}, type=ApiPod
            )
        )


def test_a_pod_with_nothing_but_a_name_has_no_containers():
    metadata = {"namespace": "tenant", "name": "compress", "uid": UID}
    told = apiserver.convert(msgspec.json.decode(json.dumps({"metadata": metadata}), type=ApiPod))
    assert (told.init, told.containers, told.states, told.sandbox) == ((), (), {}, None)


def test_values_never_show():
    told = podsapi.decode(base64.b64decode(GO_POD))
    assert "x$(Y)" not in repr(told)


def of_api_server(**metadata):
    known = {"namespace": "tenant", "name": "compress", "uid": UID, **metadata}
    told = {"metadata": known, "spec": {"containers": [], "nodeName": "node-a"}}
    return apiserver.convert(msgspec.convert(told, type=ApiPod))


def of_kubelet(**metadata):
    known = core_v1.ObjectMeta(namespace="tenant", name="compress", uid=UID, **metadata)
    return podsapi.decode(bytes(core_v1.Pod(metadata=known)))


MIRROR = {"kubernetes.io/config.mirror": "0" * 32, "kubernetes.io/config.source": "file"}
NODE = {"apiVersion": "v1", "kind": "Node", "name": "node-a", "uid": "n", "controller": True}


def test_kubelet_says_itself_which_pods_are_static():
    assert not of_kubelet().static
    assert not of_kubelet(annotations={"kubernetes.io/config.source": "api"}).static
    assert of_kubelet(annotations={"kubernetes.io/config.source": "file"}).static
    for annotations in (MIRROR, MIRROR | {"kubernetes.io/config.source": "api"}):
        assert of_kubelet(annotations=annotations).uid == UID


def test_a_mirror_belongs_to_the_node_that_it_is_on():
    mirror = of_api_server(annotations=MIRROR, ownerReferences=[NODE])
    assert (mirror.uid, mirror.static) == ("0" * 32, True)


@pytest.mark.parametrize(
    "owners",
    [
        None,
        [],
        [NODE | {"kind": "ReplicaSet"}],
        [NODE | {"apiVersion": "example.com/v1"}],
        [NODE | {"name": "node-b"}],
        [NODE | {"controller": False}],
        [{key: value for key, value in NODE.items() if key != "controller"}],
        [NODE, NODE | {"kind": "ReplicaSet"}],
        [NODE, NODE],
    ],
)
@pytest.mark.parametrize(
    "annotations", [MIRROR, {"kubernetes.io/config.source": "file"}], ids=["mirror", "source"]
)
def test_annotations_that_a_tenant_can_write_make_no_mirror_pod(annotations, owners):
    told = of_api_server(annotations=annotations, ownerReferences=owners)
    assert (told.uid, told.static) == (UID, False)


def test_a_pod_of_a_node_without_the_annotation_is_no_mirror():
    told = of_api_server(annotations={"kubernetes.io/config.source": "file"},
                         ownerReferences=[NODE])  # fmt: skip
    assert (told.uid, told.static) == (UID, False)


def test_a_mirror_of_no_uid_is_not_understood():
    annotations = {"kubernetes.io/config.mirror": "../x"}
    with pytest.raises(ValueError, match="is no pod uid"):
        of_api_server(annotations=annotations, ownerReferences=[NODE])


# -------------------------------------------------------------------- whose turn it is

INIT_1, INIT_2, SIDECAR, APP = (
    ContainerRequests("init-1", passes_on=True),
    ContainerRequests("init-2", passes_on=True),
    ContainerRequests("sidecar", passes_on=False),
    ContainerRequests("app", passes_on=False),
)
SPEC = {
    "init": (Container("init-1"), Container("init-2"), Container("sidecar", restartable=True)),
    "containers": (Container("app"), Container("other")),
}


def waiting(message="", ended=None):
    return ContainerState(Phase.WAITING, message, ended)


def ended(exit_code, started):
    return ContainerState(Phase.TERMINATED, ended=Run(exit_code, started))


RUNNING = ContainerState(Phase.RUNNING)


def status(*, sandbox=True, **states):
    named = {name.replace("_", "-"): state for name, state in states.items()}
    return pod(**SPEC, sandbox=sandbox, states=named)


def test_containers_are_in_the_order_of_their_starts():
    found, lasting = container_requests(status())
    assert found == (INIT_1, INIT_2, SIDECAR, APP, ContainerRequests("other"))
    assert lasting


def test_what_a_pods_spec_asks_for_wrongly_is_refused_with_what_it_asked_for():
    """It may be a title, whose id the refusal can give."""
    app = Container("app", (Variable(REGION, "0" * 32), Variable(AFU, "hello_afu")))
    ((asks,), _) = container_requests(pod(containers=(app,)))
    with pytest.raises(InvalidRequestError, match="FPGA_AFU_1='hello_afu'") as caught:
        asks.check()
    assert caught.value.asked == "hello_afu"
    APP.check()


@pytest.mark.parametrize(
    ("holders", "expected"),
    [
        ([INIT_1, INIT_2, APP], "init-1"),
        ([INIT_2, SIDECAR], "init-2"),
        ([INIT_1], "init-1"),
        ([APP], "app"),
        ([SIDECAR, APP], None),  # kubelet gives no device to two that stay
        ([APP, ContainerRequests("other")], None),
        ([], None),
    ],
)
def test_after_an_allocate_the_first_holder_starts_first(holders, expected):
    assert first(holders) == expected


WORDS = "which of them starts (question 0123abcd)"
QUOTED = f"device plugin PreStartContainer rpc failed with err: rpc error: desc = {WORDS}: try"


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (status(init_1=waiting(QUOTED)), "init-1"),
        (status(init_1=waiting(QUOTED), app=waiting("PodInitializing")), "init-1"),
        (status(init_1=ended(0, 9), app=waiting(QUOTED)), "app"),
        (status(init_1=ended(0, 9), app=waiting(QUOTED, Run(1, 9))), "app"),
        # A new sandbox is being made, or may be: all begin again, whatever the status says.
        (status(sandbox=None, app=waiting(QUOTED)), None),  # before Kubernetes 1.29
        (status(sandbox=None, init_1=ended(0, 9), app=waiting(QUOTED)), None),
        (status(sandbox=False, app=waiting(QUOTED)), None),
        (status(app=waiting("another reason")), None),
        (status(app=waiting("(question 0123abce)")), None),
        (status(), None),
        (status(init_1=waiting(QUOTED), app=waiting(QUOTED)), None),
        (status(init_1=waiting(QUOTED), app=RUNNING), None),
        (status(init_1=RUNNING, app=waiting(QUOTED)), None),
        # Not one that holds the devices.
        (status(other=waiting(QUOTED)), None),
        (status(init_2=waiting(QUOTED)), None),
    ],
)
def test_kubelet_quotes_a_refusal_at_the_container_that_was_refused(told, expected):
    assert refused(told, [INIT_1, APP], [WORDS]) == expected


def test_a_quote_proves_nothing_while_any_other_holder_runs():
    told = status(init_1=ended(0, 8), init_2=RUNNING, app=waiting(QUOTED))
    assert refused(told, [INIT_1, INIT_2, APP], [WORDS]) is None
    assert refused(told, [INIT_1, APP], [WORDS]) == "app"


def test_a_refusal_for_these_devices_counts_before_one_for_others():
    told = status(init_1=waiting("own words"), app=waiting("other words"))
    assert refused(told, [INIT_1, APP], ["own words", "other words"]) == "init-1"
    assert refused(told, [INIT_1, APP], ["older words", "other words"]) == "app"
    assert refused(told, [INIT_1, APP], []) is None


AT = 1000.7
"""When the last PreStart was answered; a container that starts in the same second counts."""


@pytest.mark.parametrize(
    ("last", "told", "expected"),
    [
        # It has not run since, or still runs, as far as the status knows.
        ("init-1", status(), None),
        ("init-1", status(init_1=RUNNING), None),
        ("init-1", status(init_1=waiting("PodInitializing")), None),
        ("init-1", status(init_1=ended(1, 999)), None),
        ("init-1", status(init_1=ended(0, 999)), None),
        ("app", status(init_1=ended(0, 9), init_2=ended(0, 9), app=RUNNING), None),
        # It succeeded: the next one.
        ("init-1", status(init_1=ended(0, 1000)), "init-2"),
        ("init-1", status(init_1=ended(0, 1001), app=waiting("PodInitializing")), "init-2"),
        ("init-2", status(init_1=ended(0, 900), init_2=ended(0, 1001)), "app"),
        # It failed: again.
        ("init-1", status(init_1=ended(1, 1001)), "init-1"),
        ("init-1", status(init_1=waiting("back-off", Run(1, 1001))), "init-1"),
        ("app", status(init_1=ended(0, 8), init_2=ended(0, 9), app=ended(1, 1001)), "app"),
        ("app", status(init_1=ended(0, 8), init_2=ended(0, 9), app=ended(0, 1001)), "app"),
        (
            "app",
            status(init_1=ended(0, 8), init_2=ended(0, 9), app=waiting("", Run(0, 1001))),
            "app",
        ),
        # A new sandbox is being made, or nobody knows.
        ("init-1", status(sandbox=False, init_1=ended(0, 1001)), None),
        ("init-1", status(sandbox=None, init_1=ended(0, 1001)), None),
        # It was made, and init containers run again, in order.
        ("app", status(init_1=RUNNING, init_2=ended(0, 9), app=ended(137, 1001)), None),
        ("app", status(init_1=waiting(), init_2=ended(0, 9), app=ended(137, 1001)), None),
        ("app", status(init_1=ended(1, 1), init_2=ended(0, 9), app=ended(137, 1001)), None),
        ("app", status(init_1=ended(0, 1002), init_2=ended(0, 9), app=ended(137, 1001)), None),
        ("init-2", status(init_1=ended(0, 1002), init_2=ended(0, 1001)), None),
        ("init-2", status(init_2=ended(0, 1001)), None),
        # It succeeded, and is to start again all the same.
        ("init-1", status(init_1=waiting("", Run(0, 1001))), None),
        # An init container is about to run again, or what it did is not known.
        (
            "app",
            status(init_1=waiting("", Run(0, 8)), init_2=ended(0, 9), app=ended(137, 1001)),
            None,
        ),
        (
            "app",
            status(init_1=ContainerState(Phase.TERMINATED), init_2=ended(0, 9), app=ended(1, 1001)),
            None,
        ),
        # All of them began within one second.
        ("app", status(init_1=ended(0, 1001), init_2=ended(0, 1001), app=ended(1, 1001)), "app"),
        # Not one that holds the devices (any more).
        ("other", status(other=ended(0, 1001)), None),
        ("other", status(init_1=ended(0, 8), init_2=ended(0, 9), other=ended(0, 1001)), None),
    ],
)
def test_the_container_that_starts_after_a_run_that_ended_is_known(last, told, expected):
    assert follows(told, [INIT_1, INIT_2, APP], Start(last, AT)) == expected


@pytest.mark.parametrize(
    ("now", "expected"),
    [(ended(1, 1001), None), (RUNNING, None), (waiting(), None), (ended(1, 1002), "init-1")],
    ids=["the run of before", "it runs", "no run is known", "another run"],
)
def test_the_run_that_a_prestart_saw_is_not_the_one_that_it_began(now, expected):
    last = Start("init-1", AT, before=Run(1, 1001))
    assert follows(status(init_1=now), [INIT_1, APP], last) == expected


def test_no_container_starts_after_the_last_that_holds_the_device():
    told = status(init_1=ended(0, 1001))
    assert follows(told, [INIT_1], Start("init-1", AT)) is None


def test_a_sidecar_follows_init_containers_and_itself():
    holders = [INIT_1, SIDECAR]
    began = status(init_1=ended(0, 1001), init_2=ended(0, 1002))
    assert follows(began, holders, Start("init-1", AT)) == "sidecar"
    crashed = status(init_1=ended(0, 900), init_2=ended(0, 901), sidecar=ended(2, 1001))
    assert follows(crashed, holders, Start("sidecar", AT)) == "sidecar"


def test_another_sidecar_before_it_proves_nothing():
    told = pod(
        init=(Container("proxy", restartable=True), Container("init-1")),
        containers=(Container("app"),),
        sandbox=True,
        states={"proxy": RUNNING, "init-1": ended(0, 1001)},
    )
    assert follows(told, [INIT_1, APP], Start("init-1", AT)) == "app"


def test_many_values_that_are_made_of_one_are_refused_before_they_fill_the_memory():
    large = ("A", "x" * 4000)
    tracemalloc.start()
    told = refusal(large, *((f"FPGA_REGION_{n}", "$(A)") for n in range(10_000)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "have more than 4194304 characters together: leave out" in told
    assert peak < 16 << 20
    assert "together" in refusal(large, *((f"NOISE_{n}", "$(A)") for n in range(10_000)))
