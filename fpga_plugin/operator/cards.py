"""What the operator may do to a card through the local socket, and the answer as plain values."""

from collections.abc import Awaitable, Callable, Mapping
from typing import TypedDict, cast

from fpga_plugin.operator.survey import Operation
from fpga_plugin.regions.actions import CardActions, CardState


class HolderView(TypedDict):
    """Who still has something of the card; `pod_uid` is empty, `since` null, where not known."""

    device: str
    resource: str
    pod_uid: str
    started: bool
    since: float | None


class CardStateView(TypedDict):
    """How far a card is from being pulled; see `CardState`."""

    card: str
    present: bool
    drained: bool
    may_be_pulled: bool
    holders: list[HolderView]
    waits_for: list[str]
    not_clean: list[str]


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
