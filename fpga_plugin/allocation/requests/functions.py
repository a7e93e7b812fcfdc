"""Which of a container's requests the preprogrammed functions of a call satisfy.

Nothing is programmed for these: a request only says again what the resource's name said. The Intel
plugin's pods of such resources have none, since its webhook takes the variables away.
"""

from collections.abc import Collection, Mapping, Sequence

from fpga_plugin.allocation.requests.parse import FpgaRequest, assign
from fpga_plugin.errors import RefusedError
from fpga_plugin.ids import AfuId, BitstreamId, InterfaceId, RegionId, known_resource
from fpga_plugin.kubernetes.names import ResourceName


def assign_functions(
    requests: Sequence[FpgaRequest],
    regions: Mapping[RegionId, InterfaceId],
    interface_id: InterfaceId,
    afu_id: AfuId,
    resources: Collection[ResourceName],
) -> Mapping[RegionId, FpgaRequest | None]:
    """Which request each region of a call gets (`assign`); None: it is handed over all the same.

    Kubelet calls once a resource: what another of the container's `resources` may satisfy is
    another call's.

    Raises:
        InvalidRequestError: there are requests, and none is for these devices' interface id.
        RefusedError: one asks for another accelerator, or there are more than regions.
    """
    held = [one for one in map(known_resource, resources) if one is not None]
    fitting = [one for one in requests if one.interface_id == interface_id]
    if not fitting:
        elsewhere = {one.interface_id for one in held} - {interface_id}
        return assign([one for one in requests if one.interface_id not in elsewhere], regions)
    others = {one.afu_id for one in held if one.interface_id == interface_id}
    for request in fitting:
        if AfuId(request.file_id) not in {afu_id, *others}:
            raise RefusedError(
                f"{request.region_variable} asks for {request.file_id}, but the region holds"
                f" the function {afu_id}, and a region with a function is not programmed",
                hint="ask for the resource of that accelerator, or remove the request",
            )
    return assign([one for one in fitting if one.file_id == BitstreamId(afu_id)], regions)
