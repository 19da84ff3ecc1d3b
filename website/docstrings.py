"""The extension of griffe through which mkdocstrings reads docstrings as numpydoc."""

from typing import Any

import griffe

from website.numpydoc import as_numpydoc


class Numpydoc(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = as_numpydoc(obj.docstring.value)
