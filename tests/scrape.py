"""What a scrape of /metrics says, for tests."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: str) -> Samples:
    """Every sample, by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(found: Samples, name: str, **labels: str) -> float:
    """Sum of the samples of this name that have these labels."""
    return sum(value for (sample, have), value in found.items() if sample == name and labels.items() <= dict(have).items())


def by(found: Samples, name: str, label: str) -> Mapping[str, float]:
    """The samples of this name, by one label."""
    return {dict(have)[label]: value for (sample, have), value in found.items() if sample == name}


def counted(found: Samples, name: str, label: str) -> Mapping[str, float]:
    """As `by`, without what has not happened."""
    return {have: value for have, value in by(found, name, label).items() if value}
