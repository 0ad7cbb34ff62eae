"""What differs between the processes of a job, of what each says of itself."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from kernlib.cli.checks import Finding
from kernlib.cli.job.facts import Process

SAME_INSTALLATION = "install the same versions on all hosts, in an environment that they share"
FEWER_PROCESSES = (
    "start one process for each GPU: torchrun --nproc-per-node gpu starts as many as a host has"
)
EACH_WITH_A_GPU = "give each process a GPU: leave hosts without one out, or mend what hides theirs"
ONE_ARCH = (
    "each target has kernels of its own, and a call takes as long as on the slowest GPU: take GPUs "
    "of one kind, or give the faster ones more rows"
)
ONE_FOLDER = (
    "each folder has its own compiles: give all processes of a host the same KERNLIB_CACHE_DIR"
)


def differences(processes: list[Process]) -> list[Finding]:
    """A FAIL is what must not differ, a note what costs time; versions that are equal are one line
    that is ok."""
    return [*_versions(processes), *_devices(processes), *_caches(processes)]


def of_checks(processes: list[Process]) -> list[Finding]:
    """The lines of `kernlib doctor` that are not ok, each once, with the ranks that have it."""
    ranks: dict[tuple, list[int]] = {}
    for process in processes:
        for finding in process["findings"]:
            if finding["status"] != "ok":
                key = tuple(finding[name] for name in ("label", "text", "advice", "status"))
                ranks.setdefault(key, []).append(process["rank"])
    return [
        Finding(label, f"{listed(at)}: {text}", advice, needed=status == "fail")
        for (label, text, advice, status), at in ranks.items()
    ]


def suits_nccl(processes: list[Process]) -> bool:
    """Whether NCCL has what it asks for: one version, and a GPU for each process that no other
    has."""
    devices = {(process["host"], (process["device"] or {}).get("uuid")) for process in processes}
    versions = {process["versions"].get("NCCL") for process in processes}
    is_own = len(devices) == len(processes) and all(process["device"] for process in processes)
    return is_own and len(versions) == 1


def listed(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0 to 3 and 6``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    texts = []
    for span in spans:
        texts += map(str, span) if len(span) < 3 else [f"{span[0]} to {span[-1]}"]
    *rest, final = texts
    plural = "" if final == str(spans[0][0]) else "s"
    return f"rank{plural} {', '.join(rest)}{' and ' if rest else ''}{final}"


def _ranks(pairs: Iterable[tuple[Hashable, int]]) -> dict:
    """Each value, with the ranks that have it."""
    ranks: dict[Hashable, list[int]] = {}
    for value, rank in pairs:
        ranks.setdefault(value, []).append(rank)
    return ranks


def _said(ranks: dict) -> str:
    """``2.8.0 on ranks 0 to 3, 2.9.0 on rank 4``."""
    return ", ".join(f"{value} on {listed(at)}" for value, at in ranks.items())


def _versions(processes: list[Process]) -> list[Finding]:
    findings, equal = [], []
    for name in processes[0]["versions"]:
        pairs = ((process["versions"].get(name), process["rank"]) for process in processes)
        ranks = _ranks(pairs)
        if len(ranks) > 1:
            findings.append(Finding(name, _said(ranks), SAME_INSTALLATION, needed=True))
        else:
            equal.append(f"{name} {next(iter(ranks))}")
    if equal:
        findings.append(Finding("versions", f"the same in all processes: {', '.join(equal)}"))
    return findings


def _devices(processes: list[Process]) -> list[Finding]:
    findings = []
    kinds = _ranks(
        ("a GPU" if process["device"] else "none", process["rank"]) for process in processes
    )
    if len(kinds) > 1:
        findings.append(Finding("GPU", _said(kinds), EACH_WITH_A_GPU, needed=True))
    equipped = [process for process in processes if process["device"]]
    places = _ranks(
        ((process["host"], process["device"]["uuid"], process["device"]["name"]), process["rank"])
        for process in equipped
    )
    for (host, _, name), ranks in places.items():
        if len(ranks) > 1:
            text = f"{listed(ranks)} share one {name} of {host}, which NCCL refuses"
            findings.append(Finding("GPU", text, FEWER_PROCESSES, needed=True))
    archs = _ranks((process["device"]["arch"], process["rank"]) for process in equipped)
    if len(archs) > 1:
        findings.append(Finding("GPU", _said(archs), ONE_ARCH))
    return findings


def _caches(processes: list[Process]) -> list[Finding]:
    """Folders that differ between processes of one host."""
    findings = []
    for host in dict.fromkeys(process["host"] for process in processes):
        folders = _ranks(
            (process["cache"]["folder"], process["rank"])
            for process in processes
            if process["host"] == host
        )
        if len(folders) > 1:
            findings.append(Finding("cache", f"of {host}: {_said(folders)}", ONE_FOLDER))
    return findings
