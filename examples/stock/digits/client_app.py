"""The Flower ClientApp."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from digits.task import Net, load_data
from digits.task import test as test_fn
from digits.task import train as train_fn

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the model of a message on this client's data."""
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    partition_id = int(context.node_config["partition-id"])
    trainloader, _ = load_data(partition_id, int(context.node_config["num-partitions"]))
    torch.manual_seed(partition_id)
    epochs = int(context.run_config["local-epochs"])
    train_loss = train_fn(net, trainloader, epochs, float(message.content["config"]["lr"]))
    metrics = MetricRecord({"train_loss": train_loss, "num-examples": len(trainloader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Test the model of a message on this client's data."""
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    partition_id = int(context.node_config["partition-id"])
    _, testloader = load_data(partition_id, int(context.node_config["num-partitions"]))
    loss, accuracy = test_fn(net, testloader)
    metrics = MetricRecord(
        {"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(testloader.dataset)}
    )
    return Message(content=RecordDict({"metrics": metrics}), reply_to=message)
