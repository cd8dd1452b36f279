"""The metrics of several replicas as one page.

Knows: Prometheus's text format. Does not know: what is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

PREFIX = "forerun_replica_"  # so that no name is that of a metric of the process in front


def labelled(texts: Mapping[str, bytes]) -> bytes:
    """One page from those of several replicas: forerun_X of a replica is forerun_replica_X{replica="NAME"}."""
    registry = CollectorRegistry()
    registry.register(_Pages(texts))
    return generate_latest(registry)


class _Pages(Collector):
    def __init__(self, texts: Mapping[str, bytes]) -> None:
        self._texts = texts

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for replica, text in sorted(self._texts.items()):
            for family in text_string_to_metric_families(text.decode()):
                name = PREFIX + family.name.removeprefix("forerun_")
                merged = families.setdefault(name, Metric(name, family.documentation, family.type))
                for sample in family.samples:
                    own = PREFIX + sample.name.removeprefix("forerun_")
                    merged.add_sample(own, {**sample.labels, "replica": replica}, sample.value)
        yield from families.values()
