"""Which variables count where several containers hold the same devices, and what proves nothing.

Each of these broke without a test noticing (`make mutants`). A pod's life, as its sources tell it,
is in tests/integration/test_pod_sources.py.
"""

import asyncio
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from doubles.cards import AFU, INTERFACE, PREFIX, device, make_card
from doubles.kubelet import POD

from fpga_plugin.allocation.requests.directory import PodAnswer, PodDirectory
from fpga_plugin.allocation.requests.identity import Identity
from fpga_plugin.deviceplugin import environment
from fpga_plugin.deviceplugin.environment import StockEnvironment
from fpga_plugin.errors import InvalidRequestError, NoSourceError
from fpga_plugin.kubernetes.names import PodUid
from fpga_plugin.kubernetes.pod import (
    Container,
    ContainerState,
    Phase,
    Pod,
    Reference,
    Run,
    Variable,
)

P0, P1 = (device(make_card(), port) for port in range(2))
ASKS = {"FPGA_REGION_0": INTERFACE, "FPGA_BITSTREAM_ID_0": AFU}
OTHER = ASKS | {"FPGA_BITSTREAM_ID_0": "a" * 32}
BOTH = Identity(POD, frozenset({"init", "app"}), held=frozenset({P0}))


class Pods(PodDirectory):
    """Tells one pod, with the variables of an init container and of the app after it."""

    def __init__(self, init: Mapping[str, str], app: Mapping[str, str]) -> None:
        super().__init__(kubelet_dir="/nowhere", prefix=PREFIX)
        self.reads = 0
        self.exact = True
        self.on_read: Callable[[], None] = lambda: None
        self._first, self._then = (
            Container(name, tuple(Variable(key, value) for key, value in env.items()))
            for name, env in (("init", init), ("app", app))
        )
        self.shows()

    def shows(self, *, sandbox: bool | None = True, **states: ContainerState) -> None:
        """What kubelet says of its containers from now on."""
        self._pod = Pod(
            namespace="n",
            name="p",
            uid=POD,
            init=(self._first,),
            containers=(self._then,),
            sandbox=sandbox,
            states=states,
        )

    async def read(self, uid: PodUid, held: frozenset[str]) -> PodAnswer:
        assert (uid, held) == (POD, BOTH.held)
        self.reads += 1
        self.on_read()
        return PodAnswer(pod=self._pod, source="pods-api", exact=self.exact)


@pytest.mark.parametrize(
    ("app", "container", "told"),
    [
        (ASKS, "", {"FPGA_INIT", "FPGA_APP"}),  # either may start: what neither means is told
        (OTHER, "init", {"FPGA_INIT"}),  # the app's is the app's own matter, and may be refused
    ],
    ids=["the same", "different"],
)
def test_the_variables_without_a_meaning_are_those_of_whoever_may_start(
    app: Mapping[str, str], container: str, told: set[str]
) -> None:
    source = StockEnvironment(Pods(ASKS | {"FPGA_INIT": "1"}, app | {"FPGA_APP": "1"}))
    who, env = asyncio.run(source.ask(BOTH, [P0], fresh=True))
    assert who.container == container
    assert env.keys() - ASKS.keys() == told


def test_nothing_is_remembered_where_nothing_will_be_asked() -> None:
    """Memory is for pods whose containers differ; a node's other pods must not push them out."""
    source = StockEnvironment(Pods(ASKS, ASKS))
    who, _ = asyncio.run(source.ask(BOTH, [P0], fresh=True))
    source.started(who, [P0])
    source.refused(replace(BOTH, containers=frozenset({"app"})), [P0], "words")
    source.refused(Identity(), [P0], "words")
    source.started(Identity(), [P0])
    assert not list(source._trails)


def test_a_pod_that_no_record_names_has_no_environment() -> None:
    source = StockEnvironment(Pods(ASKS, ASKS))
    with pytest.raises(NoSourceError, match="does not say which pod holds"):
        asyncio.run(source.ask(Identity(), [P0], fresh=True))


def test_only_the_containers_that_hold_the_devices_are_asked_what_they_want() -> None:
    source = StockEnvironment(Pods(ASKS, OTHER))
    for name, wants in (("init", ASKS), ("app", OTHER)):
        alone = replace(BOTH, containers=frozenset({name}))
        _, env = asyncio.run(source.ask(alone, [P0], fresh=False))
        assert env == wants
    for names in ({"init", "ghost"}, {"init", "app", "ghost"}):
        with pytest.raises(NoSourceError, match="lacks containers"):
            asyncio.run(source.ask(replace(BOTH, containers=frozenset(names)), [P0], fresh=True))


def test_a_variable_that_only_the_container_knows_is_refused() -> None:
    pods = Pods(ASKS, ASKS)
    secret = Variable("FPGA_BITSTREAM_ID_0", source=Reference(what="a Secret"))
    variables = (Variable("FPGA_REGION_0", INTERFACE), secret)
    pods._then = Container("app", variables)
    pods.shows()
    source = StockEnvironment(pods)
    with pytest.raises(InvalidRequestError, match="FPGA_BITSTREAM_ID_0"):
        asyncio.run(source.ask(replace(BOTH, containers=frozenset({"app"})), [P0], fresh=True))


# ------------------------------------------------------------------ whose turn it is


class Cgroups:
    """Containers of the pod that run, its sandbox's among them."""

    def __init__(self, *running: str) -> None:
        self.running = frozenset(running)

    def containers(self, _uid: PodUid) -> frozenset[str]:
        return self.running


def waits(words: str) -> ContainerState:
    return ContainerState(Phase.WAITING, f"PreStartContainer failed: {words}")


def starts(source: StockEnvironment) -> str:
    """Who starts now on the devices; empty: it is not known."""
    try:
        who, env = asyncio.run(source.ask(BOTH, [P0], fresh=False))
    except NoSourceError:
        return ""
    assert env == {"init": ASKS, "app": OTHER}[who.container], "the variables are that container's"
    return who.container


@pytest.fixture
def pods() -> Pods:
    return Pods(ASKS, OTHER)


def of(pods: Pods, cgroups: Cgroups) -> StockEnvironment:
    return StockEnvironment(pods, cgroups=cgroups)  # type: ignore[arg-type]


def test_no_status_is_read_where_it_could_prove_nothing(pods: Pods) -> None:
    """One that lags would be read for seconds, of the time that the PreStart has."""
    source = of(pods, Cgroups("pause"))
    for _ in range(2):
        assert not starts(source)
    assert pods.reads == 1, "its spec"


def test_the_words_for_these_devices_count_before_later_ones_for_others(pods: Pods) -> None:
    source = of(pods, Cgroups("pause"))
    assert not starts(source), "nothing is known yet"
    source.refused(BOTH, [P1], "words for others")
    source.refused(BOTH, [P0], "own words")
    pods.shows(init=waits("words for others"), app=waits("own words"))
    assert starts(source) == "app"


def test_while_a_new_sandbox_is_made_no_quote_proves_anything(pods: Pods) -> None:
    """Invariant 2: its init container starts first, whatever the status still quotes."""
    source = of(pods, Cgroups("pause"))
    assert not starts(source)
    source.refused(BOTH, [P0], "own words")
    pods.shows(app=waits("own words"))
    pods.reads = 0
    assert starts(source) == "app"
    assert pods.reads == 1, "an exact status is believed at once"
    pods.shows(app=waits("own words"), sandbox=False)
    assert not starts(source)


def test_no_words_of_an_older_sandbox_prove_anything_ever(pods: Pods) -> None:
    """Invariant 2: words for other devices of the pod are as old as those for these."""
    cgroups = Cgroups("pause-1")
    source = of(pods, cgroups)
    assert not starts(source)
    source.refused(BOTH, [P1], "words for others")
    pods.shows(app=waits("words for others"), sandbox=None)
    assert starts(source) == "app"
    cgroups.running = frozenset({"pause-2"})
    assert not starts(source)
    assert not starts(source), "the status still quotes them, and the init container starts"


def test_a_quote_that_comes_late_proves_who_starts_where_cgroups_alone_show_the_sandbox(
    pods: Pods,
) -> None:
    """Kubelet before Kubernetes 1.29. The question before it changes nothing."""
    source = of(pods, Cgroups("pause"))
    assert not starts(source)
    source.refused(BOTH, [P0], "own words")
    pods.shows(sandbox=None)
    assert not starts(source), "kubelet does not quote them yet"
    pods.shows(app=waits("own words"), sandbox=None)
    assert starts(source) == "app"


def test_what_was_known_before_a_question_without_an_answer_is_known_after_it(pods: Pods) -> None:
    """Kubelet may quote another refusal by then, or none."""
    source = of(pods, Cgroups("pause"))
    who, _ = asyncio.run(source.ask(BOTH, [P0], fresh=True))
    source.started(who, [P0])
    began = int(time.time()) + 1
    pods.shows(init=ContainerState(Phase.RUNNING, started=began))
    assert not starts(source)
    pods.shows(init=ContainerState(Phase.TERMINATED, ended=Run(0, began)))
    assert starts(source) == "app"


SETTLE = 0.02


@pytest.fixture
def lagging(pods: Pods, monkeypatch: pytest.MonkeyPatch) -> Pods:
    """The API server reports it, some time after kubelet."""
    monkeypatch.setattr(environment, "PATIENCE", 0.1)
    pods.exact = False
    return pods


def asked_about(pods: Pods, **states: ContainerState) -> StockEnvironment:
    """A plugin whose last refusal kubelet quotes at the app."""
    source = StockEnvironment(pods, cgroups=Cgroups("pause"), settle=SETTLE)  # type: ignore[arg-type]
    assert not starts(source)
    source.refused(BOTH, [P0], "own words")
    pods.shows(app=waits("own words"), **states)
    pods.reads = 0
    return source


def test_a_status_that_still_changes_proves_nothing(lagging: Pods) -> None:
    """Invariant 2: it is on its way to show that the other container runs."""
    source = asked_about(lagging)
    on_their_way = [waits("PodInitializing"), ContainerState(Phase.RUNNING, started=9)]

    def goes_on() -> None:
        if lagging.reads > 1 and on_their_way:
            lagging.shows(app=waits("own words"), init=on_their_way.pop(0))

    lagging.on_read = goes_on
    assert not starts(source)
    lagging.on_read = lambda: None
    lagging.shows(app=waits("own words"))
    begin = time.monotonic()
    assert starts(source) == "app", "it stays as it is"
    assert time.monotonic() - begin >= SETTLE


def test_what_a_lagging_status_proves_has_to_hold_until_it_has_settled(
    lagging: Pods, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 2: a status is polled more often than that, and the next one may say the same."""
    monkeypatch.setattr(environment, "POLL", 0.001)
    source = asked_about(lagging)
    runs = ContainerState(Phase.RUNNING, started=9)

    def soon() -> None:
        change = functools.partial(lagging.shows, app=waits("own words"), init=runs)
        asyncio.get_running_loop().call_later(SETTLE / 2, change)

    lagging.on_read = soon
    assert not starts(source)


def test_a_status_that_lags_is_not_asked_for_all_the_time(lagging: Pods) -> None:
    source = asked_about(lagging, init=ContainerState(Phase.RUNNING, started=9))
    assert not starts(source)
    assert lagging.reads == 2, "at once, and after a while"


def test_a_status_is_read_twice_even_if_the_first_read_takes_all_the_time(
    lagging: Pods, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise no container would ever start behind an API server that is as slow as that."""
    source = asked_about(lagging)
    monkeypatch.setattr(environment, "PATIENCE", 0.0)
    assert starts(source) == "app"
    assert lagging.reads == 2


def test_in_a_sandbox_that_nobody_shows_nothing_of_an_older_one_counts(pods: Pods) -> None:
    """Invariant 2: the init container starts again there; what comes then proves as ever."""
    cgroups = Cgroups("pause-1")
    source = of(pods, cgroups)
    who, _ = asyncio.run(source.ask(BOTH, [P0], fresh=True))
    assert not starts(source)
    source.started(who, [P0])
    began = int(time.time()) + 1
    pods.shows(init=ContainerState(Phase.TERMINATED, ended=Run(0, began)), sandbox=None)
    cgroups.running = frozenset({"pause-2"})
    for _ in range(3):
        assert not starts(source), "the init container has run in the older sandbox"
    source.refused(BOTH, [P0], "own words")
    pods.shows(app=waits("own words"), sandbox=None)
    assert starts(source) == "app"


def test_a_quote_proves_more_than_the_last_start(pods: Pods) -> None:
    source = of(pods, Cgroups("pause"))
    who, _ = asyncio.run(source.ask(BOTH, [P0], fresh=True))
    source.started(who, [P0])
    source.refused(BOTH, [P0], "own words")
    pods.shows(app=waits("own words"))
    assert starts(source) == "app"


def test_what_a_container_was_refused_with_before_it_started_proves_nothing(pods: Pods) -> None:
    """Kubelet may quote it still, and the run that it shows may be older than the start."""
    source = of(pods, Cgroups("pause"))
    assert not starts(source)
    source.refused(BOTH, [P0], "own words")
    crashed = Run(1, int(time.time()) + 5)  # by a clock that was set back since
    shown = ContainerState(Phase.WAITING, "PreStartContainer failed: own words", ended=crashed)
    done = ContainerState(Phase.TERMINATED, ended=Run(0, 1))
    pods.shows(app=shown, init=done)
    who, _ = asyncio.run(source.ask(BOTH, [P0], fresh=False))
    assert who.container == "app"
    source.started(who, [P0])
    assert not starts(source), "neither by the words nor by the run that was known before"
    pods.shows(app=replace(shown, ended=Run(1, crashed.started + 5)), init=done)
    assert starts(source) == "app", "it has run since"


def test_another_kubelet_instance_may_have_started_anything(pods: Pods) -> None:
    source = of(pods, Cgroups("pause"))
    source.new_kubelet()  # before anybody asked
    assert not starts(source)
    source.refused(BOTH, [P0], "own words")
    pods.shows(app=waits("own words"))
    forgot: list[bool] = []
    pods.new_kubelet = lambda: forgot.append(True)  # type: ignore[method-assign]
    source.new_kubelet()
    assert forgot, "what it knew of pods by their devices"
    assert not starts(source)


def test_where_no_cgroup_is_seen_the_status_alone_proves(pods: Pods) -> None:
    source = StockEnvironment(pods)
    assert not starts(source)
    source.refused(BOTH, [P0], "own words")
    pods.shows(app=waits("own words"))
    assert starts(source) == "app"


def test_a_lagging_status_is_waited_for_and_counts_only_in_its_sandbox(
    lagging: Pods, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "POLL", 0.001)
    monkeypatch.setattr(environment, "PATIENCE", 5.0)
    source = asked_about(lagging)
    lagging.shows()

    def comes() -> None:
        if lagging.reads > 3:
            lagging.shows(app=waits("own words"))

    lagging.on_read = comes
    assert starts(source) == "app"
    monkeypatch.setattr(environment, "PATIENCE", 0.1)
    source = asked_about(lagging)

    def goes() -> None:
        lagging.shows(app=waits("own words"), sandbox=lagging.reads < 2)

    lagging.on_read = goes
    assert not starts(source), "it was proved of a sandbox that is gone"
