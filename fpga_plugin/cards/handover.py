"""The last look before regions are handed over, by whichever API.

The policy may have changed while the regions were programmed, and so may what is on them. After
this look nothing is waited for until the hand-over is written.
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
    """What is on the plan's regions, under a policy that allows it.

    Args:
        permission: the operator's policy.
        preparer: reads the regions.
        plan: what was carried out.
        permitted: asks the policy once more.

    Raises:
        FpgaPluginError: it is not allowed by now, or cannot be read.
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
