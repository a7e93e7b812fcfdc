"""Decides the target of each region of a claim, by the claim's config or its pod's variables.

The config of the DeviceClass bounds both.
"""

from fpga_plugin.allocation.ledger import Ledger
from fpga_plugin.allocation.names import card_of
from fpga_plugin.allocation.requests.environment import container_requests
from fpga_plugin.allocation.requests.identity import Identity
from fpga_plugin.allocation.requests.parse import FpgaRequest, assign
from fpga_plugin.cards.targets import Targets
from fpga_plugin.dra.claim import CALL_SECONDS, ResourceClaim
from fpga_plugin.dra.regionconfig import DeviceTarget, merged, within
from fpga_plugin.errors import InvalidRequestError, NoSourceError, RefusedError
from fpga_plugin.hardware.backend import DriverSettings
from fpga_plugin.ids import DeviceId, InterfaceId, RegionId
from fpga_plugin.kubernetes.names import PodName, PodUid
from fpga_plugin.kubernetes.pod import Pod


class ClaimTargets:
    """Decides what each region of a claim is to become.

    Args:
        ledger: knows the cards.
        targets: what variables mean.
        kubeconfig: path of a file with credentials; None: the pod's service account.
    """

    def __init__(self, ledger: Ledger, targets: Targets, kubeconfig: str | None) -> None:
        self._ledger = ledger
        self._targets = targets
        self._kubeconfig = kubeconfig

    async def of(self, claim: ResourceClaim) -> dict[RegionId, FpgaRequest | None]:
        """The target of each region; None: blank.

        Raises:
            NotPermittedError: a DeviceClass does not allow it.
            NoSourceError: the pod cannot be read.
            FpgaPluginError: what is asked for makes no sense, or a card is gone.
        """
        asked = None if claim.pod is None else await self._of_pod(claim, *claim.pod)
        found: dict[RegionId, FpgaRequest | None] = {}
        for device in claim.owner.devices:
            of_claim = merged(claim.of(device, from_class=False))
            of_class = claim.of(device, from_class=True)
            # Its card may have gone meanwhile.
            regions = self._ledger.obstacles.regions_of(device)
            interface = self._ledger.cards[card_of(device)].interface_id
            for region in regions:
                target = of_claim if asked is None else asked.get(region.id, DeviceTarget())
                allowed = within(of_class, target, f"device {device}")
                found[region.id] = _request(allowed, interface, device)
        return found

    async def _of_pod(
        self, claim: ResourceClaim, name: PodName, uid: PodUid
    ) -> dict[RegionId, DeviceTarget]:
        """What the containers ask for in their environment that share the claim."""
        from fpga_plugin.kubernetes.apiserver.pods import ApiServer  # where needed

        server = ApiServer(self._kubeconfig, call_seconds=CALL_SECONDS)
        pod, mapped = await server.get_extended(*name)
        if pod.uid != uid:
            raise NoSourceError(f"pod {name} is another one by now: its uid is not {uid}")
        if mapped is None or mapped.claim != claim.owner.name:
            raise NoSourceError(
                f"pod {name} does not say yet which containers use claim {claim.owner.full_name}"
            )
        return await self._shared(claim, pod, mapped.requests)

    async def _shared(
        self, claim: ResourceClaim, pod: Pod, mapped: tuple[tuple[str, str], ...]
    ) -> dict[RegionId, DeviceTarget]:
        found: dict[RegionId, tuple[str, DeviceTarget]] = {}
        containers, _ = container_requests(pod)
        for container in containers:
            names = {request for name, request in mapped if name == container.name}
            devices = [d for d in claim.owner.devices if names & {*claim.owner.requests[d]}]
            if not devices:
                continue
            container.check()
            name = PodName(pod.namespace, pod.name)
            identity = Identity(pod=pod.uid, container=container.name, name=name)
            # Names of bitstreams become ids here, so that a class's pin is held against ids.
            requests = await self._targets.requests(identity, devices, container.env)
            for region, request in assign(requests, self._targets.interfaces(devices)).items():
                target = DeviceTarget()
                if request is not None:
                    target = DeviceTarget(request.file_id, request.settings)
                other, before = found.setdefault(region, (container.name, target))
                if before != target:
                    raise RefusedError(
                        f"containers {other} and {container.name} share a device and ask for"
                        " different bitstreams: a claim is prepared once, before both",
                        hint="give each container a device of its own, or ask for the same",
                    )
        return {region: target for region, (_, target) in found.items()}


def _request(target: DeviceTarget, interface: InterfaceId, device: DeviceId) -> FpgaRequest | None:
    if target.bitstream is None:
        if target.settings != DriverSettings():
            raise InvalidRequestError(
                f"device {device}: driver parameters are given, and no bitstream",
                hint="name the bitstream in RegionConfig",
            )
        return None
    return FpgaRequest(
        suffix="", interface_id=interface, bitstream_id=target.bitstream, settings=target.settings
    )
