"""The records of a message's content by kind.

Flower's ``content.array_records`` and its like make a view in a reference cycle: whoever looks at
a reply through one keeps its arrays, as large as a model, until the garbage collector runs. These
are plain dicts.
"""

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict


def array_records(content: RecordDict) -> dict[str, ArrayRecord]:
    """Return the array records by name."""
    return {name: record for name, record in content.items() if isinstance(record, ArrayRecord)}


def config_records(content: RecordDict) -> dict[str, ConfigRecord]:
    """Return the config records by name."""
    return {name: record for name, record in content.items() if isinstance(record, ConfigRecord)}


def metric_records(content: RecordDict) -> dict[str, MetricRecord]:
    """Return the metric records by name."""
    return {name: record for name, record in content.items() if isinstance(record, MetricRecord)}
