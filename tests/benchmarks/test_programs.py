"""Whole steps of programs: which rows there are, how they come about, and that kernlib and rivals
of the same function agree. Times need a GPU."""

import pytest
import torch

from benchmarks.common.harness import Row, Session, merge
from benchmarks.common.summary import others
from benchmarks.programs import chains, gaussian_process, mlps, problems, run, steps, vision
from benchmarks.programs.problems import Calls, Program
from tests.benchmarks.cases import HEAD, check_schema

LAYERS = ("KSLinear 512", "KroneckerLinear 512", "BlockSparseLinear 512")
WIDE = [
    f"block-sparse mlp 4096-11008 block={block} density={density} train bf16 eager"
    for block, density in ((64, 0.2), (128, 0.3))
]
SMALL_MLP = mlps.Mlp(64, 128, 32, 0.5, 8, 1.0)


@pytest.fixture
def few(monkeypatch):
    """Steps are timed on the host, few of them."""
    monkeypatch.setattr(problems, "CLOCKS", dict.fromkeys(problems.CLOCKS, problems.host_ms))
    monkeypatch.setattr(problems, "CALLS", dict.fromkeys(problems.CALLS, 1))
    monkeypatch.setattr(problems, "WARM_UPS", 0)


def program(name):
    return next(each for each in run.programs() if each.name == name)


# The cases.


def test_there_is_every_row_with_its_rival():
    """Names that results of other commits are compared by."""
    expected = {
        **{f"step {name}": ("us", "linear") for name in LAYERS},
        **{f"step {name} compiled": ("us", "linear") for name in LAYERS},
        "step kernel_matmul 256": ("us", "torch"),
        "step run_kernel 256": ("us", "torch"),
        "step attention 512": ("us", "sdpa"),
        **{
            f"hot {name}": ("us", "mm")
            for name in ("kernel_matmul 256", "kron_matmul 512", "attention 512", "dsd 1024")
        },
        **{name: ("ms", "dense") for name in WIDE},
        "block-sparse mlp 1024-4096 block=32 density=0.25 train bf16 eager": ("ms", "dense"),
        **{f"{name} sum": ("ms", "given") for name in WIDE},
        **{
            f"gp step n={count}{end}": ("ms", "gpytorch")
            for end in ("", " captured")
            for count in (500, 2000)
        },
        **{
            f"ks layer {sizes} {task} bf16": ("ms", "dense")
            for sizes in ("4096-16384", "2048-8192", "1024-4096", "768-3072")
            for task in ("inference", "train")
        },
        "boft 4096 train bf16": ("ms", "peft"),
        **{
            f"ks chain {sizes} 25088 rows inference fp16": ("ms", "copy")
            for sizes in ("384-1536", "384-384", "1536-384")
        },
        **{
            f"vit_{task}": ("ms", "dense")
            for task in ("s16 inference fp16", "s16 train bf16", "s16 train bf16 eager",
                         "s16 train bf16 compiled", "b16 inference fp16", "b16 train bf16")
        },
    }  # fmt: skip
    assert {each.name: (each.unit, each.rival) for each in run.programs()} == expected


def test_targets_are_ratios():
    musts = {each.name: each.must for each in run.programs()}
    assert musts["step KSLinear 512"] == 1.2 and musts["step KSLinear 512 compiled"] == 1.3
    assert musts["hot kernel_matmul 256"] == 0.8 and musts["hot dsd 1024"] is None
    assert 1 / musts[WIDE[1]] == 2.0 and musts[f"{WIDE[1]} sum"] == 1.1
    assert 1 / musts["gp step n=2000 captured"] == pytest.approx(15.0)


# Rows.


def test_a_row_has_times_and_the_target_of_this_run(monkeypatch):
    def make(device):
        return Calls(lambda: 2.0, {"torch": lambda: lambda: 5.0, "none": lambda: 1 / 0})

    clocks = dict.fromkeys(problems.CLOCKS, lambda call, count: call())
    monkeypatch.setattr(problems, "CLOCKS", clocks)
    row = problems.measure(Program("a", make, "ms", "torch", 0.5), Session(), "cpu")
    assert row == Row("a", "ms", 2.0, rivals={"torch": 5.0}, must=2.5)
    check_schema(merge(HEAD, [row.as_json()], None))
    row = problems.measure(Program("a", make, "us", "none", 0.5), Session(), "cpu")
    assert row == Row("a", "us", 2000.0, rivals={"torch": 5000.0})


def test_calls_take_turns():
    order = []

    def clock(call, count):
        call()
        return float(len(order)) * count

    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    assert problems.in_turn(calls, clock, 2, 3) == {"a": 6.0, "b": 8.0}
    assert order == ["a", "b"] * 3


def test_what_is_no_rival_is_not_compared():
    row = Row("hot", "us", 2.0, rivals={"mm": 3.0, "add_": 1.0, "given": 1.0}).as_json()
    assert others(row["rivals"]) == {"mm": 3.0}


# Steps.


def test_a_step_leaves_the_gradients_of_one_pass():
    x = torch.ones(3, requires_grad=True)
    run_step = problems.step(lambda: 2 * x, [x], torch.ones(3))
    for _ in range(2):
        run_step()
        assert torch.equal(x.grad, torch.full((3,), 2.0))
    problems.sum_step(lambda: 3 * x, [x])()
    assert torch.equal(x.grad, torch.full((3,), 3.0))


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "make", [steps.product_functions, steps.matrix_functions, steps.attention_functions]
)
def test_rivals_compute_the_same(make, seed):
    leaves, ours, theirs = make("cpu")
    results, grads = [], []
    for function in (ours, theirs):
        y = function()
        results.append(y.detach())
        grads.append(torch.autograd.grad(y, leaves, torch.ones_like(y)))
    loose = {"rtol": 0.05, "atol": 0.05} if leaves[0].dtype is torch.bfloat16 else {}
    torch.testing.assert_close(*results, **loose)
    loose = loose or {"rtol": 1e-3, "atol": 1e-3}
    for pair in zip(*grads, strict=True):
        torch.testing.assert_close(*pair, **loose)


@pytest.mark.few(20)
@pytest.mark.parametrize(
    "name",
    [each.name for each in steps.programs() if "compiled" not in each.name],
)
def test_small_steps_run(name, few, monkeypatch):
    monkeypatch.setattr(steps, "COLUMNS", 16)
    row = problems.measure(program(name), Session(quick=True), "cpu")
    extra = {"add_"} if name.startswith("hot") else set()
    assert set(row.rivals) == {program(name).rival} | extra


@pytest.mark.parametrize("make", [mlps.train_calls, mlps.sum_calls])
def test_steps_of_mlps_run(make):
    ours, rivals = make(SMALL_MLP, "cpu")
    for call in (ours, *(rival() for rival in rivals.values())):
        call()


def test_mlps_differ_in_how_weights_are_stored_alone(seed):
    sparse, dense = mlps.sparse(SMALL_MLP, "cpu"), mlps.dense(SMALL_MLP, "cpu")
    for index, layer in ((0, sparse[0]), (2, sparse[1])):
        dense[index].load_state_dict(layer.to_linear().state_dict())
    x, _ = mlps.tensors(SMALL_MLP, "cpu")
    torch.testing.assert_close(sparse(x), dense(x), rtol=0.05, atol=0.05)


# Chains of Kronecker-sparse factors.


@pytest.mark.parametrize("trains", (False, True))
def test_layers_of_chains_run(trains):
    small = chains.Layer(32, 64, 4, ((4, 8, 8, 1), (1, 16, 8, 4)), (1, 1))
    ours, rivals = chains.layer_calls(small, trains, "cpu")
    for call in (ours, *(rival() for rival in rivals.values())):
        call()


def test_a_copy_moves_the_bytes_of_a_chain():
    ours, rivals = chains.chain_calls((384, 1536), 2, "cpu")
    assert ours().shape == (2, 1536)
    assert 2 * rivals["copy"]()().numel() == 2 * (384 + 1536)


def test_steps_of_adapters_run():
    pytest.importorskip("peft")
    ours, rivals = chains.boft_calls(16, 4, "cpu")
    for call in (ours, *(rival() for rival in rivals.values())):
        call()


@pytest.mark.parametrize("make", (vision.inference_calls, vision.train_calls))
def test_transformers_run_in_all_forms(make):
    pytest.importorskip("timm")
    sizes = (("depth", 1), ("img_size", 32))
    ours, rivals = make(vision.S16._replace(batch=2, smaller=sizes), "eager", "cpu")
    for call in (ours, *(rival() for rival in rivals.values())):
        call()


def test_gelu_by_one_call_is_near_it(seed):
    """By its tanh approximation on a GPU."""
    linear, x = torch.nn.Linear(8, 16), torch.randn(2, 3, 8)
    wanted = torch.nn.functional.gelu(linear(x))
    torch.testing.assert_close(vision.LinearGelu(linear)(x), wanted, atol=2e-3, rtol=0)


# Gaussian processes.


def test_an_iteration_for_a_graph_is_the_eager_one(seed, monkeypatch):
    adam, data = torch.optim.Adam, gaussian_process.data(50, "cpu")
    eager = gaussian_process.kernlib_step(*data)
    # On CPU tensors Adam refuses to be capturable.
    monkeypatch.setattr(torch.optim, "Adam", lambda leaves, rate, capturable: adam(leaves, rate))
    other = gaussian_process.kernlib_step(*data, in_graph=True)
    losses, same = (torch.stack([step() for _ in range(5)]) for step in (eager, other))
    assert losses[-1] < losses[0] and torch.equal(losses, same)


def test_the_loss_is_the_negative_log_marginal_likelihood(seed):
    x, y = gaussian_process.data(40, "cpu")
    bandwidth, scale, noise = gaussian_process.SCALES
    kernel = torch.exp(-torch.cdist(x, x).square() / (2 * bandwidth**2))
    covariance = (scale * kernel + noise**2 * torch.eye(40)).double()
    normal = torch.distributions.MultivariateNormal(torch.zeros(40).double(), covariance)
    constant = 20 * torch.log(torch.tensor(2 * torch.pi))
    loss = gaussian_process.kernlib_step(x, y)()
    torch.testing.assert_close(
        loss.double() + constant, -normal.log_prob(y.double()), rtol=1e-3, atol=1e-3
    )


def test_gpytorch_may_be_absent(few, monkeypatch):
    def absent(x, y):
        raise ImportError("gpytorch")

    monkeypatch.setattr(gaussian_process, "gpytorch_step", absent)
    row = problems.measure(program("gp step n=500"), Session(quick=True), "cpu")
    assert row.rivals == {} and row.must is None
