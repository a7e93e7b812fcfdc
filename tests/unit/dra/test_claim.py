"""What a ResourceClaim's object says: whose it is, what it has of this node, and for whom."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fpga_plugin.dra import claim as claim_module
from fpga_plugin.dra.claim import (
    EXTENDED,
    MAX_RESULTS,
    POD_CLAIM,
    ClaimReader,
    ClaimRef,
    NoSuchClaimError,
    ResourceClaim,
    read_claim,
)
from fpga_plugin.errors import (
    InvalidRequestError,
    NoSourceError,
    RefusedError,
    UnknownDeviceError,
)
from fpga_plugin.kubernetes.apiserver.rest import ApiServerError
from fpga_plugin.kubernetes.names import ClaimUid, PodName, PodUid

DRIVER, NODE = "fpga.intel.com", "node-a"
REF = ClaimRef(ClaimUid("claim-a"), "space", "claim")
DEVICE, NAME = "0000-3b-00.0-p0", "0000-3b-00-0-p0"
AFU = "d8424dc4a4a3c413f89e433683f9040b"

Json = dict[str, Any]


def result(**rest: Any) -> Json:
    return {"request": "fpga", "driver": DRIVER, "pool": NODE, "device": NAME} | rest


def config(source: str = "FromClaim", driver: str = DRIVER, requests: Any = None) -> Json:
    parameters = {
        "apiVersion": "fpga.intel.com/v1alpha1",
        "kind": "RegionConfig",
        "bitstream": AFU,
    }
    return {
        "source": source,
        "requests": requests,
        "opaque": {"driver": driver, "parameters": parameters},
    }


def pod(uid: str = "pod-1", **rest: Any) -> Json:
    return {"resource": "pods", "name": f"name-of-{uid}", "uid": uid} | rest


def claim(
    *results: Json, uid: str = "claim-a", configs: Any = (), pods: Any = (), **metadata: Any
) -> Json:
    devices = {"results": [*results], "config": [*configs]}
    return {
        "metadata": {"uid": uid} | metadata,
        "status": {"allocation": {"devices": devices}, "reservedFor": [*pods]},
    }


def read(body: Json) -> ResourceClaim:
    return read_claim(json.dumps(body).encode(), REF, driver=DRIVER, node=NODE)


def test_a_claims_devices_are_those_of_this_driver_in_their_order() -> None:
    told = read(
        claim(
            result(driver="gpu.example.com", pool="elsewhere", device="gpu-0"),
            result(request="main/sub"),
            result(device="0000-3b-00-0"),
        )
    )
    owner = told.owner
    assert owner.devices == (DEVICE, "0000-3b-00.0")
    assert owner.requests == {DEVICE: ("main",), "0000-3b-00.0": ("fpga",)}
    assert (owner.subrequests, owner.driver) == ({"main": "main/sub"}, DRIVER)
    assert (ClaimRef.of(owner), told.configs, told.pods, told.pod) == (REF, (), frozenset(), None)


def test_a_device_of_several_requests_is_listed_for_each() -> None:
    told = read(claim(*(result(request=name) for name in ("a", "b/x", "a"))))
    assert told.owner.devices == (DEVICE,)
    assert told.owner.requests == {DEVICE: ("a", "b")}
    assert told.owner.subrequests == {"b": "b/x"}


def _not_allocated() -> Json:
    return {"metadata": {"uid": "claim-a"}, "status": {}}


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (claim(result(), uid="claim-b"), NoSuchClaimError, "another one by now"),
        (_not_allocated(), NoSuchClaimError, "not allocated"),
        (claim(), NoSuchClaimError, "0 devices"),
        (claim(result(driver="gpu.example.com")), NoSuchClaimError, "0 devices"),
        (claim(result(pool="b"), result(pool="b")), NoSuchClaimError, "pool 'b'"),
        (claim(result(), result(pool="b")), RefusedError, "of pool 'b' and of node node-a"),
        (claim(result(pool="b"), result()), RefusedError, "of pool 'b' and of node node-a"),
        (claim(result(adminAccess=True)), RefusedError, "adminAccess"),
        (claim(result(device="../../x")), UnknownDeviceError, "not a device's name"),
        (claim(*[result()] * (MAX_RESULTS + 1)), RefusedError, "33 devices"),
        (claim(result(), pods=[pod("a/b")]), NoSourceError, "no pod uid"),
        ({}, NoSourceError, "not understood"),
        ({"metadata": {"uid": 7}}, NoSourceError, "not understood"),
    ],
)
def test_what_is_not_this_nodes_or_not_this_claim_is_refused(
    body: Json, kind: type[Exception], words: str
) -> None:
    """A claim that is over may be ended by this word alone, so which word it is matters."""
    with pytest.raises(kind, match=words) as caught:
        read(body)
    assert type(caught.value) is kind


def test_what_is_left_out_or_null_is_nothing() -> None:
    """The API server leaves out what is empty, and other encoders write null."""
    body = claim(result())
    del body["status"]["reservedFor"]
    told = read(body)
    assert (told.pods, told.names) == (frozenset(), {})
    body["status"]["allocation"]["devices"] = {"results": None, "config": None}
    with pytest.raises(NoSuchClaimError):
        read(body)


def test_only_a_class_lists_bitstreams() -> None:
    lists = config()
    lists["opaque"]["parameters"] |= {"bitstream": None, "bitstreams": [AFU]}
    with pytest.raises(InvalidRequestError, match="belongs into a DeviceClass"):
        read(claim(result(), configs=[lists]))
    (entry,) = read(claim(result(), configs=[lists | {"source": "FromClass"}])).configs
    assert entry.config.choices == {AFU}


def test_as_many_devices_as_an_allocation_has_are_read() -> None:
    names = [f"0000-3b-00-0-p{port}" for port in range(MAX_RESULTS)]
    told = read(claim(*(result(adminAccess=False, device=name) for name in names)))
    assert len(told.owner.devices) == MAX_RESULTS


@pytest.mark.parametrize("raw", [b"", b"[", b"[" * 100_000, b"\xff", b"null"])
def test_an_answer_that_is_no_claim_says_nothing_of_it(raw: bytes) -> None:
    with pytest.raises(NoSourceError):
        read_claim(raw, REF, driver=DRIVER, node=NODE)


def test_only_our_own_config_counts_and_for_its_requests() -> None:
    told = read(
        claim(
            result(request="main/sub"),
            configs=[
                config("FromClass"),
                config(driver="gpu.example.com"),
                {"source": "FromClaim"},
                config(requests=["main/sub"]),
                config(requests=["main"]),
                config(requests=["other"]),
            ],
        )
    )
    assert [(one.from_class, one.requests) for one in told.configs] == [
        (True, frozenset()),
        (False, {"main/sub"}),
        (False, {"main"}),
        (False, {"other"}),
    ]
    (one,) = told.owner.devices
    assert len(told.of(one, from_class=True)) == 1
    assert len(told.of(one, from_class=False)) == 2


def test_a_claims_pods_are_known_by_their_uids_and_called_as_far_as_they_can_be() -> None:
    """Its regions are cleared under nobody: no pod may be missing; a name is only shown."""
    told = read(
        claim(
            result(),
            pods=[
                pod("pod-1"),
                pod("pod-2", name="../../x"),
                pod("job-1", resource="jobs"),
                pod("pod-3", apiGroup="example.com"),
            ],
        )
    )
    assert told.pods == {PodUid("pod-1"), PodUid("pod-2")}
    assert told.names == {"pod-1": PodName("space", "name-of-pod-1")}


OWNER = {"apiVersion": "v1", "kind": "Pod", "name": "compress", "uid": "pod-1"}
OTHER_OWNERS = [
    OWNER | {"kind": "Job", "name": "job"},
    OWNER | {"apiVersion": "example.com/v1", "name": "theirs"},
]


@pytest.mark.parametrize(
    ("annotations", "owners", "found"),
    [
        ({EXTENDED: "true"}, [*OTHER_OWNERS, OWNER], True),
        ({EXTENDED: "true"}, OTHER_OWNERS, False),
        ({EXTENDED: "true"}, None, False),
        ({EXTENDED: "false"}, [OWNER], False),
        ({}, [OWNER], False),
        (None, [OWNER], False),
    ],
)
def test_a_claim_of_extended_resources_stands_for_the_pod_that_owns_it(
    annotations: Any, owners: Any, *, found: bool
) -> None:
    told = read(claim(result(), annotations=annotations, ownerReferences=owners))
    expected = (PodName("space", "compress"), PodUid("pod-1")) if found else None
    assert told.pod == expected


def test_an_owner_without_a_proper_name_is_not_asked_for() -> None:
    """Invariant 11: it would become part of a path of the API server's."""
    body = claim(
        result(), annotations={EXTENDED: "true"}, ownerReferences=[OWNER | {"name": "../x"}]
    )
    with pytest.raises(NoSourceError, match="no name"):
        read(body)


# ------------------------------------------------------------------ the API server


class Server:
    def __init__(self, answer: object) -> None:
        self.answer, self.asked = answer, []  # type: ignore[var-annotated]

    async def call(self, method: str, path: str) -> bytes:
        self.asked.append((method, path))
        if isinstance(self.answer, Exception):
            raise self.answer
        return json.dumps(self.answer).encode()


def ask(
    monkeypatch: pytest.MonkeyPatch, answer: object, ref: ClaimRef = REF
) -> tuple[Server, ResourceClaim | Exception, list[Any]]:
    server, named = Server(answer), []  # type: ignore[var-annotated]

    @asynccontextmanager
    async def session(_: object, *, seconds: float) -> AsyncIterator[Server]:
        assert seconds > 0
        yield server

    monkeypatch.setattr(claim_module, "session", session)
    claims = ClaimReader(None, driver=DRIVER, node=NODE, named=named.append)
    try:
        return server, asyncio.run(claims.get(ref)), named
    except NoSourceError as error:
        return server, error, named
    except RefusedError as error:
        return server, error, named


def test_a_claim_is_asked_for_by_its_name_and_its_pods_names_are_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    odd = ClaimRef(REF.uid, "a/b", "c/../d")
    server, told, named = ask(monkeypatch, claim(result(), pods=[pod()]), odd)
    path = "/apis/resource.k8s.io/v1/namespaces/a%2Fb/resourceclaims/c%2F..%2Fd"
    assert server.asked == [("GET", path)]
    assert isinstance(told, ResourceClaim)
    assert named == [told.names]


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (404, "NotFound", NoSuchClaimError),
        (404, "", ApiServerError),
        (403, "NotFound", ApiServerError),
        (503, "ServiceUnavailable", ApiServerError),
    ],
)
def test_only_the_api_servers_own_word_says_that_a_claim_is_gone(
    monkeypatch: pytest.MonkeyPatch, code: int, reason: str, kind: type[Exception]
) -> None:
    """What a proxy says must not end a claim that pods use."""
    _, told, _ = ask(monkeypatch, ApiServerError("no", code=code, reason=reason))
    assert type(told) is kind


def test_who_else_has_a_claim_reserved_is_no_pod_and_still_counts() -> None:
    """A consumer that is not understood lives, until the claim is reserved for nobody."""
    group = {"resource": "podgroups", "apiGroup": "scheduling.k8s.io", "name": "g", "uid": "u"}
    for consumers, pods, others in (
        ([], 0, False),
        ([pod()], 1, False),
        ([pod(), pod("pod-2")], 2, False),
        ([group], 0, True),
        ([pod(), group], 1, True),
    ):
        told = read(claim(result(), pods=consumers))
        assert (len(told.pods), told.others) == (pods, others)


def test_what_a_pod_calls_the_claim_that_a_template_made() -> None:
    told = read(claim(result(), annotations={POD_CLAIM: "fpga"}))
    assert told.owner.pod_claim == "fpga"
    assert read(claim(result())).owner.pod_claim == ""


def test_a_claim_of_a_former_driver_name_is_read_under_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FPGA_PLUGIN_RESOURCE_PREFIX may have changed since (docs/architecture.md, f2)."""
    server = Server(claim(result(driver="former.example.com")))

    @asynccontextmanager
    async def session(_: object, *, seconds: float) -> AsyncIterator[Server]:
        assert seconds > 0
        yield server

    monkeypatch.setattr(claim_module, "session", session)
    claims = ClaimReader(None, driver=DRIVER, node=NODE)
    told = asyncio.run(claims.get(REF, "former.example.com"))
    assert told.owner.devices == (DEVICE,)
    assert told.owner.driver == "former.example.com"
    with pytest.raises(NoSuchClaimError):
        asyncio.run(claims.get(REF))
