"""Calls with categories that somebody records: torch.compile, fake and meta tensors, vmap."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kernlib as kl
from kernlib.descriptors.text import from_text
from tests.families.pairwise.categories.cases import drawn
from tests.support.dynamo_messages import said

CASE = drawn(7, 6, 4, (3, 5))
LAPLACE = kl.laplace_l2(categories=2)


A_CODES, B_CODES = CASE.a_codes, CASE.b_codes


def call(a, b, tables, bandwidth=2.0, a_codes=A_CODES, b_codes=B_CODES, **options):
    codes = {"a_codes": a_codes, "b_codes": b_codes, "tables": list(tables)}
    return kl.run_kernel(LAPLACE, a, b, bandwidth=bandwidth, **codes, **options)


def compiled(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def test_compiled_calls_write_and_add():
    out = torch.ones(7, 6, dtype=torch.float64)
    compiled(lambda *given: call(*given, out=out, accumulate=True))(CASE.a, CASE.b, CASE.tables)
    assert torch.equal(out, call(CASE.a, CASE.b, CASE.tables) + 1)


def test_compiled_calls_have_gradients():
    found, wanted = [], []
    for function, into in ((compiled(call), found), (call, wanted)):
        given = [t.clone().requires_grad_() for t in (CASE.a, CASE.b, *CASE.tables)]
        bandwidth = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        made = function(given[0], given[1], given[2:], bandwidth)
        into += torch.autograd.grad(made.square().sum(), (*given, bandwidth))
    for mine, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, right)


def test_a_new_size_is_compiled_for():
    function = compiled(call)
    for rows in (7, 5, 3):
        given, codes = (CASE.a[:rows], CASE.b, CASE.tables), A_CODES[:rows]
        found = function(*given, a_codes=codes)
        assert torch.equal(found, call(*given, a_codes=codes))
    with pytest.raises(Exception, match=said("tables must be 2 tables")):
        function(CASE.a, CASE.b, CASE.tables[:1])


def test_meta_and_fake_tensors_have_shapes():
    meta = CASE._replace(**{name: getattr(CASE, name).to("meta") for name in CASE._fields[:4]})
    meta = meta._replace(tables=[table.to("meta") for table in CASE.tables])
    found = meta.run(LAPLACE, bandwidth=2.0)
    assert found.is_meta and found.shape == (7, 6) and found.dtype == torch.float64
    with FakeTensorMode() as mode:
        fake = CASE._replace(**{name: mode.from_tensor(getattr(CASE, name))
                                for name in CASE._fields[:4]})  # fmt: skip
        fake = fake._replace(tables=[mode.from_tensor(table) for table in CASE.tables])
        inside = fake.run(LAPLACE, bandwidth=2.0)
    for found in (inside, fake.run(LAPLACE, bandwidth=2.0)):
        assert found.shape == (7, 6)


def test_vmap_maps_over_points_and_tables():
    points = torch.stack([CASE.a, 2 * CASE.a])
    found = torch.vmap(lambda a: call(a, CASE.b, CASE.tables))(points)
    for mine, a in zip(found, points, strict=True):
        torch.testing.assert_close(mine, call(a, CASE.b, CASE.tables))
    tables = torch.stack([CASE.tables[0], 3 * CASE.tables[0]])
    found = torch.vmap(lambda table: call(CASE.a, CASE.b, [table, CASE.tables[1]]))(tables)
    for mine, table in zip(found, tables, strict=True):
        torch.testing.assert_close(mine, call(CASE.a, CASE.b, [table, CASE.tables[1]]))


def test_other_transforms_are_refused():
    with pytest.raises(RuntimeError, match="is inside a transform of torch"):
        torch.func.grad(lambda a: call(a, CASE.b, CASE.tables).sum())(CASE.a)


def test_texts_without_categories_are_what_they_were():
    assert "categories" not in kl.gaussian().text
    assert kl.gaussian(categories=0) == kl.gaussian()
    assert kl.gaussian(categories=0).canonical() == kl.gaussian().canonical()
    made = kl.gaussian(categories=2)
    assert from_text(made.text) == made != kl.gaussian()
    assert made.canonical() != kl.gaussian().canonical()
    assert made.describe() == "gaussian(categories=2)"
