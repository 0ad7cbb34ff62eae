from kernlib.families.sparse.lowering import macko, slices
from kernlib.lowering.kernel import Kernel


class Macko(Kernel):
    role, name, header, entry, formats = (
        "product",
        "macko",
        "sparse/macko/macko.cuh",
        "",
        ("macko",),
    )

    def takes(self, problem, arch):
        return macko.takes(problem, arch)

    def launch(self, e, problem, gpu, choice):
        return macko.lower(e, problem, *gpu)

    def specs(self, e, scope, arch):
        return macko.variants(e, scope.dtypes, arch)


class Slices(Kernel):
    role, name, header, entry, formats = (
        "product",
        "slices",
        "sparse/slices/slices.cuh",
        "",
        ("u8", "u4", "u2"),
    )

    def takes(self, problem, arch):
        return slices.KERNELS[problem.format].takes(problem, arch)

    def launch(self, e, problem, gpu, choice):
        low = slices.KERNELS[problem.format].lower(e, problem, *gpu)
        if problem.frozen and low.steps and low.steps[0].overlaps and len(low.steps[0].fixed) > 32:
            low = low._replace(
                steps=(slices.KERNELS[problem.format].ahead(low.steps[0]), *low.steps[1:])
            )
        return low

    def specs(self, e, scope, arch):
        return slices.KERNELS[scope.format].variants(e, scope.dtypes, arch)
