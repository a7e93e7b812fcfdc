"""What a run of the plugin is started with: nothing of it has to be as in the last life."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

PODS, CLAIMS = "device-plugin", "dra"
APIS = (PODS, CLAIMS)
PREFIXES = ("fpga.intel.com", "fpga.example.com")

POLICY = "version: 1\ndefault: allow\nrules:\n- {name: no-second, action: deny, bitstreams: [%s]}\n"


@dataclass(frozen=True)
class Setup:
    """Settings of one life, and what the node lets it see.

    Attributes:
        api: which of kubelet's APIs serves.
        prefix: of resources, and the driver's name.
        cdi: the directory of the claims' files.
        scrub: `required` or `best-effort`.
        cgroups: they are seen.
        forbids: a bitstream that the operator's policy denies to everybody; empty: there is none.
        records: kubelet's are `there`, `half` written, or `away`: not mounted, or lost. Only what
            the other API's kubelet wrote can be away: without its own no kubelet asks anything.
        boot: how often the node has booted.
    """

    api: str = PODS
    prefix: str = PREFIXES[0]
    cdi: str = "cdi"
    scrub: str = "required"
    cgroups: bool = True
    forbids: str = ""
    records: str = "there"
    boot: int = 0

    def settings(self, folder: Path) -> Mapping[str, str]:
        """Its part of the plugin's environment."""
        values = {
            "MODE": self.api,
            "RESOURCE_PREFIX": self.prefix,
            "CDI_DIR": str(folder / self.cdi),
            "SCRUB": self.scrub,
            "CGROUP_ROOT": str(folder / "cgroup") if self.cgroups else "",
        }
        if self.forbids:
            policy = folder / "policy" / "policy.yaml"
            policy.parent.mkdir(exist_ok=True)
            policy.write_text(POLICY % self.forbids)
            values["POLICY_FILE"] = str(policy)
        return {f"FPGA_PLUGIN_{name}": value for name, value in values.items()}


def changed(
    before: Setup,
    rng: random.Random,
    apis: tuple[str, ...],
    bitstream: str,
    *,
    blind: bool,
    settled: bool = False,
) -> Setup:
    """The next life's: mostly as before.

    Args:
        before: the last one's.
        rng: whatever is by chance.
        apis: those that may serve.
        bitstream: what a policy may deny.
        blind: whether it may be one that sees no cgroups.
        settled: whether the last life left users of everything, so that a change tells most.
    """

    def happens(often: float) -> bool:
        return rng.random() < (2 * often if settled else often / 2)

    def other(now: str, *values: str, often: float) -> str:
        return rng.choice([one for one in values if one != now]) if happens(often) else now

    api = other(before.api, *apis, often=0.2) if len(apis) > 1 else apis[0]
    # Who changes the API changes the mounts of kubelet's directories with it.
    records = [16, 1, 3] if api == before.api else [2, 1, 3]
    return replace(
        before,
        api=api,
        prefix=other(before.prefix, *PREFIXES, often=0.1 if before.prefix == PREFIXES[0] else 0.2),
        cdi=other(before.cdi, "cdi", "cdi-2", often=0.05),
        scrub=other(before.scrub, "required", "best-effort", often=0.05),
        cgroups=not (blind and happens(0.2)),
        forbids=bitstream if rng.random() < 0.2 else "",
        records=rng.choices(["there", "half", "away"], records)[0],
        boot=before.boot + happens(0.03),
    )
