"""The frame of the HTML pages that commands write. A page is one file, and needs no other file and no network.

>>> page("Tuning of <host>", "<p>body</p>").count("&lt;host&gt;")
2
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_FRAME = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1100px; padding: 0 1em; color: #1c1c1c }}
h1 {{ font-size: 1.5em }} h2 {{ font-size: 1.15em; margin-top: 2em }}
table {{ border-collapse: collapse; font-size: 13px }}
th, td {{ border: 1px solid #d5d5d0; padding: 4px 8px; text-align: left }}
.scroll {{ overflow-x: auto }} img, svg {{ max-width: 100% }} code {{ font-size: 13px }}
{style}</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def page(title: str, body: str, style: str = "") -> str:
    """Return a page.

    Args:
        title: the title as text; the page has it as its heading, too.
        body: the rest as HTML.
        style: further rules of CSS.
    """
    return _FRAME.format(title=escape(title), body=body, style=style)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose headings are text, and whose cells are HTML between ``<td>`` and ``</td>``."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    lines = "\n".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table>\n<tr>{head}</tr>\n{lines}</table></div>'
