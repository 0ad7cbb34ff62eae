"""Files of the checkout, as the rules of the house see them."""

from tests.support.paths import ROOT

PACKAGE = ROOT / "kernlib"
MODULES = sorted(PACKAGE.rglob("*.py"))
FAMILIES = sorted(path.parent.name for path in (PACKAGE / "families").glob("*/__init__.py"))
