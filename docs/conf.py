"""How is the documentation site built? `make site`; a warning is an error.

Pages are the Markdown files of this folder. Two things are made before they are read, in
docs/generated/ (git ignores it): the reference, from the public names of docs/api.md
(`reference.py`), and the pictures of the concepts, drawn by the library itself (`pictures.py`).
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import reference  # noqa: E402

import ibaml  # noqa: E402
import pictures  # noqa: E402

project = "ibaml"
release = version = ibaml.__version__
copyright = "the authors of ibaml; Apache-2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autoclass_content = "class"
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"ibaml {release}"
html_theme_options = {"navigation_with_keys": True}

generated = HERE / "generated"
reference.write(HERE / "api.md", generated)
pictures.draw_all(generated)
default_role = "code"


def not_ours(app, what, name, thing, skip, options):
    """scikit-learn puts methods for the routing of metadata into every estimator."""
    return skip or (name.startswith("set_") and name.endswith("_request"))


def setup(app):
    app.connect("autodoc-skip-member", not_ours)
