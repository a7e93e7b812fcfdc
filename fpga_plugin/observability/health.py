"""Whether the plugin lives, and whether it serves kubelet; and why not.

Live: the event loop answers, and so does the common thread pool. A card that is stuck in a PR does
not count: the kernel would not let the process die anyway. Ready: every resource is registered and
kubelet holds its stream. A node without cards has nothing to register and is ready.
"""

import asyncio
from typing import Final

from fpga_plugin.observability.status_context import StatusContext

THREAD_SECONDS: Final = 5.0
"""How long the thread pool may take to answer."""


async def not_live(*, seconds: float = THREAD_SECONDS) -> str:
    """Why the process should be started again; empty while it lives."""
    try:
        async with asyncio.timeout(seconds):
            await asyncio.to_thread(lambda: None)
    except TimeoutError:
        return f"no thread was free within {seconds:g} s"
    return ""


def not_ready(context: StatusContext) -> list[str]:
    """Why kubelet is not served, one reason a line; empty while it is."""
    plugin = context.plugin
    if plugin is None:
        return [context.phase]
    if plugin.dra is not None:
        return plugin.dra.not_ready()
    return [
        f"{resource}: {status.problem or _step(registered=status.registered)}"
        for resource, status in sorted(plugin.link.status.items())
        if not (status.registered and status.streaming)
    ]


def _step(*, registered: bool) -> str:
    if registered:
        return "registered; kubelet has not asked for the device list yet"
    return "not registered with kubelet yet"
