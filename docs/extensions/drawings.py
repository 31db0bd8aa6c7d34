"""Directives of Sphinx that draw the project's own objects, as SVG that has the text colour of the page."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import figures
import matplotlib
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

from unisono.algorithms.catalogue.registry import find
from unisono.algorithms.ir.drawing import rows
from unisono.bench import curves
from unisono.cli.output.schedule_picture import Panel, picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
PIXELS = 100  # the most for an inch of a figure
INK = "#010203"  # no other part of a picture has this colour, so it can be replaced by that of the page's text


def inline_svg(figure: Figure, description: str) -> nodes.raw:
    """Return the figure as SVG for an HTML page. Screen readers read the description."""
    written = io.StringIO()
    with matplotlib.rc_context(curves.SVG):
        figure.savefig(written, format="svg", metadata=curves.NO_METADATA)
    return inline_text(written.getvalue(), description, figure.get_figwidth())


def inline_text(written: str, description: str, inches: float) -> nodes.raw:
    """Return a picture in the text of an SVG file for an HTML page, at most so many inches wide."""
    svg = re.search(r"<svg.*</svg>", written, re.DOTALL)
    assert svg is not None
    attributes = f'role="img" aria-label="{description}" style="max-width: {inches * PIXELS:.0f}px"'
    text = svg[0].replace(INK, "currentColor").replace("<svg ", f"<svg {attributes} ", 1)
    return nodes.raw("", f'<div class="drawing">{text}</div>', format="html")


class Plans(SphinxDirective):
    """Draws the schedules of algorithms side by side: ``{plans} allreduce ring rabenseifner``."""

    required_arguments = 2
    optional_arguments = 6
    option_spec = {  # noqa: RUF012 - the base class defines it so
        "ranks": directives.positive_int,
        "segments": directives.positive_int,
        "root": directives.nonnegative_int,
    }

    def run(self) -> list[nodes.Node]:
        """Return the picture."""
        collective, *names = self.arguments
        size, root = self.options.get("ranks", 4), self.options.get("root", 0)
        panels = []
        for name in names:
            algorithm = find(collective, name)
            plans = [algorithm.build(size, rank, root) for rank in range(size)]
            panels.append(Panel(name, plans, rows(plans, self.options.get("segments", 1))))
        description = f"Schedules of {collective} on {size} ranks: {', '.join(names)}"
        return [inline_svg(picture(panels, INK), description)]


class Curves(SphinxDirective):
    """Draws the newest saved benchmark of a collective that measured all the libraries that are named."""

    required_arguments = 2
    optional_arguments = 9
    option_spec = {"cpu": directives.unchanged, "ranks": directives.positive_int}  # noqa: RUF012

    def run(self) -> list[nodes.Node]:
        """Return the picture. The page depends on the file of results."""
        collective, *libraries = self.arguments
        path = ROOT / "bench" / "results" / f"{collective}.jsonl"
        self.env.note_dependency(str(path))
        benchmark = curves.newest(path, libraries, self.options.get("cpu", ""), self.options.get("ranks", 2))
        return [inline_svg(curves.picture(benchmark, INK), benchmark.title)]


class Losses(SphinxDirective):
    """A table of the saved comparisons in which another library was surely faster than Unisono."""

    def run(self) -> list[nodes.Node]:
        """Return a sentence with the counts, and the table."""
        paths = [ROOT / "bench" / "results" / f"{name}.jsonl" for name in figures.COLLECTIVES]
        compared = curves.comparisons(paths)
        lines = [
            f"In {len(compared)} situations the newest results compare another library with Unisono. "
            f"The other library was surely faster in {sum(each.high < 1 for each in compared)} of them:",
            "",
            *figures.losses(compared),
        ]
        for path in paths:
            self.env.note_dependency(str(path))
        return self.parse_text_to_nodes("\n".join(lines))


class Predictions(SphinxDirective):
    """Draws the times that the tuner predicts: ``{predictions} allreduce ring recursive_doubling``."""

    required_arguments = 2
    optional_arguments = 6
    option_spec = {"ranks": directives.positive_int, "link": directives.unchanged}  # noqa: RUF012

    def run(self) -> list[nodes.Node]:
        """Return the picture."""
        collective, *algorithms = self.arguments
        ranks, link = self.options.get("ranks", 8), self.options.get("link", "shm")
        figure = figures.predictions(collective, algorithms, ranks, link, INK)
        return [inline_svg(figure, f"Predicted times of {collective} on {ranks} ranks by size")]


class Layers(SphinxDirective):
    """Draws the layers of the library."""

    def run(self) -> list[nodes.Node]:
        """Return the picture."""
        return [inline_svg(figures.layers(INK), "The layers of Unisono, the highest first")]


class Boxes(SphinxDirective):
    """Draws rows of boxes with arrows, as `figures.boxes` describes; the argument describes the picture."""

    required_arguments = 1
    final_argument_whitespace = True
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the picture."""
        try:
            return [inline_svg(figures.boxes(list(self.content), INK), self.arguments[0])]
        except ValueError as error:
            raise self.error(str(error)) from error


class Waiting(SphinxDirective):
    """Runs ranks, and draws when each of them computed and when it waited."""

    def run(self) -> list[nodes.Node]:
        """Return the picture."""
        return [inline_svg(figures.waiting(INK), "Ranks 0 and 2 wait in each allreduce for rank 1, which is slow")]


class GradientSteps(SphinxDirective):
    """Trains on two ranks, and shows the picture that `GradientReducer.draw` makes of the last steps."""

    def run(self) -> list[nodes.Node]:
        """Return the picture."""
        description = "Three steps: buckets are reduced while further gradients become ready"
        return [inline_text(figures.gradient_steps(INK), description, 10)]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    app.add_directive("plans", Plans)
    app.add_directive("curves", Curves)
    app.add_directive("losses", Losses)
    app.add_directive("predictions", Predictions)
    app.add_directive("layers", Layers)
    app.add_directive("boxes", Boxes)
    app.add_directive("waiting", Waiting)
    app.add_directive("gradient-steps", GradientSteps)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
