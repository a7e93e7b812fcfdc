"""The last look before regions are handed over, by whichever API.

The policy, and the contents of the regions, may have changed while the regions were programmed.
Between this look and the written hand-over the plugin waits for nothing.
"""

from collections.abc import Awaitable, Callable, Mapping

from fpga_plugin.allocation.permission import Permission
from fpga_plugin.cards.prepare import Plan, Preparer
from fpga_plugin.errors import NotFinishedError
from fpga_plugin.ids import AfuId, RegionId


async def last_look(
    permission: Permission,
    preparer: Preparer,
    plan: Plan,
    permitted: Callable[[], Awaitable[object]],
) -> Mapping[RegionId, AfuId | None]:
    """Read the AFU ids of the plan's regions, under a policy that still permits the hand-over.

    Args:
        permission: the operator's policy.
        preparer: reads the regions.
        plan: what was carried out.
        permitted: asks the policy once more.

    Raises:
        FpgaPluginError: the policy forbids it by now, or a region cannot be read.
        NotFinishedError: the policy changed during the look.
    """
    await permitted()
    policy = permission.policy
    observed = await preparer.read_back(plan)
    if permission.policy != policy:
        raise NotFinishedError(
            f"{', '.join(plan.lease.devices)}: the policy changed during the call",
            hint="kubelet's next try is judged by the policy that is in force now",
        )
    return observed
