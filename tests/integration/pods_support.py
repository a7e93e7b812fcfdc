"""Kubelet's own APIs as servers of a test: pods with their status, and who has which device."""

import asyncio
import contextlib
import datetime as dt
from collections.abc import Mapping, Sequence

from daemon_support import AFU_2, ID, LIMIT, REGIONS, Node
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from fpga_plugin.demo.double import STOCK, KubeletDouble, Profile
from fpga_plugin.demo.pod import DemoContainer, DemoPod
from fpga_plugin.kubernetes.grpc.server import ClosingServer
from fpga_plugin.kubernetes.messages import core_v1, v1, v1alpha1
from fpga_plugin.kubernetes.names import PodUid, ResourceName

UID = PodUid("0f1c2d3e-0000-4000-8000-000000000001")
REGION = ResourceName(REGIONS)


def request(afu: str) -> dict[str, str]:
    return {"FPGA_REGION_1": ID, "FPGA_AFU_1": afu}


APP_ENV = request(AFU_2)
NODE = "node-a"
OF_NODE = {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": "n", "controller": True}
"""The owner of a mirror that kubelet made."""


class FakePod:
    """A pod as kubelet knows it; what kubelet does with it is up to the test."""

    def __init__(
        self, *, init=None, app=None, uid=UID, name="compress", annotations=None, owners=()
    ):
        self.uid, self.name = uid, name
        self.annotations: dict[str, str] = annotations or {}
        self.owners: Sequence[Mapping[str, object]] = owners
        self.labels: dict[str, str] = {}
        self.init: dict[str, Mapping[str, object]] = init or {}
        self.app: dict[str, Mapping[str, object]] = {"app": APP_ENV} if app is None else app
        self.sidecars: frozenset[str] = frozenset()
        self.states: dict[str, dict] = {}
        self.sandbox: bool | None = True  # None: kubelets before 1.29, which do not say
        self.phase = "Pending"

    def json(self) -> dict:
        """As the API server writes it."""

        def containers(named):
            return [
                {
                    "name": name,
                    "image": "i",
                    "env": [
                        {"name": key, **(what if isinstance(what, dict) else {"value": what})}
                        for key, what in env.items()
                    ],
                    **({"restartPolicy": "Always"} if name in self.sidecars else {}),
                }
                for name, env in named.items()
            ]

        def statuses(named):
            return [
                {
                    "name": name,
                    "image": "i",
                    "imageID": "",
                    "ready": False,
                    "restartCount": 0,
                    "lastState": {},
                    "state": {"waiting": {"reason": "PodInitializing"}},
                    **self.states.get(name, {}),
                }
                for name in named
            ]

        return {
            "kind": "Pod",
            "apiVersion": "v1",
            "metadata": {
                "namespace": "tenant",
                "name": self.name,
                "uid": self.uid,
                "labels": self.labels,
                "annotations": self.annotations,
                "ownerReferences": list(self.owners),
            },
            "spec": {
                "nodeName": NODE,
                "initContainers": containers(self.init),
                "containers": containers(self.app),
            },
            "status": {
                "phase": self.phase,
                "conditions": []
                if self.sandbox is None
                else [{"type": "PodReadyToStartContainers", "status": str(self.sandbox)}],
                "initContainerStatuses": statuses(self.init),
                "containerStatuses": statuses(self.app),
            },
        }

    def message(self) -> core_v1.Pod:
        """The same as kubelet's Pods API writes it."""
        told = self.json()

        def state(of):
            ended = of.get("terminated")
            return core_v1.ContainerState(
                waiting=core_v1.ContainerStateWaiting(**of["waiting"]) if "waiting" in of else None,
                running=core_v1.ContainerStateRunning(
                    started_at=core_v1.Time(seconds=of["running"].get("seconds", 0))
                )
                if "running" in of
                else None,
                terminated=None
                if ended is None
                else core_v1.ContainerStateTerminated(
                    exit_code=ended["exitCode"],
                    started_at=core_v1.Time(seconds=int(ended["seconds"])),
                ),
            )

        def variable(one):
            source = one.get("valueFrom")
            if source is None:
                return core_v1.EnvVar(name=one["name"], value=one["value"])
            ref = core_v1.ObjectFieldSelector(field_path=source["fieldRef"]["fieldPath"])
            return core_v1.EnvVar(name=one["name"], value_from=core_v1.EnvVarSource(field_ref=ref))

        def containers(of):
            return [
                core_v1.Container(
                    name=one["name"],
                    env=[variable(each) for each in one["env"]],
                    restart_policy=one.get("restartPolicy", ""),
                )
                for one in of
            ]

        def statuses(of):
            return [
                core_v1.ContainerStatus(
                    name=one["name"], state=state(one["state"]), last_state=state(one["lastState"])
                )
                for one in of
            ]

        return core_v1.Pod(
            metadata=core_v1.ObjectMeta(
                **{name: of for name, of in told["metadata"].items() if name != "ownerReferences"}
            ),
            spec=core_v1.PodSpec(
                init_containers=containers(told["spec"]["initContainers"]),
                containers=containers(told["spec"]["containers"]),
            ),
            status=core_v1.PodStatus(
                phase=self.phase,
                conditions=[core_v1.PodCondition(**one) for one in told["status"]["conditions"]],
                init_container_statuses=statuses(told["status"]["initContainerStatuses"]),
                container_statuses=statuses(told["status"]["containerStatuses"]),
            ),
        )

    # What kubelet writes into the status.

    def refused(self, name: str, words: str) -> None:
        reason = {
            "reason": "CreateContainerConfigError",
            "message": "device plugin PreStartContainer rpc failed with err: rpc error: code ="
            f" Unavailable desc = {words}",
        }
        last = self.states.get(name, {}).get("state", {})
        self.states[name] = {
            "state": {"waiting": reason},
            "lastState": {k: v for k, v in last.items() if k == "terminated"},
        }

    def runs(self, name: str, *, started: float = 0) -> None:
        at = dt.datetime.fromtimestamp(int(started), dt.UTC)
        running = {"seconds": int(started), "startedAt": at.strftime("%Y-%m-%dT%H:%M:%SZ")}
        self.states[name] = {"state": {"running": running if started else {}}}

    def ended(self, name: str, exit_code: int = 0, *, started: float) -> None:
        at = dt.datetime.fromtimestamp(int(started), dt.UTC)
        self.states[name] = {
            "state": {
                "terminated": {
                    "exitCode": exit_code,
                    "seconds": int(started),
                    "startedAt": at.strftime("%Y-%m-%dT%H:%M:%SZ"),
                }
            }
        }


class PodsServer(v1alpha1.PodsBase):
    """Kubelet's Pods API."""

    def __init__(self, *pods: FakePod) -> None:
        self.pods = {pod.uid: pod for pod in pods}
        self.calls: list[str] = []
        self.error: Exception | None = None
        self.raw: bytes | None = None
        self.hangs = False
        self.called = asyncio.Event()
        self.go_on = asyncio.Event()

    async def get_pod(self, message):
        self.calls.append(message.pod_uid)
        self.called.set()
        if self.hangs:
            await self.go_on.wait()
        if self.error is not None:
            raise self.error
        if self.raw is not None:
            return v1alpha1.GetPodResponse(pod=self.raw)
        if message.pod_uid not in self.pods:
            raise GRPCError(Status.NOT_FOUND, "pod not found")
        return v1alpha1.GetPodResponse(pod=bytes(self.pods[message.pod_uid].message()))


class PodResources(v1.PodResourcesListerBase):
    """Which pod has which devices, by name.

    Attributes:
        resource: of all of them.
    """

    resource = REGION

    def __init__(self, **devices: str) -> None:
        self.devices = devices
        self.calls = 0

    async def list(self, message):
        self.calls += 1
        return v1.ListPodResourcesResponse(
            pod_resources=[
                v1.PodResources(
                    name=name,
                    namespace="tenant",
                    containers=[
                        v1.ContainerResources(
                            name="app",
                            devices=[
                                v1.ContainerDevices(
                                    resource_name=self.resource, device_ids=[device]
                                )
                            ],
                        )
                    ],
                )
                for name, device in self.devices.items()
            ]
        )


@contextlib.asynccontextmanager
async def serving(service, path):
    """One of kubelet's APIs; its end ends connections that a plugin still has, as kubelet's does.

    A connection that outlived its loop would be found, as an error, in any later test.
    """
    server = ClosingServer([service])
    await server.start(path=str(path))
    try:
        yield
    finally:
        await server.close_all()
        async with asyncio.timeout(LIMIT):
            await server.wait_closed()


def as_kubelet_has_it(pod: DemoPod) -> FakePod:
    known = FakePod(
        uid=pod.uid,
        name=pod.name,
        init={one.name: one.env for one in pod.init_containers},
        app={one.name: one.env for one in pod.containers},
    )
    known.sidecars = frozenset(one.name for one in pod.init_containers if one.restartable)
    return known


def on_stock_kubelet(
    story, *, profile: Profile = STOCK, resource: ResourceName = REGION, **settings: str
) -> None:
    """A node with a stock kubelet that serves its Pods API; `story(node, double, server)`.

    It begins when both regions are Healthy devices of `resource`.
    """

    async def told(node: Node) -> None:
        server = PodsServer()
        double = KubeletDouble(
            str(node.kubelet_dir),
            profile=profile,
            podresources_path=str(node.folder / "list.sock"),
        )
        await double.start()
        try:
            async with serving(server, node.folder / "pods.sock"):
                await double.wait_for(resource, lambda listed: len(listed.healthy) == 2)
                await story(node, double, server)
        finally:
            # The plugin first: connections that it makes meanwhile would outlive the loop.
            if node.plugin.process.poll() is None:
                await asyncio.to_thread(node.plugin.kill)
            await double.stop()

    with Node() as node:
        given = {
            "pods_socket": str(node.folder / "pods.sock"),
            "podresources_socket": str(node.folder / "list.sock"),
            "reconcile_interval": "0.02",
        }
        node.set(**(given | settings))
        node.start()

        async def limited() -> None:
            async with asyncio.timeout(LIMIT):
                await told(node)

        asyncio.run(limited())


async def logged(node: Node, event: str, since: int = 0, **values: str) -> None:
    """Wait for a line of the log, while the kubelet of this loop goes on."""
    await asyncio.to_thread(node.plugin.until_logged, event, since, **values)


def fpga(name: str, env: Mapping[str, str]) -> DemoContainer:
    return DemoContainer(name=name, devices={REGION: 1}, env=env)
