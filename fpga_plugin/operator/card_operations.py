"""What the operator may do to a card through the local socket, and the answer as plain values."""

from collections.abc import Awaitable, Callable, Mapping
from typing import cast

from fpga_plugin.ids import DeviceId, PodUid
from fpga_plugin.operator.node import function_view
from fpga_plugin.operator.owners import Names, Use, by_device, who
from fpga_plugin.operator.schema import CardStateView, ProgrammedView
from fpga_plugin.operator.survey import Operation
from fpga_plugin.operator.view import learn_names
from fpga_plugin.plugin import Plugin
from fpga_plugin.pods.names import PodName
from fpga_plugin.regions.actions import CardActions, CardState
from fpga_plugin.regions.byhand import Programmed


def operations(actions: CardActions, plugin: Plugin | None = None) -> dict[str, Operation]:
    """By the word that the command line has for it; `plugin` tells what pods are called."""
    return {
        "drain": _shown(actions.drain, plugin),
        "undrain": _shown(actions.undrain, plugin),
        "retry": _shown(actions.retry, plugin),
        "release": _shown(actions.release, plugin),
        "functions-make": _functions(actions, make=True),
        "functions-remove": _functions(actions, make=False),
    }


def _functions(actions: CardActions, *, make: bool) -> Operation:
    async def operation(card: str) -> Mapping[str, object]:
        found = await actions.functions(card, make=make)
        return {
            "card": card,
            "functions": [function_view(one) for one in found],
        }

    return operation


def _shown(action: Callable[[str], Awaitable[CardState]], plugin: Plugin | None) -> Operation:
    async def operation(card: str) -> Mapping[str, object]:
        state = await action(card)
        names: Names = _nobody
        if plugin is not None and state.holders:
            await learn_names(plugin.ledger, plugin.node.pods)
            names = plugin.node.pods.known
        held = {} if plugin is None else by_device(plugin.ledger)
        return cast("Mapping[str, object]", state_view(state, names, held))

    return operation


def _nobody(_pod: PodUid | None) -> PodName | None:
    return None


def state_view(
    state: CardState, names: Names = _nobody, held: Mapping[DeviceId, Use] | None = None
) -> CardStateView:
    """As JSON shows it; `held` are the ResourceClaims that have devices."""
    held = held or {}
    return {
        "card": state.card,
        "present": state.present,
        "drained": state.drained,
        "may_be_pulled": state.may_be_pulled,
        "holders": [
            {
                **who(holder.device, holder.pod, held, names),
                "device": holder.device,
                "resource": holder.resource,
                "started": holder.started,
                "since": holder.since or None,
            }
            for holder in state.holders
        ],
        "waits_for": list(state.waits_for),
        "not_clean": list(state.not_clean),
    }


def programmed_view(done: Programmed | None) -> ProgrammedView:
    """As JSON shows it; None: not finished."""
    if done is None:
        return {
            "finished": False,
            "region": "",
            "afu_id": "",
            "name": "",
            "clock": None,
            "steps": {},
        }
    return {
        "finished": True,
        "region": done.region,
        "afu_id": done.afu_id,
        "name": done.name,
        "clock": {"state": done.clock.state.value, "detail": done.clock.detail},
        "steps": {name: round(seconds, 6) for name, seconds in done.steps},
    }
