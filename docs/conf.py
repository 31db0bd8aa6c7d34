"""The configuration of Sphinx, which builds the site from the pages in this folder: `make docs`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import unisono

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

project = "Unisono"
author = "The Unisono developers"
release = unisono.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "sphinx_copybutton",
    "sphinx_design",
    "drawings",
]

# Links between pages may name headings up to this level, and Sphinx checks that the headings exist.
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block"]

# The tutorial is run whenever the site is built, and an exception in it is an error.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
# Errors say in this section what the user can do.
napoleon_custom_sections = ["Remedy"]
napoleon_use_ivar = True
napoleon_use_rtype = False
# Docstrings write names in single backticks. A name that the reference contains becomes a link.
default_role = "py:obj"
# Several classes have a `rank`, and a docstring says of which class it speaks.
suppress_warnings = ["ref.python"]
toc_object_entries_show_parents = "hide"

smartquotes = False  # texts have options such as --seconds

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_title = "Unisono"
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True


def draw_dashes(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Write a dash between an argument and its description, which smart quotes would do."""
    for text in list(doctree.findall(nodes.Text)):
        if text == " -- ":
            text.parent.replace(text, nodes.Text(" – "))


def leave_out_of_search(app: Sphinx, environment: BuildEnvironment) -> list[str]:
    """Let the search find measurements and decisions by their titles only, so that guides come first."""
    for page in environment.found_docs:
        if page.startswith(("measurements/", "decisions/")) or page == "changes":
            environment.metadata[page]["nosearch"] = "true"
    return []


def show_own_section(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document) -> None:
    """Let the sidebar list the pages of the current section only.

    All 150 pages on each page would take half of the time of a build.
    """
    whole = context["toctree"]
    context["toctree"] = lambda **options: whole(**{**options, "collapse": True})


def setup(app: Sphinx) -> None:
    """Register the functions of this file."""
    app.connect("doctree-resolved", draw_dashes)
    app.connect("env-updated", leave_out_of_search)
    app.connect("html-page-context", show_own_section, priority=400)  # before that of furo
