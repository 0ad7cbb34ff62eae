"""Exported programs are the eager calls: here, in another process, and compiled ahead of time."""

import os
import subprocess
import sys

import pytest
import torch

from tests.contract.library.calls import close, targets
from tests.contract.library.operations import every
from tests.support.speeds import slow_but

pytestmark = pytest.mark.few(by="operation")


def exported(given, strict, dynamic):
    sizes = ({0: torch.export.Dim("rows", min=2)},) if dynamic else None
    example = given.example(given.rows[0])
    return torch.export.export(given.module(), (example,), dynamic_shapes=sizes, strict=strict)


@pytest.mark.parametrize("dynamic", slow_but((True,), (False, True)))
@pytest.mark.parametrize("strict", [False, True])
@every(lambda one: one.exported)
def test_an_exported_program_is_the_eager_one(operation, case, strict, dynamic):
    given, near = operation.exported[case], operation.near
    program = exported(given, strict, dynamic)
    names = {f"kernlib.{name}.default" for name in given.operators}
    assert names <= {*targets(program.graph_module)}
    for made in (program, program.run_decompositions()):
        for rows in given.rows if dynamic else given.rows[:1]:
            x = given.example(rows)
            found, wanted = made.module()(x), given.module()(x)
            close(found.detach(), wanted.detach(), near.recorded if given.trains else near.plain)


@every(lambda one: [name for name, given in one.exported.items() if given.trains])
def test_an_exported_program_trains(operation, case):
    given = operation.exported[case]
    x, ours, theirs = (
        given.example(given.rows[0]),
        exported(given, False, False).module(),
        given.module(),
    )
    for module in (ours, theirs):
        module(x).square().sum().backward()
    found, wanted = (dict(module.named_parameters()) for module in (ours, theirs))
    assert wanted and found.keys() == wanted.keys()
    for name in wanted:
        close(found[name].grad, wanted[name].grad, operation.near.slopes, operation.strides)


CHILD = """
import sys, torch
import kernlib
kernlib.register_operators()
program = torch.export.load(sys.argv[1]).module()
x, wanted, (rtol, atol) = torch.load(sys.argv[2])
print(torch.allclose(program(x), wanted, rtol=rtol, atol=atol))
"""


@pytest.mark.slow
@every(lambda one: one.exported)
def test_a_saved_program_runs_in_another_process(operation, case, tmp_path):
    given, near = operation.exported[case], operation.near
    x = given.example(given.rows[-1])
    torch.export.save(exported(given, False, True), tmp_path / "program.pt2")
    wanted = given.module()(x).detach()
    tolerance = near.recorded if given.trains else near.plain
    torch.save((x, wanted, tolerance), tmp_path / "wanted.pt")
    files = [str(tmp_path / name) for name in ("program.pt2", "wanted.pt")]
    run = subprocess.run(
        [sys.executable, "-c", CHILD, *files], capture_output=True, text=True, env=os.environ
    )
    assert run.stdout == "True\n", run.stderr


def ahead(given, path):
    """The program of a module, compiled by AOTInductor."""
    with torch.no_grad():
        program = exported(given, False, False)
        made = torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    return torch._inductor.aoti_load_package(made)


@pytest.mark.slow
@every(lambda one: one.exported, promise="AOTInductor")
def test_a_program_of_aot_inductor_is_the_eager_one(operation, case, tmp_path):
    """It hands over None for a list that is empty."""
    given = operation.exported[case]
    x = given.example(given.rows[0])
    run, wanted = ahead(given, tmp_path / "program.pt2"), given.module()(x).detach()
    with torch.inference_mode():
        close(run(x), wanted, operation.near.recorded)
    with torch.no_grad():
        close(run(x), wanted, operation.near.recorded)
