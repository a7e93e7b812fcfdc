"""Whether a pod still has processes, told by its cgroup.

Kubelet can lose sight of a pod that still runs (a force delete does that), so its word alone does
not show that nobody has the region open or mapped. The pod's cgroup does: kubelet makes it before
the first container starts and removes it after the last process is gone.

Where it lies (pkg/kubelet/cm: pod_container_manager_linux.go, cgroup_manager_linux.go): below
`<cgroup root>/kubepods`, directly or in `burstable` or `besteffort`, as `pod<uid>`. With the
systemd driver each part repeats its parents' names and `-` in a uid becomes `_`:
`kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid>.slice`; a cgroup root of its
own (as kind has) makes that `kubelet.slice/kubelet-kubepods.slice/...`. In cgroup v1 each
controller has such a tree. With `--cgroups-per-qos=false` there is none, and nothing can be said.

How it is asked: `cgroup.events` (v2) and `pids.current` (the pids controller of v1) count the whole
subtree, whoever reads them. v1's `cgroup.procs` is not like that: it leaves out processes of other
pid namespaces (kernel/cgroup/cgroup-v1.c, pidlist_array_load; seen on Linux 6.18), so in a plugin
without hostPID every other pod's looks empty. A pid in it proves life; its emptiness proves nothing
unless we are in the initial pid namespace.
"""

import enum
import errno
import os
import re
import time
from collections.abc import Iterator
from typing import Final

from fpga_plugin.ids import PodUid

_UID: Final = re.compile(r"[A-Za-z0-9-]{1,64}", re.ASCII)

_LEVELS: Final = 3
"""How far below a hierarchy's top `kubepods` is looked for: a cgroup root of two parts."""

_MAX_LISTED: Final = 4096
"""Directories that the search lists before it gives up."""

_MAX_BELOW: Final = 1024
"""Cgroups below one pod that are looked at; a pod that has more is taken to be alive."""

_FRESH_SECONDS: Final = 30.0
"""How long a search for `kubepods` is good for: kubelet may come back with another driver."""

_NOT_FOUND_FRESH_SECONDS: Final = 1.0
"""The same for a search that found none: kubelet makes it when it starts."""

_QOS: Final = ("", "burstable", "besteffort")
_ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENODEV})
"""A cgroup that is removed while it is read answers ENODEV."""

_INITIAL_PID_NAMESPACE: Final = 0xEFFFFFFC
"""Inode of the initial pid namespace: PROC_PID_INIT_INO in include/linux/proc_ns.h."""


class PodPresence(enum.Enum):
    """What a pod's cgroup says."""

    GONE = "gone"
    """Kubelet's tree is there and has no cgroup of the pod."""

    EMPTY = "empty"
    """The pod's cgroup is there, without a process in it or below."""

    ALIVE = "alive"
    """There are processes."""

    UNKNOWN = "unknown"
    """Cgroups cannot be seen: not mounted, unreadable, or pods have none."""


class _Answer(enum.Enum):
    """What one cgroup of a pod says."""

    ABSENT = enum.auto()
    EMPTY = enum.auto()
    NO_PID_SEEN = enum.auto()
    ALIVE = enum.auto()
    UNREADABLE = enum.auto()


class PodCgroups:
    """The cgroups of a node's pods. Blocks: call it from a thread; any thread will do.

    Args:
        root: where the node's /sys/fs/cgroup is seen; None or empty: nowhere.
    """

    def __init__(self, root: str | None) -> None:
        self._root = root or None
        self._trees: tuple[str, ...] = ()
        self._searched: float | None = None
        self._distrusted = False

    def state(self, pod_uid: PodUid) -> PodPresence:
        """Whether the pod has processes; never raises.

        In cgroup v1 every controller's tree is asked, and the most alive answer counts.
        """
        presence = self._presence(pod_uid)
        if presence is PodPresence.GONE and self._distrusted:
            return PodPresence.UNKNOWN
        return presence

    def expect(self, pod_uid: PodUid) -> bool:
        """Check what is seen against a pod that kubelet is just starting; never raises.

        Such a pod has a cgroup. If none is seen, the tree that is seen is not kubelet's (a leftover
        of another driver, or of a time before `--cgroups-per-qos=false`), and GONE would be said of
        living pods: from then on it is UNKNOWN, until an expected pod is found.

        Returns:
            Whether the pod's cgroup was found.
        """
        self._searched = None
        found = self._presence(pod_uid) in {PodPresence.ALIVE, PodPresence.EMPTY}
        self._distrusted = not found
        return found

    def _presence(self, pod_uid: PodUid) -> PodPresence:
        """What is seen, trusted or not."""
        # Checked here too: whatever made the uid, this module builds paths of it.
        if not _UID.fullmatch(pod_uid):
            return PodPresence.UNKNOWN
        answers: set[_Answer] = set()
        for tree in self._find_trees():
            answers.update(_ask(candidate) for candidate in _candidates(tree, pod_uid))
            if _Answer.ALIVE in answers:
                return PodPresence.ALIVE
        if not answers or _Answer.UNREADABLE in answers:
            return PodPresence.UNKNOWN
        if _Answer.EMPTY in answers:
            return PodPresence.EMPTY
        if _Answer.NO_PID_SEEN in answers:
            return PodPresence.EMPTY if _sees_all_pids() else PodPresence.UNKNOWN
        return PodPresence.GONE

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


def _search(root: str) -> Iterator[str]:
    """`kubepods` directories below `root`: v2's one, or those of v1's controllers."""
    # Controllers that share a hierarchy (cpu,cpuacct) are also there as links: left out.
    tops = _directories_if_readable(root)
    if os.path.exists(os.path.join(root, "cgroup.controllers")) or any(map(_is_tree, tops)):
        tops = [root]
    for top in tops:
        yield from _search_hierarchy(top)


def _search_hierarchy(top: str) -> Iterator[str]:
    """Level by level; what lies below a found tree, or deeper than one, is somebody else's."""
    level = [top]
    listed = 0
    for _ in range(_LEVELS):
        below: list[str] = []
        for directory in level:
            listed += 1
            if listed > _MAX_LISTED:
                return
            below += _directories_if_readable(directory)
        found = [directory for directory in below if _is_tree(directory)]
        yield from found
        if found:
            return
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
