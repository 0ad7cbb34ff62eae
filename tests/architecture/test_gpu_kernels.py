"""What GPU tests ask for is noted by entry, and compiled without a GPU."""

from kernlib import events
from kernlib.jit import bundle, layers, service
from kernlib.jit.spec import KernelSpec
from tests.support import gpu_kernels

SOURCE = 'extern "C" __global__ void f(float* x) { x[0] = 1.0f; }\n'
ONE = ("sm_80", KernelSpec("test", SOURCE, "f", 32, 0, ("-O1",), "one"))
TWO = ("sm_90a", KernelSpec("test", SOURCE, "f", 64))


def test_notes_of_other_entries_stay(tmp_path):
    path = tmp_path / gpu_kernels.NAME
    gpu_kernels.write({"pairwise": [ONE], "sparse": [TWO]}, path)
    gpu_kernels.write({"sparse": [ONE, TWO, TWO]}, path)
    notes = gpu_kernels.read(path)
    assert notes["pairwise"] == [ONE] and sorted(notes["sparse"]) == [ONE, TWO]


def test_who_watches_does_not_listen(monkeypatch):
    """So GPU tests launch as users do, whom nobody listens to."""
    monkeypatch.setattr(service, "request_of", service.request_of)
    monkeypatch.setattr(layers.Request, "emit", layers.Request.emit)
    watch, spec = gpu_kernels.Watch(), KernelSpec("test", f"// watched\n{SOURCE}", "f", 32)
    watch.start()
    service.build(spec, "sm_80")  # of no test
    watch.entry = "sparse"
    service.build(spec, "sm_80")
    assert watch.kernels == {"sparse": {("sm_80", spec)}}
    assert watch.events == {"compile": 1} and not events.listening()


def test_what_workers_saw_adds_up():
    workers, run = [gpu_kernels.Watch(), gpu_kernels.Watch()], gpu_kernels.Watch()
    for worker, kernel, event in zip(workers, (ONE, TWO), ("hit", "compile"), strict=True):
        worker.kernels["pairwise"] = {kernel}
        worker.events[event] = 2
        run.merge(worker.state())
    assert run.kernels == {"pairwise": {ONE, TWO}}
    assert str(run) == "2 from the bundle, 2 compiled"


def test_a_bundle_holds_what_fits(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_kernels, "read", lambda: {"pairwise": [ONE], "sparse": [ONE, TWO]})
    said = gpu_kernels.build(tmp_path / "kernels")
    assert said.startswith("2 of 2 kernels") and (tmp_path / "kernels.tar.xz").is_file()
    held = bundle.open_bundle(tmp_path / "kernels")
    for arch, spec in (ONE, TWO):
        assert held.get(layers.request_of(spec, arch).portable)
    held.close()
    old = ("sm_80", ONE[1]._replace(source="#error of other headers"))
    monkeypatch.setattr(gpu_kernels, "read", lambda: {"pairwise": [ONE, TWO, old]})
    said = gpu_kernels.build(tmp_path / "kernels")
    assert said.startswith("2 of 3 kernels, 0 of them compiled and 1 outdated")
    assert gpu_kernels.build(tmp_path / "less", 1).startswith("0 of 3 kernels")
