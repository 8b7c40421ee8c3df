"""The clients' half of the rules: which hooks a message asks for, and SCAFFOLD's control."""

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, RecordDict
from torch import nn

from fedfrozen_app.models.selection import Selection
from fedfrozen_app.strategies import FedFrozen, Scaffold
from fedfrozen_app.strategies.effective_steps import effective_steps
from fedfrozen_app.strategies.fedprox import Proximal
from fedfrozen_app.strategies.scaffold import Correction
from fedfrozen_app.training.client_rules import ClientRules
from fedfrozen_app.training.hooks import ValueL2
from fedfrozen_app.training.local import LocalTraining
from fedfrozen_app.transport.client_state import ClientState
from fedfrozen_app.transport.payload import (
    ACCEPTED,
    CONTROL,
    PATH,
    PROXIMAL_MU,
    RUN,
    SERVER_ROUND,
    VALUE_L2,
    VERSION,
    Payload,
)
from tests.strategies.learners import Learners, Tensors, sequences, small_transformer

TOKEN = "0123456789abcdef" * 2
QKV, BIAS, HEAD = "blocks.0.attn.qkv.weight", "blocks.0.attn.qkv.bias", "head.weight"
X = {"w": torch.tensor([1.0, -2.0, 4.0]), "b": torch.tensor([0.5])}
GRADIENT = {"w": torch.tensor([0.25, -1.5, 3.0]), "b": torch.tensor([-0.75])}
C = {"w": torch.tensor([0.5, 0.5, -1.0]), "b": torch.tensor([0.25])}
C_I = {"w": torch.tensor([-0.25, 2.0, 0.0]), "b": torch.tensor([1.0])}


def payload(
    x: Tensors, c: Tensors | None, *, version: int = 1, accepted: int = 0, **config: Any
) -> Payload:
    said: dict[str, Any] = {SERVER_ROUND: 1, **config.pop("also", {})}
    path = config.pop("path", [])
    if c is not None:
        said |= {RUN: TOKEN, VERSION: version, ACCEPTED: accepted}
        said[PATH] = path
    extra = {} if c is None else {CONTROL: c}
    return Payload(x, None, config.pop("selection", "all"), "", ConfigRecord(said), extra)


def rules(one: Payload, entries: Tensors, folder: Path, **options: Any) -> ClientRules:
    selection = Selection.build(one.selection, entries)
    given = {"state": RecordDict(), "own_node": True, **options}
    return ClientRules(one, entries, selection, partition_id=3, folder=folder, **given)


def kept(folder: Path, state: RecordDict, *, own_node: bool = True) -> ClientState:
    return ClientState(state, folder, TOKEN, 3, CONTROL, own_node=own_node)


# --- hooks ------------------------------------------------------------------------------
def test_a_plain_message_asks_for_nothing(tmp_path: Path) -> None:
    state = RecordDict()
    plain = rules(payload(X, None), X, tmp_path, state=state)
    assert plain.hooks == [] and plain.reply(X, 0.5) == X
    assert not state and list(tmp_path.iterdir()) == []


def test_each_hook_is_there_for_its_key_and_only_then(tmp_path: Path) -> None:
    entries = dict(small_transformer().state_dict())
    zero = {name: torch.zeros_like(tensor) for name, tensor in entries.items()}
    asked = payload(entries, zero, also={VALUE_L2: 0.1, PROXIMAL_MU: 0.2})
    kinds = [type(hook) for hook in rules(asked, entries, tmp_path).hooks]
    assert kinds == [ValueL2, Proximal, Correction]
    zeros = payload(entries, None, also={VALUE_L2: 0.0, PROXIMAL_MU: 0.0})
    assert rules(zeros, entries, tmp_path).hooks == []


def test_a_control_without_a_run_is_an_error(tmp_path: Path) -> None:
    one = payload(X, C)
    del one.config[RUN]
    with pytest.raises(ValueError, match="token is 32 lowercase hex digits, got ''"):
        rules(one, X, tmp_path)


# --- SCAFFOLD's control -------------------------------------------------------------------
def step(params: dict[str, nn.Parameter], hooks: list[Any], steps: int, **sgd: Any) -> Tensors:
    """Take steps under the same gradient each."""
    optimizer = torch.optim.SGD(params.values(), **sgd)
    for hook in hooks:
        hook.begin(params)
    for _ in range(steps):
        for name, param in params.items():
            param.grad = GRADIENT[name].clone()
        for hook in hooks:
            hook.correct(params)
        optimizer.step()
    return {name: param.detach().clone() for name, param in params.items()}


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_under_constant_gradients_the_next_control_is_the_gradient(
    tmp_path: Path, momentum: float, steps: int
) -> None:
    state = RecordDict()
    kept(tmp_path, state).put(1, 0, C_I, "all")
    one = rules(payload(X, C, version=2, accepted=1), X, tmp_path, state=state)
    params = {name: nn.Parameter(tensor.clone()) for name, tensor in X.items()}
    y = step(params, one.hooks, steps, lr=0.25, momentum=momentum)
    # 1 and 3 steps of plain SGD count 1 and 3; with momentum .5: 1, 1 + 1.5 + 1.75 = 4.25
    count = {(1, 0.0): 1, (3, 0.0): 3, (1, 0.5): 1, (3, 0.5): 4.25}[steps, momentum]
    assert effective_steps(steps, momentum=momentum) == count
    for name in X:  # g - c_i + c = 1, -3, 2 and -1.5
        shifted = {"w": torch.tensor([1.0, -3.0, 2.0]), "b": torch.tensor([-1.5])}[name]
        assert torch.equal(y[name], X[name] - 0.25 * count * shifted)
    delta = one.reply(y, 0.25 * count)
    following = kept(tmp_path, state).get(2)
    assert following is not None and following.selection == "all"
    for name in X:
        torch.testing.assert_close(following.tensors[name], GRADIENT[name], rtol=0, atol=3e-7)
        assert torch.equal(delta[f"control/{name}"], following.tensors[name] - C_I[name])
    assert delta.keys() == {"w", "b", "control/w", "control/b"}


def test_a_client_asked_for_the_first_time_starts_at_zero_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = rules(payload(X, C), X, tmp_path)
    y = step({n: nn.Parameter(t.clone()) for n, t in X.items()}, one.hooks, 1, lr=0.5)
    assert torch.equal(y["w"], X["w"] - 0.5 * (GRADIENT["w"] + C["w"]))
    assert caplog.records == []


@pytest.mark.parametrize("own_node", [True, False])
def test_a_client_that_lost_its_control_warns_and_takes_the_servers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, own_node: bool
) -> None:
    state = RecordDict()
    kept(tmp_path, state, own_node=own_node).put(5, 0, C_I, "all")
    asked = payload(X, C, version=9, accepted=4)
    one = rules(asked, X, tmp_path, state=state, own_node=own_node)
    y = step({n: nn.Parameter(t.clone()) for n, t in X.items()}, one.hooks, 1, lr=0.5)
    assert torch.equal(y["w"], X["w"] - 0.5 * GRADIENT["w"])  # c - c_i = 0
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "client 3 has lost its SCAFFOLD control of version 4" in record.getMessage()
    delta = one.reply(y, 0.5)  # c_i+ is the gradient, c_i was c
    assert torch.allclose(delta["control/w"], GRADIENT["w"] - C["w"])


def test_a_client_without_examples_changes_nothing(tmp_path: Path) -> None:
    state = RecordDict()
    kept(tmp_path, state).put(1, 0, C_I, "all")
    one = rules(payload(X, C, version=2, accepted=1), X, tmp_path, state=state)
    delta = one.reply(X, 0.0)
    assert {name: delta[name].tolist() for name in delta if name not in X} == {
        "control/w": [0.0, 0.0, 0.0],
        "control/b": [0.0],
    }
    assert kept(tmp_path, state).get(2) is None
    before = kept(tmp_path, state).get(1)
    assert before is not None and torch.equal(before.tensors["w"], C_I["w"])


@pytest.mark.parametrize("own_node", [True, False])
def test_the_control_lies_with_the_node_or_in_files(tmp_path: Path, own_node: bool) -> None:
    state = RecordDict()
    rules(payload(X, C), X, tmp_path, state=state, own_node=own_node).reply(X, 0.5)
    assert bool(state) is own_node
    files = [path.name for path in tmp_path.rglob("*.safetensors")]
    assert files == ([] if own_node else ["control-1.safetensors"])


def test_a_message_tried_again_goes_on_from_the_accepted_control(tmp_path: Path) -> None:
    state = RecordDict()
    kept(tmp_path, state).put(1, 0, C_I, "all")
    deltas = []
    for version in (2, 3, 4):  # the replies of 2 and 3 were lost
        one = rules(payload(X, C, version=version, accepted=1), X, tmp_path, state=state)
        y = step({n: nn.Parameter(t.clone()) for n, t in X.items()}, one.hooks, 1, lr=0.5)
        deltas.append(one.reply(y, 0.5)["control/w"].tolist())
    assert deltas[0] == deltas[1] == deltas[2] == [0.5, -3.5, 3.0]  # g - c_i


def test_a_control_follows_the_path_of_selections(tmp_path: Path) -> None:
    entries = dict(small_transformer().state_dict())
    state = RecordDict()
    old = {name: torch.full_like(tensor, 3.0) for name, tensor in entries.items()}
    kept(tmp_path, state).put(1, 0, old, "all")
    c = {name: torch.zeros_like(tensor) for name, tensor in entries.items()}
    keys = f"{QKV}[key] {BIAS}[0:3]"
    one = payload(entries, c, version=7, accepted=1, path=["query-key", keys, "all"])
    delta = rules(one, entries, tmp_path, state=state).reply(entries, 0.5)
    # x = y and c = 0, so c_i+ = c_i, whatever it was: see what was taken up
    assert all((delta[f"control/{name}"] == 0).all() for name in entries)
    after = kept(tmp_path, state).get(7)
    assert after is not None and after.selection == "all"
    assert (after.tensors[QKV][:14] == 0).all() and (after.tensors[QKV][14:] == 3).all()
    assert (after.tensors[BIAS][:14] == 0).all() and (after.tensors[BIAS][14:] == 3).all()
    assert (after.tensors[HEAD] == 3).all()


# --- where the control lies in the parameters -----------------------------------------------
SPECS = {
    "all": "all",
    "query-key": "query-key",
    "two ranges": f"{QKV}[key] {BIAS}[key]",
    "three ranges": f"{QKV}[2:5] {QKV}[11:17] {HEAD}[1:3]",
    "whole": f"{HEAD} head.bias {QKV}[query]",
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_after_one_step_on_all_examples_the_control_is_the_gradient(
    tmp_path: Path, spec: str
) -> None:
    # c and c_i are not zero then, so the gradient comes out only if they were added in place
    settings = LocalTraining(steps=1, batch_size=100, lr=0.5, momentum=0.9)
    clients = Learners(tmp_path, small_transformer, sequences((11, 5, 7)), settings)
    rule = Scaffold()
    strategy = FedFrozen(rule, warmup_rounds=2, frozen=spec)
    arrays = clients.run(strategy, 3)
    x = {name: torch.from_numpy(array.numpy()) for name, array in arrays.items()}
    clients.run(strategy, 1, arrays, first=4)
    selection = Selection.build(spec, x)
    for client, examples in enumerate(clients.examples):
        model = small_transformer()
        model.load_state_dict(x)
        nn.functional.cross_entropy(model(examples.x), examples.y).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        expected, _ = selection.split(gradients)
        control = clients.control(rule, client)
        assert control is not None and control.tensors.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(control.tensors[name], gradient, rtol=1e-4, atol=2e-6)
        assert rule.state.c[QKV].abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_correction_takes_the_dtype_of_the_parameters(dtype: torch.dtype) -> None:
    hook = Correction(C, C_I, Selection.build("all", X))
    params = {name: nn.Parameter(tensor.to(dtype)) for name, tensor in X.items()}
    hook.begin(params)
    params["w"].grad = torch.zeros(3, dtype=dtype)  # b has none: the loss does not use it
    hook.correct(params)
    assert params["w"].grad.dtype == dtype
    assert params["w"].grad.tolist() == [0.75, -1.5, -1.0]
    assert params["b"].grad is not None and params["b"].grad.dtype == dtype


def test_the_correction_goes_where_the_parameters_are() -> None:
    hook = Correction(C, C_I, Selection.build("all", X))
    params = {name: nn.Parameter(tensor.to("meta")) for name, tensor in X.items()}
    hook.begin(params)
    assert {tensor.device.type for tensor in hook._shift.values()} == {"meta"}
    assert hook._shift.keys() == X.keys()


@pytest.mark.gpu
def test_the_correction_on_a_gpu_is_that_on_a_cpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    hook = Correction(C, C_I, Selection.build("all", X))
    params = {name: nn.Parameter(tensor.cuda()) for name, tensor in X.items()}
    hook.begin(params)
    params["w"].grad = torch.zeros(3, device="cuda")
    hook.correct(params)
    assert params["w"].grad.tolist() == [0.75, -1.5, -1.0]


def test_entries_that_have_no_control_are_left_alone() -> None:
    only = Correction({"w": C["w"]}, {"w": C_I["w"]}, Selection.build("all", X))
    params = {name: nn.Parameter(tensor.clone()) for name, tensor in X.items()}
    only.begin(params)
    for param in params.values():
        param.grad = torch.zeros_like(param)
    only.correct(params)
    assert params["w"].grad is not None and params["w"].grad.tolist() == [0.75, -1.5, -1.0]
    assert params["b"].grad is not None and params["b"].grad.tolist() == [0.0]
