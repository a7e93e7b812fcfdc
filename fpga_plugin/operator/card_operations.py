"""What the operator may do to a card through the local socket, and the answer as plain values."""

from collections.abc import Awaitable, Callable, Mapping
from typing import cast

from fpga_plugin.operator.schema import CardStateView
from fpga_plugin.operator.survey import Operation
from fpga_plugin.regions.actions import CardActions, CardState


def operations(actions: CardActions) -> dict[str, Operation]:
    """By the word that the command line has for it."""
    return {
        "drain": _shown(actions.drain),
        "undrain": _shown(actions.undrain),
        "retry": _shown(actions.retry),
    }


def _shown(action: Callable[[str], Awaitable[CardState]]) -> Operation:
    async def operation(card: str) -> Mapping[str, object]:
        return cast("Mapping[str, object]", state_view(await action(card)))

    return operation


def state_view(state: CardState) -> CardStateView:
    """As JSON shows it."""
    return {
        "card": state.card,
        "present": state.present,
        "drained": state.drained,
        "may_be_pulled": state.may_be_pulled,
        "holders": [
            {
                "device": holder.device,
                "resource": holder.resource,
                "pod_uid": holder.pod or "",
                "started": holder.started,
                "since": holder.since or None,
            }
            for holder in state.holders
        ],
        "waits_for": list(state.waits_for),
        "not_clean": list(state.not_clean),
    }
