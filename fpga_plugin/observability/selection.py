"""The part of a status that concerns one pod, one card or one region."""

from typing import Final

from fpga_plugin.observability.schema import (
    CardView,
    OwnerView,
    RefusalView,
    RegionView,
    StatusView,
)

MAX_WORDS: Final = 256
"""Characters of what is looked for; names of pods and their namespaces are not longer."""


def selected(status: StatusView, words: str) -> StatusView:
    """What has the words in a card's or region's id, or in its owner's name or uid.

    A card that matches is shown whole, another one with its regions that match. What is of the
    whole node (its trouble, resources, store) stays. Without words everything is.
    """
    look = words[:MAX_WORDS].strip().lower().replace(":", "-")
    if not look:
        return status
    cards = [one for card in status["cards"] if (one := _card(card, look)) is not None]
    return {
        **status,
        "cards": cards,
        "problems": [one for one in status["problems"] if look in one["card"].lower()],
        "refusals": [one for one in status["refusals"] if _refusal(one, look)],
        "warnings": [one for one in status["warnings"] if _refusal(one, look)],
    }


def _card(card: CardView, look: str) -> CardView | None:
    if look in card["card"].lower():
        return card
    regions = [region for region in card["regions"] if _region(region, look)]
    return {**card, "regions": regions} if regions else None


def _region(region: RegionView, look: str) -> bool:
    return look in region["region"].lower() or _owner(region["owner"], look)


def _owner(owner: OwnerView | None, look: str) -> bool:
    if owner is None:
        return False
    claim = f"{owner['namespace']}/{owner['claim']}".lower() if owner["claim"] else ""
    return (
        _pod(owner["namespace"], owner["pod"], owner["pod_uid"], look)
        or look in claim
        or look in owner["claim_uid"]
        or any(look in pod.lower() for pod in owner["pods"])
    )


def _refusal(refusal: RefusalView, look: str) -> bool:
    return (
        any(look in device.lower() for device in refusal["devices"])
        or _pod(refusal["namespace"], refusal["pod"], refusal["pod_uid"], look)
        or look in refusal["claim"].lower()
    )


def _pod(namespace: str, name: str, uid: str, look: str) -> bool:
    return look in f"{namespace}/{name}".lower() or look in uid.lower()
