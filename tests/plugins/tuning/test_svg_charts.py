"""Charts of measurements as SVG."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from edge_server.plugins.tuning.svg_charts import ChartCurve, CurvePanel, draw_panels


def dots(picture: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', picture)]


def test_a_logarithmic_axis_gives_each_factor_the_same_width() -> None:
    curve = ChartCurve("kB", [(1, 3.0), (10, 3.0), (1000, 3.0)], "#000")
    at = [x for x, _ in dots(draw_panels("memory", [CurvePanel("memory", [curve], "models", is_log=True)]))]
    assert at[2] - at[1] == pytest.approx(2 * (at[1] - at[0]), abs=0.2)


def test_panels_in_columns_lie_beside_each_other_within_the_picture() -> None:
    panels = [CurvePanel(f"panel {n}", [ChartCurve("a", [(1, 1.0), (2, math.nan)], "#000")], "x") for n in range(3)]
    picture = draw_panels("three", panels, columns=2)
    ElementTree.fromstring(picture)
    width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', picture).groups())
    (x0, y0), (x1, y1), (x2, y2) = dots(picture)
    assert x0 == x2 < x1 < width
    assert y0 == y1 < y2 < height


def test_values_below_zero_lie_on_the_axis() -> None:
    curve = ChartCurve("kB", [(1, -3.0), (2, 0.0)], "#000")
    (_, low), (_, zero) = dots(draw_panels("memory", [CurvePanel("memory", [curve], "models")]))
    assert low == zero
