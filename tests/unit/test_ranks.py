"""Ranks without processes: who has which teachers, whose files hold them, and a world of one."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from datalens.errors import DatalensError
from datalens.private.networks import Network, Spectral, compact_network
from datalens.private.partition import Partition
from datalens.private.shares import Shares
from datalens.private.teachers import Teachers
from datalens.public.basis import make_basis
from datalens.run import ranks
from datalens.run.folder import load_part, part_name, save_tensors
from datalens.run.ranks import World
from datalens.run.remote_teachers import Shown


@given(teachers=st.integers(1, 5000), size=st.integers(1, 64))
def test_every_teacher_has_one_rank(teachers: int, size: int) -> None:
    if size > teachers:
        size = teachers
    ranges = [World(rank=rank, size=size).numbers(teachers) for rank in range(size)]
    assert [number for numbers in ranges for number in numbers] == list(range(teachers))
    sizes = [len(numbers) for numbers in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[0] == max(sizes)
    assert World(rank=0, size=size).numbers(teachers, rank=size - 1) == ranges[-1]


def test_a_world_of_one_sends_nothing() -> None:
    world = World.start("cpu")
    with world:
        assert (world.rank, world.size, world.leads) == (0, 1, True)
        values = torch.tensor([1, 2])
        assert world.add(values) is values
        assert world.broadcast(values) is values
        assert world.gather(b"x") == [b"x"]
        world.agree({"k": 1})
        with pytest.raises(ZeroDivisionError):
            world.together(lambda: 1 // 0)


# --- the same bits on any rank --------------------------------------------------------------------------------------


def networks() -> dict[str, Network]:
    shape = (1, 28, 28)
    pixels, cosines = make_basis("pixel", shape, None), make_basis("dct", shape, 40)
    return {
        "spectral": Spectral(basis=make_basis("dct", shape, 64), classes=10, hidden=16),
        "compact": compact_network(pixels, 10, linear=5.0),
        "compact, cosines": compact_network(cosines, 10, linear=5.0),
        "compact, colour": compact_network(make_basis("pixel", (3, 14, 11), None), 10, linear=7.0),
    }


def rows(network: Network, numbers: range, *, teachers: int = 13) -> torch.Tensor:
    """What these teachers say, step after step, as one rank has them: [steps, teachers, m, d]."""
    drawn = torch.Generator().manual_seed(1)
    channels, height, width = network.basis.shape  # type: ignore[attr-defined] # of ours
    images = torch.randint(0, 256, (4 * teachers, height, width, channels), generator=drawn, dtype=torch.uint8)
    labels = torch.randint(10, (len(images),), generator=drawn)
    share = np.arange(len(images)) % teachers
    kept = (share >= numbers.start) & (share < numbers.stop)
    shares = Shares(
        network.record_features(images[kept]),
        labels[kept],
        Partition(share=share[kept], teachers=teachers),
        numbers=numbers,
    )
    mine = Teachers(network, shares, batch=15, learning_rate=1e-3, weight_decay=0.03, seed=0)
    said = []
    for step in range(3):
        fakes = Shown(
            images=torch.rand(15, channels, height, width, generator=drawn),
            labels=torch.randint(10, (15,), generator=drawn),
            step=step,
        )
        mine.fit_step(fakes, step=step, repeats=2)
        said.append(torch.cat([chunk.values.clone() for chunk in mine.image_gradients(fakes, step=step)]))
    return torch.stack(said)


@pytest.mark.parametrize("name", ["spectral", "compact", "compact, cosines", "compact, colour"])
def test_a_teacher_says_the_same_on_any_rank(name: str) -> None:
    """Bit by bit. In float32 Adam blows up what little rounding there is, and then votes differ."""
    network = networks()[name]
    alone = rows(network, range(13))
    for cuts in ([0, 7, 13], [0, 1, 4, 13]):
        parts = [rows(network, range(first, end)) for first, end in itertools.pairwise(cuts)]
        together = torch.cat(parts, dim=1)
        differ = (together != alone).flatten(2).any(dim=2)
        assert not differ.any(), f"teachers {differ.any(dim=0).nonzero().flatten().tolist()} of ranks {cuts}"


# --- parts of a checkpoint ------------------------------------------------------------------------------------------


def saved(folder: Path, cuts: list[int], *, step: int = 3) -> list[str]:
    """Ten teachers, whose state says which they are, in one file a range."""
    names = []
    for first, end in zip([0, *cuts], [*cuts, 10], strict=True):
        state = {"w": torch.arange(first, end).view(-1, 1).repeat(1, 2).float(), "steps": torch.tensor(7.0)}
        names.append(part_name(step, range(first, end)))
        save_tensors(folder / names[-1], state, {"step": str(step), "first": str(first), "end": str(end)})
    return names


@pytest.mark.parametrize("written", [[], [5], [1, 2, 9], [3, 6]])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 10])
def test_any_number_of_ranks_reads_what_any_other_wrote(tmp_path: Path, written: list[int], size: int) -> None:
    names = saved(tmp_path, written)
    for rank in range(size):
        numbers = World(rank=rank, size=size).numbers(10)
        state = load_part(tmp_path, names, step=3, numbers=numbers)
        assert state["w"][:, 0].tolist() == list(numbers)
        assert float(state["steps"]) == 7


def test_files_of_two_steps_are_never_mixed(tmp_path: Path) -> None:
    names = saved(tmp_path, [5])
    stale = saved(tmp_path, [5], step=2)
    with pytest.raises(DatalensError, match="damaged"):
        load_part(tmp_path, [names[0], stale[1]], step=3, numbers=range(10))
    (tmp_path / stale[1]).rename(tmp_path / names[1])  # whatever its name
    with pytest.raises(DatalensError, match="damaged"):
        load_part(tmp_path, names, step=3, numbers=range(10))


@pytest.mark.parametrize("left", [[0], [1], []])
def test_a_file_that_is_not_named(tmp_path: Path, left: list[int]) -> None:
    names = saved(tmp_path, [5])
    with pytest.raises(DatalensError, match="names no file with teacher"):
        load_part(tmp_path, [names[i] for i in left], step=3, numbers=range(10))


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    names = saved(tmp_path, [5])
    (tmp_path / names[1]).unlink()
    with pytest.raises(DatalensError, match=names[1]):
        load_part(tmp_path, names, step=3, numbers=range(10))


# --- torchrun -------------------------------------------------------------------------------------------------------


def test_without_torchrun_nothing_is_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert ranks.launch() is None
    assert not ranks.restarted(None)


def test_a_call_of_torchrun_knows_its_own_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 7")
    mine = ranks.launch()
    assert ranks.restarted(mine)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 8")
    assert not ranks.restarted(mine)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # no name: the same parent, and torchrun says it is a restart
    mine = ranks.launch()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert not ranks.restarted(mine)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert ranks.restarted(mine)
    monkeypatch.setattr(ranks.os, "getppid", lambda: -1)
    assert not ranks.restarted(mine)


@pytest.mark.parametrize(("gpus", "here", "fits"), [(2, 2, True), (1, 2, False), (8, 4, True)])
def test_a_gpu_for_each_rank(monkeypatch: pytest.MonkeyPatch, gpus: int, here: int, fits: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    monkeypatch.setenv("LOCAL_RANK", str(here - 1))
    if fits:
        assert ranks._device("auto", sharing=True) == torch.device("cuda", here - 1)
    else:
        with pytest.raises(DatalensError, match=f"--nproc-per-node={gpus}"):
            ranks._device("auto", sharing=True)
    assert ranks._device("cpu", sharing=True) == torch.device("cpu")


def test_a_store_that_outlives_its_ranks(tmp_path: Path) -> None:
    """Words of processes that are gone still lie in it; the ranks of now find each other all the same."""
    import threading

    import torch.distributed as dist

    store = dist.HashStore()
    names: dict[int, list[str]] = {0: [], 1: [], 2: []}
    for _ in range(3):  # three starts, one store
        threads = [
            threading.Thread(target=lambda rank=rank: names[rank].append(ranks._meet(store, rank, 3)))
            for rank in (0, 1, 2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert names[0] == names[1] == names[2]
    assert len(set(names[0])) == 3
