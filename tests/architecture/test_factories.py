"""New tensors of the package say where they are and of what they are made."""

import ast

from tests.architecture.package import MODULES

# Functions of torch that make a tensor of nothing that lies on a device: unless told, they follow
# torch.set_default_device, `with torch.device(...)` and torch.set_default_dtype.
FACTORIES = {
    "arange", "as_tensor", "asarray", "bartlett_window", "blackman_window", "empty",
    "empty_permuted", "empty_strided", "eye", "fft.fftfreq", "fft.rfftfreq", "full",
    "hamming_window", "hann_window", "kaiser_window", "linspace", "logspace",
    "nested.as_nested_tensor", "nested.nested_tensor", "normal", "ones", "rand", "randint",
    "randn", "randperm", "range", "scalar_tensor", "sparse_bsc_tensor", "sparse_bsr_tensor",
    "sparse_compressed_tensor", "sparse_coo_tensor", "sparse_csc_tensor", "sparse_csr_tensor",
    "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip


def unplaced(source):
    """Calls of torch's factories that do not say where, or of what dtype, the tensor is."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = ast.unparse(node.func)
            said = {keyword.arg for keyword in node.keywords}
            known = name.startswith("torch.") and name.removeprefix("torch.") in FACTORIES
            if known and not said >= {"device", "dtype"}:
                yield f"{node.lineno}: {ast.unparse(node)}"


def test_new_tensors_say_their_device_and_dtype():
    """So that what a caller has set as a default never decides of temporaries."""
    faults = [f"{path}:{call}" for path in MODULES for call in unplaced(path.read_text())]
    assert not faults, "\n".join(faults)


def test_the_reader_of_factories_sees_what_is_not_said():
    assert list(unplaced("torch.zeros(3, device=d)")) == ["1: torch.zeros(3, device=d)"]
    assert list(unplaced("x = f(torch.arange(3, dtype=torch.int64))"))
    assert not list(unplaced("torch.zeros(3, device=d, dtype=t); x.new_zeros(3); torch.sum(x)"))
