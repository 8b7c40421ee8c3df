"""The Flower ClientApp: message -> model -> local training -> reply."""

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedfrozen_app.engine.roster import NUM_PARTITIONS, QUERY_PARTITION
from fedfrozen_app.strategies.effective_steps import effective_steps
from fedfrozen_app.training.client_rules import ClientRules
from fedfrozen_app.training.worker import client_config, resident
from fedfrozen_app.transport.payload import (
    METRICS,
    NUM_EXAMPLES,
    PARTITION_ID,
    PERSONALISE,
    REPLY,
    SERVER_ROUND,
    STEPS,
    MissingFrozenBlock,
    missing_reply,
    open_payload,
    train_reply,
)

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the entries the message leaves active and reply with them."""
    worker = resident(client_config(context.run_config, context.node_config))
    try:
        payload = open_payload(message, worker.cache, worker.digest)
    except MissingFrozenBlock as missing:
        return missing_reply(message, str(missing))
    config = payload.config
    partition_id = int(config.get(PARTITION_ID, context.node_config.get(PARTITION_ID, -1)))  # type: ignore[arg-type]
    worker.load(payload)
    rules = ClientRules(
        payload,
        worker.entries,
        worker.selection,
        partition_id=partition_id,
        state=context.state,
        folder=worker.client_states,
        own_node=context.node_config.get(NUM_PARTITIONS) == worker.num_clients,
    )
    result = worker.train(partition_id, int(config[SERVER_ROUND]), rules.hooks)  # type: ignore[arg-type]
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
    worker = resident(client_config(context.run_config, context.node_config))
    try:
        payload = open_payload(message, worker.cache, worker.digest)
    except MissingFrozenBlock as missing:
        return missing_reply(message, str(missing))
    config = payload.config
    partition_id = int(config.get(PARTITION_ID, context.node_config.get(PARTITION_ID, -1)))  # type: ignore[arg-type]
    worker.load(payload)
    found = worker.test_client(
        partition_id,
        int(config[SERVER_ROUND]),  # type: ignore[arg-type]
        personalise=bool(config.get(PERSONALISE, False)),
    )
    metrics = MetricRecord({PARTITION_ID: partition_id, **found})
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
