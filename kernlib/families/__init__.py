"""One package a family of operations; none of them imports another.

Each reads in the order descriptor, lowering, reference, plans, ``operation`` (checks, primitive,
gradients and the call as it is made), operators, rules. What two of them need lies in
``kernlib.lowering`` or ``kernlib.runtime``.
"""

# Modules that register operators of torch.library, below this package, by what they are known as.
# ``run`` of a family's own answers run_kernel where somebody records the call.
OPERATORS = {
    "blocksparse": "blocksparse.operators",
    "kronecker_product": "kronecker_product.operators",
    "kronecker_sparse": "kronecker_sparse.operators",
    "pairwise": "pairwise.operators",
    "pairwise_formula": "pairwise.formula.operators",
    "pairwise_reduce": "pairwise.reductions.operators",
    "sparse": "sparse.operators",
}
