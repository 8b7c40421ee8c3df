"""Collect what clients' tests on their own examples came to."""

from collections.abc import Sequence

from flwr.app import MetricRecord, RecordDict

from fedfrozen_app.transport.payload import NUM_EXAMPLES, PARTITION_ID
from fedfrozen_app.transport.records import metric_records


class ClientTests:
    """A strategy's ``evaluate_metrics_aggr_fn`` that keeps every client's result, too."""

    def __init__(self) -> None:
        self._tests: list[dict[str, float]] = []

    def __call__(self, contents: Sequence[RecordDict], weighted_by_key: str) -> MetricRecord:
        """Return the mean over clients, each by the examples that it tested on."""
        records = [dict(next(iter(metric_records(content).values()))) for content in contents]
        for record in records:
            client = int(record.pop(PARTITION_ID))  # type: ignore[arg-type]
            count = int(record.pop(NUM_EXAMPLES))  # type: ignore[arg-type]
            if count > 0:  # others held no examples back
                test = {name: float(value) for name, value in record.items()}  # type: ignore[arg-type]
                self._tests.append({"client": client, "num_examples": count, **test})
        total = sum(test["num_examples"] for test in self._tests)
        names = self._tests[0].keys() - {"client", "num_examples"} if self._tests else ()
        return MetricRecord(
            {
                name: sum(test[name] * test["num_examples"] for test in self._tests) / total
                for name in sorted(names)
            }
        )

    def take(self) -> list[dict[str, float]]:
        """Return the results since the last call, by client."""
        tests, self._tests = self._tests, []
        return sorted(tests, key=lambda test: test["client"])
