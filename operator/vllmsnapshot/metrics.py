"""Metrics: how a family is declared, and the families that operator and agent have in common.

A family is data. The registry, docs/reference/metrics.md, and the test that looks for every name used by an alert or a panel are
made of the same declarations, so they cannot differ. Names and labels follow Prometheus and controller-runtime: base units in the
name, `_total` for counters, no label whose values grow with the number of pods.

Counters count from the start of the process: after a restart they begin at 0, which `rate` and `increase` allow for. What is, as
opposed to what happened, is a gauge that is computed from objects when somebody asks, and so is right after a restart too.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from . import __version__
from .api.constants import Reason
from .kube import Call, Kube

K = TypeVar("K")

# A second series per counter and histogram, telling when it began: Prometheus sees that by itself.
disable_created_metrics()  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Buckets:
    """Upper bounds of a histogram's buckets, and why these."""

    bounds: tuple[float, ...]
    why: str


@dataclass(frozen=True, kw_only=True)
class Family:
    """A metric as it is exposed. `labels` maps each label to what its values are."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: dict[str, str]
    buckets: Buckets | None = None

    def counter(self, registry: CollectorRegistry) -> Counter:
        """As a counter in this registry."""
        assert self.kind == "counter"
        assert self.name.endswith("_total")
        return Counter(self.name, self.help, list(self.labels), registry=registry)

    def gauge(self, registry: CollectorRegistry) -> Gauge:
        """As a gauge in this registry, for what is set once."""
        assert self.kind == "gauge"
        return Gauge(self.name, self.help, list(self.labels), registry=registry)

    def histogram(self, registry: CollectorRegistry) -> Histogram:
        """As a histogram in this registry."""
        assert self.kind == "histogram"
        assert self.buckets is not None
        return Histogram(self.name, self.help, list(self.labels), registry=registry, buckets=self.buckets.bounds)

    def now(self, values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
        """As a gauge whose whole content is known at this moment: label values (in the order of `labels`) and value."""
        assert self.kind == "gauge"
        family = GaugeMetricFamily(self.name, self.help, labels=list(self.labels))
        for labels, value in values:
            family.add_metric(labels, value)
        return family


class State(Collector):
    """Gauges that are computed when they are asked for. `describe` is empty: registering must not look at the state."""

    def __init__(self, look: Callable[[], Iterable[Metric]]) -> None:
        self._look = look

    def collect(self) -> Iterable[Metric]:
        """The state now."""
        return self._look()

    def describe(self) -> Iterable[Metric]:
        """Nothing: the names are the declarations'."""
        return ()


CONTROLLER = "what is reconciled: `snapshot` and `resync` in the operator, `pod` and `content` in an agent"

BUILD_INFO = Family(
    name="vllmsnapshot_build_info",
    kind="gauge",
    help="1, with the version of the running component.",
    labels={
        "component": "`operator` or `agent`",
        "version": "version of VLLMSnapshot",
        "python_version": "version of Python",
    },
)
RECONCILE = Family(
    name="vllmsnapshot_reconcile_total",
    kind="counter",
    help="Passes, by how they ended.",
    labels={
        "controller": CONTROLLER,
        "result": "`success`; `requeue`: done, and looked at again after a time; `wait`: something was refused that somebody "
        "may remedy; `error`: tried again with back-off",
    },
)
RECONCILE_SECONDS = Family(
    name="vllmsnapshot_reconcile_seconds",
    kind="histogram",
    help="Seconds that a pass took. A pass of an agent over a pod includes the restore or capture that it carries out.",
    labels={"controller": CONTROLLER},
    buckets=Buckets(
        (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
        "a pass that finds nothing to do takes milliseconds, one with requests tenths of seconds, one with a capture or restore "
        "seconds to minutes (300 s is the default limit of a capture)",
    ),
)
API_REQUESTS = Family(
    name="vllmsnapshot_api_requests_total",
    kind="counter",
    help="Requests to the API server, by the verb and resource that RBAC knows. The operator's own watches are not among them.",
    labels={
        "verb": "`get`, `list`, `watch`, `create`, `patch`, `delete`",
        "resource": "resource, with its subresource after a slash",
        "code": "HTTP status, or `error` where no answer came",
    },
)
API_SECONDS = Family(
    name="vllmsnapshot_api_request_seconds",
    kind="histogram",
    help="Seconds until the API server began to answer; watches are not observed.",
    labels={"verb": API_REQUESTS.labels["verb"], "resource": API_REQUESTS.labels["resource"]},
    buckets=Buckets(
        (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 30.0),
        "Kubernetes' own objectives are 1 s for one object and 30 s for a list; 30 s is the limit of a request here",
    ),
)

COMMON = (BUILD_INFO, RECONCILE, RECONCILE_SECONDS, API_REQUESTS, API_SECONDS)


class Common:
    """The registry of a process, with what both components measure."""

    def __init__(self, component: Literal["operator", "agent"]) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        BUILD_INFO.gauge(self.registry).labels(component, __version__, platform.python_version()).set(1)
        self._reconciled = RECONCILE.counter(self.registry)
        self._reconcile_seconds = RECONCILE_SECONDS.histogram(self.registry)
        self._requests = API_REQUESTS.counter(self.registry)
        self._request_seconds = API_SECONDS.histogram(self.registry)

    def attach(self, kube: Kube) -> None:
        """Count the requests of this client."""
        kube.observe = self._called

    def _called(self, call: Call) -> None:
        code = str(call.status) if call.status else "error"
        self._requests.labels(call.verb, call.resource, code).inc()
        if call.verb != "watch":
            self._request_seconds.labels(call.verb, call.resource).observe(call.seconds)

    def timed(
        self,
        controller: Callable[[K], str],
        settle: Callable[[K], Awaitable[float | None]],
        waits: type[Exception] | tuple[type[Exception], ...] = (),
    ) -> Callable[[K], Awaitable[float | None]]:
        """`settle`, measured. An exception of `waits` is no error; a pass that is cancelled is not counted."""

        async def measured(key: K) -> float | None:
            began = time.monotonic()
            result = "cancelled"
            try:
                again = await settle(key)
                result = "success" if again is None else "requeue"
            except Exception as e:
                result = "wait" if isinstance(e, waits) else "error"
                raise
            finally:
                # CancelledError is no Exception: such a pass was cut off, and is made again by whoever comes next.
                if result != "cancelled":
                    self._reconciled.labels(controller(key), result).inc()
                    self._reconcile_seconds.labels(controller(key)).observe(time.monotonic() - began)
            return again

        return measured

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The answer to a scrape and its content type, for this Accept header."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


_REASONS = frozenset(value for name, value in vars(Reason).items() if name.isupper())


def known_reason(reason: str) -> str:
    """A reason as the value of a label: one that is not ours (a workload can write any) is `Other`."""
    return reason if reason in _REASONS else "Other"


class Once:
    """Counts a transition once, although whoever brings it about may have to try again and may not hear of its success.

    `expect` says that a token is about to be written for a key; `confirm` tells what is on record now, and is True the first time
    that this is the expected token. A process that starts and finds it on record expects nothing, so it counts nothing twice.
    """

    def __init__(self) -> None:
        self._expected: dict[str, str] = {}

    def expect(self, key: str, token: str) -> None:
        """The token is about to be written."""
        self._expected[key] = token

    def confirm(self, key: str, token: str) -> bool:
        """Whether this is news: the token is on record, and had been expected."""
        if self._expected.get(key) != token:
            return False
        del self._expected[key]
        return True

    def forget(self, key: str) -> None:
        """The object is gone."""
        self._expected.pop(key, None)
