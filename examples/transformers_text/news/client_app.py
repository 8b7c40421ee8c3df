"""The Flower ClientApp: its handlers read and return whole state dicts."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedfrozen_app.mods import active_entries, freeze_, selection_of
from news.task import load_data, new_model
from news.task import test as test_fn
from news.task import train as train_fn

app = ClientApp(mods=[active_entries()])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the model of a message on this client's data."""
    config, node = message.content["config"], context.node_config
    partition = int(node["partition-id"])
    model = new_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    freeze_(model, selection_of(message))
    data, _ = load_data(partition, int(node["num-partitions"]))
    torch.manual_seed(1000 * int(config["server-round"]) + partition)
    loss = train_fn(model, data, int(context.run_config["local-epochs"]), float(config["lr"]))
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(data.dataset)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Test the model of a message on this client's data."""
    node = context.node_config
    model = new_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    _, data = load_data(int(node["partition-id"]), int(node["num-partitions"]))
    loss, accuracy = test_fn(model, data)
    metrics = {"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(data.dataset)}
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)
