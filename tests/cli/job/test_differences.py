"""What differs between processes: of invented machines with GPUs."""

from __future__ import annotations

import pytest

from kernlib.cli.job.differences import differences, listed, of_checks, suits_nccl

VERSIONS = {"kernlib": "1.0.0", "torch": "2.13.0+cu130", "CUDA": "13.0", "NCCL": "2.28.9"}


def process(rank: int, host: str = "a", gpu: int | None = None, **changes) -> dict:
    """One of a host whose GPUs have the numbers of ranks."""
    number = rank if gpu is None else gpu
    device = {"index": number, "name": "NVIDIA H200", "arch": "sm_90a", "memory": 1 << 37}
    device["uuid"] = f"{host}{number}"
    facts = {"rank": rank, "host": host, "local_rank": rank, "device": device, "driver": "580.1"}
    facts |= {"versions": VERSIONS, "findings": [], "cache": {"folder": "/c", "writable": True}}
    return facts | changes


def lines(*processes: dict) -> list[tuple[str, str, str]]:
    return [(line.mark, line.label, line.text) for line in differences(list(processes))]


def test_equal_processes_have_one_line():
    job = [process(0), process(1), process(2, "b", 0, cache={"folder": "/d", "writable": True})]
    ((mark, label, text),) = lines(*job)
    assert (mark, label) == ("ok", "versions") and "torch 2.13.0+cu130" in text
    assert suits_nccl(job)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", VERSIONS)
def test_other_versions_fail(name):
    job = [process(0), process(1), process(2, "b", versions=VERSIONS | {name: "0.9"})]
    first, others = lines(*job)
    assert first == ("FAIL", name, f"{VERSIONS[name]} on ranks 0 and 1, 0.9 on rank 2")
    assert others[:2] == ("ok", "versions") and name not in others[2]
    assert suits_nccl(job) is (name != "NCCL")


def test_two_processes_on_one_gpu_fail_and_are_named():
    job = [process(0), process(1), process(2, gpu=0), process(3, "b", 0)]
    _, (mark, label, text) = lines(*job)
    assert (mark, label) == ("FAIL", "GPU")
    assert text == "ranks 0 and 2 share one NVIDIA H200 of a, which NCCL refuses"
    assert not suits_nccl(job)


def test_a_process_without_a_gpu_fails():
    job = [process(0), process(1, device=None)]
    assert ("FAIL", "GPU", "a GPU on rank 0, none on rank 1") in lines(*job)
    assert not suits_nccl(job)
    assert len(lines(process(0, device=None), process(1, device=None))) == 1


def test_other_architectures_are_a_note():
    older = process(1, device=process(1)["device"] | {"name": "NVIDIA A100", "arch": "sm_80"})
    assert ("note", "GPU", "sm_90a on rank 0, sm_80 on rank 1") in lines(process(0), older)
    assert suits_nccl([process(0), older])


def test_two_folders_of_one_host_are_a_note():
    job = [process(0), process(1, cache={"folder": "/d", "writable": True})]
    assert ("note", "cache", "of a: /c on rank 0, /d on rank 1") in lines(*job)


def test_equal_lines_of_the_doctor_are_one():
    bad = {"label": "disk", "text": "full", "advice": "make room", "status": "note", "details": {}}
    good = bad | {"status": "ok", "advice": ""}
    job = [process(rank, findings=[bad if rank != 1 else good]) for rank in range(4)]
    (line,) = of_checks(job)
    assert (line.mark, line.text) == ("note", "ranks 0, 2 and 3: full")


def test_ranks_are_listed_in_spans():
    assert listed([3]) == "rank 3" and listed([2, 0, 1]) == "ranks 0 to 2"
    assert listed([0, 2, 3, 5]) == "ranks 0, 2, 3 and 5"
