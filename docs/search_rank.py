"""A hook of `make docs`: the search of the site shows guides before the reference, errors and measurements.

Where only one page has the words, such as the class of an error, it is still the first one.
"""

from typing import Any

_LATER = ("errors_", "keras_matrix", "reliability", "architecture", "data_resume", "tpu_")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lowers the rank of the pages that are looked up, not read."""
    if page.file.src_uri.startswith(_LATER):
        page.meta.setdefault("search", {})["boost"] = 0.3
    elif page.file.src_uri.startswith("api/"):
        page.meta.setdefault("search", {})["boost"] = 0.1
    elif page.file.src_uri == "reference/run_directory.md":
        page.meta.setdefault("search", {})["boost"] = 2
    return markdown
