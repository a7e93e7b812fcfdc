"""A claim's file for the container runtime, as the claim is prepared now.

It is written in a thread. Meanwhile the claim may end, be withdrawn because it was allocated anew,
or be prepared anew with other devices. So the ledger is asked again afterwards: a file that nobody
answers for any more would let containers start with what became another claim's.
"""

import asyncio

from fpga_plugin.dra.cdi import CdiFiles
from fpga_plugin.ids import ClaimUid
from fpga_plugin.ledger.ledger import Ledger
from fpga_plugin.ledger.records import Holder


async def write_file(ledger: Ledger, files: CdiFiles, uid: ClaimUid) -> Holder | None:
    """Write the file of a claim that is prepared.

    Returns the claim as its file has it; None: it is not prepared (any more), and nothing of it was
    left there.

    Raises:
        CdiError: the file cannot be written or removed.
    """
    written: Holder | None = None
    content: object = None
    while True:
        holder = ledger.holders.get(uid)
        if holder is None or not ledger.resource_claims.is_prepared(holder):
            if written is None:
                return None
            await asyncio.to_thread(files.remove, files.of(written))
            written = None  # it may be prepared again by now
            continue
        claims = tuple(ledger.claims[device] for device in holder.devices)
        # Pods may have come to it, of which the file says nothing.
        now = holder.requests, holder.file, [(claim.device, claim.grants) for claim in claims]
        if written is not None and now == content:
            return holder
        await asyncio.to_thread(files.write, holder, claims)
        written, content = holder, now
