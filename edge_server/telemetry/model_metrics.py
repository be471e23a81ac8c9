"""Families that models made, in the page's form."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from edge_server.core.custom_metric import MetricFamilyView
from edge_server.telemetry.metrics_page import Family, Source


def custom_families(views: Callable[[], Iterable[MetricFamilyView]]) -> Source:
    """Return a source of the page that shows what `views` gives at the time."""

    def families() -> list[Family]:
        return [_family(view) for view in views()]

    return families


def _family(view: MetricFamilyView) -> Family:
    family = Family(view.name, view.kind, view.help)
    for sample in view.samples:
        family.add(sample.labels, sample.value, part=sample.part)
    return family
