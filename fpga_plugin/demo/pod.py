"""A pod as far as devices are concerned: containers, what they ask for, their environment."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from fpga_plugin.kubernetes.names import PodUid, ResourceName


def new_uid() -> PodUid:
    """A pod uid as the API server makes them."""
    return PodUid(str(uuid.uuid4()))


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoContainer:
    """One container.

    Attributes:
        name: unique in its pod.
        devices: how many devices it asks for, by resource.
        env: its environment, as the pod's spec gives it.
        restartable: an init container that keeps running (a sidecar).
    """

    name: str
    devices: Mapping[ResourceName, int] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    restartable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPod:
    """One pod.

    Attributes:
        name: its name.
        containers: the app containers.
        init_containers: started before them, one after the other.
        namespace: its namespace.
        uid: differs for every pod that ever was.
    """

    name: str
    containers: tuple[DemoContainer, ...]
    init_containers: tuple[DemoContainer, ...] = ()
    namespace: str = "default"
    uid: PodUid = field(default_factory=new_uid)

    @property
    def all_containers(self) -> tuple[DemoContainer, ...]:
        """In the order in which kubelet allocates and starts them."""
        return self.init_containers + self.containers

    def container(self, name: str) -> DemoContainer:
        """One of them by name.

        Raises:
            KeyError: there is none.
        """
        for container in self.all_containers:
            if container.name == name:
                return container
        raise KeyError(name)
