"""Docstrings as mkdocstrings reads them: examples get a heading, parameters a line of their own.

In the source, an example follows the parameters without a heading, and a parameter with a short
description has it on its own line after a colon, where numpydoc expects a type.
"""

import re

PARAMETER = re.compile(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*) : (.+)$")


def as_numpydoc(text: str) -> str:
    """Return a docstring in numpydoc's form.

    >>> as_numpydoc("Add.\\n\\nParameters\\n----------\\na, b : numbers")
    'Add.\\n\\nParameters\\n----------\\na, b\\n    numbers'
    >>> as_numpydoc("Add.\\n\\n>>> 1 + 1\\n2")
    'Add.\\n\\nExamples\\n--------\\n>>> 1 + 1\\n2'
    """
    lines: list[str] = []
    inside = shown = False
    for line in text.splitlines():
        inside = inside or line.rstrip() == "Parameters"
        match = PARAMETER.match(line) if inside else None
        if match:
            lines += [match[1], f"    {match[2]}"]
        elif line.startswith(">>>") and not shown:
            shown, inside = True, False
            lines += [*(() if "Examples" in lines else ("Examples", "--------")), line]
        elif match is None and inside and line.startswith("  ") and not line.startswith("    "):
            lines.append(f"    {line.strip()}")
        else:
            lines.append(line)
    return "\n".join(lines)
