"""The documentation's site: it has every document and every public name, and a browser reads it."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import kernlib
from tests.support import reference as docstrings
from tests.support.paths import ROOT

SITE = ROOT / "docs" / "site"


def _parts() -> SimpleNamespace:
    """The modules that build the site, which lie in no package."""
    sys.path.insert(0, str(SITE))
    try:
        names = ("reference", "roles", "links", "navigation", "browser")
        return SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(SITE))


parts = _parts()
PAGES = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]


# What it holds.


def test_every_document_is_reached_by_the_navigation():
    nav = parts.navigation.navigation(PAGES)
    pages = parts.navigation.pages_in(nav)
    assert {*PAGES} <= pages
    assert {*parts.reference.pages()} <= pages
    assert [next(iter(entry)) for entry in nav] == [
        *("Start", "Families", "Concepts", "Guides", "Gallery", "Reference", "Results"),
        "Development",
    ]


def test_a_new_page_has_its_place():
    nav = parts.navigation.navigation([*PAGES, "gallery/new.md", "new.md"])
    places = {title: str(inside) for entry in nav for title, inside in entry.items()}
    assert "'gallery/new.md'" in places["Gallery"] and "'new.md'" in places["Development"]


def test_the_reference_lists_public_names_and_all_of_them():
    names = {*parts.reference.values()}
    for module in parts.reference.modules():
        loaded = importlib.import_module(module)
        for key in parts.reference.names_of(module):
            assert not key.startswith("_") and getattr(loaded, key) is not None
    listed = {f"{m}.{key}" for m in docstrings.MODULES for key in docstrings.listed(_module(m))}
    assert listed <= names
    public = {name for name in dir(kernlib) if not name.startswith("_")}
    modules = {name for name in public if f"kernlib.{name}" in parts.reference.modules()}
    assert {f"kernlib.{name}" for name in public - modules} <= names
    assert {*parts.reference.modules()} == {*docstrings.MODULES}


def test_pages_of_the_reference_have_every_name_once():
    texts = "".join(parts.reference.pages().values())
    for name in parts.reference.values():
        entries = texts.count(f"::: {parts.reference.anchor(name)}\n")
        assert entries + texts.count(f"{{ #{name} }}") == 1, name
        assert f"#{parts.reference.anchor(name)})" in parts.reference.table()
    assert parts.reference.MARK in (ROOT / "docs" / parts.reference.INDEX).read_text()


def test_every_public_name_has_a_docstring():
    assert parts.reference.undocumented() == []


# What is made of docstrings.


@pytest.mark.parametrize(
    "target, scope, place",
    [
        ("kernlib.Pairwise", "", "kernlib.Pairwise"),
        ("Pairwise", "kernlib.families.pairwise.descriptor.gaussian", "kernlib.Pairwise"),
        ("kernlib.linalg", "", "kernlib.linalg"),
        ("freeze", "kernlib.nn.kronecker_sparse.KSLinear", "kernlib.nn.KSLinear.freeze"),
        ("SparseLinear.from_linear", "", "kernlib.nn.SparseLinear.from_linear"),
        ("gemkm", "kernlib.compat.fastkron.fastkronnumpy", None),
        ("kernlib.runtime.plan", "", None),
        ("logging", "", None),
    ],
)
@pytest.mark.few(1000)
def test_a_role_is_a_link_where_there_is_a_page(target, scope, place):
    if target == "gemkm":
        place = "kernlib.compat.fastkron.fastkronnumpy.gemkm"
    text = parts.roles.as_markdown(f"See :class:`{target}`.", scope)
    assert f"<code>{target}</code>" in text if place else text == f"See `{target}`."
    assert place is None or f'identifier="{place}"' in text


def test_markup_of_docstrings_is_what_they_mean():
    text = "``a_b`` (*B, P) and x_i [1]\n\nso::\n\n    run --now\n\nExample:\n    >>> 1\n    1\n"
    assert parts.roles.as_markdown(text, "") == (
        "`a_b` (\\*B, P) and x\\_i \\[1\\]\n\nso:\n\n\n```text\nrun --now\n```\n\n\n"
        "**Example**\n\n\n```pycon\n>>> 1\n1\n```\n"
    )


def test_no_role_is_left_in_the_docstring_of_a_public_name():
    for name, value in parts.reference.values().items():
        text = inspect.cleandoc(value.__doc__ or "") if callable(value) else ""
        assert not re.search(parts.roles.ROLE, parts.roles.as_markdown(text, name)), name


# What is made of links.


def test_links_lead_to_pages_of_the_site_and_code_is_left_alone():
    text = (
        "[a](../../CONTRIBUTING.md#tests) [b](../versions.md) [c](#d) [e](https://f.g)\n"
        "![h](../../benchmarks/results/h200/sparse.svg) `examples/quickstart.py`, `a | b`\n"
        "```python\n[a](../../CONTRIBUTING.md)\n```\n"
    )
    assert parts.links.page_text(text, "docs/guides/install.md") == (
        "[a](../project/CONTRIBUTING.md#tests) [b](../versions.md) [c](#d) [e](https://f.g)\n"
        "![h](../pictures/benchmarks/results/h200/sparse.svg) "
        "[`examples/quickstart.py`](../examples/quickstart.md), `a | b`\n"
        "```python\n[a](../../CONTRIBUTING.md)\n```\n"
    )


def test_names_in_code_lead_to_the_reference():
    text = parts.links.page_text("`kl.cdist(a, b)` and `kernlib.nothing`", "docs/index.md")
    assert text.strip() == (
        '<autoref identifier="kernlib.cdist" optional hover><code>kl.cdist(a, b)</code></autoref>'
        " and `kernlib.nothing`"
    )


def test_lists_are_indented_as_the_site_needs_it():
    text = "1. a\n   b\n\n   - c\n2. d\n\ne\n- f\n  g\n"
    expected = "1. a\n    b\n\n    - c\n\n2. d\n\ne\n- f\n    g\n"
    assert parts.links.with_wide_lists(text) == expected


# In a browser.


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built strictly."""
    pytest.importorskip("mkdocs", reason='the site needs pip install -e ".[docs]"')
    if not (ROOT / "mkdocs.yml").exists():
        pytest.skip("mkdocs.yml is in a checkout only")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", str(folder)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


@pytest.fixture(scope="module")
def address(site):
    if parts.browser.lacks():
        pytest.skip(parts.browser.lacks())
    with parts.browser.server(site) as where:
        yield where


@pytest.fixture(scope="module")
def driver(address):
    with parts.browser.chromium() as one:
        yield one


@pytest.fixture(params=parts.browser.SIZES)
def size(request) -> str:
    return request.param


@pytest.fixture(params=parts.browser.SCHEMES)
def shown(request, driver, size):
    """The browser as it is on such a screen, of a system that is light or dark."""
    parts.browser.look(driver, size, request.param)
    driver.scheme = request.param
    return driver


# Those with tables and pictures that are wide.
WIDE = (
    *("", "reference/", "reference/kernlib/", "reference/kernlib.compat.torch_blocksparse/"),
    *("families/blocksparse/", "concepts/running/", "results/blocksparse/", "results/sparse/"),
    *("gallery/", "examples/quickstart/", "project/CONTRIBUTING/", "project/CHANGELOG/"),
)


@pytest.mark.slow
@pytest.mark.few(1000)
def test_ten_links_lead_to_pages_and_to_no_other_host(shown, address):
    parts.browser.requests(shown)
    shown.get(address)
    links = shown.find_elements("css selector", "article a[href]:not(.headerlink)")
    inside = [x.get_attribute("href") for x in links]
    chosen = [x for x in dict.fromkeys(inside) if x.startswith(address)][:10]
    assert len(chosen) == 10
    for target in chosen:
        shown.get(address)
        link = next(
            x
            for x in shown.find_elements("css selector", "article a[href]")
            if x.get_attribute("href") == target
        )
        shown.execute_script("arguments[0].scrollIntoView({block: 'center'})", link)
        link.click()
        assert shown.current_url == target
        assert shown.find_element("css selector", "article h1").text
    foreign = {url for url in parts.browser.requests(shown) if not url.startswith(address)}
    assert not foreign
    assert not [x for x in shown.get_log("browser") if x["level"] == "SEVERE"]


@pytest.mark.slow
@pytest.mark.few(1000)
def test_the_search_knows_cdist(shown, size, address):
    shown.get(address)
    if size == "phone":
        shown.find_element("css selector", "label.md-header__button[for=__search]").click()
    field = shown.find_element("css selector", "input.md-search__input")
    _until(field.is_displayed)
    field.send_keys("cdist")
    entries = "a.md-search-result__link"
    _until(lambda: shown.find_elements("css selector", entries))
    targets = [x.get_attribute("href") for x in shown.find_elements("css selector", entries)]
    assert any(x.endswith("#kernlib.cdist") for x in targets), targets


@pytest.mark.slow
@pytest.mark.few(1000)
def test_pages_fit_the_screen_and_the_scheme(shown, address):
    for page in WIDE:
        shown.get(address + page)
        width, seen = shown.execute_script(
            "return [document.documentElement.scrollWidth, window.innerWidth]"
        )
        assert width <= seen, page
        _until(lambda: shown.execute_script(_LOADED), page)
        scheme = shown.find_element("css selector", "body").get_attribute("data-md-color-scheme")
        assert scheme == {"light": "default", "dark": "slate"}[shown.scheme]
        assert shown.execute_script(_CONTRAST) >= 4.5, page


# Whether every picture is there, loaded where it is lazily, and no wider than the text.
_LOADED = """
return [...document.querySelectorAll("article img")].every(x => {
  x.loading = "eager";
  return x.complete && x.naturalWidth > 0 && x.width <= x.closest("article").clientWidth;
})
"""
# Of text to its background, in running text and in code.
_CONTRAST = """
function parts(text) { return text.match(/[\\d.]+/g).map(Number); }
function light(c) {
  const [r, g, b] = c.map(x => x / 255).map(x => x <= 0.03928 ? x / 12.92
    : Math.pow((x + 0.055) / 1.055, 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function over(front, back) {
  const a = front.length > 3 ? front[3] : 1;
  return [0, 1, 2].map(i => a * front[i] + (1 - a) * back[i]);
}
const page = parts(getComputedStyle(document.body).backgroundColor);
const least = [...document.querySelectorAll("article p, article li, article pre > code")].map(x => {
  const style = getComputedStyle(x);
  const back = over(parts(style.backgroundColor), page);
  const pair = [light(over(parts(style.color), back)), light(back)].sort((a, b) => b - a);
  return (pair[0] + 0.05) / (pair[1] + 0.05);
});
return Math.min(...least, 21);
"""


def _until(is_so, what: str = "") -> None:
    """Wait for what a page does by itself."""
    for _ in range(400):
        if is_so():
            return
        time.sleep(0.05)
    raise AssertionError(f"it does not happen within 20 s {what}")


def _module(name: str):
    return importlib.import_module(name)
