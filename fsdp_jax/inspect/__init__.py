"""Looking at a layout, and at what the compiled step sends: as text, as JSON, as a page."""

from fsdp_jax.inspect.contract import Contract, check_contract
from fsdp_jax.inspect.show import layout_html, layout_json, layout_report

__all__ = ["Contract", "check_contract", "layout_html", "layout_json", "layout_report"]
