"""KSLinear as a module: construction, its one set of parameters, and life in place of nn.Linear."""

from __future__ import annotations

import copy
import inspect
import io
import operator
import pickle
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import kernlib as kl
from kernlib.nn import KSLinear
from kernlib.nn.kronecker_sparse import ALGOS as KNOWN
from tests.nn.kronecker_sparse_cases import (
    ALGOS,
    CHAIN,
    LAYOUTS,
    error,
    expected,
    inputs,
    layer,
    matrix,
    noted_storage,
    product,
    random,
)
from tests.support.defaults import default_dtype

ONE = (2, 3, 5, 4)
each_algo = pytest.mark.parametrize("algo", ALGOS)


# Construction.


def test_names_and_order_of_arguments():
    assert list(inspect.signature(KSLinear).parameters) == [
        "patterns", "weights", "bias", "algo", "dtype", "bs_last", "more", "device", "activation",
        "precision", "init",
    ]  # fmt: skip
    assert set(KNOWN) == {"auto", *ALGOS}


def test_what_stands_behind_bs_last_in_ksmm_is_not_misread():
    """A device in some of its versions, vsize and then a device in others."""
    before = (CHAIN, None, True, "einsum", torch.float64, True)
    for device in ("meta", torch.device("meta")):
        assert KSLinear(*before, device).bias.device.type == "meta"
    for behind in ((4,), (2,), (4, "cpu"), ("cpu", "relu"), (None,), ("cpu", None, "fp32")):
        with pytest.raises(TypeError, match=r"vsize is gone.*leave it out"):
            KSLinear(*before, *behind)
    with pytest.raises(TypeError, match="by name"):
        KSLinear(*before, "cpu", device="cpu")


def test_sizes_and_members():
    made = KSLinear(CHAIN)
    assert made.patterns == tuple(CHAIN) and made.num_mat == 3
    assert (made.in_size, made.out_size) == (made.in_features, made.out_features) == (48, 15)
    assert [tuple(factor.shape) for factor in made.factors] == CHAIN
    assert made.bias.shape == (15,) and made.algo == "auto" and made.bs_last is False
    assert KSLinear(CHAIN, bs_last=True).bias.shape == (15,)
    assert KSLinear(CHAIN, bias=False).bias is None
    text = repr(KSLinear([ONE], algo="bmm", bs_last=True, activation="gelu"))
    assert "in_features=40, out_features=24, patterns=[(2, 3, 5, 4)], algo='bmm', bias=True" in text
    assert "bs_last=True, activation=Gelu(approximate='none')" in text


def test_patterns_may_be_lists_and_numpys_ints():
    assert KSLinear([list(ONE), np.array([4, 5, 6, 1])]).patterns == (ONE, (4, 5, 6, 1))


def test_the_dtype_is_torchs_default():
    for dtype in (torch.float64, torch.float32):
        with default_dtype(dtype):
            made = KSLinear([ONE])
        assert made.factors[0].dtype == made.bias.dtype == dtype


def test_parameters_are_drawn_uniformly():
    torch.manual_seed(0)
    made = KSLinear([(4, 50, 25, 10), (1, 20, 2000, 1)])
    first, second = (3**0.5 / 25) ** 0.5, (3**0.5 / 2000) ** 0.5
    bounds = {made.factors[0]: first, made.factors[1]: second, made.bias: 1000**-0.5}
    for parameter, bound in bounds.items():
        assert 0.8 * bound < parameter.abs().max() <= bound
        assert parameter.min() < 0 < parameter.max()
    before = made.factors[0].clone()
    made.reset_parameters()
    assert not torch.equal(made.factors[0], before)


@pytest.mark.parametrize("init", ["linear", "ksmm"])
@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_new_outputs_have_the_variance_of_a_linear_however_many_factors(count, init):
    """1/3 of the mean square of the input, and by KSMM's rule 1/3 a factor."""
    patterns = [(2 ** (count - 1 - i) * 3, 2, 2, 2**i) for i in range(count)]
    torch.manual_seed(0)
    total = 0.0
    for _ in range(200):
        made = KSLinear(patterns, bias=False, dtype=torch.float64, init=init)
        total += made(inputs(made, 2)).square().mean().item() / 200
    wanted = 1 / 3 if init == "linear" else 3.0**-count
    square = inputs(made, 2).square().mean().item()
    assert abs(total / (wanted * square) - 1) < 0.1 and made.init == init
    assert ("init='ksmm'" in repr(made)) == (init == "ksmm")
    assert KSLinear([ONE], init=init).factors[0].abs().max() <= 5**-0.5


def test_weights_are_copied():
    weights = [random(*pattern, seed=i) for i, pattern in enumerate(CHAIN)]
    made = KSLinear(CHAIN, weights)
    assert all(factor.dtype == torch.float64 for factor in made.factors)
    assert all(torch.equal(factor, w) for factor, w in zip(made.factors, weights, strict=True))
    narrow = KSLinear(CHAIN, weights, dtype=torch.float16)
    assert torch.equal(narrow.factors[0], weights[0].half())
    weights[0].zero_()
    assert made.factors[0].all() and made.factors[0].requires_grad


DEEP: list = []
for _ in range(5000):
    DEEP = [DEEP]

WRONG = {
    "no list": (dict(patterns=ONE), TypeError, r"patterns\[0\] must be four ints"),
    "float": (dict(patterns=[ONE, (1, 2.0, 3, 1)]), TypeError, r"patterns\[1\] must be four ints"),
    "bool": (dict(patterns=[(1, 2, True, 1)]), TypeError, r"patterns\[0\] must be four ints"),
    "zero": (dict(patterns=[(1, 0, 3, 1)]), ValueError, r"patterns\[0\] must have sizes of 1"),
    "algo": (dict(algo="cusparse"), ValueError, "algo must be one of auto, kernel, einsum.*cuspar"),
    "init": (dict(init="normal"), ValueError, "init must be one of linear, ksmm, got 'normal'"),
    "scale": (dict(activation=kl.Scale()), ValueError, "needs the argument.* scale"),
    "vsize": (dict(vsize=4), TypeError, "vsize"),
    "bias of values": (
        dict(bias=torch.tensor([5.0])),
        TypeError,
        "bias must be a bool, got a Tensor",
    ),
    "weights sparse": (dict(weights=[random(*ONE).to_sparse()]), TypeError, "be a dense tensor"),
    "one tensor": (dict(weights=random(1, *ONE)), TypeError, "weights must be a list of tensors"),
    "huge": (dict(patterns=[(2**40, 1, 1, 2**40)]), ValueError, r"patterns\[0\] must hold below"),
    "many digits": (dict(patterns=[(10**5000, 1, 1, 1)]), ValueError, r"patterns\[0\] must hold"),
    "deep": (dict(activation=DEEP), TypeError, "activation must be a name such as 'gelu'"),
    "count": (dict(weights=[]), ValueError, "one tensor for each of 1 patterns, got 0"),
    "shape": (dict(weights=[random(4, 3, 5, 2)]), ValueError, r"weights\[0\] must have the shape"),
    "ints": (dict(weights=[torch.ones(ONE).int()]), TypeError, r"weights\[0\].*floats.*int32"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_an_exception_that_names_it(case):
    arguments, kind, message = WRONG[case]
    with pytest.raises(kind, match=message):
        KSLinear(**({"patterns": [ONE]} | arguments))


INPUTS = {
    "list": (lambda x: x.tolist(), TypeError, "input must be a tensor|x must be a tensor"),
    "coo": (lambda x: x.to_sparse(), TypeError, "must be a dense tensor"),
    "csr": (lambda x: x.to_sparse_csr(), TypeError, "must be a dense tensor"),
    "nested": (lambda x: torch.nested.nested_tensor([x[0], x[1]]), TypeError, "be a dense tensor"),
    "mkldnn": (lambda x: x.to_mkldnn(), TypeError, "must be a dense tensor"),
    "meta": (lambda x: x.to("meta"), ValueError, "on one device|input must be on cpu"),
    "double": (lambda x: x.double(), TypeError, "one dtype|must be torch.float32 as"),
    "features": (lambda x: x[:, 1:], ValueError, r"must (have|be) .*\(\.\.\., 40\)"),
    "turned": (lambda x: x.mT, ValueError, r"must (have|be) .*\(\.\.\., 40\)"),
    "scalar": (lambda x: x[0, 0], ValueError, r"must (have|be) .*\(\.\.\., 40\)"),
}


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("case", INPUTS)
def test_what_is_no_input_is_said_by_every_algorithm(case, algo):
    make, kind, message = INPUTS[case]
    made = KSLinear([ONE], algo=algo, dtype=torch.float32)
    with pytest.raises(kind, match=message):
        made(make(torch.ones(3, 40)))


@each_algo
def test_an_input_whose_batch_is_not_last_is_refused(algo):
    with pytest.raises(ValueError, match=r"\(40, \.\.\.\)"):
        layer([ONE], algo, bs_last=True)(random(3, 40))


def test_parts_of_a_forward_pass_say_what_is_no_input():
    made = KSLinear([ONE], dtype=torch.float32)
    x = torch.ones(3, 40)
    with pytest.raises(TypeError, match="input must be a tensor"):
        made.pre_process(None)
    with pytest.raises(ValueError, match="input must have shape"):
        made.post_process(x[:, 1:], x)
    with pytest.raises(TypeError, match="output must be a tensor"):
        made.post_process(x, None)
    with pytest.raises(ValueError, match="output must be the product of the input, 72 values"):
        made.post_process(x, x)


def test_weights_of_several_dtypes_need_the_layers():
    weights = [random(*CHAIN[0]), random(*CHAIN[1]).float(), random(*CHAIN[2])]
    with pytest.raises(ValueError, match="weights have several dtypes"):
        KSLinear(CHAIN, weights)
    assert KSLinear(CHAIN, weights, dtype=torch.float32).factors[0].dtype == torch.float32


@each_algo
def test_factors_that_do_not_fit_are_named(algo):
    with pytest.raises(ValueError, match=r"factors\[1\].* takes 96 features.*factors\[0\].* 24"):
        KSLinear([ONE, (1, 2, 96, 1)], algo=algo)


def test_an_algorithm_that_is_set_is_checked():
    made = KSLinear([ONE])
    made.algo = "bsr"
    with pytest.raises(ValueError, match="algo must be one of"):
        made.algo = "kernels"
    assert made.algo == "bsr"
    with pytest.raises(AttributeError):
        made.bs_last = True


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a torch without a GPU")
@each_algo
def test_every_spelling_of_a_device_means_the_same(algo):
    for spelling in ("cpu", torch.device("cpu"), "cpu:0"):
        made = KSLinear([ONE], algo=algo, device=spelling, dtype=torch.float64)
        torch.testing.assert_close(made(inputs(made, 3)), expected(made, inputs(made, 3)))
    errors = set()
    for spelling in ("cuda", torch.device("cuda"), "cuda:0", torch.device("cuda", 0)):
        with pytest.raises((RuntimeError, AssertionError)) as raised:
            KSLinear([ONE], algo=algo, device=spelling)
        errors.add(type(raised.value))
    assert len(errors) == 1


@pytest.mark.parametrize("bs_last", LAYOUTS)
@each_algo
def test_meta(algo, bs_last):
    made = KSLinear(CHAIN, algo=algo, bs_last=bs_last, device="meta")
    assert all(parameter.is_meta for parameter in made.parameters())
    shape = (48, 2, 3) if bs_last else (2, 3, 48)
    assert made(torch.empty(shape, device="meta")).shape == ((15, 2, 3) if bs_last else (2, 3, 15))
    real = made.to_empty(device="cpu")
    real.load_state_dict(layer(CHAIN, dtype=torch.float32).state_dict())
    x = inputs(real, 3)
    torch.testing.assert_close(real(x).double(), expected(real, x), rtol=1e-5, atol=1e-5)
    assert nn.utils.skip_init(KSLinear, CHAIN, algo=algo).factors[0].shape == CHAIN[0]


# Dense product.


@each_algo
def test_the_dense_product(algo):
    made = layer(CHAIN, algo)
    wanted = product(made)
    for total in (made.get_dense_product(), made.to_dense(), made.weight):
        assert total.shape == (15, 48)
        torch.testing.assert_close(total, wanted)
    assert torch.equal(layer([ONE], algo).to_dense() != 0, matrix(torch.ones(ONE)) != 0)
    made.to_dense().square().sum().backward()
    assert all(factor.grad is not None for factor in made.factors)


@pytest.mark.parametrize("bs_last", LAYOUTS)
@pytest.mark.parametrize("algo", ["auto", *ALGOS])
def test_forward_is_its_parts(algo, bs_last):
    made = layer(CHAIN, algo, bs_last, activation="tanh")
    x = inputs(made, 2, 3)
    flat = made.pre_process(x)
    assert flat.shape == ((48, 6) if bs_last else (6, 48))
    apply = made.forward_bs_last if bs_last else made.forward_bs_first
    total = made.post_process(x, apply(flat))
    torch.testing.assert_close(total, made(x))
    other = made.forward_bs_first if bs_last else made.forward_bs_last
    torch.testing.assert_close(other(flat.T), apply(flat).T)


# State.


@pytest.mark.parametrize("algo", ["auto", *ALGOS])
def test_one_state_dict_for_all_algorithms_and_layouts(algo):
    source = layer(CHAIN, algo)
    state = source.state_dict()
    assert list(state) == ["bias", "factors.0", "factors.1", "factors.2"]
    with torch.no_grad():
        wanted = source(inputs(source, 3))  # with what it keeps, none of which may be saved
    assert list(source.state_dict()) == list(state)
    for other in ("auto", *ALGOS):
        for bs_last in LAYOUTS:
            target = layer(CHAIN, other, bs_last, seed=9)
            target.load_state_dict(state)
            x = inputs(source, 3)
            total = target(x.T).T if bs_last else target(x)
            torch.testing.assert_close(total, wanted)


def test_the_bias_of_ksmms_batch_last_layers_is_loaded():
    source = layer(CHAIN, bs_last=True)
    state = OrderedDict(source.state_dict(), bias=source.bias.detach()[:, None])
    target = nn.Sequential(layer(CHAIN, bs_last=True, seed=9))
    target.load_state_dict({f"0.{name}": value for name, value in state.items()})
    assert torch.equal(target[0].bias, source.bias) and state["bias"].shape == (15, 1)
    with pytest.raises(RuntimeError, match="size mismatch for bias"):
        source.load_state_dict(state | {"bias": torch.zeros(1, 15)})


@pytest.mark.parametrize("algo", ["auto", *ALGOS])
def test_copies_and_pickles_hold_parameters_alone(algo, monkeypatch):
    made = layer(CHAIN, algo, activation="silu", bs_last=True).requires_grad_(False).freeze()
    x, stored = inputs(made, 3), noted_storage(monkeypatch)
    wanted = made(x)
    own = [*stored]
    assert None not in own
    buffer = io.BytesIO()
    torch.save(made, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(made),
        pickle.loads(pickle.dumps(made)),
        torch.load(buffer, weights_only=False),
        copy.copy(made),
    ]
    bound = len(pickle.dumps(layer(CHAIN, "einsum", activation="silu", bs_last=True))) + 50
    assert len(pickle.dumps(made)) < bound
    for other in copies:
        stored.clear()
        assert other.algo == algo
        torch.testing.assert_close(other.freeze()(x), wanted)
        assert len(stored) == len(own) and not any(map(operator.is_, stored, own))
    copies[0].factors[0].zero_()
    torch.testing.assert_close(made(x), wanted)


@each_algo
def test_conversions(algo):
    made = layer(CHAIN, algo)
    x = inputs(made, 3)
    with torch.no_grad():
        wanted = made(x)
        for convert, dtype in ((made.float, torch.float32), (made.half, torch.float16)):
            assert error(convert()(x.to(dtype)), wanted) < 5e-3
        assert error(made.to(torch.bfloat16)(x.bfloat16()), wanted) < 5e-2
        assert error(made.to("cpu", torch.float64)(x), wanted) < 5e-2


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


@each_algo
def test_parametrizations(algo):
    made = layer(CHAIN, algo)
    x = inputs(made, 3)
    with torch.no_grad():
        made(x)
    parametrize.register_parametrization(made.factors, "0", Twice())
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(made(x), expected(made, x))
            made.factors.parametrizations["0"].original.mul_(3)
    made(x).sum().backward()
    assert made.factors.parametrizations["0"].original.grad is not None
    parametrize.register_parametrization(made, "bias", Twice())
    torch.testing.assert_close(made(x), expected(made, x))
    made(x).sum().backward()
    assert made.parametrizations["bias"].original.grad is not None
    parametrize.remove_parametrizations(made, "bias")
    parametrize.remove_parametrizations(made.factors, "0")
    torch.testing.assert_close(made(x), expected(made, x))


@each_algo
def test_functional_call_and_transforms(algo):
    made = layer(CHAIN[:2], algo)
    x = inputs(made, 3)
    parameters = {name: p.detach() for name, p in made.named_parameters()}
    doubled = {name: 2 * p for name, p in parameters.items()}

    def call(parameters, x):
        return torch.func.functional_call(made, parameters, (x,))

    with torch.no_grad():
        torch.testing.assert_close(call(doubled, x), 4 * made(x) - 2 * made.bias)
        torch.testing.assert_close(call(parameters, x), made(x))
    stacked = {name: torch.stack([parameters[name], doubled[name]]) for name in parameters}
    both = torch.func.vmap(call, (0, None))(stacked, x)
    torch.testing.assert_close(both[1], call(doubled, x))
    torch.testing.assert_close(torch.func.vmap(call, (None, 0))(parameters, x), made(x))
    gradient = torch.func.grad(lambda p: call(p, x).square().sum())(parameters)
    made(x).square().sum().backward()
    for name, parameter in made.named_parameters():
        torch.testing.assert_close(gradient[name], parameter.grad)
