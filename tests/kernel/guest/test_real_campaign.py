"""A short crash campaign on the real drivers: random lives, killed at random instants.

The judge is that of `make campaign` (`tests/campaign/checker.py`): it sees what the drivers were
told to do (`mortal`), what the cards hold, the journal, and the lists. GUEST_SEED and GUEST_SECONDS
choose another life than CI's.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mortal
import pytest
import rack
from campaign.checker import Checker, read_journal
from daemon_support import (
    AFU,
    AFU_2,
    AFU_3,
    BLANK,
    CARD,
    CARD_2,
    CARDS,
    HEALTHY,
    P0,
    REGIONS,
    Node,
    Refused,
    eventually,
    request,
)

pytestmark = pytest.mark.skipif(not rack.DEBUGFS.exists(), reason="the guest's: make test-kernel")

Q0, Q1 = (f"{CARD_2}-p{port}" for port in range(2))
BLANKS = dict.fromkeys((P0, Q0, Q1), BLANK)
SEED = os.environ.get("GUEST_SEED", "17")
SECONDS = float(os.environ.get("GUEST_SECONDS", "45"))
KILLS = 3
"""At least so many, on however slow a machine."""


class RealChecker(Checker):
    """Looks at the drivers where the campaign's reads what simulated cards keep."""

    def state(self) -> dict[str, dict[str, Any]]:
        return rack.attributes()


@dataclass
class Pod:
    """Who has a device.

    Attributes:
        wants: what its container asked for, by region; empty while none runs.
        held: what a process of it has open, which may outlive its allocation.
    """

    name: str
    device: str
    wants: dict[str, str] = field(default_factory=dict)
    held: list[int] = field(default_factory=list)

    @property
    def resource(self) -> str:
        return REGIONS if self.device in BLANKS else CARDS


class Life:
    """One process of the plugin after the other, and what kubelet does meanwhile."""

    def __init__(self, node: Node, rng: random.Random) -> None:
        self.node, self.rng = node, rng
        self.pods: dict[str, Pod] = {}
        self.unsure: set[str] = set()  # devices whose Deallocate may not have arrived
        self.lingering: list[Pod] = []
        self.kills = self.starts = self.number = 0
        self.checker = RealChecker(
            node.folder / "log",
            Path(),
            BLANKS,
            lambda: {pod.device: pod.name for pod in self.pods.values()},
        )

    # ---------------------------------------------------------------- steps

    def step(self) -> None:
        """Something happens to a pod, and perhaps to the plugin."""
        timer = self.threaten()
        try:
            free = [d for d in (*BLANKS, CARD_2) if not self.taken(d)]
            if free and (not self.pods or self.rng.random() < 0.5):
                self.admit(self.rng.choice(free))
            elif self.pods:
                pod = self.rng.choice([*self.pods.values()])
                self.end(pod) if self.rng.random() < 0.6 else self.run(pod)
            if self.lingering and self.rng.random() < 0.5:
                self.close(self.lingering.pop())
        finally:
            if timer is not None:
                timer.join()
        if self.died():
            self.recover()
        self.checker.unharmed()
        self.nobody_else_was_there()

    def threaten(self) -> threading.Timer | None:
        """It dies at one of its next calls to the kernel, or in a while, or not now."""
        match self.rng.randrange(4):
            case 0 | 1:
                die(self.node, f"#{self.rng.randint(1, 45)}")
            case 2:
                timer = threading.Timer(self.rng.uniform(0, 2), self.node.plugin.process.kill)
                timer.start()
                return timer
        return None

    def taken(self, device: str) -> bool:
        return any(rival in self.pods for rival in {device, *self.rivals(device)})

    def rivals(self, device: str) -> list[str]:
        """Devices that the same hardware is known as."""
        return [Q0, Q1] if device == CARD_2 else [device.partition("-p")[0]]

    def admit(self, device: str) -> None:
        """A pod is given a device that is listed Healthy, as kubelet gives none else."""
        self.number += 1
        pod = Pod(f"pod-{self.number}", device)
        listed = self.node.kubelet.listed(pod.resource)
        if listed.get(device) != HEALTHY or self.unsure & {*self.rivals(device)}:
            return
        try:
            self.node.kubelet.allocate(device, resource=pod.resource)
        except Refused as refused:
            self.unsure.add(device)  # it is not admitted; the journal may have it
            if self.killed(refused):
                self.recover()
            self.deallocate(device)
            return
        self.pods[device] = pod
        self.unsure.discard(device)
        self.run(pod)

    def run(self, pod: Pod) -> None:
        """Its container starts, or starts again, if the plugin lets it."""
        self.stop(pod)
        afu = self.rng.choice([AFU, AFU_2, AFU_3, ""])
        env: Mapping[str, str] = request(afu) if afu else {"PATH": "/bin"}
        try:
            self.node.kubelet.prestart(pod.device, env=env, resource=pod.resource)
        except Refused as refused:
            if self.killed(refused):
                self.recover()
            return
        regions = self.checker.regions_of(pod.device)
        pod.wants = dict.fromkeys(regions, BLANK) | {regions[0]: afu or BLANK}
        self.checker.began(pod.name, pod.wants, whole=pod.device == CARD_2)
        self.starts += 1
        for region in regions:
            path = rack.group(rack.FUNCTIONS[0]) if region == P0 else rack.node(region)
            pod.held.append(os.open(path, os.O_RDWR))

    def stop(self, pod: Pod, *, linger: bool = False) -> None:
        """Its container ends; a process of it may live on."""
        if linger and pod.held:
            self.lingering.append(Pod(pod.name, pod.device, pod.wants, pod.held))
            pod.held = []
        self.close(pod)
        if pod.wants:
            self.checker.ended(pod.name, pod.wants)
            pod.wants = {}

    def close(self, pod: Pod) -> None:
        while pod.held:
            os.close(pod.held.pop())

    def end(self, pod: Pod) -> None:
        """The pod ends, in one of the orders that kubelets have."""
        self.stop(pod, linger=self.rng.random() < 0.3)
        del self.pods[pod.device]
        self.unsure.add(pod.device)
        try:
            if self.rng.random() < 0.5:
                self.node.kubelet.poststop(pod.device, resource=pod.resource)
        except Refused as refused:
            assert self.killed(refused), refused  # noqa: PT017  # both are allowed
            self.recover()
        self.deallocate(pod.device)

    def deallocate(self, device: str) -> None:
        resource = REGIONS if device in BLANKS else CARDS
        for _ in range(10):
            try:
                self.node.kubelet.deallocate(device, resource=resource)
            except Refused as refused:
                assert self.killed(refused), refused  # noqa: PT017  # both are allowed
                self.recover()
            else:
                self.unsure.discard(device)
                return
        raise AssertionError("ten deaths in a row")

    # ---------------------------------------------------------------- deaths

    def died(self) -> bool:
        return self.node.plugin.process.poll() is not None

    def killed(self, refused: Refused) -> bool:
        """Whether a call failed because the plugin died in it.

        It may refuse, of a region that somebody still has open.
        """
        if refused.code == "FAILED_PRECONDITION":
            return False
        eventually(self.died, f"its end; it is alive and says {refused}")
        return True

    def recover(self) -> None:
        """The plugin died: what it left behind is judged, and what the next one lists at first."""
        assert self.node.plugin.exit_code() == -signal.SIGKILL
        self.kills += 1
        (self.node.state_dir / "die").unlink(missing_ok=True)
        checker = self.checker
        checker.died()
        scratch = self.node.folder / "scratch"
        checker.journal(read_journal(self.node.state_dir, scratch))
        self.node.restarted()
        for resource in (REGIONS, CARDS):
            first = self.node.kubelet.endpoints[resource].lists[0]
            checker.listed(
                first,
                [device for device, health in first.items() if health == HEALTHY],
                [pod.device for pod in self.pods.values() if pod.resource == resource],
                {*self.pods, *self.unsure},
                known=True,
            )
        checker.unharmed()

    def nobody_else_was_there(self) -> None:
        """What a process has open is as it was, whether or not its pod still has an allocation."""
        state = rack.attributes()
        for pod in self.lingering:
            for region, afu in pod.wants.items():
                assert state[region]["afu_id"] == afu, f"{region} changed under {pod}"

    def finish(self) -> None:
        """Everybody goes; everything becomes clean, and what it was."""
        (self.node.state_dir / "die").unlink(missing_ok=True)
        if self.died():
            self.recover()
        for pod in [*self.pods.values()]:
            self.end(pod)
        for pod in self.lingering:
            self.close(pod)
        self.node.kubelet.until(CARDS, {CARD: HEALTHY, CARD_2: HEALTHY})
        self.node.kubelet.until(REGIONS, dict.fromkeys(BLANKS, HEALTHY))
        self.checker.all_clean()
        eventually(lambda: rack.drivers() == ["", ""], "drivers given back")


def die(node: Node, where: str) -> None:
    """Where the plugin may read it: it is confined."""
    path = node.state_dir / "die"
    path.with_suffix(".new").write_text(where)
    path.with_suffix(".new").replace(path)


@pytest.fixture
def node() -> Iterator[Node]:
    with Node("1x1+ofs,1x2") as it:
        it.settings |= {
            mortal.DEATH: str(it.state_dir / "die"),
            mortal.LOG: str(it.folder / "log"),
        }
        yield it.up()


def test_random_lives_with_kills_at_random_instants_break_nothing(node: Node):
    life = Life(node, random.Random(SEED))
    begin, steps = time.monotonic(), 0
    try:
        while time.monotonic() < begin + SECONDS or life.kills < KILLS:
            life.step()
            steps += 1
        life.finish()
    finally:
        for pod in (*life.pods.values(), *life.lingering):
            life.close(pod)
    checked, seconds = life.checker.checked, time.monotonic() - begin
    print(  # noqa: T201  # pytest shows it with a failure, and with -rP
        f"seed {SEED}: {steps} steps, {life.starts} containers, {life.kills} kills,"
        f" {checked} checks, {seconds:.0f} s"
    )
