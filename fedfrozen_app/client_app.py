"""The Flower ClientApp: message -> model -> local training -> reply."""

from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedfrozen_app.engine.roster import NUM_PARTITIONS, QUERY_PARTITION
from fedfrozen_app.strategies.effective_steps import effective_steps
from fedfrozen_app.training.client_rules import ClientRules
from fedfrozen_app.training.worker import Worker, client_config, resident
from fedfrozen_app.transport.payload import (
    METRICS,
    NUM_EXAMPLES,
    PARTITION_ID,
    PERSONALISE,
    REPLY,
    SERVER_ROUND,
    STEPS,
    MissingFrozenBlock,
    Payload,
    missing_reply,
    open_payload,
    train_reply,
)

app = ClientApp()


@dataclass(frozen=True)
class Opened:
    """What a message is about: the worker that has loaded it, what it brought, whose turn it is."""

    worker: Worker
    payload: Payload
    partition_id: int
    server_round: int


def load(message: Message, context: Context) -> Opened:
    """Load a message's model into this process's worker.

    Raises
    ------
    MissingFrozenBlock
        If the frozen block has to be sent, too.
    """
    worker = resident(client_config(context.run_config, context.node_config))
    payload = open_payload(message, worker.cache, worker.digest)
    config: dict[str, Any] = dict(payload.config)
    partition_id = config.get(PARTITION_ID, context.node_config.get(PARTITION_ID, -1))
    worker.load(payload)
    return Opened(worker, payload, int(partition_id), int(config[SERVER_ROUND]))


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the entries the message leaves active and reply with them."""
    try:
        opened = load(message, context)
    except MissingFrozenBlock as missing:
        return missing_reply(message, str(missing))
    worker, payload, partition_id = opened.worker, opened.payload, opened.partition_id
    rules = ClientRules(
        payload,
        worker.entries,
        worker.selection,
        partition_id=partition_id,
        state=context.state,
        folder=worker.client_states,
        own_node=context.node_config.get(NUM_PARTITIONS) == worker.num_clients,
    )
    result = worker.train(partition_id, opened.server_round, rules.hooks)
    step_sizes = worker.config.lr * effective_steps(result.steps, momentum=worker.config.momentum)
    metrics = {
        NUM_EXAMPLES: result.num_examples,
        "train_loss": result.train_loss,
        "train_seconds": result.seconds,
        STEPS: result.steps,
    }
    return train_reply(message, rules.reply(worker.active(), step_sizes), metrics)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Test the model on the client's own held-out examples; see ``Worker.test_client``."""
    try:
        opened = load(message, context)
    except MissingFrozenBlock as missing:
        return missing_reply(message, str(missing))
    found = opened.worker.test_client(
        opened.partition_id,
        opened.server_round,
        personalise=bool(opened.payload.config.get(PERSONALISE, False)),
    )
    metrics = MetricRecord({PARTITION_ID: opened.partition_id, **found})
    return Message(RecordDict({METRICS: metrics}), reply_to=message)


@app.query(QUERY_PARTITION.partition(".")[2])
def partition(message: Message, context: Context) -> Message:
    """Say which partition this node holds, of how many."""
    reply = ConfigRecord(
        {
            key: int(context.node_config.get(key, default))
            for key, default in ((PARTITION_ID, 0), (NUM_PARTITIONS, 1))
        }
    )
    return Message(RecordDict({REPLY: reply}), reply_to=message)
