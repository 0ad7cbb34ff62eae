"""Who listens to events, and until when."""

import inspect

import pytest
import torch

import kernlib as kl
from kernlib import blocksparse, events, linalg, sparse

SPD, B = torch.eye(4) * 3 + 1, torch.randn(4, 2)
X, COLUMN, BANDWIDTH = torch.randn(4, 3), torch.randn(4), {"bandwidth": 1.0}
W, LAYOUT = sparse.compress(torch.eye(4), "u8"), blocksparse.dense(16, 16, 16)
VALUES, HEADS = torch.randn(1, 16, 16), torch.randn(1, 1, 16, 16)
Q, SCALES = torch.randn(16, 16).to(torch.float8_e4m3fn), (torch.ones(()), torch.ones(1))
# A call of each public function that computes something of tensors.
CALLS = {
    kl.agop: (kl.gaussian(), X, X, COLUMN, BANDWIDTH),
    kl.cdist: (X, X),
    kl.cdist_expadd: (X, X, {"scale": -1.0}),
    kl.cdist_grad: (SPD, SPD, SPD, SPD),
    kl.cdist_grad_expadd: (SPD, SPD, SPD, SPD, {"scale": -1.0}),
    kl.kernel_argmin: (kl.gaussian(), X, X, BANDWIDTH),
    kl.kernel_count: (kl.gaussian(), X, X, {"threshold": 0.5, **BANDWIDTH}),
    kl.kernel_logsumexp: (kl.gaussian(), X, X, BANDWIDTH),
    kl.kernel_matmul: (kl.gaussian(), X, X, COLUMN, BANDWIDTH),
    kl.kernel_mean: (kl.gaussian(), X, X, BANDWIDTH),
    kl.kernel_min: (kl.gaussian(), X, X, BANDWIDTH),
    kl.kernel_neighbors: (kl.gaussian(), X, X, {"threshold": 0.5, **BANDWIDTH}),
    kl.kernel_softmax_matmul: (kl.gaussian(), X, X, COLUMN, BANDWIDTH),
    kl.kernel_sum: (kl.gaussian(), X, X, BANDWIDTH),
    kl.kernel_topk: (kl.gaussian(), X, X, 2, BANDWIDTH),
    kl.kron_matmul: (X, [torch.randn(3, 2)]),
    kl.run_kernel: (kl.gaussian(), X, X, BANDWIDTH),
    sparse.compress: (torch.eye(4), "u8"),
    sparse.from_csr: (torch.arange(5), torch.arange(4), torch.ones(4), (4, 4), "u8"),
    sparse.magnitude: (X, 0.5),
    sparse.matmul: (W, COLUMN),
    blocksparse.attention: (HEADS, HEADS, HEADS, LAYOUT),
    blocksparse.dds: (HEADS, VALUES, LAYOUT),
    blocksparse.dsd: (VALUES, HEADS, LAYOUT),
    blocksparse.quantize: (X,),
    blocksparse.scaled_dds: (Q, Q[None], LAYOUT, *SCALES),
    blocksparse.scaled_dsd: (Q[None], Q, LAYOUT, *SCALES[::-1]),
    blocksparse.scaled_dot_product_attention: (HEADS, HEADS, HEADS, {"layout": LAYOUT}),
    blocksparse.sdd: (HEADS, HEADS, LAYOUT),
    blocksparse.softmax: (VALUES, LAYOUT),
    blocksparse.top_k: (torch.randn(2, 2), 16, 1),
    linalg.conjugate_gradient: (SPD.matmul, B),
    linalg.eigh: (SPD,),
    linalg.kron_cholesky: ([SPD],),
    linalg.kron_eigh: ([SPD],),
    linalg.kron_inverse: ([SPD],),
    linalg.kron_logdet: ([SPD],),
    linalg.kron_solve: ([SPD], B),
    linalg.masked_kron_matmul: (COLUMN, [SPD], torch.arange(4)),
    linalg.masked_kron_solve: ([SPD], COLUMN, torch.arange(4), {"noise": 1.0}),
    linalg.falkon: (kl.gaussian(), X, COLUMN, X, {"regularization": 1.0, **BANDWIDTH}),
    linalg.nystrom: (kl.gaussian(), X, 2, {"regularization": 1.0, **BANDWIDTH}),
    linalg.solve_cholesky: (SPD, B),
    linalg.solve_kernel: (kl.gaussian(), X, COLUMN, {"regularization": 1.0, **BANDWIDTH}),
    linalg.solve_lu: (SPD, B),
}
# What only describes, and what the tests of its own module cover.
OTHERS = {
    kl.compile, kl.prepare, kl.recording, kl.register_operators, kl.tune,
    blocksparse.block_diagonal, blocksparse.causal, blocksparse.dense, blocksparse.fixed,
    blocksparse.random, blocksparse.sliding_window,
}  # fmt: skip


def test_each_public_operation_has_its_call_here():
    listed = {getattr(module, name) for module in (kl, sparse, blocksparse, linalg)
              for name in module.__all__}  # fmt: skip
    functions = {each for each in listed if inspect.isfunction(each)}
    descriptors = {each for each in functions if each.__module__.endswith("descriptor")}
    assert functions - descriptors - OTHERS - {kl.compile} == set(CALLS)


@pytest.mark.few(99)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_every_operation_takes_debug(call, capsys):
    """What it is says what was done; nothing else is, and what is no bool is refused."""
    *values, last = CALLS[call]
    named = last if isinstance(last, dict) else {}
    values = values if named else [*values, last]
    call(*values, **named)
    assert not capsys.readouterr().err
    call(*values, **named, debug=True)
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(line.startswith("kernlib ") for line in lines)
    with pytest.raises(TypeError, match=r"debug must be a bool, got 1"):
        call(*values, **named, debug=1)
    assert not capsys.readouterr().err


@pytest.mark.few(99)
@pytest.mark.parametrize(
    # But for neighbours, whose number no meta tensor knows.
    "call", [c for c in CALLS if c.__name__.startswith("kernel_") and c is not kl.kernel_neighbors]
)  # fmt: skip
def test_the_line_of_a_call_without_events_names_the_function(call, capsys):
    *values, named = CALLS[call]
    values = [v.to("meta") if isinstance(v, torch.Tensor) else v for v in values]
    call(*values, **named, debug=True)
    assert f" {call.__name__}: no kernel" in capsys.readouterr().err


def test_each_subscription_ends_once_and_alone():
    heard = []
    first, second = events.subscribe(heard.append), events.subscribe(heard.append)
    try:
        first()
        first()
        events.emit("lookup", "", "", "")
        assert len(heard) == 1
    finally:
        second()
    events.emit("lookup", "", "", "")
    assert len(heard) == 1 and heard.append not in events.watched


def test_the_logger_gets_events_of_kernels_and_launches_by_subscription(caplog, capsys):
    def emit_all():
        caplog.clear()
        for name in events.NAMES:
            events.emit(name, "0f", "sm_90a", "a kernel", ms=2)
        return [(record.levelname, record.event.name) for record in caplog.records]

    assert emit_all() == [("WARNING", "failed")]  # without any set-up
    caplog.set_level("INFO", "kernlib")
    assert emit_all() == [("INFO", "compile"), ("INFO", "evict"), ("WARNING", "failed")]
    assert caplog.records[0].getMessage() == "compile 0f sm_90a ms=2 a kernel"
    caplog.set_level("DEBUG", "kernlib")
    assert {name for _, name in emit_all()} == {*events.NAMES} - {"launch", "torch"}
    end = events.subscribe(events.log)
    try:
        assert [name for _, name in emit_all()] == list(events.NAMES)
    finally:
        end()
    assert capsys.readouterr().err == ""


def test_every_call_that_torch_computes_is_heard_of():
    """Those without a pair and gradients of matrices too, whatever describes them."""
    a, b, none, heard = torch.randn(9, 5), torch.randn(7, 5), torch.randn(0, 5), []
    v, c = torch.randn(7, 2), torch.randn(2, 7)
    calls = (
        lambda: kl.cdist(a, b),
        lambda: kl.cdist_grad(torch.randn(7, 4), torch.randn(5, 7), c, torch.randn(5, 4), p=1.5),
        lambda: kl.agop(kl.laplace_l1(), a, b, c, bandwidth=1.0),
        lambda: kl.kernel_sum(kl.gaussian(), none, b, bandwidth=1.0),
        lambda: kl.kernel_matmul(kl.gaussian(), none, b, v, bandwidth=1.0),
        lambda: kl.kernel_min(kl.l1_distance(), none, b),
        lambda: kl.kernel_topk(kl.l1_distance(), none, b, 3),
        lambda: kl.run_kernel(kl.KroneckerSparse(1, 4, 5, 1), a, torch.randn(1, 4, 5, 1)),
        lambda: kl.kron_matmul(torch.randn(3, 4), [torch.randn(2, 3), torch.randn(2, 5)]),
    )
    end = events.subscribe(lambda event: heard.append(event.description))
    try:
        for call in calls:
            heard.clear()
            call()
            assert heard and all("on cpu: no kernel" in text for text in heard)
    finally:
        end()
