"""Looking at a layout: as text, as JSON, as a page."""

from fsdp_jax.inspect.show import layout_html, layout_json, layout_report

__all__ = ["layout_html", "layout_json", "layout_report"]
