"""The promise that a matrix is not written: what it changes, what breaks it, how it is taken
back; what is kept of a matrix, and made anew after a write that torch counts."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

import kernlib as kl
from kernlib.errors import CaptureError
from kernlib.families.sparse import operation, reference
from kernlib.families.sparse.descriptor import SparseMatmul
from kernlib.families.sparse.lowering import choose
from kernlib.families.sparse.lowering.codes import SLICES
from kernlib.families.sparse.lowering.problem import Problem
from kernlib.families.sparse.reference import laid_out
from kernlib.families.sparse.tensors import state_of
from kernlib.jit import targets
from kernlib.runtime import driver
from kernlib.sparse import SparseMatrix, compress, matmul
from tests.families.sparse import fake_kernels
from tests.families.sparse.cases import DTYPES, FORMATS, QUANTISED, made
from tests.support import fakes
from tests.support.fakes import OnGpu

every_format = pytest.mark.parametrize("format", FORMATS)


def test_formats_that_read_ahead():
    facts = tuple({"largest": 600, "width": 64, "entries": 8, "longest": 1, "busiest": 1}.items())

    def reads_ahead(name, arch):
        problem = Problem(96, 64, 1, "float16", 64, False, (96, 1), facts, name)
        early = choose.lower((), problem._replace(frozen=True), arch, 132)
        return early != choose.lower((), problem, arch, 132)

    found = {
        arch: {name for name in choose.formats() if reads_ahead(name, arch)}
        for arch in targets.SHARED_BYTES
    }
    assert found["sm_90a"] == {"bitmap", "u8", "u4", "u2", *QUANTISED} and not found["sm_80"]


@pytest.mark.parametrize("format", SLICES)
def test_slices_of_a_matrix_that_may_be_written_begin_early_and_wait(format):
    problem = Problem(96, 64, 1, "float16", 64, False, (96, 1), (("width", 32),), format)
    for arch, overlaps in (("sm_90a", True), ("sm_80", False)):
        lowered = choose.lower((), problem, arch, 132)
        first, *others = lowered.steps
        assert first.overlaps is overlaps and first.fixed[-4:] == bytes(4)
        early, *same = choose.lower((), problem._replace(frozen=True), arch, 132).steps
        assert same == others and early.overlaps is overlaps
        assert early == first._replace(fixed=first.fixed[:-4] + bytes([overlaps, 0, 0, 0]))


# The promise, as a GPU sees it.


@pytest.fixture
def gpus(monkeypatch):
    """GPUs by name; ``waited`` is how often somebody waited for one, ``early`` whether the first
    launch of each product may overlap the one before."""
    fakes.forget()
    found = fake_kernels.install(monkeypatch)
    found.waited, found.early = [], []
    monkeypatch.setattr(torch.cuda, "synchronize", found.waited.append)
    inner = driver.launch_kernel_ex()

    def launched(config, function, arguments, extra):
        if found.loads[int(function) - 1].what.startswith("sum"):
            found.early.append(config.numAttrs == 1)
        return inner(config, function, arguments, extra)

    monkeypatch.setattr(driver, "launch_kernel_ex", lambda: launched)
    yield found
    fakes.forget()


def matrix(gpus, rows=9, cols=40):
    dense, w = made(rows, cols, "bitmap", dtype=torch.float16)
    return fake_kernels.on_gpu(w, gpus, dense)


def gpu(*shape):
    return torch.randn(*shape).half().as_subclass(OnGpu)


def test_products_wait_unless_the_matrix_is_frozen(gpus, seed):
    w, x, bias = matrix(gpus), gpu(3, 40), gpu(9)
    for _ in range(3):
        matmul(w, x, bias)
    assert not w.frozen and gpus.early == [False] * 3 and not gpus.waited
    assert w.freeze() is w and w.frozen and gpus.waited == [torch.device("cuda", 0)]
    for _ in range(3):
        matmul(w, x, bias)
    assert gpus.early[3:] == [True] * 3
    w.freeze()  # again, which has nothing to wait for
    assert len(gpus.waited) == 1
    assert w.thaw() is w and not w.frozen
    matmul(w, x, bias)
    assert gpus.early[6:] == [False] and w.thaw() is w


def test_recorded_products_keep_the_promise_and_lose_it(gpus, seed):
    w, x = matrix(gpus), gpu(3, 40).requires_grad_()
    for change, early in ((w.thaw, False), (w.freeze, True), (w.thaw, False)):
        change()
        for _ in range(2):
            matmul(w, x)
        assert gpus.early[-2:] == [early] * 2


def test_a_counted_write_to_a_frozen_matrix_raises(gpus, seed):
    w = matrix(gpus)
    for x in (gpu(3, 40), gpu(20, 40), gpu(3, 40).requires_grad_()):
        for tensor in w.operands:
            w.freeze()
            matmul(w, x)
            tensor.add_(0)
            for refused in (lambda x=x: matmul(w, x), w.freeze):
                with pytest.raises(RuntimeError, match=r"written or moved after freeze.*w\.thaw\("):
                    refused()
            matmul(w.thaw(), x)


def test_other_memory_of_a_frozen_matrix_raises(gpus, seed):
    w = matrix(gpus).freeze()
    tensor, x = w.operands[1], gpu(1, 40)
    matmul(w, x)
    version, tensor.data = tensor._version, tensor.clone()
    assert tensor._version == version  # torch does not count that
    with pytest.raises(RuntimeError, match="written or moved after freeze"):
        matmul(w, x)


def test_a_capture_cannot_freeze(gpus, seed):
    w = matrix(gpus)
    gpus.capturing = True
    with pytest.raises(CaptureError, match="call it before the capture"):
        w.freeze()
    assert not w.frozen and not gpus.waited


def test_prepare_makes_the_plan_of_a_frozen_matrix(gpus, seed):
    w, x = matrix(gpus), gpu(1, 40)
    kl.prepare(SparseMatmul(), w, x)
    w.freeze()
    kl.prepare(SparseMatmul(), w, x)
    loads = len(gpus.loads)
    matmul(w, x)
    assert gpus.early == [True] and len(gpus.loads) == loads == 2  # the same kernels


# Elsewhere.


def test_a_frozen_matrix_of_the_cpu(seed):
    w, x = compress(torch.eye(64), "u8").freeze(), torch.ones(64)
    assert w.frozen and torch.equal(matmul(w, x), x)
    w.operands[0].add_(0)
    with pytest.raises(RuntimeError, match="after freeze"):
        matmul(w, x)
    with pytest.raises(RuntimeError, match="after freeze"):
        torch.vmap(lambda x: matmul(w, x))(x[None])
    assert torch.equal(matmul(w.thaw(), x), x)


def test_a_compiled_product_follows_the_promise(seed):
    torch._dynamo.reset()
    dense, w = made(40, 70, "u8", dtype=torch.float32)
    call = torch.compile(lambda x: matmul(w, x), fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 70)
    for change in (w.freeze, w.thaw):
        change()
        torch.testing.assert_close(call(x), x @ dense.t(), rtol=1e-4, atol=1e-5)
    w.freeze().operands[0].add_(0)
    with pytest.raises(RuntimeError, match="after freeze"):
        call(x)
    torch._dynamo.reset()


def test_copies_are_not_frozen(seed):
    w = compress(torch.eye(64).half(), "u8").freeze()
    assert w.cpu() is w and copy.copy(w) is w and w.convert("u8") is w
    others = copy.deepcopy(w), pickle.loads(pickle.dumps(w)), w.to("meta"), w.transpose()
    assert not any(other.frozen for other in others)
    assert w.frozen


def test_tensors_without_a_version_can_be_frozen(seed):
    with torch.inference_mode():
        w = compress(torch.eye(64), "u8")
    x = torch.ones(64)
    assert state_of(w) is None and torch.equal(matmul(w.freeze(), x), x)
    with torch.inference_mode():
        w.operands[0].data = w.operands[0].clone()
    with pytest.raises(RuntimeError, match="after freeze"):
        matmul(w, x)


def test_fake_tensors_are_not_frozen(seed):
    from torch._subclasses.fake_tensor import FakeTensorMode

    w = compress(torch.eye(64), "u8")
    with FakeTensorMode() as mode:
        fake = SparseMatrix.from_layout(w.layout, [mode.from_tensor(t) for t in w.operands])
    with pytest.raises(ValueError, match="no values here to freeze"):
        fake.freeze()


# What is made of a matrix, and made again after a write.


def written(w, dense):
    """Twice the values, in place, by operations that torch counts."""
    other = compress(2 * dense, w.format)
    for to, given in zip(w.operands, other.operands, strict=True):
        to.copy_(given)


@every_format
def test_the_transpose_of_a_matrix_that_was_written(format, seed):
    dense, w = made(40, 70, format, dtype=torch.float32)
    turned = w.transpose()
    assert w.transpose() is turned and turned.transpose() is w
    written(w, dense)
    assert w.known_transpose() is None and turned.known_transpose() is None
    assert torch.equal(w.transpose().to_dense(), 2 * dense.t())
    assert torch.equal(turned.transpose().to_dense(), dense)  # which is not w any more
    again = w.transpose()
    assert again is w.transpose() and again.transpose() is w


@every_format
def test_a_transpose_that_was_written_is_one_no_more(format, seed):
    dense, w = made(40, 70, format, dtype=torch.float32)
    written(w.transpose(), dense.t().contiguous())
    assert w.known_transpose() is None and torch.equal(w.transpose().to_dense(), dense.t())


@every_format
def test_the_number_of_entries_is_counted_again(format, seed):
    dense, w = made(40, 70, format, dtype=torch.float32)
    count = int(torch.count_nonzero(dense))
    assert w.nnz == count and "density=" in repr(w)
    written(w, 0 * dense if format == "dense" else dense)
    assert w.known_nnz() is None and "density=" not in repr(w)
    assert copy.deepcopy(w).nnz == w.nnz == (0 if format == "dense" else count)
    assert w.state()[0]["nnz"] == w.nnz


def test_nothing_is_kept_of_tensors_whose_writes_are_not_counted(seed):
    with torch.inference_mode():
        w = compress(torch.eye(64), "dense")
    assert w.transpose() is not w.transpose() and w.nnz == 64
    with torch.inference_mode():
        w.operands[0].zero_()
    assert w.nnz == 0 and not w.transpose().to_dense().any()
    y = torch.ones(1, 64).as_subclass(OnGpu)
    assert operation.transpose_for(w, y) is None


@pytest.mark.parametrize("format", ["bitmap", "u4", "macko"])
def test_a_compiled_gradient_does_not_take_a_transpose_of_the_past(format, seed):
    torch._dynamo.reset()
    dense, w = made(40, 70, format, dtype=torch.float32)
    w.transpose()
    call = torch.compile(lambda x: matmul(w, x), fullgraph=True, backend="aot_eager")
    x, grad = torch.randn(3, 70, requires_grad=True), torch.randn(3, 40)
    for times in (1, 2):
        (found,) = torch.autograd.grad(call(x), x, grad)
        torch.testing.assert_close(found, times * (grad @ dense), rtol=1e-4, atol=1e-5)
        written(w, dense)
    torch._dynamo.reset()


# What is kept on a CPU: the matrix laid out, until the compressed one is written or goes.


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("format", ("bitmap", "u8", "dense"))
def test_it_is_laid_out_once_in_the_dtype_of_the_sums(format, dtype, seed):
    dense, w = made(9, 40, format, dtype=dtype)
    first = laid_out(w)
    assert first.dtype == torch.float32 and torch.equal(first, dense.float())
    assert laid_out(w) is first
    x = torch.randn(3, 40).to(dtype)
    wanted = (x.double() @ dense.double().T).to(dtype)
    for _ in range(2):
        torch.testing.assert_close(matmul(w, x), wanted, rtol=1e-2, atol=1e-2)


def test_a_write_lays_it_out_anew(seed):
    dense, w = made(9, 40)
    x = torch.randn(3, 40)
    before = matmul(w, x)
    written(w, dense)
    torch.testing.assert_close(matmul(w, x), 2 * before)
    torch.testing.assert_close(matmul(w, x), 2 * x @ dense.T)


def test_it_ends_with_its_matrix(seed):
    _, w = made(9, 40)
    dense = weakref.ref(laid_out(w))
    del w
    gc.collect()
    assert dense() is None


def test_no_more_than_the_budget_is_kept(monkeypatch, seed):
    monkeypatch.setattr(reference, "MOST_BYTES", 3 * 9 * 40 * 4)
    matrices = [made(9, 40)[1] for _ in range(4)]
    first = [laid_out(w) for w in matrices]
    again = [laid_out(w) for w in reversed(matrices)]
    assert [new is old for new, old in zip(again, reversed(first), strict=True)][:3] == [True] * 3
    assert laid_out(matrices[0]) is again[-1] and torch.equal(again[-1], first[0])
    _, large = made(40, 40)
    assert laid_out(large) is not laid_out(large)


def test_tensors_of_inference_mode_are_laid_out_each_time(seed):
    with torch.inference_mode():
        dense, w = made(9, 40)
        assert laid_out(w) is not laid_out(w) and torch.equal(laid_out(w), dense)
    _, w = made(9, 40)
    with torch.inference_mode():
        known = laid_out(w)
    assert laid_out(w) is known and not known.is_inference()


def test_gradients_and_transforms_take_what_was_laid_out(seed):
    dense, w = made(9, 40)
    x = torch.randn(5, 40, requires_grad=True)
    for _ in range(2):
        found = torch.autograd.grad(matmul(w, x).square().sum(), x)[0]
        torch.testing.assert_close(found, 2 * (x @ dense.T) @ dense)
    mapped = torch.vmap(lambda one: matmul(w, one))(x.detach())
    torch.testing.assert_close(mapped, x.detach() @ dense.T)
    dense, fresh = made(9, 40)
    _, tangent = torch.func.jvp(lambda y: matmul(fresh, y), (x.detach(),), (x.detach(),))
    torch.testing.assert_close(tangent, x.detach() @ dense.T)


# Between a product and its gradient.


def recorded(w, x):
    """A product as eager calls on a GPU record it, on the CPU."""
    return operation.RECORDING.result((operation.PLAIN, (w, x), None, {}))


@every_format
def test_a_write_before_the_gradient_raises_as_in_torch(format, seed):
    dense, w = made(40, 70, format, dtype=torch.float32)
    x, grad = torch.randn(3, 70, requires_grad=True), torch.randn(3, 40)
    (found,) = torch.autograd.grad(recorded(w, x), x, grad)
    torch.testing.assert_close(found, grad @ dense, rtol=1e-4, atol=1e-5)
    y = recorded(w, x)
    written(w, dense)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: w\.tensors\["):
        y.backward(grad)
    (found,) = torch.autograd.grad(recorded(w, x), x, grad)
    torch.testing.assert_close(found, 2 * grad @ dense, rtol=1e-4, atol=1e-5)


def test_the_gradient_of_the_bias_alone_needs_no_matrix(seed):
    dense, w = made(40, 70, dtype=torch.float32)
    x, bias = torch.randn(3, 70), torch.randn(40, requires_grad=True)
    y = operation.RECORDING.result((operation.BIASED, (w, x), None, {"bias": bias}))
    written(w, dense)
    (found,) = torch.autograd.grad(y.sum(), bias)
    assert torch.equal(found, torch.full((40,), 3.0))


def test_a_write_before_the_second_gradient_raises(seed):
    dense, w = made(40, 70, dtype=torch.float32)
    x = torch.randn(3, 70, requires_grad=True)
    grad = torch.randn(3, 40, requires_grad=True)
    (first,) = torch.autograd.grad(recorded(w, x), x, grad, create_graph=True)
    written(w, dense)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(first.sum(), grad)
