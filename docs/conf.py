"""The documentation as a site: `make docs` builds it.

Sphinx's source folder is the repository, so that a link from a page to README or to a script is the
one that the repository's own page has.
"""

from importlib import import_module
from pathlib import Path

from sphinx.application import Sphinx

PACKAGES = [
    *("checkpoint", "contract", "data", "launch", "lora", "models", "optim", "planner"),
    *("testing", "trackers", "train", "weights"),
]
# The sidebar. It is not in docs/index.md, where the repository's own page would show it as code.
CONCEPTS = ["strategies", "units", "prefetch", "meshes", "remat-and-offload"]
NOTEBOOKS = sorted(path.stem for path in (Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
CHAPTERS = {
    "Start": ["tutorial", "translation", "glossary"],
    "Notebooks": [f"../notebooks/{name}" for name in NOTEBOOKS],
    "Concepts": [f"concepts/{name}" for name in CONCEPTS],
    "Train": [
        *("sharding", "models-and-data", "checkpoints", "bring-your-checkpoints"),
        *("trackers-and-profiles", "clusters", "restart", "command"),
    ],
    "Memory and time": ["memory", "edge-of-memory", "planning", "communication"],
    "Check": ["views", "certify", "troubleshooting", "limits", "evidence", "third_party"],
    "Reference": ["api/fsdp_jax", *(f"api/{name}" for name in PACKAGES)],
    "The project": [
        "README <../README>",
        "design/README",
        "../CONTRIBUTING",
        "../tests/README",
        "../CHANGELOG",
    ],
}
DESIGN_NOTES = [
    *("communication", "prefetch", "planner", "processes"),
    *("traced-programs", "other-libraries", "xla-cpu-waits"),
]

project = "fsdp_jax"
root_doc = "docs/index"
include_patterns = [
    *("docs/**", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/README.md"),
    "notebooks/*.ipynb",
]
exclude_patterns = [".*", "docs/_build", "output", "*.egg-info"]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_heading_anchors = 4
# Notebooks are shown as they are kept: the tests execute them.
nb_execution_mode = "off"

html_theme = "sphinx_book_theme"
html_title = "fsdp_jax"
html_theme_options = {
    "show_toc_level": 2,
    "home_page_in_toc": True,
    "navbar_persistent": [],
    "footer_content_items": [],
}
html_show_copyright = False
html_show_sourcelink = False
html_copy_source = False
# The first page is docs/index.html; index.html leads there.
html_additional_pages = {"index": "first_page.html"}
html_static_path = ["static"]
html_css_files = ["site.css"]
templates_path = ["templates"]

# Docstrings are in Google's style, with code between single backquotes.
default_role = "code"
autodoc_default_options = {"members": True, "imported-members": True, "no-value": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
napoleon_use_ivar = True
python_maximum_signature_line_length = 88
# The groups of arguments of `fully_shard`.
napoleon_custom_sections = [
    ("The model", "params_style"),
    ("What to shard and how", "params_style"),
    ("How units are formed", "params_style"),
    ("Precision", "params_style"),
    ("Memory against time", "params_style"),
]


def import_public_names() -> None:
    """Imports what the packages import when it is used: autodoc lists the names that are there."""
    for package in ("fsdp_jax", *(f"fsdp_jax.{name}" for name in PACKAGES)):
        module = import_module(package)
        names = getattr(module, "__all__", ())
        vars(module).update({name: getattr(module, name) for name in names}, __all__=names)


def add_tables_of_pages(app: Sphinx, page: str, source: list[str]) -> None:
    """Adds the tables of pages that make the sidebar to the first page and the design notes."""
    tables = {"docs/index": CHAPTERS, "docs/design/README": {"Design notes": DESIGN_NOTES}}
    for caption, pages in tables.get(page, {}).items():
        options = f":hidden:\n:caption: {caption}\n:maxdepth: 1\n"
        source[0] += f"\n```{{toctree}}\n{options}\n" + "\n".join(pages) + "\n```\n"


def setup(app: Sphinx) -> None:
    """Is called by Sphinx as the build begins."""
    import_public_names()
    app.connect("source-read", add_tables_of_pages)
