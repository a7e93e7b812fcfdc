"""What the kernel reports in small text files, such as those of /proc and of control groups."""


def lines_of(path: str) -> list[str]:
    """The lines of a file; none where it cannot be read."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []
