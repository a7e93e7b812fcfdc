"""Where pods' cgroups lie, and what they say, on made-up trees and on this machine's own."""

import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from fpga_plugin.kubernetes import cgroup
from fpga_plugin.kubernetes.cgroup import PodCgroups, PodPresence
from fpga_plugin.kubernetes.names import PodUid

UID = PodUid("7b9f0c5e-0d2a-4f7e-9a58-2f1f4f0b7c11")
UNDERSCORED = UID.replace("-", "_")
STATIC = PodUid("0123456789abcdef0123456789abcdef")
OTHER = PodUid("ffffffff-0d2a-4f7e-9a58-2f1f4f0b7c11")

CGROUPFS = [
    f"kubepods/pod{UID}",
    f"kubepods/burstable/pod{UID}",
    f"kubepods/besteffort/pod{UID}",
    f"kubelet/kubepods/burstable/pod{UID}",
    f"a/b/kubepods/pod{UID}",
]
SYSTEMD = [
    f"kubepods.slice/kubepods-pod{UNDERSCORED}.slice",
    f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UNDERSCORED}.slice",
    f"kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{UNDERSCORED}.slice",
    f"kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{UNDERSCORED}.slice",
    f"k.slice/k-kubepods.slice/k-kubepods-burstable.slice/k-kubepods-burstable-pod{UNDERSCORED}.slice",
]


@pytest.fixture(autouse=True)
def all_pids_seen(monkeypatch):
    monkeypatch.setattr(cgroup, "_sees_all_pids", lambda: True)


@pytest.fixture
def v2(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    return tmp_path


def populate(directory: Path, populated: int = 1) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "cgroup.events").write_text(f"populated {populated}\nfrozen 0\n")
    return directory


def pids(directory: Path, *numbers: int) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "cgroup.procs").write_text("".join(f"{n}\n" for n in numbers))
    return directory


def begin_anew(directory: Path, aside: Path) -> Path:
    """As a cgroup that is removed and made again: another inode, which the old one still has."""
    directory.rename(aside)
    return populate(directory)


@pytest.mark.parametrize("place", CGROUPFS + SYSTEMD)
def test_an_instance_of_a_pod_is_gone_while_another_of_the_same_uid_runs(v2, place):
    """A static pod that is removed and put back has the uid that it had."""
    populate(v2 / place)
    pods = PodCgroups(str(v2))
    (first,) = pods.instance(UID)
    assert not pods.instance_gone([first])
    begin_anew(v2 / place, v2 / "aside")
    (second,) = pods.instance(UID)
    assert pods.instance_gone([first])
    assert not pods.instance_gone([second])
    assert not pods.instance_gone([first, second])
    assert pods.state(UID) is PodPresence.ALIVE


def test_of_an_instance_that_was_not_noted_nothing_is_known(v2):
    pods = PodCgroups(str(v2))
    assert pods.instance(UID) == ()
    assert not pods.instance_gone(())


def test_a_uid_that_is_no_name_of_a_cgroup_has_none(v2):
    (v2 / "kubepods/podx").mkdir(parents=True)
    assert PodCgroups(str(v2)).instance(PodUid("x/../podx")) == ()


def test_an_instance_whose_cgroups_cannot_be_seen_is_not_gone(v2):
    place = v2 / CGROUPFS[1]
    populate(place)
    pods = PodCgroups(str(v2))
    noted = pods.instance(UID)
    (v2 / "kubepods").rename(v2 / "away")
    assert not pods.instance_gone(noted), "its tree is gone with it"
    (v2 / "away").rename(v2 / "kubepods")
    assert not pods.instance_gone(noted)


def test_an_instance_is_gone_only_when_each_of_its_cgroups_is(tmp_path):
    places = [tmp_path / name / "kubepods" / f"pod{UID}" for name in ("pids", "memory")]
    for place in places:
        pids(place, 1)
    pods = PodCgroups(str(tmp_path))
    noted = pods.instance(UID)
    assert len(noted) == 2
    places[0].rename(tmp_path / "pids/aside")
    assert not pods.instance_gone(noted)
    places[1].rename(tmp_path / "memory/aside")
    assert pods.instance_gone(noted)


@pytest.mark.parametrize("place", CGROUPFS + SYSTEMD)
def test_the_containers_that_have_processes_are_told_by_name(v2, place):
    assert PodCgroups(str(v2)).containers(UID) == frozenset()
    populate(v2 / place)
    pods = PodCgroups(str(v2))
    assert pods.containers(UID) == frozenset()
    populate(v2 / place / "cri-containerd-a.scope")
    populate(v2 / place / "cri-containerd-b.scope", 0)
    populate(v2 / place / "cri-containerd-c.scope" / "below")
    (v2 / place / "cri-containerd-c.scope" / "cgroup.events").write_text("populated 1\n")
    assert pods.containers(UID) == {"cri-containerd-a.scope", "cri-containerd-c.scope"}
    assert pods.containers(OTHER) == frozenset()
    assert pods.containers(PodUid("../x")) == frozenset()


@pytest.mark.parametrize("place", CGROUPFS + SYSTEMD)
@pytest.mark.parametrize(("populated", "state"), [(1, PodPresence.ALIVE), (0, PodPresence.EMPTY)])
def test_v2_tells_whether_the_pod_is_populated(v2, place, populated, state):
    populate(v2 / place, populated)
    pods = PodCgroups(str(v2))
    assert pods.expect(UID)
    assert pods.state(UID) is state
    assert pods.may_live(UID) is bool(populated)
    assert pods.state(OTHER) is PodPresence.GONE
    assert not pods.may_live(OTHER)


@pytest.mark.parametrize("place", CGROUPFS + SYSTEMD)
def test_v1_looks_for_pids_in_the_pod_and_below(tmp_path, place):
    pod = pids(tmp_path / "memory" / place)
    pods = PodCgroups(str(tmp_path))
    assert pods.state(UID) is PodPresence.EMPTY
    container = pids(pod / "cri-containerd-1.scope")
    assert pods.state(UID) is PodPresence.EMPTY
    pids(container / "nested", 42)
    assert pods.state(UID) is PodPresence.ALIVE
    pids(container / "nested")
    pids(pod, 43)
    assert pods.state(UID) is PodPresence.ALIVE
    assert pods.state(OTHER) is PodPresence.GONE


def test_in_v1_one_controller_with_a_process_is_enough(tmp_path):
    for controller in ("blkio", "memory", "systemd"):
        pids(tmp_path / controller / "kubepods" / f"pod{UID}")
    pods = PodCgroups(str(tmp_path))
    assert pods.state(UID) is PodPresence.EMPTY
    pids(tmp_path / "systemd" / "kubepods" / f"pod{UID}", 7)
    assert pods.state(UID) is PodPresence.ALIVE


def test_in_v1_the_pods_cgroup_is_gone_only_when_every_controller_lacks_it(tmp_path):
    (tmp_path / "memory" / "kubepods").mkdir(parents=True)
    pod = pids(tmp_path / "pids" / "kubepods" / f"pod{UID}")
    pods = PodCgroups(str(tmp_path))
    assert pods.state(UID) is PodPresence.EMPTY
    (pod / "cgroup.procs").unlink()
    pod.rmdir()
    assert pods.state(UID) is PodPresence.GONE


def test_pids_current_counts_what_another_pid_namespace_hides(tmp_path, monkeypatch):
    monkeypatch.setattr(cgroup, "_sees_all_pids", lambda: False)
    pids(tmp_path / "memory" / "kubepods" / f"pod{UID}")
    in_pids = pids(tmp_path / "pids" / "kubepods" / f"pod{UID}")
    (in_pids / "pids.current").write_text("2\n")
    pods = PodCgroups(str(tmp_path))
    assert pods.state(UID) is PodPresence.ALIVE
    (in_pids / "pids.current").write_text("0\n")
    assert pods.state(UID) is PodPresence.EMPTY


def test_no_pid_seen_from_another_pid_namespace_proves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(cgroup, "_sees_all_pids", lambda: False)
    pod = pids(tmp_path / "memory" / "kubepods" / f"pod{UID}")
    pods = PodCgroups(str(tmp_path))
    assert pods.expect(UID)
    assert pods.state(UID) is PodPresence.UNKNOWN
    assert pods.state(OTHER) is PodPresence.GONE
    pids(pod, 9)
    assert pods.state(UID) is PodPresence.ALIVE


def test_a_static_pods_uid_has_no_dashes(v2):
    populate(v2 / f"kubepods.slice/kubepods-pod{STATIC}.slice")
    assert PodCgroups(str(v2)).state(STATIC) is PodPresence.ALIVE


def test_both_drivers_trees_are_asked(v2):
    (v2 / "kubepods" / "burstable").mkdir(parents=True)
    populate(v2 / SYSTEMD[1])
    assert PodCgroups(str(v2)).state(UID) is PodPresence.ALIVE


def test_a_tree_inside_a_pod_is_not_kubelets(v2):
    inside = populate(v2 / f"kubepods/pod{OTHER}") / "kubepods" / f"pod{UID}"
    populate(inside)
    pods = PodCgroups(str(v2))
    assert pods.state(OTHER) is PodPresence.ALIVE
    assert pods.state(UID) is PodPresence.GONE


def test_links_are_not_followed(tmp_path):
    pids(tmp_path / "cpu,cpuacct" / "kubepods" / f"pod{UID}")
    (tmp_path / "cpu").symlink_to("cpu,cpuacct")
    pods = PodCgroups(str(tmp_path))
    assert pods.state(UID) is PodPresence.EMPTY
    assert len(pods._trees) == 1


def test_a_bare_tree_without_controllers_is_taken_for_v2(tmp_path):
    populate(tmp_path / CGROUPFS[1])
    assert PodCgroups(str(tmp_path)).state(UID) is PodPresence.ALIVE


@pytest.mark.parametrize("root", [None, "", "/nowhere/at/all", "/dev/null"])
def test_without_a_root_nothing_is_known(root):
    assert PodCgroups(root).state(UID) is PodPresence.UNKNOWN


def test_without_kubepods_nothing_is_known(v2):
    populate(v2 / "system.slice" / "containerd.service")
    assert PodCgroups(str(v2)).state(UID) is PodPresence.UNKNOWN


@pytest.mark.parametrize("uid", ["", ".", "..", "a/../b", "../x", "a\0", "a" * 65, "a b", "é"])
def test_an_invalid_uid_is_not_looked_for(v2, uid):
    populate(v2 / "kubepods")
    assert PodCgroups(str(v2)).state(PodUid(uid)) is PodPresence.UNKNOWN


def test_a_directory_that_is_no_cgroup_says_nothing(v2):
    (v2 / CGROUPFS[0]).mkdir(parents=True)
    assert PodCgroups(str(v2)).state(UID) is PodPresence.UNKNOWN


@pytest.mark.parametrize("events", ["", "frozen 0\n", "populated\n", "populated x\n", "\xff"])
def test_events_that_do_not_say_leave_it_unknown(v2, events):
    (populate(v2 / CGROUPFS[0]) / "cgroup.events").write_text(events, encoding="latin-1")
    assert PodCgroups(str(v2)).state(UID) is PodPresence.UNKNOWN


def test_an_unreadable_cgroup_below_the_pod_leaves_it_unknown(tmp_path):
    pod = pids(tmp_path / "memory" / CGROUPFS[0])
    (pod / "container").mkdir()
    assert PodCgroups(str(tmp_path)).state(UID) is PodPresence.UNKNOWN


def test_a_cgroup_that_goes_while_it_is_read_is_no_obstacle(tmp_path, monkeypatch):
    pod = pids(tmp_path / "memory" / CGROUPFS[0])
    container = pids(pod / "container")
    read = cgroup._read

    def remove_then_read(path, name):
        if path == str(container) and container.exists():
            (container / "cgroup.procs").unlink()
            container.rmdir()
        return read(path, name)

    monkeypatch.setattr(cgroup, "_read", remove_then_read)
    assert PodCgroups(str(tmp_path)).state(UID) is PodPresence.EMPTY
    assert not container.exists()


def test_a_pod_with_too_many_cgroups_is_held_for_alive(tmp_path, monkeypatch):
    monkeypatch.setattr(cgroup, "_MAX_BELOW", 3)
    pod = pids(tmp_path / "memory" / CGROUPFS[0])
    for n in range(3):
        pids(pod / str(n))
    assert PodCgroups(str(tmp_path)).state(UID) is PodPresence.ALIVE


def test_the_search_is_bounded(v2, monkeypatch):
    populate(v2 / "a/b/c/d/e/f" / CGROUPFS[0])
    assert PodCgroups(str(v2)).state(UID) is PodPresence.UNKNOWN
    populate(v2 / "a/b/c/d/e" / CGROUPFS[0])
    assert PodCgroups(str(v2)).state(UID) is PodPresence.ALIVE
    monkeypatch.setattr(cgroup, "_MAX_LISTED", 1)
    assert PodCgroups(str(v2)).state(UID) is PodPresence.UNKNOWN


def test_a_tree_that_appears_later_is_found(v2, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(cgroup.time, "monotonic", lambda: now[0])
    pods = PodCgroups(str(v2))
    assert pods.state(UID) is PodPresence.UNKNOWN
    populate(v2 / CGROUPFS[1])
    now[0] += 2
    assert pods.state(UID) is PodPresence.ALIVE
    populate(v2 / CGROUPFS[1], 0)
    populate(v2 / SYSTEMD[1])
    now[0] += 31
    assert pods.state(UID) is PodPresence.ALIVE


# ------------------------------------------------------------------ which tree is kubelet's


def remove(cgroup: Path) -> None:
    for file in cgroup.iterdir():
        file.unlink()
    cgroup.rmdir()


def test_a_tree_in_which_no_pod_was_ever_seen_does_not_prove_that_a_pod_is_gone(v2):
    populate(v2 / f"kubepods/pod{OTHER}")
    pods = PodCgroups(str(v2))
    assert pods.state(UID) is PodPresence.UNKNOWN
    assert pods.may_live(UID), "some pod lives, so cgroups can be seen"
    populate(v2 / f"kubepods/pod{OTHER}", 0)
    assert pods.state(UID) is PodPresence.UNKNOWN
    assert not pods.may_live(UID), "pods seem to have no cgroups"


def test_a_leftover_tree_does_not_hide_the_real_one_below_another_slice(v2):
    (v2 / "kubepods.slice").mkdir()
    populate(v2 / SYSTEMD[3])
    assert PodCgroups(str(v2)).state(UID) is PodPresence.ALIVE


@pytest.mark.parametrize("place", CGROUPFS + SYSTEMD)
@pytest.mark.parametrize("below", ["", "/cri-containerd-1.scope/init"])
def test_the_plugins_own_pod_shows_which_tree_is_kubelets(v2, tmp_path, monkeypatch, place, below):
    (v2 / "kubepods.slice").mkdir(exist_ok=True)
    populate(v2 / place)
    own = tmp_path / "own"
    own.write_text(f"12:pids:/\n0::/{place}{below}\n")
    monkeypatch.setattr(cgroup, "_OWN", str(own))
    monkeypatch.setattr(cgroup, "_OWN_MOUNTS", "/nowhere")
    assert PodCgroups(str(v2)).state(OTHER) is PodPresence.GONE
    own.write_text(f"0::/kubepods/pod{STATIC}\n")  # none of those that are seen
    assert PodCgroups(str(v2)).state(OTHER) is PodPresence.UNKNOWN


@pytest.mark.parametrize(
    ("line", "state"),
    [
        (f"/var/lib/kubelet/pods/{UID}/containers/plugin/1a2b /dev/termination-log rw", "gone"),
        (f"/pods/{UID}/etc-hosts /etc/hosts rw", "gone"),
        (f"/var/lib/kubelet/pods/{UID}/volumes/x /srv rw", "unknown"),
    ],
)
def test_in_a_cgroup_namespace_kubelets_mounts_tell_the_own_pod(
    v2, tmp_path, monkeypatch, line, state
):
    populate(v2 / CGROUPFS[0])
    for name, text in (("_OWN", "0::/\n"), ("_OWN_MOUNTS", f"700 600 8:1 {line} - ext4 x\n")):
        path = tmp_path / name
        path.write_text(text)
        monkeypatch.setattr(cgroup, name, str(path))
    assert PodCgroups(str(v2)).state(OTHER) is PodPresence(state)


def test_pods_that_kubelet_runs_show_which_tree_is_kubelets(v2, tmp_path):
    kubelets = tmp_path / "pods"
    for name in ("not a uid", UID, STATIC):
        (kubelets / name).mkdir(parents=True)
    populate(v2 / CGROUPFS[0], 0)
    assert PodCgroups(str(v2), str(kubelets)).state(OTHER) is PodPresence.UNKNOWN, "ended"
    populate(v2 / CGROUPFS[0])
    assert PodCgroups(str(v2), str(kubelets)).state(OTHER) is PodPresence.GONE


def test_a_pod_whose_cgroup_was_seen_is_gone_once_it_is_removed(v2):
    pods = PodCgroups(str(v2))
    populate(v2 / CGROUPFS[0], 0)
    assert pods.state(UID) is PodPresence.EMPTY
    remove(v2 / CGROUPFS[0])
    assert pods.state(UID) is PodPresence.GONE
    (v2 / "kubepods").rmdir()  # with the whole tree: what is seen now is another one
    (v2 / "kubepods.slice").mkdir()
    assert pods.state(UID) is PodPresence.UNKNOWN


def test_a_tree_that_was_kubelets_proves_nothing_once_it_is_gone(v2):
    populate(v2 / CGROUPFS[0])
    pods = PodCgroups(str(v2))
    assert pods.expect(UID)
    assert pods.state(OTHER) is PodPresence.GONE
    remove(v2 / CGROUPFS[0])
    (v2 / "kubepods").rmdir()
    (v2 / "kubepods.slice").mkdir()
    assert pods.state(OTHER) is PodPresence.UNKNOWN


def test_after_a_starting_pod_was_not_found_only_pods_that_were_seen_are_gone(v2):
    populate(v2 / CGROUPFS[0])
    pods = PodCgroups(str(v2))
    assert pods.expect(UID)
    assert pods.state(STATIC) is PodPresence.GONE
    assert not pods.expect(OTHER)
    assert pods.state(STATIC) is PodPresence.UNKNOWN
    assert pods.state(OTHER) is PodPresence.UNKNOWN
    assert pods.may_live(OTHER)
    remove(v2 / CGROUPFS[0])
    assert pods.state(UID) is PodPresence.GONE
    populate(v2 / "kubepods.slice" / f"kubepods-pod{OTHER.replace('-', '_')}.slice", 0)
    assert pods.expect(OTHER)
    assert pods.state(STATIC) is PodPresence.GONE
    assert pods.state(OTHER) is PodPresence.EMPTY


def test_a_tree_that_came_since_the_last_search_is_searched_before_a_pod_is_gone(v2):
    populate(v2 / f"kubepods/pod{OTHER}")
    pods = PodCgroups(str(v2))
    assert pods.expect(OTHER)
    assert pods.state(STATIC) is PodPresence.GONE
    populate(v2 / SYSTEMD[3])
    assert pods.state(UID) is PodPresence.ALIVE


def test_in_v1_any_living_pod_holds_what_is_unknown(tmp_path):
    tree = tmp_path / "pids" / "kubepods"
    pids(tree / f"pod{OTHER}", 7)
    pods = PodCgroups(str(tmp_path))
    assert pods.may_live(UID)
    pids(tree)
    (tree / "pids.current").write_text("0\n")
    assert not pods.may_live(UID)


def test_cgroups_that_do_not_tell_are_logged_once(v2):
    populate(v2 / f"kubepods/pod{OTHER}")
    pods = PodCgroups(str(v2))
    with capture_logs() as logs:
        assert pods.may_live(UID)
        assert pods.may_live(STATIC)
    assert [line["event"] for line in logs] == ["cgroups do not say whether a pod still runs"]


# ------------------------------------------------------------------ containers of a pod

ID_1, ID_2 = "a" * 64, "b" * 64


def child(pod: Path, name: str, tasks: int) -> Path:
    path = populate(pod / name, int(tasks > 0))
    (path / "pids.current").write_text(f"{tasks}\n")
    return path


@pytest.fixture
def pod(v2):
    path = populate(v2 / CGROUPFS[0])
    (path / "cgroup.procs").write_text("")
    (path / "pids.current").write_text("9\n")
    return path


@pytest.mark.parametrize("name", [f"cri-containerd-{ID_1}.scope", ID_1, f"docker-{ID_1}.scope"])
def test_a_pod_with_nothing_but_its_pause_process_runs_no_container(v2, pod, name):
    child(pod, name, 1)
    child(pod, ID_2, 0)
    pods = PodCgroups(str(v2))
    assert not pods.may_run_containers(UID)
    assert pods.may_live(UID)


@pytest.mark.parametrize(
    "children",
    [
        {ID_1: 1, ID_2: 1},
        {ID_1: 2},
        {f"crio-{ID_1}.scope": 1},  # CRI-O makes sandboxes without a process
        {f"crio-conmon-{ID_1}.scope": 1},
        {"kata_1": 1},
        {},
    ],
)
def test_cgroups_other_than_one_sandbox_may_be_containers(v2, pod, children):
    for name, tasks in children.items():
        child(pod, name, tasks)
    assert PodCgroups(str(v2)).may_run_containers(UID)


def test_a_process_beside_the_sandbox_may_be_a_containers(v2, pod):
    child(pod, ID_1, 1)
    (pod / "cgroup.procs").write_text("0\n")  # of another pid namespace
    assert PodCgroups(str(v2)).may_run_containers(UID)


def test_where_tasks_are_not_counted_a_sandbox_is_not_told_from_a_container(v2, pod):
    (child(pod, ID_1, 1) / "pids.current").unlink()
    assert PodCgroups(str(v2)).may_run_containers(UID)
    (pod / "pids.current").unlink()
    assert PodCgroups(str(v2)).may_run_containers(UID)


def test_in_v1_the_pids_controller_tells_a_sandbox_from_a_container(tmp_path):
    pids(tmp_path / "memory" / CGROUPFS[0])
    pod = pids(tmp_path / "pids" / CGROUPFS[0])
    (pod / "pids.current").write_text("1\n")
    (pids(pod / ID_1) / "pids.current").write_text("1\n")
    pods = PodCgroups(str(tmp_path))
    assert not pods.may_run_containers(UID)
    (pids(pod / ID_2) / "pids.current").write_text("1\n")
    assert pods.may_run_containers(UID)


def test_a_pod_that_is_gone_runs_no_container(v2, pod):
    pods = PodCgroups(str(v2))
    assert pods.may_run_containers(UID)
    remove(pod)
    assert not pods.may_run_containers(UID)


def test_this_machines_own_cgroups_do_no_harm():
    state = PodCgroups("/sys/fs/cgroup").state(OTHER)
    assert state in {PodPresence.UNKNOWN, PodPresence.GONE}


def test_pid_namespaces_are_told_apart(monkeypatch):
    monkeypatch.undo()
    ours = os.stat("/proc/self/ns/pid").st_ino
    monkeypatch.setattr(cgroup, "_INITIAL_PID_NAMESPACE", ours)
    assert cgroup._sees_all_pids()
    monkeypatch.setattr(cgroup, "_INITIAL_PID_NAMESPACE", ours + 1)
    assert not cgroup._sees_all_pids()
