"""The crash campaign's checker notices what it is for, and its bugs still fit the code.

The campaign itself is tests/campaign.
"""

import json
import os
import random
import sqlite3
import sys
import time
from contextlib import closing, nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from repository import module

from fpga_plugin.allocation.journal.journal import Journal, JournalError
from fpga_plugin.allocation.journal.records import Change
from fpga_plugin.ids import CardId

CARD = "0000-10-00.0"
P0, P1 = f"{CARD}-p0", f"{CARD}-p1"
BLANK, IMAGE, OTHER = "0" * 32, "1" * 32, "2" * 32


checking, bugs = module("campaign", "checker"), module("campaign", "bugs")
before = [*sys.path]
nodes, weather = module("campaign", "node"), module("campaign", "weather")
points, setup = module("campaign", "points"), module("campaign", "setup")
claims = module("campaign", "claims")
sys.path[:] = before  # a node's modules add where the integration tests' are
SCRUB = ("RESET {}", f"PR {{}} {BLANK}")


def write_journal(folder: Path, *rows: tuple[str, str, object]) -> None:
    (folder / "state").mkdir(exist_ok=True)
    path = folder / "state" / "journal.sqlite3"
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE journal (kind, key, value)")
        db.executemany(
            "INSERT INTO journal VALUES (?, ?, ?)",
            [(kind, key, json.dumps(value)) for kind, key, value in rows],
        )


class Scene:
    """A card of two regions, and what the checker is notified of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log, self.file = folder / "log", folder / "state.json"
        self.holds = {P0: BLANK, P1: BLANK}
        self.owned: dict[str, str] = {}
        self.log.touch()
        self.checker = checking.Checker(
            self.log, self.file, {P0: BLANK, P1: BLANK}, lambda: self.owned
        )
        self.happens(*(line.format(region) for region in (P0, P1) for line in SCRUB))
        self.happens(f"CLEAR {CARD}")

    def happens(self, *lines: str) -> None:
        """The cards write these, and are as they say."""
        with self.log.open("a") as file:
            file.writelines(f"1.0 {line}\n" for line in lines)
        for kind, target, *value in map(str.split, lines):
            if kind == "PR":
                self.holds[target] = value[0]
        regions = {region: {"afu_id": afu} for region, afu in self.holds.items()}
        self.file.write_text(json.dumps({"regions": regions}))

    def scrubbed(self, region: str) -> None:
        self.happens(*(line.format(region) for line in SCRUB))

    def runs(self, region: str = P0, pod: str = "a", afu: str = IMAGE, *, whole: bool = False):
        self.happens(f"PR {region} {afu}")
        self.checker.began(pod, {region: afu}, whole=whole)

    def ran(self, region: str = P0, pod: str = "a") -> None:
        self.runs(region, pod)
        self.checker.ended(pod, [region])

    def list(self, *healthy: str, devices=(CARD, P0, P1), mine=(), busy=()) -> None:
        self.checker.listed(devices, healthy, mine, busy, known=True)

    def journal(self, *rows: tuple[str, str, object]):
        """What the checker makes of a journal with these rows."""
        write_journal(self.folder, *rows)
        found = checking.read_journal(self.folder / "state", self.folder / "read")
        return self.checker.journal(found, self.owned)


@pytest.fixture
def scene(tmp_path):
    return Scene(tmp_path)


def record(condition: str, afu: str | None = None) -> dict[str, object]:
    return {"condition": condition, "afu_id": afu}


def test_lives_in_which_all_is_well(scene):
    scene.list(CARD, P0, P1)
    scene.ran(P0, "a")
    scene.scrubbed(P0)
    scene.happens(f"CLEAR {CARD}")
    scene.runs(P0, "b", OTHER)
    scene.owned = {P0: "b"}
    scene.list(P0, P1, devices=(P0, P1), mine=(P0,), busy=(P0,))
    scene.runs(P1, "c")
    scene.checker.unharmed()
    scene.checker.died()
    idle = scene.journal(
        ("allocations", P0, {"started": True}),
        ("allocations", P1, {"started": True}),
        ("regions", P0, record("PROGRAMMED", OTHER)),
        ("regions", P1, record("PROGRAMMED", IMAGE)),
    )
    assert idle == set()
    assert scene.checker.checked == 7


def not_asked_for(scene):
    scene.happens(f"PR {P0} {OTHER}")
    scene.checker.began("a", {P0: IMAGE}, whole=False)


def never_blanked(scene):
    scene.ran()
    scene.runs(pod="b", afu=OTHER)


def never_reset(scene):
    scene.ran()
    scene.happens(f"PR {P0} {BLANK}")
    scene.runs(pod="b")


def blanked_while_the_last_pod_ran(scene):
    scene.runs()
    scene.scrubbed(P0)
    scene.checker.ended("a", [P0])


def two_at_once(scene):
    scene.runs()
    scene.checker.began("b", {P0: IMAGE}, whole=False)


def memory_of_the_last_pod(scene):
    scene.ran(P1)
    scene.scrubbed(P1)
    scene.runs(P0, "b", whole=True)


def memory_of_a_neighbour(scene):
    scene.runs(P1)
    scene.happens(f"CLEAR {CARD}")
    scene.checker.unharmed()


def opened_under_a_pod(scene):
    scene.runs()
    scene.happens(f"OPEN {P0}")
    scene.checker.unharmed()


def programmed_and_not_told(scene):
    scene.runs()
    scene.file.write_text(json.dumps({"regions": {P0: {"afu_id": BLANK}, P1: {"afu_id": BLANK}}}))
    scene.checker.unharmed()


def two_owners(scene):
    scene.owned = {CARD: "a", P1: "b"}
    scene.checker.unharmed()


def owner_not_listed(scene):
    scene.list(P1, devices=(P1,), mine=(P0,), busy=(P0,))


def owner_unhealthy(scene):
    scene.list(P1, devices=(P0, P1), mine=(P0,), busy=(P0,))


def healthy_and_dirty(scene):
    scene.ran()
    scene.list(P0)


def healthy_under_a_pod_deleted_by_force(scene):
    scene.runs(afu=BLANK)
    scene.list(P0)


def healthy_card_with_memory(scene):
    scene.ran()
    scene.scrubbed(P0)
    scene.list(CARD)


def journalled_clean_and_dirty(scene):
    scene.ran()
    scene.journal(("regions", P0, record("BLANK", BLANK)))


def journalled_as_another_image(scene):
    scene.runs()
    rows = ("allocations", P0, {"started": True}), ("regions", P0, record("PROGRAMMED", OTHER))
    scene.journal(*rows)


def claim_not_journalled(scene):
    scene.owned = {P0: "a"}
    scene.journal()


def claimed_twice(scene):
    scene.journal(("allocations", CARD, {}), ("allocations", P1, {}))


def a_row_that_grew(scene):
    scene.journal(("claim_owners", "a", {"pods": ["b" * 36] * 1000}))


def programmed_by_a_restart(scene):
    idle = scene.journal(("regions", P0, record("BLANK")), ("regions", P1, record("BLANK")))
    since = scene.checker.now()
    scene.scrubbed(P1)
    scene.checker.now()
    scene.checker.left_alone(idle, since, {P0})


def damaged(scene):
    (scene.folder / "state").mkdir()
    (scene.folder / "state" / "journal.sqlite3").write_bytes(b"no database" * 500)
    checking.read_journal(scene.folder / "state", scene.folder / "read")


@pytest.mark.parametrize(
    ("happens", "words"),
    [
        (not_asked_for, "2: .* asked for"),
        (never_blanked, "2: .* not blanked"),
        (never_reset, "2: .* not reset"),
        (blanked_while_the_last_pod_ran, "7: RESET"),
        (two_at_once, "1: .* runs on it"),
        (memory_of_the_last_pod, "2: memory"),
        (memory_of_a_neighbour, "7: memory"),
        (opened_under_a_pod, "7: OPEN"),
        (programmed_and_not_told, "9: .* changed under pod a"),
        (two_owners, "1: .* two owners"),
        (owner_not_listed, "3: .* not on the list"),
        (owner_unhealthy, "3: .* Unhealthy"),
        (healthy_and_dirty, "4: .* holds"),
        (healthy_under_a_pod_deleted_by_force, "4: .* runs on"),
        (healthy_card_with_memory, "2: memory"),
        (journalled_clean_and_dirty, "4: the journal"),
        (journalled_as_another_image, "9: .* the journal says"),
        (claim_not_journalled, "9: the journal has no allocation"),
        (claimed_twice, "1: .* is allocated as"),
        (a_row_that_grew, "9: a row of the journal has grown"),
        (programmed_by_a_restart, "9: .* a restart programmed it"),
        (damaged, "the journal cannot be opened"),
    ],
)
def test_a_violation_is_noticed(scene, happens, words):
    with pytest.raises(checking.Violation, match=words):
        happens(scene)


def test_what_died_before_it_was_written_down_has_happened(scene):
    scene.file.write_text(json.dumps({"regions": {P0: {"afu_id": IMAGE}, P1: {"afu_id": BLANK}}}))
    scene.checker.died()
    with pytest.raises(checking.Violation, match=r"4: .* holds"):
        scene.list(P0)


@pytest.mark.parametrize("name", bugs.BUGS)
def test_a_deliberate_bug_fits_the_code(name):
    for file, text in bugs.broken(bugs.BUGS[name]).items():
        compile(text, file, "exec")


def test_what_a_claim_leaves_is_not_judged_where_the_journal_has_another_claim():
    rows = {"a": {"devices": [P0]}, "b": {"devices": [P1]}, "c": {"devices": [CARD]}}
    found = checking.Snapshot(claim_owners=rows)
    assert found.of_others("a") == {P1, CARD}
    assert found.of_others("z") == {P0, P1, CARD}


@pytest.mark.parametrize("ended", [False, True])
def test_what_a_pod_of_the_other_api_has_by_the_journal_is_no_claims(*, ended: bool):
    rows = {"a": {"devices": [P0], "ended": ended}}
    found = checking.Snapshot(claim_owners=rows, allocations={P0: {}, P1: {}})
    assert found.of_others("a") == ({P0, P1} if ended else {P1})


def a_node(side):
    return nodes.Node(random.Random(0), {setup.PODS: side}, apis=(setup.PODS,), storms=False)


def test_no_journal_is_spoilt_while_only_it_knows_what_a_prepared_claim_has():
    node = a_node(claims.ClaimSide)
    side = node.side
    try:
        tenant = side.make()
        side.tenants.append(tenant)
        assert not side.exposed(), "it has nothing yet"
        named = claims.dra_name(tenant.devices[0])
        answer = SimpleNamespace(
            pool_name="p", device_name=named, request_names=["r0"], cdi_device_ids=["a"]
        )
        tenant.prepared = True
        entry = tenant.claim, tenant.driver, tenant.devices, tenant.pods
        side.kubelet.keep(*entry, [answer])
        assert not side.exposed()
        side.kubelet.wipe()
        assert side.exposed()
        # Kubelet asks for it again, and has no answer yet: its record names no device.
        side.kubelet.keep(*entry)
        assert side.exposed()
        side.kubelet.keep(*entry, [answer])
        assert not side.exposed()
    finally:
        node.close()


class Killed:
    """A plugin of which only the log is left."""

    def __init__(self, *said: str) -> None:
        self.said = said

    def logged(self, event: str) -> list[str]:
        return [one for one in self.said if one == event]

    def kill(self) -> None:
        pass


class Lives:
    """A node without pods, on which a plugin lives and is killed."""

    def __init__(self) -> None:
        nothing = dict.fromkeys(nodes.Side.__abstractmethods__, lambda *_: {})
        self.node = a_node(type("Quiet", (nodes.Side,), nothing))
        self.blank = nodes.BLANKS[P0]
        self.holds(self.blank)
        self.journal_says("BLANK", self.blank)
        self.scrubs()

    def holds(self, afu: str) -> None:
        """What is on the card's first region."""
        regions = {"regions": {P0: {"afu_id": afu}}}
        (self.node.folder / "cards" / "state.json").write_text(json.dumps(regions))

    def journal_says(self, *values: str) -> None:
        write_journal(self.node.folder, ("regions", P0, record(*values)))

    def scrubs(self) -> None:
        with (self.node.folder / "cards.log").open("a") as log:
            log.writelines(
                f"1.0 {line.format(P0)}\n" for line in (SCRUB[0], f"PR {{}} {self.blank}")
            )

    def life(self, *said: str, wind=weather.FAIR, scrubs: bool = False) -> None:
        """One that said this, judged."""
        node = self.node
        node.wind, node.plugin, node.since = wind, Killed(*said), node.checker.now()
        if scrubs:
            self.scrubs()
        node.judge()


@pytest.fixture
def lives():
    made = Lives()
    yield made
    made.node.close()


def test_what_the_policy_denies_is_noticed(lives):
    lives.node.setup = setup.Setup(forbids=IMAGE)
    lives.node.allowed("a pod", {P0: OTHER})
    with pytest.raises(checking.Violation, match="4: a pod gets what the policy denies"):
        lives.node.allowed("a pod", {P0: OTHER, P1: IMAGE})


def test_a_row_of_schema_3_has_a_claims_pods_and_a_regions_former_ones(tmp_path):
    def tenancy(region, allocation, pod, **more):
        key = {"region": region, "allocation": allocation, "pod": pod}
        row = {"key": key, "nodes": ["/dev/n"], "used": True, "left": False, "cgroups": []}
        return "tenancies", json.dumps(key), {**row, **more}

    write_journal(
        tmp_path,
        ("regions", P0, record("DIRTY")),
        ("claim_owners", "c", {"devices": [P1]}),
        tenancy(P0, 1, "a", left=True),
        tenancy(P1, 2, "b"),
    )
    weather._schema_3(tmp_path / "state", random.Random(0))
    with closing(sqlite3.connect(tmp_path / "state" / "journal.sqlite3")) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (3,)
        found = {
            (kind, key): json.loads(value)
            for kind, key, value in db.execute("SELECT kind, key, value FROM journal")
        }
    loan = json.dumps({"pod": "a", "region": P0, "node": "/dev/n"})
    assert found == {
        ("regions", P0): record("DIRTY") | {"former": ["a"]},
        ("holders", "c"): {"devices": [P1], "pods": ["b"]},
        ("loans", loan): True,
    }


def test_the_next_life_differs_in_what_may_change():
    rng, now = random.Random(1), setup.Setup()
    seen = [now := setup.changed(now, rng, setup.APIS, IMAGE, blind=True) for _ in range(300)]
    for name in ("api", "prefix", "cdi", "scrub", "cgroups", "forbids"):
        assert len({getattr(one, name) for one in seen}) == 2, name
    assert {one.records for one in seen} == {"there", "half", "away"}
    assert all(after.boot - before.boot in {0, 1} for before, after in pairwise(seen))
    assert all(
        setup.changed(now, rng, (setup.PODS,), "", blind=False).cgroups for _ in range(99)
    ), "who lives has to be seen while somebody is deleted by force"


def test_transactions_fail_by_their_numbers_and_leave_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(Journal, "write", Journal.write)
    points._do_not_write([1])
    with closing(Journal(str(tmp_path / "journal.sqlite3"))) as journal:
        for fails in (False, True, False):
            with pytest.raises(JournalError) if fails else nullcontext():
                journal.write(Change(drained={CardId(CARD): not fails}))


def test_more_changes_after_a_life_that_left_users_of_everything():
    def changes(*, settled):
        rng, now, count = random.Random(1), setup.Setup(), 0
        for _ in range(300):
            before = now
            now = setup.changed(now, rng, setup.APIS, IMAGE, blind=True, settled=settled)
            names = ("api", "prefix", "boot")
            count += sum(getattr(before, name) != getattr(now, name) for name in names)
        return count

    assert changes(settled=True) > 2 * changes(settled=False) > 0


def test_no_weather_loses_the_users_of_regions_of_whom_only_the_journal_knows():
    rng = random.Random(1)
    exposed = {weather.wind(rng, exposed=True).name for _ in range(300)}
    assert {"marker lost", "journal of schema 3", "accelerators hang"} <= exposed
    assert exposed.isdisjoint({"journal lost", "older journal put back", "journal cut"})
    assert {weather.wind(rng).name for _ in range(999)} == {*weather.NAMES}
    assert weather.wind(rng, "journal lost", exposed=True) is weather.FAIR
    assert weather.wind(rng, "journal lost").name == "journal lost"


def test_the_api_server_names_nobody_of_a_group():
    node = a_node(claims.ClaimSide)
    side = node.side
    try:
        made = [side.make() for _ in range(20)]
        groups = [one for one in made if isinstance(one.claim, claims.GroupClaim)]
        assert 0 < len(groups) < len(made)
        for one in made:
            kinds = {each["resource"] for each in one.claim.object()["status"]["reservedFor"]}
            assert kinds == {"podgroups" if one in groups else "pods"}
            assert side.seen(one) == (one not in groups), "kubelet has not written it down"
        named = SimpleNamespace(pool_name="p", device_name="d", request_names=[], cdi_device_ids=[])
        one = groups[0]
        side.kubelet.keep(one.claim, one.driver, one.devices, one.pods, [named])
        assert side.seen(one)
    finally:
        node.close()


SET_BACK = weather.Wind("set back", lambda *_: None)
DAMAGED = "the journal is in doubt"


def test_a_journal_that_the_weather_had_is_judged_once_a_plugin_has_read_it(lives):
    lives.holds(IMAGE)
    lives.life(wind=SET_BACK)
    lives.life()
    with pytest.raises(checking.Violation, match="the journal"):
        lives.life("serving")


def test_a_wrong_journal_is_judged_though_its_plugin_said_nothing(lives):
    lives.holds(IMAGE)
    with pytest.raises(checking.Violation, match="the journal"):
        lives.life()


def test_whoever_mends_a_journal_may_program_everything_until_it_is_mended(lives):
    lives.life("serving")
    assert lives.node.idle == {P0}
    lives.life("serving", DAMAGED, wind=SET_BACK, scrubs=True)
    lives.life("serving", DAMAGED, scrubs=True)  # the one before died before it was mended
    lives.life("serving")
    with pytest.raises(checking.Violation, match="a restart programmed it"):
        lives.life("serving", scrubs=True)


def test_a_journal_set_back_may_be_mended_lives_after_it_was(lives):
    lives.life("serving")
    lives.life(wind=SET_BACK)
    assert lives.node.idle == set(), "what the journal said is not known to be so"
    lives.life()
    assert lives.node.spoilt
    lives.life("serving", scrubs=True)
    assert not lives.node.spoilt
    with pytest.raises(checking.Violation, match="a restart programmed it"):
        lives.life("serving", scrubs=True)


def test_a_slow_disk_holds_up_each_commit_and_fsync_and_a_kill_may_come_in_it(
    monkeypatch, tmp_path
):
    seen: list[tuple[str, str]] = []

    class Noted:
        def visit(self, *point: str) -> None:
            seen.append(point)

    for owner, name in ((sqlite3, "connect"), (os, "fsync")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    points._sync_slowly(Noted(), [0.05])
    begin = time.monotonic()
    with closing(Journal(str(tmp_path / "journal.sqlite3"))) as journal:
        seen.clear()
        journal.write(Change())
        assert seen == [("journal", "in-a-sync")]
        journal.checkpoint()
        assert seen == [("journal", "in-a-sync")] * 2
    with (tmp_path / "file").open("w") as file:
        os.fsync(file.fileno())
    assert seen[2:] == [("rename", "in-a-sync")]
    assert time.monotonic() - begin >= 0.15
    assert "slow fsync" in weather.NAMES
