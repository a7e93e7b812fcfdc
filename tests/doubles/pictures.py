"""Pictures of the page."""

_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def size(png: bytes) -> tuple[int, int]:
    """A PNG's width and height."""
    assert png.startswith(_SIGNATURE)
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")
