"""Asks the operator's policy whether a PreStart is permitted, for the namespace of the pod.

None of kubelet's calls carries a namespace. On a stock kubelet it comes with the pod's spec, which
was read to learn what the container asks for. On an extended one the plugin asks the directory of
pods for it, only if some rule depends on it. PodResources knows no uids. But one pod at a time has
a device, the call is for that pod, and the allocation must be the same before and after the
question. The plugin never guesses: while the namespace is unknown, the answer is no.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from fpga_plugin.allocation.lease import Lease
from fpga_plugin.allocation.requests.directory import PodDirectory
from fpga_plugin.allocation.requests.identity import Identity
from fpga_plugin.allocation.requests.parse import FpgaRequest
from fpga_plugin.errors import NoSourceError, NotPermittedError
from fpga_plugin.ids import BitstreamId, DeviceId, Resource
from fpga_plugin.policy.rules import Ask, Policy

if TYPE_CHECKING:
    from fpga_plugin.policy.file import PolicyFile  # imports YAML: only where there is a policy

log = structlog.get_logger()


class Permission:
    """Asks the operator's policy.

    Args:
        policy: None: everything is permitted, and nothing is asked.
        pods: finds the names of pods.
    """

    def __init__(self, policy: "PolicyFile | None", pods: PodDirectory) -> None:
        self._file = policy
        self._pods = pods

    @property
    def policy(self) -> Policy | None:
        """The policy in force, to compare later with the one that `check` asked."""
        return None if self._file is None else self._file.policy

    async def check(
        self,
        identity: Identity,
        resource: Resource,
        devices: Sequence[DeviceId],
        requests: Sequence[FpgaRequest],
        lease: Lease,
    ) -> Identity:
        """Refuse what the policy does not allow; returns the identity, with its namespace if known.

        Args:
            identity: the pod and container.
            resource: of the call.
            devices: of the call.
            requests: everything that the container asks for.
            lease: on the allocations of the call.

        Raises:
            NotPermittedError: the message names the rule.
            NoSourceError: the policy depends on the namespace, and no source knows it.
        """
        if self._file is None:
            return identity
        policy = await self._file.current()
        if policy.needs_namespace and not identity.namespace:
            try:
                name = await self._pods.name(identity, devices, lease.check)
            except NoSourceError as error:
                raise NoSourceError(
                    f"{', '.join(devices[:3])}: the policy depends on the pod's namespace, and"
                    f" nothing reports it: {error.message}",
                    hint="mount the socket of kubelet's Pods API or of PodResources"
                    " (FPGA_PLUGIN_PODS_SOCKET, FPGA_PLUGIN_PODRESOURCES_SOCKET)",
                ) from error
            identity = replace(identity, name=name)
            policy = self._file.policy  # it may have changed while others were asked
        for ask in asks(resource, requests):
            verdict = policy.judge(identity.namespace, ask)
            if verdict.allowed:
                continue
            log.warning(
                "refused by the policy",
                namespace=identity.namespace or None,
                pod=identity.pod,
                devices=list(devices),
                bitstream=ask.bitstream_id,
                resource=resource.name,
                rule=verdict.rule or None,
            )
            who = f"namespace {identity.namespace}" if identity.namespace else "nobody"
            why = (
                f"rule {verdict.rule} of {self._file.path} denies it"
                if verdict.rule
                else f"no rule of {self._file.path} allows it, and the default is deny"
            )
            may = "may not" if identity.namespace else "may"
            raise NotPermittedError(
                f"{', '.join(devices[:3])}: {who} {may} have {ask}: {why}",
                hint="ask the cluster's operator, or delete the pod",
            )
        return identity


def asks(of: Resource, requests: Sequence[FpgaRequest]) -> tuple[Ask, ...]:
    """The questions to the policy that a container's requests make for one resource.

    Each request that fits is one question. The remaining devices are handed over blank and need no
    question: a pod that may have the devices with a bitstream may have some without. Only a
    container without any request asks for blank devices. If no request fits, that is an error,
    which another module raises. A preprogrammed region's resource names its function.
    """
    if of.afu_id is not None:
        function = BitstreamId(of.afu_id)
        return (Ask(kind=of.kind, interface_id=of.interface_id, bitstream_id=function),)
    fitting = dict.fromkeys(r.file_id for r in requests if r.interface_id == of.interface_id)
    bitstreams = tuple(fitting) if requests else (None,)
    return tuple(
        Ask(kind=of.kind, interface_id=of.interface_id, bitstream_id=bitstream)
        for bitstream in bitstreams
    )
