"""An extension of griffe for the site: docstrings as Markdown.

In the sources a paragraph of a docstring says what an argument is by `name: text` or
`name [sizes] text`, with its further lines set in. Here each becomes an item of a list.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ITEM = re.compile(r"^(\*{0,2}\w+(?:, \w+)*)((?: \[[^\]]*\])?)(:?) (?=\S)")


class Docstrings(griffe.Extension):
    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        _rewrite(func, {p.name for p in func.parameters})

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        made = cls.members.get("__init__")
        given = made.parameters if isinstance(made, griffe.Function) else ()
        _rewrite(cls, {p.name for p in given} | set(cls.members))


def _rewrite(of: griffe.Function | griffe.Class, names: set[str]) -> None:
    if of.docstring is None:
        return
    lines: list[str] = []
    item = False
    for line in of.docstring.value.splitlines():
        start = ITEM.match(line)
        named = start is not None and all(n.strip("* ") in names for n in start[1].split(","))
        if named and start is not None and (start[2] or start[3]):
            if not item:
                lines.append("")
            head = f"- **{start[1]}**" + (f" `{start[2].strip()}`" if start[2] else "")
            line, item = f"{head}{start[3]} {line[start.end() :]}", True
        elif item and line.startswith("  "):
            line = "  " + line.strip()
        elif item and line:
            lines.append("")
            item = False
        lines.append(line)
    of.docstring.value = "\n".join(lines)
