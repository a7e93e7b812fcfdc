"""What the process forbids itself once it has started, and nothing can take back.

Three measures, each of the kernel's own and independent of the others: root's capabilities are
given up (`capabilities`), system calls that the plugin has no use for are refused (`seccomp`), and
files are reached only where it has something to do (`landlock`). Capabilities alone do not keep a
process that was taken over from getting them back in a user namespace of its own, nor from writing
what root's file modes allow.

All three belong to a thread and are inherited by those that it makes: apply them before there is a
second one. The kernel's calls are made through ctypes: Python has none of them. There is no package
for Landlock on PyPI, and pyseccomp takes libseccomp, a C library of its own in the image, for a
filter of fixed content that `seccomp` builds in a hundred lines.

What may be reached is the caller's to say: no module here knows a setting.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Measure:
    """One of them, as operators are shown it.

    Attributes:
        name: `capabilities`, `seccomp` or `landlock`.
        holds: whether it is in force.
        detail: how far it goes; where it does not hold, why.
    """

    name: str
    holds: bool
    detail: str
