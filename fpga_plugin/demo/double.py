"""The kubelet double: device manager, container starts and ends, as calls that a test makes.

    double = KubeletDouble(directory, profile=EXTENDED)
    await double.start()                       # serves <directory>/kubelet.sock
    await double.wait_for(resource)            # the plugin has registered and sent its list
    await double.admit(pod)                    # GetPreferredAllocation, Allocate, checkpoint
    await double.start_container(pod, "app")   # PreStartContainer
    double.end_container(pod, "app", 1)        # its status says so
    await double.remove_container(pod, "app")  # PostStopContainer, where the profile has it
    await double.end_pod(pod)                  # Deallocate, where the profile has it
    await double.stop()

The single calls (`allocate`, `prestart`, `poststop`, `deallocate`, `preferred`) are there for
orders that no kubelet should choose and some do: the fork behind kubernetes/kubernetes pull request
91190 calls PostStopContainer when it removes a container, maybe after its successor started, and
repeats Deallocate. Nothing is retried here, and errors come as the plugin sent them.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from grpclib.exceptions import GRPCError

from fpga_plugin.demo.held_devices import UNKNOWN_NODE, HeldDevices, write_checkpoint
from fpga_plugin.demo.plugins import DeviceList, NoEndpointError, PluginManager
from fpga_plugin.demo.pod import DemoContainer, DemoPod
from fpga_plugin.demo.podsapi_double import PodsApiDouble
from fpga_plugin.errors import FpgaPluginError
from fpga_plugin.kubernetes.messages import v1
from fpga_plugin.kubernetes.names import PodUid, ResourceName

if TYPE_CHECKING:
    from grpclib._typing import IServable

SERVICE_ENV = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
"""The API server's service, which kubelet names to every container, whatever its spec says
(getServiceEnvVarMap of pkg/kubelet/kubelet_pods.go): no container's environment is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What a kind of kubelet does.

    Attributes:
        env: PreStartContainer carries the container's environment, `SERVICE_ENV` among it.
        poststop: PostStopContainer is called when a container is removed.
        deallocate: Deallocate is called when a pod has ended, or its Allocate failed.
        reuse: init containers leave their devices to the pod's later containers.
    """

    env: bool
    poststop: bool
    deallocate: bool
    reuse: bool


STOCK = Profile(env=False, poststop=False, deallocate=False, reuse=True)
"""Kubelet as shipped."""

EXTENDED = Profile(env=True, poststop=True, deallocate=True, reuse=True)
"""Both KEPs, as last written: Deallocate, and init containers' devices reused."""

FORK = replace(EXTENDED, reuse=False)
"""The code of kubernetes/kubernetes#91190: each container gets devices of its own."""


class AdmissionError(FpgaPluginError):
    """Kubelet rejects the pod for good.

    Attributes:
        call: the plugin's refusal, where it was one.
    """

    def __init__(self, message: str, call: GRPCError | None = None) -> None:
        super().__init__(message)
        self.call = call


class KubeletDouble(PluginManager):
    """One node's kubelet.

    Attributes:
        profile: what kind of kubelet it plays.
        held: what each container holds (kubelet's podDevices), by pod uid, container, resource.
        pods: the pods that were admitted and have not ended.
        podresources_error: the error that PodResources returns to every call; None: it answers.
        podresources_calls: how many calls of each kind it got.
    """

    def __init__(
        self,
        directory: str,
        *,
        profile: Profile = EXTENDED,
        podresources_path: str | None = None,
        pods_path: str | None = None,
    ) -> None:
        """Not yet serving.

        Args:
            directory: kubelet's device plugin directory.
            profile: see `EXTENDED`, `FORK` and `STOCK`.
            podresources_path: where to serve PodResources v1 List; None: nowhere.
            pods_path: where to serve the Pods API; None: nowhere.
        """
        super().__init__(directory)
        self.listeners.append(lambda _: self.write_checkpoint())
        self.profile = profile
        self.held: dict[tuple[PodUid, str, ResourceName], HeldDevices] = {}
        self.pods: dict[PodUid, DemoPod] = {}
        self.podresources_error: GRPCError | None = None
        self.podresources_calls: Counter[str] = Counter()
        self._statuses = PodsApiDouble(self.pods)
        self._apis: dict[str, IServable] = {}
        if podresources_path is not None:
            self._apis[podresources_path] = _PodResources(self)
        if pods_path is not None:
            self._apis[pods_path] = self._statuses

    async def start(self) -> None:
        """Serve kubelet.sock, and the APIs that were asked for."""
        await super().start()
        for path, api in self._apis.items():
            await self.serve(path, api)

    # ---------------------------------------------------------------- pods

    async def admit(self, pod: DemoPod) -> None:
        """Allocate devices for every container, init containers first.

        Raises:
            AdmissionError: kubelet's words for the pod's event; what was granted stays held until
                `end_pod`, as in kubelet.
        """
        await self.free_inactive()
        self.pods[pod.uid] = pod
        reusable: dict[ResourceName, list[str]] = {}
        try:
            for container in pod.all_containers:
                changed = False
                for resource, count in container.devices.items():
                    changed |= await self._allocate(pod, container, resource, count, reusable)
                self._pass_on(pod, container, reusable)
                if changed:
                    self.write_checkpoint()
        except AdmissionError:
            del self.pods[pod.uid]  # it is Failed: no longer active
            raise

    async def _allocate(
        self,
        pod: DemoPod,
        container: DemoContainer,
        resource: ResourceName,
        count: int,
        reusable: Mapping[ResourceName, list[str]],
    ) -> bool:
        """One container's devices of one resource; returns whether there was something to do."""
        key = (pod.uid, container.name, resource)
        if count == 0 or key in self.held:
            return False
        try:
            ids = await self._pick(resource, count, reusable.get(resource, []))
            try:
                response = await self.allocate(resource, ids)
            except GRPCError:
                if self.profile.deallocate:  # the fork deallocates what it was refused
                    await self.deallocate(resource, ids)
                raise
        except (GRPCError, NoEndpointError) as error:
            raise AdmissionError(
                f"Pod was rejected: Allocate failed due to {rpc_error(error)}, which is unexpected",
                error if isinstance(error, GRPCError) else None,
            ) from error
        self.held[key] = HeldDevices(
            pod.uid, container.name, resource, self._by_node(resource, ids), response
        )
        return True

    async def _pick(self, resource: ResourceName, count: int, reusable: list[str]) -> list[str]:
        picked = reusable[:count]
        if len(picked) == count:
            return picked
        listed = self.lists.get(resource, DeviceList(resource))
        in_use = {device for held in self.held.values() for device in held.ids}
        free = [d for d in listed.ids if d in listed.healthy and d not in in_use]
        if len(picked) + len(free) < count:
            raise AdmissionError(
                f"Pod was rejected: Allocate failed due to requested number of devices unavailable"
                f" for {resource}. Requested: {count - len(picked)}, Available: {len(free)}, which"
                " is unexpected"
            )
        candidates = [*picked, *free]
        if self.connection(resource).options.get_preferred_allocation_available:
            preferred = await self.preferred(resource, candidates, picked, count)
            # Kubelet takes what it knows of the answer, then anything.
            candidates = [*picked, *(d for d in preferred if d in free), *free]
        return list(dict.fromkeys(candidates))[:count]

    def _pass_on(
        self, pod: DemoPod, container: DemoContainer, reusable: dict[ResourceName, list[str]]
    ) -> None:
        """Init containers leave their devices to later containers of the pod."""
        if not self.profile.reuse:
            return
        ends = container in pod.init_containers and not container.restartable
        for resource in container.devices:
            held = self.held.get((pod.uid, container.name, resource))
            ids = held.ids if held is not None else ()
            known = reusable.setdefault(resource, [])
            if ends:
                known += [device for device in ids if device not in known]
            else:
                reusable[resource] = [device for device in known if device not in ids]

    async def start_container(self, pod: DemoPod, container: str) -> list[ResourceName]:
        """PreStartContainer for each resource that the container holds.

        Returns the resources for which it was called: after its own restart kubelet starts
        containers without it until the plugin has registered again.

        Raises:
            GRPCError: as the plugin answered; later resources are not called.
            NoEndpointError: the plugin is gone.
        """
        env = {**SERVICE_ENV, **pod.container(container).env} if self.profile.env else {}
        called = []
        for held in self.held_by(pod, container):
            connection = self.connections.get(held.resource)
            if connection is None or not connection.options.pre_start_required:
                continue
            try:
                await self.prestart(held.resource, held.ids, env)
            except GRPCError as error:
                self._statuses.waits(pod, container, rpc_error(error))
                raise
            called.append(held.resource)
        self._statuses.runs(pod, container)
        return called

    def end_container(self, pod: DemoPod, container: str, exit_code: int) -> None:
        """The process of a container that runs ends; the pod's status says so."""
        self._statuses.ended(pod, container, exit_code)

    async def remove_container(self, pod: DemoPod, container: str) -> None:
        """The stopped container is removed: PostStopContainer, where the profile has it."""
        if not self.profile.poststop:
            return
        for held in self.held_by(pod, container):
            if self._serves(held.resource):
                await self.poststop(held.resource, held.ids)

    async def end_pod(self, pod: DemoPod) -> None:
        """The pod has ended: Deallocate for each container and resource, where the profile has it.

        A stock kubelet makes no call: it frees the devices at the next admission or List.
        """
        self.pods.pop(pod.uid, None)
        self._statuses.forget(pod)
        if self.profile.deallocate:
            await self.free_inactive()

    async def free_inactive(self) -> None:
        """Free what pods that have ended hold (kubelet's UpdateAllocatedDevices).

        The fork deallocates each container's devices, under its lock: no list is worked on before
        the entries are gone. The checkpoint is not rewritten, in neither kubelet.
        """
        ended = {key: held for key, held in self.held.items() if held.pod not in self.pods}
        for key in ended:
            del self.held[key]
        for held in ended.values() if self.profile.deallocate else ():
            if self._serves(held.resource):
                await self.deallocate(held.resource, held.ids)

    def devices(self, pod: DemoPod, container: str) -> dict[ResourceName, tuple[str, ...]]:
        """What a container holds."""
        return {held.resource: held.ids for held in self.held_by(pod, container)}

    def write_checkpoint(self) -> None:
        """Kubelet does so after admissions and at every list."""
        write_checkpoint(
            self.directory,
            self.held.values(),
            {resource: listed.healthy for resource, listed in self.lists.items()},
        )

    def held_by(self, pod: DemoPod, container: str) -> list[HeldDevices]:
        """What a container holds, an entry for each resource."""
        return [
            held
            for held in self.held.values()
            if held.pod == pod.uid and held.container == container
        ]

    def _serves(self, resource: ResourceName) -> bool:
        connection = self.connections.get(resource)
        return connection is not None and not connection.stopped

    def _by_node(self, resource: ResourceName, ids: list[str]) -> dict[int, tuple[str, ...]]:
        nodes = self.lists[resource].devices if resource in self.lists else {}
        grouped: dict[int, tuple[str, ...]] = {}
        for device in ids:
            node = nodes.get(device, UNKNOWN_NODE)
            grouped[node] = (*grouped.get(node, ()), device)
        return grouped


class _PodResources(v1.PodResourcesListerBase):
    """What kubelet 1.34 and later shows: in List active pods, without their init containers."""

    def __init__(self, kubelet: KubeletDouble) -> None:
        self._kubelet = kubelet

    async def get_allocatable_resources(
        self, message: v1.AllocatableResourcesRequest
    ) -> v1.AllocatableResourcesResponse:
        del message  # has no fields
        self._called("GetAllocatableResources")
        return v1.AllocatableResourcesResponse(
            devices=[
                v1.ContainerDevices(resource_name=resource, device_ids=sorted(listed.healthy))
                for resource, listed in self._kubelet.lists.items()
            ]
        )

    def _called(self, method: str) -> None:
        self._kubelet.podresources_calls[method] += 1
        if self._kubelet.podresources_error is not None:
            raise self._kubelet.podresources_error

    async def list(self, message: v1.ListPodResourcesRequest) -> v1.ListPodResourcesResponse:
        del message  # has no fields
        self._called("List")
        await self._kubelet.free_inactive()
        return v1.ListPodResourcesResponse(
            pod_resources=[self._pod(pod) for pod in self._kubelet.pods.values()]
        )

    def _pod(self, pod: DemoPod) -> v1.PodResources:
        shown = [c for c in pod.init_containers if c.restartable] + list(pod.containers)
        return v1.PodResources(
            name=pod.name,
            namespace=pod.namespace,
            containers=[
                v1.ContainerResources(
                    name=container.name,
                    devices=[
                        v1.ContainerDevices(
                            resource_name=held.resource,
                            device_ids=list(ids),
                            topology=None
                            if node == UNKNOWN_NODE
                            else v1.TopologyInfo(nodes=[v1.NumaNode(id=node)]),
                        )
                        for held in self._kubelet.held_by(pod, container.name)
                        for node, ids in held.devices.items()
                    ],
                )
                for container in shown
            ],
        )


def rpc_error(error: GRPCError | NoEndpointError) -> str:
    """How Go prints the error of a call, and so how kubelet's events show it."""
    if isinstance(error, NoEndpointError):
        return str(error)
    name = "".join(word.capitalize() for word in error.status.name.split("_"))
    name = {"Ok": "OK", "Cancelled": "Canceled"}.get(name, name)  # as Go spells them
    return f"rpc error: code = {name} desc = {error.message or ''}"
