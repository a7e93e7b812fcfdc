"""Whether a pod still has processes, by its cgroup.

Kubelet can lose sight of a pod that still runs (a force delete does that), so its word alone does
not show that nobody has the region open or mapped. The pod's cgroup does: kubelet makes it before
the first container starts and removes it after the last process is gone.

Where it lies (pkg/kubelet/cm: pod_container_manager_linux.go, cgroup_manager_linux.go): below
`<cgroup root>/kubepods`, directly or in `burstable` or `besteffort`, as `pod<uid>`. With the
systemd driver each part repeats its parents' names and `-` in a uid becomes `_`:
`kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid>.slice`; a cgroup root of its
own (as kind has) makes that `kubelet.slice/kubelet-kubepods.slice/...`. In cgroup v1 each
controller has such a tree. With `--cgroups-per-qos=false` there is none, and nothing can be said.

Which tree is kubelet's: a leftover of another driver, or of another cgroup root, looks like the
real one and lacks every pod. So all trees are searched, and that a pod is in none of them proves
that it is gone only where it was seen in one before, or where one of them is known to be kubelet's:
the plugin's own pod, or one that kubelet runs, is in it. Otherwise the answer is UNKNOWN.

How it is asked: `cgroup.events` (v2) and `pids.current` (the pids controller of v1) count the whole
subtree for every reader. v1's `cgroup.procs` is not like that: it leaves out processes of other
pid namespaces (kernel/cgroup/cgroup-v1.c, pidlist_array_load; seen on Linux 6.18), so in a plugin
without hostPID every other pod's looks empty. A pid in it proves life; its emptiness proves nothing
unless we are in the initial pid namespace.
"""

import enum
import errno
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Final, TypeAlias

import structlog
from msgspec import Meta

from fpga_plugin.host.bounded import BoundedDict
from fpga_plugin.host.file_identity import inode_at, inode_of
from fpga_plugin.host.kernel_files import lines_of
from fpga_plugin.kubernetes.names import PodUid

log = structlog.get_logger()

_UID: Final = re.compile(r"[A-Za-z0-9-]{1,64}", re.ASCII)

_OWN: Final = "/proc/self/cgroup"

_OWN_POD: Final = re.compile(r"(?:/|-)pod([A-Za-z0-9_-]{1,64}?)(?:\.slice)?(?=/|$)", re.ASCII)
"""A pod in a cgroup's path, of either driver."""

_OWN_MOUNTS: Final = "/proc/self/mountinfo"

_OWN_FILES: Final = re.compile(
    r"/pods/([A-Za-z0-9-]{1,64})/\S+ (?:/dev/termination-log|/etc/hosts) ", re.ASCII
)
"""Files of its pod that kubelet mounts into each container: what is mounted, and where."""

_LONE_SANDBOX: Final = re.compile(r"(?:cri-containerd-|docker-)?[0-9a-f]{64}(?:\.scope)?")
"""Containers of the runtimes whose every sandbox has a process of its own, `pause`. CRI-O's
(`crio-<id>`) need not have one."""

_LEVELS: Final = 6
"""How far below a hierarchy's top `kubepods` is looked for: a cgroup root of five parts."""

_KEPT_PODS: Final = 1024
"""Pods whose place is remembered; kubelet runs 110 by default."""

_MAX_LISTED: Final = 4096
"""Directories that the search lists before it gives up."""

_MAX_BELOW: Final = 1024
"""Cgroups below one pod that are looked at; a pod that has more is taken to be alive."""

_FRESH_SECONDS: Final = 30.0
"""How long a search for `kubepods` is good for: kubelet may come back with another driver."""

_NOT_FOUND_FRESH_SECONDS: Final = 1.0
"""The same for a search that found none: kubelet makes it when it starts."""

_Text: TypeAlias = Annotated[str, Meta(max_length=1 << 12)]
_Number: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 62)]

_QOS: Final = ("", "burstable", "besteffort")
_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENODEV})
"""A cgroup that is removed while it is read answers ENODEV."""

_INITIAL_PID_NAMESPACE: Final = 0xEFFFFFFC
"""Inode of the initial pid namespace: PROC_PID_INIT_INO in include/linux/proc_ns.h."""


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A cgroup of a pod: no later one has the same path and inode.

    Attributes:
        tree: the `kubepods` directory that it is in.
        path: of the cgroup.
        device: the file system's.
        inode: the cgroup's; kernfs counts them upwards.
    """

    tree: _Text
    path: _Text
    device: _Number
    inode: _Number


class PodPresence(enum.Enum):
    """What a pod's cgroup says."""

    GONE = "gone"
    """Kubelet's tree is there, is known to be kubelet's, and has no cgroup of the pod."""

    EMPTY = "empty"
    """The pod's cgroup is there, without a process in it or below."""

    ALIVE = "alive"
    """There are processes."""

    UNKNOWN = "unknown"
    """Cgroups cannot be seen (not mounted, unreadable, or pods have none), or which of them are
    kubelet's is not known."""


class _Answer(enum.Enum):
    """What one cgroup of a pod says."""

    ABSENT = enum.auto()
    EMPTY = enum.auto()
    NO_PID_SEEN = enum.auto()
    ALIVE = enum.auto()
    UNREADABLE = enum.auto()


_MOST_ALIVE_FIRST: Final = (
    _Answer.ALIVE,
    _Answer.UNREADABLE,
    _Answer.EMPTY,
    _Answer.NO_PID_SEEN,
    _Answer.ABSENT,
)


class PodCgroups:
    """The cgroups of a node's pods. Blocks: call it from a thread; any thread will do.

    Args:
        root: where the node's /sys/fs/cgroup is seen; None or empty: nowhere.
        pods: where kubelet keeps its pods' files, a folder a uid; need not be there.
    """

    def __init__(self, root: str | None, pods: str = "") -> None:
        self._root = root or None
        self._pods = pods
        self._trees: tuple[str, ...] = ()
        self._searched: float | None = None
        self._kubelets: set[str] = set()
        self._seen = BoundedDict[PodUid, frozenset[str]](_KEPT_PODS)
        self._missed: PodUid | None = None
        self._told_unknown = False

    def state(self, pod_uid: PodUid) -> PodPresence:
        """Whether the pod has processes; never raises.

        In cgroup v1 every controller's tree is asked, and the most alive answer counts.
        """
        presence = self._presence(pod_uid)
        if presence is PodPresence.GONE and not self._was_seen(pod_uid):
            self._searched = None  # a tree that came since the last search may have it
            presence = self._presence(pod_uid)
            if presence is PodPresence.GONE and not self._knows_kubelets_tree():
                return PodPresence.UNKNOWN
        return presence

    def may_live(self, pod_uid: PodUid) -> bool:
        """Whether the pod has processes, or may have; never raises.

        What is UNKNOWN may live wherever any pod is seen to. Only where none is seen, because
        cgroups are not, or pods have none, does kubelet's word count in their stead.
        """
        return self._may(pod_uid, self.state(pod_uid))

    def may_run_containers(self, pod_uid: PodUid) -> bool:
        """Whether the pod runs a container, or may; its sandbox is none. Never raises."""
        presence = self.state(pod_uid)
        if presence is PodPresence.ALIVE:
            return not self._is_sandbox_only(pod_uid)
        return self._may(pod_uid, presence)

    def expect(self, pod_uid: PodUid) -> bool:
        """Check what is seen against a pod that kubelet is just starting; never raises.

        Such a pod has a cgroup. If none is seen, kubelet's tree is none of those that are seen, and
        pods that were never seen are UNKNOWN from then on, until an expected pod is found.

        Returns:
            Whether the pod's cgroup was found.
        """
        found = self._where(pod_uid)
        if not found:
            self._searched = None
            found = self._where(pod_uid)
        if found:
            self._missed = None
            self._kubelets |= found
        else:
            self._missed = pod_uid
        return bool(found)

    def _may(self, pod_uid: PodUid, presence: PodPresence) -> bool:
        if presence is not PodPresence.UNKNOWN:
            return presence is PodPresence.ALIVE
        alive = self._any_pod_lives()
        if alive and not self._told_unknown:
            self._told_unknown = True
            log.warning(
                "cgroups do not say whether a pod still runs",
                pod=pod_uid,
                trees=self._trees,
                missed=self._missed,
                hint="what it had is held back: mount the node's whole /sys/fs/cgroup at"
                " FPGA_PLUGIN_CGROUP_ROOT, and restart the plugin",
            )
        return alive

    def _any_pod_lives(self) -> bool:
        return any(map(_has_living_pod, self._find_trees()))

    def _was_seen(self, pod_uid: PodUid) -> bool:
        """Whether the pod's cgroup was in trees that are still there: it was removed since."""
        trees = self._seen.get(pod_uid)
        return trees is not None and all(map(os.path.isdir, trees))

    def _knows_kubelets_tree(self) -> bool:
        """Whether the cgroup of any pod that is there would be seen."""
        if self._missed is not None:
            return False
        if not any(tree in self._kubelets for tree in self._trees):
            self._look_for_running_pods()
        return any(tree in self._kubelets for tree in self._trees)

    def _look_for_running_pods(self) -> None:
        """Find kubelet's tree by the plugin's own pod, or by those that kubelet runs."""
        for name in (*_own_pod(), *_names(self._pods)):
            if _UID.fullmatch(name) and self._presence(PodUid(name)) is PodPresence.ALIVE:
                return  # which notes its tree

    def instance(self, pod_uid: PodUid) -> tuple[Cgroup, ...]:
        """The cgroups of a pod, which no later pod of the same uid has; never raises.

        A static pod that is removed and put back has the uid that it had, and another cgroup.
        """
        if not _UID.fullmatch(pod_uid):
            return ()
        return tuple(
            Cgroup(tree, candidate, *identity)
            for tree in self._find_trees()
            for candidate in _candidates(tree, pod_uid)
            if (identity := inode_at(candidate)) is not None
        )

    def instance_gone(self, cgroups: Collection[Cgroup]) -> bool:
        """Whether the pod that ran in these is gone, whatever runs under its uid; never raises.

        What was not noted, or cannot be seen, is not gone.
        """
        return bool(cgroups) and all(os.path.isdir(one.tree) and _is_gone(one) for one in cgroups)

    def _presence(self, pod_uid: PodUid) -> PodPresence:
        """What is seen, whichever tree is kubelet's."""
        answers = self._ask_for(pod_uid)
        if _Answer.ALIVE in answers.values():
            self._kubelets |= {tree for tree, each in answers.items() if each is _Answer.ALIVE}
            return PodPresence.ALIVE
        if not answers or _Answer.UNREADABLE in answers.values():
            return PodPresence.UNKNOWN
        if _Answer.EMPTY in answers.values():
            return PodPresence.EMPTY
        if _Answer.NO_PID_SEEN in answers.values():
            return PodPresence.EMPTY if _sees_all_pids() else PodPresence.UNKNOWN
        return PodPresence.GONE

    def _where(self, pod_uid: PodUid) -> set[str]:
        """Trees that have a cgroup of the pod."""
        answers = self._ask_for(pod_uid)
        return {tree for tree, answer in answers.items() if answer is not _Answer.ABSENT}

    def _ask_for(self, pod_uid: PodUid) -> dict[str, _Answer]:
        """What each tree says of the pod."""
        # Checked here too: whatever made the uid, this module builds paths of it.
        if not _UID.fullmatch(pod_uid):
            return {}
        answers: dict[str, _Answer] = {}
        for tree in self._find_trees():
            said = {_ask(candidate) for candidate in _candidates(tree, pod_uid)}
            answers[tree] = next(answer for answer in _MOST_ALIVE_FIRST if answer in said)
        seen = frozenset(t for t, answer in answers.items() if answer is not _Answer.ABSENT)
        if seen:
            self._seen[pod_uid] = seen
        return answers

    def _is_sandbox_only(self, pod_uid: PodUid) -> bool:
        """Whether one process is all that the pod has, and it is the sandbox's own.

        Only trees that count tasks are asked: v2's one, and v1's pids controller.
        """
        told = False
        for tree in self._find_trees():
            for candidate in _candidates(tree, pod_uid):
                if not os.path.exists(os.path.join(candidate, "pids.current")):
                    continue
                told = True
                try:
                    if not _has_lone_sandbox(candidate):
                        return False
                except (OSError, ValueError):
                    return False  # something ends or begins just now
        return told

    def containers(self, pod_uid: PodUid) -> frozenset[str]:
        """The cgroups of the pod's containers that have processes, its sandbox's among them.

        By name, which holds the runtime's id and therefore never comes again. Empty where none is
        seen. Never raises.
        """
        if not _UID.fullmatch(pod_uid):
            return frozenset()
        return frozenset(
            os.path.basename(child)
            for tree in self._find_trees()
            for candidate in _candidates(tree, pod_uid)
            for child in _directories_if_readable(candidate)
            if _ask(child) is _Answer.ALIVE
        )

    def _find_trees(self) -> tuple[str, ...]:
        """Every `kubepods` directory, from a recent search."""
        now = time.monotonic()
        fresh = _FRESH_SECONDS if self._trees else _NOT_FOUND_FRESH_SECONDS
        if (
            self._searched is None
            or now - self._searched > fresh
            or not all(map(os.path.isdir, self._trees))
        ):
            self._trees = tuple(_search(self._root)) if self._root else ()
            self._searched = now
        return self._trees


def known_gone(cgroups: PodCgroups, pods: Iterable[PodUid]) -> set[PodUid]:
    """Those of these pods that certainly have no processes: their cgroups are known to be gone.

    What a record of kubelet's says of them is stale. Blocks: call it from a thread.
    """
    return {pod for pod in pods if cgroups.state(pod) is PodPresence.GONE}


def known_idle(cgroups: PodCgroups, pods: Iterable[PodUid]) -> set[PodUid]:
    """Those of these pods that certainly have no processes now; they may get some.

    Blocks: call it from a thread.
    """
    return {pod for pod in pods if cgroups.state(pod) in {PodPresence.GONE, PodPresence.EMPTY}}


def _own_pod() -> list[str]:
    """The uid of the pod that the plugin runs in, if it runs in one.

    Its cgroup's path reports, unless a cgroup namespace hides it; then what kubelet mounts does.
    """
    for line in lines_of(_OWN):
        if found := _OWN_POD.findall(line):
            return [found[-1].replace("_", "-")]
    for line in lines_of(_OWN_MOUNTS):
        if found := _OWN_FILES.findall(line):
            return [found[-1]]
    return []


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory) if directory else []
    except OSError:
        return []


def _has_lone_sandbox(pod: str) -> bool:
    """Whether a pod's cgroup has one populated child, with one task, that can be a sandbox.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    if _read(pod, "cgroup.procs").strip():
        return False
    populated = [child for child in _directories(pod) if _count(child) is not _Answer.EMPTY]
    return (
        len(populated) == 1
        and _LONE_SANDBOX.fullmatch(os.path.basename(populated[0])) is not None
        and int(_read(populated[0], "pids.current")) == 1
    )


def _search(root: str) -> Iterator[str]:
    """`kubepods` directories below `root`: v2's one, or those of v1's controllers."""
    # Controllers that share a hierarchy (cpu,cpuacct) are also there as links: left out.
    tops = _directories_if_readable(root)
    if os.path.exists(os.path.join(root, "cgroup.controllers")) or any(map(_is_tree, tops)):
        tops = [root]
    for top in tops:
        yield from _search_hierarchy(top)


def _search_hierarchy(top: str) -> Iterator[str]:
    """Level by level; what lies below a found tree is a pod's own."""
    level = [top]
    listed = 0
    for _ in range(_LEVELS):
        below: list[str] = []
        for directory in level:
            listed += 1
            if listed > _MAX_LISTED:
                return
            for each in _directories_if_readable(directory):
                if _is_tree(each):
                    yield each
                else:
                    below.append(each)
        level = below


def _is_tree(directory: str) -> bool:
    name = os.path.basename(directory)
    return name in {"kubepods", "kubepods.slice"} or name.endswith("-kubepods.slice")


def _directories(path: str) -> list[str]:
    with os.scandir(path) as entries:
        return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]


def _directories_if_readable(path: str) -> list[str]:
    try:
        return _directories(path)
    except OSError:
        return []


def _candidates(tree: str, pod_uid: PodUid) -> Iterator[str]:
    """Where the pod's cgroup may lie in a tree."""
    name = os.path.basename(tree)
    if name.endswith(".slice"):
        stem = name.removesuffix(".slice")
        uid = pod_uid.replace("-", "_")
        for qos in _QOS:
            parent = f"{stem}-{qos}" if qos else stem
            directory = os.path.join(tree, f"{parent}.slice") if qos else tree
            yield os.path.join(directory, f"{parent}-pod{uid}.slice")
    else:
        for qos in _QOS:
            yield os.path.join(tree, qos, f"pod{pod_uid}")


def _has_living_pod(tree: str) -> bool:
    """Whether a tree has processes, which are pods'."""
    if (answer := _ask(tree)) is not _Answer.UNREADABLE:
        return answer is _Answer.ALIVE
    for qos in _directories_if_readable(tree):
        for cgroup in (qos, *_directories_if_readable(qos)):
            if _ask(cgroup) is _Answer.ALIVE:
                return True
    return False


def _is_gone(cgroup: Cgroup) -> bool:
    """Whether the very cgroup is not there any more."""
    try:
        status = os.stat(cgroup.path)
    except OSError as error:
        return error.errno in _ABSENT
    return inode_of(status) != (cgroup.device, cgroup.inode)


def _ask(cgroup: str) -> _Answer:
    """Whether a cgroup, or one below it, has processes; never raises."""
    try:
        os.stat(cgroup)
        return _count(cgroup)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in _ABSENT and not os.path.isdir(cgroup):
            return _Answer.ABSENT
        return _Answer.UNREADABLE


def _count(cgroup: str) -> _Answer:
    """Ask the summaries first, then look for pids.

    Raises:
        OSError, ValueError: it cannot be read, or is no cgroup.
    """
    try:
        events = _read(cgroup, "cgroup.events")
    except FileNotFoundError:
        pass
    else:
        # Without the key `get` gives a text that is no number: a ValueError, as intended.
        populated = dict(line.split(" ", 1) for line in events.splitlines()).get("populated", "")
        return _Answer.EMPTY if int(populated) == 0 else _Answer.ALIVE
    try:
        tasks = _read(cgroup, "pids.current")
    except FileNotFoundError:
        return _look_for_pids(cgroup)
    return _Answer.EMPTY if int(tasks) == 0 else _Answer.ALIVE


def _look_for_pids(cgroup: str) -> _Answer:
    """Look into each cgroup of a subtree.

    Raises:
        OSError, ValueError: one of them cannot be read.
    """
    pending = [cgroup]
    looked_at = 0
    while pending:
        looked_at += 1
        if looked_at > _MAX_BELOW:
            return _Answer.ALIVE
        current = pending.pop()
        try:
            pids = _read(current, "cgroup.procs")
            below = _directories(current)
        except OSError as error:
            if error.errno not in _ABSENT or current == cgroup or os.path.isdir(current):
                raise
            continue  # removed meanwhile, which only an empty cgroup can be
        if pids.strip():
            return _Answer.ALIVE
        pending += below
    return _Answer.NO_PID_SEEN


def _sees_all_pids() -> bool:
    """Whether no process is hidden from us by a pid namespace."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _INITIAL_PID_NAMESPACE
    except OSError:
        return False


def _read(cgroup: str, name: str) -> str:
    with open(os.path.join(cgroup, name), encoding="ascii") as file:
        return file.read()
