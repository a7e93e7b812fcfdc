"""The status page. Being written."""

from fpga_plugin.status.view import StatusView

HEADERS: tuple[tuple[str, str], ...] = ()


def page(status: StatusView) -> str:
    """The page."""
    return f"<!doctype html><title>{len(status['cards'])}</title>"
