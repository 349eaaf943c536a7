"""The documentation site: `make docs` writes it to build/docs.

The pages are the Markdown files of the repository where they lie, so the source directory is its
root: a relative link or image is then right on a code host and on the site alike, nothing is
copied, and no list of pages is kept. `docs/index.md` is the table of contents (see site/contents).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "site"))

from qsgd_hpc import __version__

project = "qsgd-hpc"
author = "The qsgd-hpc authors"
copyright = f"{author}. Apache-2.0"
release = version = __version__

root_doc = "docs/index"
include_patterns = [
    "*.md",
    "docs/**",
    "tutorials/**README.md",
    "scaling/**README.md",
    "jobs/README.md",
    "benchmarks/README.md",
    "benchmarks/results/*.md",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "sphinx_copybutton",
    "contents",
    "repository_links",
    "common_names",
    "command_help",
    "signatures",
]

myst_heading_anchors = 4
# Output that is not quite what its language allows, such as "..." in a listing, is left uncoloured.
suppress_warnings = ["misc.highlighting_failure"]
default_role = "literal"  # docstrings write `name`, as Markdown does
nitpicky = True
# Names of other projects: their documentation is not fetched, so that the site builds offline.
nitpick_ignore = [("py:class", "qsgd_hpc.frameworks.meter.Batch")]  # a type variable
nitpick_ignore_regex = [
    ("py:.*", r"(?!qsgd_hpc\.).*"),
    # Not public: a base class, a function of Python's private modules.
    ("py:.*", r"qsgd_hpc\.(.*\.)?_(?!handle).*"),
    # Described under the names by which the framework modules export them.
    ("py:class", r"qsgd_hpc\.frameworks\.(compressors\.NoneCompressor|parts\.ElasticShares)"),
    # What quantize_fsdp hands to QuantizedShards, which nobody else makes.
    ("py:class", r"qsgd_hpc\.torch\.fsdp\.collectives\.(ShardedModule|Traffic|QSGD\w+)"),
]

# It needs a numpy that is too old for the other frameworks; those must be installed.
autodoc_mock_imports = ["mxnet"]
autodoc_default_options = {"members": True, "member-order": "groupwise"}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
add_module_names = False
maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_custom_sections = [("Source", "returns_style")]

copybutton_prompt_text = "$ "

templates_path = ["site/templates"]
html_static_path = ["site/static"]
html_css_files = ["site.css"]
html_theme = "furo"
html_title = f"qsgd-hpc {release}"
html_show_sphinx = False
html_copy_source = False
html_additional_pages = {"index": "to_contents.html"}
