"""Counters in the text format of Prometheus."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)  # seconds


class Metrics:
    """What happened since the server started; written and read by the event loop alone."""

    def __init__(self) -> None:
        self.under_way = 0
        self._answers: Counter[tuple[str, str, int]] = Counter()
        self._buckets: defaultdict[str, list[int]] = defaultdict(lambda: [0] * (len(BUCKETS) + 1))
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count an answer; ``route`` is the pattern of its address, of which there are few."""
        self._answers[method, route, status] += 1
        self._buckets[route][bisect_left(BUCKETS, seconds)] += 1
        self._seconds[route] += seconds

    def text(self, others: Mapping[str, tuple[str, str, float]]) -> str:
        """Return all as text; ``others`` are more values by name: kind, purpose, value."""
        lines = [
            "# HELP vsm_requests_total Requests answered.",
            "# TYPE vsm_requests_total counter",
            *(
                f'vsm_requests_total{{method="{method}",route="{route}",status="{status}"}} {count}'
                for (method, route, status), count in sorted(self._answers.items())
            ),
            "# HELP vsm_request_seconds Time from the first byte to the answer.",
            "# TYPE vsm_request_seconds histogram",
            *(line for route in sorted(self._buckets) for line in self._histogram(route)),
        ]
        under_way = ("gauge", "Requests under way.", float(self.under_way))
        for name, (kind, purpose, value) in {"vsm_requests": under_way, **others}.items():
            lines += [f"# HELP {name} {purpose}", f"# TYPE {name} {kind}", f"{name} {value:g}"]
        return "\n".join(lines) + "\n"

    def _histogram(self, route: str) -> Iterable[str]:
        total = 0
        for bound, count in zip((*BUCKETS, "+Inf"), self._buckets[route], strict=True):
            total += count
            yield f'vsm_request_seconds_bucket{{route="{route}",le="{bound}"}} {total}'
        yield f'vsm_request_seconds_sum{{route="{route}"}} {self._seconds[route]:.6f}'
        yield f'vsm_request_seconds_count{{route="{route}"}} {total}'
