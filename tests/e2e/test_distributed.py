"""One run on several processes: the same sums, one charge, and nobody left waiting when one of them ends.

Ranks are forked from a server that has imported torch already (torchrun starts Python anew for each: seconds). Two
tests at the end use torchrun itself.
"""

import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SMALL = ("--data", "digits", "--preset", "quick", "--teachers", "21", "--device", "cpu")
COMPACT = (*SMALL, "--network", "compact", "--basis", "pixel", "--k", "20", "--noise-seed", "3")

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "datalens.driver",
        "datalens.methods.topagg",
        "datalens.methods.refined",
        "sklearn.datasets",
    ]
)


# --- ranks ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """What one rank left behind."""

    code: int
    out: str
    err: str
    seen: dict[str, list[Any]]

    def said_nothing(self) -> bool:
        return self.out == self.err == ""


class Ranks:
    """`size` processes of one world, each calling the command line. `different`: more options for one of them."""

    def __init__(self, folder: Path, size: int, *arguments: object, different: dict[int, tuple] | None = None, **more):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.size = folder, size
        port = free_port()
        self.processes = [
            SERVER.Process(
                target=be_a_rank,
                args=(rank, size, port, folder, [str(a) for a in (*arguments, *(different or {}).get(rank, ()))]),
                kwargs=more,
            )
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()

    def wait(self, seconds: float = 60) -> list[Ended]:
        """All of them end, by themselves."""
        end = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.1, end - time.monotonic()))
        hung = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        for process in self.processes:
            process.kill()
            process.join()
        ended = [self._ended(rank) for rank in range(self.size)]
        assert not hung, f"ranks {hung} hang: {[one.err for one in ended]}"
        return ended

    def _ended(self, rank: int) -> Ended:
        text = [(self.folder / f"{rank}.{kind}").read_text() for kind in ("out", "err")]
        seen = self.folder / f"{rank}.json"
        code = self.processes[rank].exitcode
        assert code is not None
        return Ended(code, *text, seen=json.loads(seen.read_text()) if seen.exists() else {})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def be_a_rank(
    rank: int,
    size: int,
    port: int,
    folder: Path,
    arguments: list[str],
    *,
    after: Callable[[int], None] | None = None,
    environment: dict[str, str] | None = None,
) -> None:
    """In a process of its own. `after(rank)` may change things before the command line is called."""
    os.environ |= {
        **{"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        **(environment or {}),
    }
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for kind, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(folder / f"{rank}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    import torch
    from rich.console import Console

    from datalens import progress
    from datalens.cli.main import main
    from datalens.methods import topagg as method

    torch.set_num_threads(1)
    progress.console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
    make = method.dcgan_architecture
    method.dcgan_architecture = lambda *a, **k: replace(make(*a, **k), dense=32, widths=(8, 8))
    seen = spies()
    if after is not None:
        after(rank)
    code: Any = 1
    try:
        main(arguments)
    except SystemExit as ended:
        code = ended.code or 0
    finally:
        (folder / f"{rank}.json").write_text(json.dumps(seen))
        sys.stdout.flush()
        sys.stderr.flush()
        if sys.exc_info()[0] is None or isinstance(sys.exc_info()[1], SystemExit):
            os._exit(code)


def spies() -> dict[str, list[Any]]:
    """What happens in this process, as it happens."""
    from datalens.privacy.ledger import Ledger
    from datalens.privacy.mechanisms import DiscreteGaussianSum, GaussianSum
    from datalens.privacy.noise import DrawnAhead, ExactNoise, SecureNoise, SeededNoise
    from datalens.private.shares import Shares
    from datalens.private.teachers import Teachers
    from datalens.run import remote_teachers

    seen: dict[str, list[Any]] = {
        name: [] for name in ("fakes", "totals", "sums", "charges", "noise", "teachers", "records")
    }

    def spy(owner: Any, name: str, note: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def spied(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            note(result, *args, **kwargs)
            return result

        setattr(owner, name, spied)

    def note_fakes(_: Any, __: Any, fakes: Any, *, step: int, repeats: int) -> None:
        digest = hashlib.sha256(fakes.images.detach().numpy().tobytes() + fakes.labels.numpy().tobytes()).hexdigest()
        seen["fakes"].append([step, digest])

    def note_sum(result: Any, part: Any, *_: Any, **__: Any) -> None:
        seen["sums"].append(None if result is None else "total")

    spy(Teachers, "fit_step", note_fakes)
    spy(remote_teachers, "sum_over_ranks", note_sum)
    for gate in (DiscreteGaussianSum, GaussianSum):
        spy(gate, "release", lambda _, __, c, ledger, step: seen["totals"].append(c.private_total.tolist()))
    spy(Ledger, "charge", lambda number, *_: seen["charges"].append(number))
    for source in (SecureNoise, SeededNoise):
        spy(source, "standard_normal", lambda *_: seen["noise"].append(1))
    for exact in (ExactNoise, DrawnAhead):
        spy(exact, "integers", lambda *_: seen["noise"].append(1))
    gather = Shares.gather.__func__  # type: ignore[attr-defined]

    def gathered(cls: type[Shares], *args: Any, **kwargs: Any) -> Shares:
        shares = gather(cls, *args, **kwargs)
        seen["teachers"] += list(shares.numbers)
        seen["records"].append(shares.count)
        return shares

    Shares.gather = classmethod(gathered)  # type: ignore[assignment, method-assign]
    return seen


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    """`ranks(2, …)` starts a world; none outlives the test."""
    started: list[Ranks] = []

    def start(size: int, *arguments: object, **more: Any) -> Ranks:
        started.append(Ranks(tmp_path / f"ranks{len(started)}", size, *arguments, **more))
        return started[-1]

    yield start
    for world in started:
        for process in world.processes:
            process.kill()


def charges(run: Path) -> list[int]:
    content = (run / "ledger.jsonl").read_bytes()
    return [json.loads(line)["event"]["step"] for line in content[: content.rfind(b"\n") + 1].splitlines()[1:]]


def weights(run: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(run / "release" / "generator.safetensors")


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def until(condition: Callable[[], bool], *, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


# --- the same run -----------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["spectral", "compact"])
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, tuple[Path, list[Ended]]]:
    """The same run on 1, 2 and 4 ranks (21 teachers: 11 + 10, and 6 + 5 + 5 + 5)."""
    options = (*SMALL, "--noise-seed", 3) if request.param == "spectral" else COMPACT
    folder = tmp_path_factory.mktemp(request.param)
    found = {}
    for size in (1, 2, 4):
        run = folder / f"run{size}"
        found[size] = (
            run,
            Ranks(folder / str(size), size, "train", *options, "--steps", 3, "--out", run, "--json").wait(),
        )
        assert [one.code for one in found[size][1]] == [0] * size, [one.err for one in found[size][1]]
    return found


def test_the_sums_do_not_depend_on_the_ranks(runs: dict[int, tuple[Path, list[Ended]]]) -> None:
    (alone,) = runs[1][1]
    assert len(alone.seen["totals"]) == 3
    assert any(value for row in alone.seen["totals"][0] for value in row)
    for size in (2, 4):
        assert runs[size][1][0].seen["totals"] == alone.seen["totals"]
        assert same(weights(runs[size][0]), weights(runs[1][0]))
        assert (runs[size][0] / "ledger.jsonl").read_bytes() == (runs[1][0] / "ledger.jsonl").read_bytes()


def test_every_rank_sees_the_same_fakes(runs: dict[int, tuple[Path, list[Ended]]]) -> None:
    """There is one student. Were there one on each rank, this is what would have to stay identical."""
    alone = runs[1][1][0].seen["fakes"]
    assert [step for step, _ in alone] == [0, 1, 2]
    assert len({digest for _, digest in alone}) == 3
    for size in (2, 4):
        assert [one.seen["fakes"] for one in runs[size][1]] == [alone] * size


def test_charge_noise_and_total_are_on_rank_0_alone(runs: dict[int, tuple[Path, list[Ended]]]) -> None:
    for size in (1, 2, 4):
        leader, *others = runs[size][1]
        assert leader.seen["charges"] == [0, 1, 2]
        assert len(leader.seen["noise"]) == 3
        assert leader.seen["sums"] == ["total"] * 3
        for other in others:
            assert other.seen["charges"] == other.seen["noise"] == other.seen["totals"] == []
            assert other.seen["sums"] == [None] * 3
            assert other.said_nothing()
        assert json.loads(leader.out)["steps"] == 3


def test_each_rank_reads_its_own_shares(runs: dict[int, tuple[Path, list[Ended]]]) -> None:
    ((whole,),) = [one.seen["records"] for one in runs[1][1]]
    for size in (1, 2, 4):
        kept = [one.seen["records"][0] for one in runs[size][1]]
        assert sum(kept) == whole
        assert max(kept) < 1.6 * whole / size
        assert [number for one in runs[size][1] for number in one.seen["teachers"]] == list(range(21))


def test_checkpoints_are_a_file_a_rank(runs: dict[int, tuple[Path, list[Ended]]]) -> None:
    names = {path.name for path in (runs[4][0] / "checkpoints").iterdir()}
    parts = {f"teachers-3-{first}-{last}.safetensors" for first, last in ((0, 5), (6, 10), (11, 15), (16, 20))}
    assert names == {"latest.safetensors", *parts}
    assert {path.stat().st_mode & 0o777 for path in (runs[4][0] / "checkpoints").iterdir()} == {0o600}


# --- what is refused --------------------------------------------------------------------------


def refused(ended: list[Ended], *, code: int = 2) -> str:
    """One line, from rank 0; the same exit code everywhere."""
    leader, *others = ended
    assert [one.code for one in ended] == [code] * len(ended), [one.err for one in ended]
    assert all(one.said_nothing() for one in others), [one.err for one in others]
    (line,) = leader.err.splitlines()
    assert line.startswith("datalens: ")
    assert leader.out in ("", json.dumps({"error": line.removeprefix("datalens: "), "exit_code": code}) + "\n")
    return line


def refused_train(ranks: Callable[..., Ranks], run: Path, size: int, *options: object, **more: Any) -> str:
    ended = ranks(size, "train", *SMALL, "--steps", 2, "--out", run, *options, **more).wait()
    assert not run.exists()
    assert all(one.seen["charges"] == one.seen["noise"] == [] for one in ended)
    return refused(ended)


@pytest.mark.parametrize(
    ("options", "name"),
    [(("--k", 16), "k: null on rank 0, 16 on rank 1"), (("--seed", 1), "seed"), (("--out", "elsewhere"), "out")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ranks_that_disagree(ranks: Callable[..., Ranks], tmp_path: Path, options: tuple, name: str) -> None:
    line = refused_train(ranks, tmp_path / "run", 2, different={1: options})
    assert f"ranks disagree on {name}" in line
    assert not (tmp_path / "elsewhere").exists()


def test_more_ranks_than_teachers(ranks: Callable[..., Ranks], tmp_path: Path) -> None:
    line = refused_train(ranks, tmp_path / "run", 3, "--teachers", 2)
    assert "3 ranks are more than 2 teachers" in line


def test_no_gpu(ranks: Callable[..., Ranks], tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert "no CUDA device" in refused_train(ranks, tmp_path / "run", 2, "--device", "cuda")


def three_gpus(rank: int) -> None:
    import torch

    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1


def test_more_ranks_than_gpus(ranks: Callable[..., Ranks], tmp_path: Path) -> None:
    line = refused_train(ranks, tmp_path / "run", 2, "--device", "auto", after=three_gpus)
    assert "--nproc-per-node=1" in line


def cannot_read(rank: int) -> None:
    from datalens.data import formats
    from datalens.errors import DatalensError

    def broken(*args: Any, **kwargs: Any) -> None:
        raise DatalensError("the file is broken")

    if rank == 1:
        formats.open_records = broken


def test_a_rank_that_cannot_read(ranks: Callable[..., Ranks], tmp_path: Path) -> None:
    assert "rank 1: the file is broken" in refused_train(ranks, tmp_path / "run", 4, after=cannot_read)


def elsewhere(rank: int) -> None:
    """Rank 1 is on a machine of its own: the same path leads to another place."""
    from datalens import driver

    driver.NEWS_SECONDS = 0.1
    if rank == 1:
        os.chdir("/")


def test_a_folder_that_is_not_shared(ranks: Callable[..., Ranks], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    here = os.path.relpath(tmp_path / "run")
    ended = ranks(2, "train", *SMALL, "--steps", 2, "--out", here, after=elsewhere).wait()
    assert "file system that all machines share" in refused(ended)
    assert charges(tmp_path / "run") == []


def test_out_exists(ranks: Callable[..., Ranks], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("all of it")
    line = refused(ranks(2, "train", *SMALL, "--steps", 2, "--out", tmp_path / "run").wait())
    assert "exists already" in line


def test_only_training_has_ranks(ranks: Callable[..., Ranks]) -> None:
    assert "without torchrun" in refused(ranks(2, "data", "list").wait())


def overlap(rank: int) -> None:
    """Teacher 10 on both ranks, wherever ranks say what is theirs."""
    from datalens.run.ranks import World

    World.numbers = lambda self, teachers, *, rank=None: range(0, 11) if self.rank == 0 else range(10, 21)


def a_gap(rank: int) -> None:
    from datalens.run.ranks import World

    World.numbers = lambda self, teachers, *, rank=None: range(0, 10) if self.rank == 0 else range(11, 21)


def unchecked(rank: int) -> None:
    from datalens.bounded import contributions

    overlap(rank)
    contributions._check_spread = lambda *_: None


@pytest.mark.parametrize(
    ("broken", "words"), [(overlap, "teacher 10 is in the sum twice"), (a_gap, "teacher 10 is in no rank's sum")]
)
def test_a_teacher_on_two_ranks_or_none(ranks: Callable[..., Ranks], tmp_path: Path, broken: Any, words: str) -> None:
    ended = ranks(2, "train", *SMALL, "--steps", 2, "--out", tmp_path / "run", after=broken).wait()
    for one in ended:
        assert one.code == 1
        assert words in one.err
    assert charges(tmp_path / "run") == []


def test_without_the_check_it_would_have_been_charged(ranks: Callable[..., Ranks], tmp_path: Path) -> None:
    ended = ranks(2, "train", *SMALL, "--steps", 1, "--out", tmp_path / "run", after=unchecked).wait()
    assert ended[0].seen["charges"] == [0]


# --- ranks that end ---------------------------------------------------------------------------


def dies_fitting(rank: int) -> None:
    """Rank 1 is killed while it trains its teachers for step 3."""
    from datalens.private.teachers import Teachers

    fit = Teachers.fit_step

    def deadly(self: Teachers, fakes: Any, *, step: int, repeats: int) -> float:
        if rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return fit(self, fakes, step=step, repeats=repeats)

    Teachers.fit_step = deadly  # type: ignore[method-assign]


def leader_dies(rank: int) -> None:
    """Rank 0 is killed between a charge and its noise."""
    from datalens.privacy.noise import Held

    take = Held.take

    def deadly(self: Held) -> np.ndarray:
        deadly.calls += 1  # type: ignore[attr-defined]
        if deadly.calls == 3:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL)
        return take(self)

    deadly.calls = 0  # type: ignore[attr-defined]
    Held.take = deadly  # type: ignore[method-assign]


ROOMY = ("--steps", 5, "--sigma", 1000)


def test_a_killed_rank_takes_the_run_down(
    ranks: Callable[..., Ranks], datalens: Callable[..., Any], tmp_path: Path
) -> None:
    run, began = tmp_path / "run", time.monotonic()
    leader, killed, other = ranks(3, "train", *SMALL, *ROOMY, "--out", run, after=dies_fitting).wait()
    assert time.monotonic() - began < 30
    assert killed.code == -signal.SIGKILL
    assert (leader.code, other.code) == (2, 2)
    assert "another rank has ended" in leader.err.splitlines()[-1]
    assert "Traceback" not in leader.err
    assert other.said_nothing()
    before = (run / "ledger.jsonl").read_bytes()
    assert charges(run) == [0, 1, 2]
    # With fewer ranks it goes on; what was journaled is used, and nothing is charged twice.
    again = ranks(2, "train", "--out", run, "--resume", "--device", "cpu", "--json").wait()
    assert [one.code for one in again] == [0, 0], again[0].err
    assert (run / "ledger.jsonl").read_bytes().startswith(before)
    assert charges(run) == [0, 1, 2, 3, 4]
    assert again[0].seen["charges"] == [3, 4]
    assert [one.seen["sums"] for one in again] == [["total"] * 2, [None] * 2]  # steps 0 to 2 were not asked again
    assert datalens("verify", run, "--json").succeeded().json["events"] == 5


def test_a_killed_leader_forgets_no_charge(
    ranks: Callable[..., Ranks], datalens: Callable[..., Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    killed, other = ranks(2, "train", *SMALL, *ROOMY, "--out", run, after=leader_dies).wait()
    assert killed.code == -signal.SIGKILL
    assert other.code == 2
    assert other.said_nothing()
    assert charges(run) == [0, 1, 2]
    (alone,) = ranks(1, "train", "--out", run, "--resume", "--device", "cpu", "--json").wait()
    assert alone.code == 0, alone.err
    assert charges(run) == [0, 1, 2, 2, 3, 4]
    assert datalens("verify", run, "--json").succeeded().json["events"] == 6


def often(rank: int) -> None:
    """A checkpoint after every step: the time since the last one always dwarfs what that one cost."""
    from datalens.run import folder as runs

    ages = (100.0**i for i in itertools.count())
    runs.CHECKPOINT_SECONDS = 0.0
    runs.time = type("Clock", (), {"monotonic": staticmethod(lambda: next(ages)), "time": staticmethod(time.time)})


def dies_after_saving(rank: int) -> None:
    """Rank 1 is killed in the second checkpoint, once its own file is there; that of rank 0 may be or not."""
    from datalens.run import remote_teachers as remote_teachers

    often(rank)
    save = remote_teachers.save_tensors

    def deadly(path: Path, *args: Any) -> None:
        save(path, *args)
        if rank == 1 and path.name.startswith("teachers-2-"):
            os.kill(os.getpid(), signal.SIGKILL)

    remote_teachers.save_tensors = deadly


def dies_saving(rank: int) -> None:
    """Rank 1 is killed in the second checkpoint with half of its file written."""
    from datalens.run import remote_teachers as remote_teachers

    often(rank)
    save = remote_teachers.save_tensors

    def deadly(path: Path, *args: Any) -> None:
        if rank == 1 and path.name.startswith("teachers-2-"):
            path.with_suffix(".tmp").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        save(path, *args)

    remote_teachers.save_tensors = deadly


def dies_before_latest(rank: int) -> None:
    """Rank 0 is killed when all teachers of the second checkpoint are on disk, and nothing says so yet."""
    from datalens.run import folder as runs

    often(rank)
    save = runs.save_tensors

    def deadly(path: Path, tensors: Any, facts: dict[str, str]) -> None:
        if path.name == "latest.safetensors" and facts["step"] == "2":
            os.kill(os.getpid(), signal.SIGKILL)
        save(path, tensors, facts)

    runs.save_tensors = deadly


def dies_after_latest(rank: int) -> None:
    """Rank 0 is killed when the second checkpoint counts, and the files of the first are still there."""
    from datalens.privacy.journal import Journal

    often(rank)
    forget = Journal.forget_before

    def deadly(self: Journal, ledger: Any, *, step: int, part: str = "") -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        forget(self, ledger, step=step, part=part)

    Journal.forget_before = deadly  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    Ranks(folder / "ranks", 1, "train", *SMALL, "--steps", 4, "--epsilon", "inf", "--out", folder / "run").wait()
    return folder / "run"


@pytest.mark.parametrize("death", [dies_after_saving, dies_saving, dies_before_latest, dies_after_latest])
def test_a_kill_in_a_checkpoint(ranks: Callable[..., Ranks], tmp_path: Path, unbroken: Path, death: Any) -> None:
    """Without noise a run is a function of its seed: resumed with another number of ranks it ends at the same bits.

    (With a noise seed it would not: after an interruption the noise goes on from another place, so that no draw is
    used twice.)
    """
    run = tmp_path / "run"
    options = ("train", *SMALL, "--steps", 4, "--epsilon", "inf", "--out", run)
    assert -signal.SIGKILL in [one.code for one in ranks(2, *options, after=death).wait()]
    assert (run / "checkpoints" / "latest.safetensors").exists()
    assert [one.code for one in ranks(3, "train", "--out", run, "--resume", "--device", "cpu", after=often).wait()] == [
        0
    ] * 3
    assert charges(run) == [0, 1, 2, 3]
    assert same(weights(run), weights(unbroken))
    names = {path.name for path in (run / "checkpoints").iterdir()}
    assert names == {"latest.safetensors", *(f"teachers-4-{a}-{b}.safetensors" for a, b in ((0, 6), (7, 13), (14, 20)))}
    assert list((run / "journal").iterdir()) == []


def cannot_write(rank: int) -> None:
    import errno

    from datalens.run import remote_teachers as remote_teachers

    save = remote_teachers.save_tensors

    def full(path: Path, *args: Any) -> None:
        if rank == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        save(path, *args)

    remote_teachers.save_tensors = full


def test_a_rank_whose_disk_is_full(ranks: Callable[..., Ranks], tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = ranks(2, "train", *SMALL, "--steps", 2, "--out", run, after=cannot_write).wait()
    assert [one.code for one in ended] == [2, 2]
    line = ended[0].err.splitlines()[-1]
    assert "rank 1:" in line and "No space left" in line
    assert len(list((run / "journal").iterdir())) == 2  # what was paid for is still there
    assert not (run / "checkpoints" / "latest.safetensors").exists()


def slowly(rank: int) -> None:
    from datalens.private.teachers import Teachers

    fit = Teachers.fit_step

    def slow(self: Teachers, fakes: Any, *, step: int, repeats: int) -> float:
        time.sleep(0.05)
        return fit(self, fakes, step=step, repeats=repeats)

    Teachers.fit_step = slow  # type: ignore[method-assign]


def test_ctrl_c_reaches_all_ranks_and_rank_0_decides(
    ranks: Callable[..., Ranks], datalens: Callable[..., Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    world = ranks(2, "train", *SMALL, "--steps", 300, "--out", run, "--json", after=slowly)
    until(lambda: (run / "ledger.jsonl").exists() and len(charges(run)) >= 3)
    for process in reversed(world.processes):
        os.kill(process.pid, signal.SIGINT)
    leader, other = world.wait(30)
    assert (leader.code, other.code) == (130, 0)
    assert other.said_nothing()
    found = json.loads(leader.out)
    assert found["interrupted"] is True
    assert 3 <= found["steps"] == len(charges(run)) < 300
    assert (run / "checkpoints" / "latest.safetensors").exists()
    datalens("verify", run).succeeded()


def launched(name: str, *, restarts: int) -> dict[str, str]:
    """What torchrun says of itself. Without --rdzv-id the name is "none"."""
    return {"TORCHELASTIC_RUN_ID": name, "TORCHELASTIC_RESTART_COUNT": str(restarts)}


@pytest.mark.parametrize("name", ["none", "job 7"])
def test_a_restart_resumes_by_itself(ranks: Callable[..., Ranks], tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    command = ("train", *SMALL, *ROOMY, "--out", run)
    ranks(2, *command, after=dies_fitting, environment=launched(name, restarts=0)).wait()
    assert charges(run) == [0, 1, 2]
    # torchrun counts restarts machine by machine: where rank 0 is, it may not have counted this one.
    count = 1 if name == "none" else 0
    again = ranks(2, *command, environment=launched(name, restarts=count)).wait()
    assert [one.code for one in again] == [0, 0], again[0].err
    assert charges(run) == [0, 1, 2, 3, 4]


def test_what_is_not_a_restart_is_refused(ranks: Callable[..., Ranks], tmp_path: Path) -> None:
    """torchrun also restarts what was refused: it must be refused again, not taken for a restart of the older run."""
    run = tmp_path / "run"
    command = ("train", *SMALL, "--steps", 1, "--out", run)
    ranks(1, *command, environment=launched("job 7", restarts=0)).wait()
    before = (run / "ledger.jsonl").read_bytes()
    for environment in (launched("job 8", restarts=0), launched("job 8", restarts=1), {}, launched("none", restarts=1)):
        assert "exists already" in refused(ranks(2, *command, environment=environment).wait())
    other = refused(ranks(2, *command, "--k", 9, environment=launched("job 7", restarts=1)).wait())
    assert "--resume cannot change it" in other
    assert (run / "ledger.jsonl").read_bytes() == before


# --- records on ranks: private moments, and the second stage ----------------------------------

MOMENTS = ("train", "--data", "digits", "--epsilon", 10, "--coordinates", 10, "--texture", 5, "--device", "cpu")
REFINED = (*MOMENTS, "--refine", "diffusion", "--refine-steps", 3, "--refine-batch", 40, "--pretraining", 2)
REFINED = (*REFINED, "--accountant", "rdp-improved")


def tiny(rank: int) -> None:
    """A network and a classifier that take no time."""
    from datalens.methods import refined

    refined.POOL, refined.PRE_BATCH, refined.ROUNDS = 100, 8, 4
    refined.NETWORK = {"wide": 8, "deep": 8, "hidden": 8}


def kinds(run: Path) -> list[str]:
    """The part of the run that each charge is for."""
    return [json.loads(line)["event"].get("part", "") for line in (run / "ledger.jsonl").read_text().splitlines()[1:]]


@pytest.fixture(scope="module")
def refined_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, list[Ended]]]:
    """The same run of two stages in one process and on two ranks, with the same seed of the noise."""
    folder, found = tmp_path_factory.mktemp("refined"), {}
    for size in (1, 2):
        run, options = folder / f"run{size}", (*REFINED, "--noise-seed", 3, "--json")
        found[size] = (run, Ranks(folder / str(size), size, *options, "--out", run, after=tiny).wait())
        assert [one.code for one in found[size][1]] == [0] * size, [one.err for one in found[size][1]]
    return found


def test_both_stages_release_the_same_on_two_ranks(refined_runs: dict[int, tuple[Path, list[Ended]]]) -> None:
    (one, (alone,)), (two, (leader, other)) = refined_runs[1], refined_runs[2]
    assert same(weights(one), weights(two))
    assert (one / "ledger.jsonl").read_bytes() == (two / "ledger.jsonl").read_bytes()
    assert leader.seen["totals"] == alone.seen["totals"]
    # One charge and one noise for each sum, on rank 0.
    assert leader.seen["charges"] == alone.seen["charges"] == list(range(8 + 4 + 3))
    assert len(leader.seen["noise"]) == len(alone.seen["noise"]) == 8 + 4 + 3
    assert other.seen["charges"] == other.seen["noise"] == other.seen["totals"] == []
    assert other.said_nothing()


def noise_everywhere(rank: int) -> None:
    """Broken twin: another rank adds noise, too."""
    from datalens.methods.refined import Worker
    from datalens.privacy.noise import SeededNoise

    tiny(rank)
    real = Worker.of_rank

    def noisy(self: Worker, *given: Any) -> Any:
        found = real(self, *given)
        total = found.total.private_total
        noise = 1000 * SeededNoise(rank).standard_normal(total.numel())
        return replace(found, total=replace(found.total, private_total=total + int(rank > 0) * total.new_tensor(noise)))

    Worker.of_rank = noisy  # type: ignore[method-assign]


def everything_again(rank: int) -> None:
    """Broken twin: rank 1 holds all records, those of rank 0 too."""
    from datalens.run.rank_rows import PartOfRank

    tiny(rank)
    real = PartOfRank.is_here
    PartOfRank.is_here = lambda self, number: rank == 1 or real(self, number)  # type: ignore[method-assign]


def everything_again_unchecked(rank: int) -> None:
    from datalens.run.rank_rows import RankRows

    everything_again(rank)
    real = RankRows.meet

    def unchecked(self: RankRows) -> None:
        self.part.held = self.part.everyone if rank == 0 else 0
        real(self)

    RankRows.meet = unchecked  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("broken", [noise_everywhere, everything_again_unchecked])
def test_broken_ranks_release_something_else(
    refined_runs: dict[int, tuple[Path, list[Ended]]], ranks: Callable[..., Ranks], tmp_path: Path, broken: Any
) -> None:
    run = tmp_path / "run"
    ended = ranks(2, *REFINED, "--noise-seed", 3, "--out", run, after=broken).wait()
    assert [one.code for one in ended] == [0, 0], [one.err for one in ended]
    assert not same(weights(run), weights(refined_runs[1][0]))


@pytest.mark.slow
def test_records_on_two_ranks_are_found_before_anything_is_charged(ranks: Callable[..., Ranks], tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = ranks(2, *REFINED, "--out", run, after=everything_again).wait()
    assert [one.code for one in ended] == [2, 2]
    assert "a record is on two ranks, or on none" in ended[0].err
    assert charges(run) == []


def dies_in_a_step(rank: int) -> None:
    """Rank 1 is killed while it adds up the second of its samples."""
    from datalens.methods.refined import Worker

    tiny(rank)
    real = Worker.of_rank

    def deadly(self: Worker, given: Any, number: int, words: Any) -> Any:
        if rank == 1 and number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, given, number, words)

    Worker.of_rank = deadly  # type: ignore[method-assign]


def test_a_rank_that_dies_in_a_step_ends_the_run_without_its_sum(
    ranks: Callable[..., Ranks], datalens: Callable[..., Any], tmp_path: Path
) -> None:
    """Its noise is the operating system's. The run goes on with another number of ranks, and charges only the rest."""
    run = tmp_path / "run"
    leader, killed = ranks(2, *REFINED, "--out", run, after=dies_in_a_step).wait()
    assert (leader.code, killed.code) == (2, -signal.SIGKILL)
    assert "another rank has ended" in leader.err.splitlines()[-1]
    assert kinds(run) == [""] * 8 + ["labels"] * 4 + ["refinement"]  # the second step was not charged
    again = ranks(3, "train", "--out", run, "--resume", "--device", "cpu", "--json", after=tiny).wait()
    assert [one.code for one in again] == [0, 0, 0], again[0].err
    assert kinds(run) == [""] * 8 + ["labels"] * 4 + ["refinement"] * 3
    assert again[0].seen["charges"] == [13, 14]
    assert json.loads(again[0].out)["private"] is True
    datalens("verify", run).succeeded()


@pytest.mark.slow
def test_moments_alone_release_the_same_on_two_ranks(ranks: Callable[..., Ranks], tmp_path: Path) -> None:
    for size in (1, 2):
        run = tmp_path / f"run{size}"
        ended = ranks(size, *MOMENTS, "--noise-seed", 3, "--out", run).wait()
        assert [one.code for one in ended] == [0] * size, ended[0].err
    assert same(weights(tmp_path / "run1"), weights(tmp_path / "run2"))
    assert ended[1].seen["charges"] == ended[1].seen["noise"] == []


# --- GPUs -------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_nccl_takes_what_is_sent() -> None:
    """On one GPU there can be one rank. What can be seen with it: the kinds of number, and which way they go."""
    import torch
    import torch.distributed as dist

    from datalens.run.ranks import World

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = World(rank=0, size=2)  # so that it sends
        world.device = torch.device("cuda", 0)
        torch.cuda.set_device(world.device)
        world._on_device = dist.new_group(backend="nccl")
        for kind in (torch.int32, torch.float64):
            votes = torch.arange(6, device="cuda", dtype=kind).view(2, 3)
            total = world.add(votes)
            assert total is not None
            assert total is not votes
            assert total.tolist() == votes.tolist()
        images = torch.rand(3, 1, 8, 8, device="cuda")
        assert world.broadcast(images) is images
        assert world.broadcast(torch.tensor([1, 2])).tolist() == [1, 2]  # a word, by gloo
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
def test_one_rank_on_a_gpu(environment: dict[str, str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("-m", "datalens", "train", *SMALL[:-2], "--device", "cuda", "--steps", 2, "--out", run, "--json")
    with torchrun("--nproc-per-node=1", *options, environment=environment) as process:
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["steps"] == 2
    more = torch_gpus() + 1
    with torchrun(f"--nproc-per-node={more}", *options[:-3], "--out", tmp_path / "two", environment=environment) as two:
        _, err = two.communicate(timeout=300)
    assert two.returncode != 0
    assert err.count("datalens: ") == 1
    assert "GPU: use --nproc-per-node" in err


def torch_gpus() -> int:
    import torch

    return torch.cuda.device_count()


# --- torchrun itself --------------------------------------------------------------------------


@contextlib.contextmanager
def torchrun(*arguments: object, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "torch.distributed.run", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def workers(agent: int) -> dict[int, int]:
    """Process numbers of torchrun's ranks."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, StopIteration):
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == agent:
                words = (path / "environ").read_bytes().split(b"\0")
                found[next(int(word[5:]) for word in words if word.startswith(b"RANK="))] = int(path.name)
    return found


def test_torchrun_restarts_where_a_kill_left_off(
    environment: dict[str, str], datalens: Callable[..., Any], tmp_path: Path
) -> None:
    """The same command line again, without --resume; every charge is still in the ledger."""
    run = tmp_path / "run"
    options = ("-m", "datalens", "train", *SMALL, "--steps", 60, "--out", run, "--json")
    port = f"--master-port={free_port()}"
    with torchrun("--nproc-per-node=2", "--max-restarts=1", port, *options, environment=environment) as process:
        until(lambda: process.poll() is not None or ((run / "ledger.jsonl").exists() and len(charges(run)) >= 3))
        assert process.poll() is None, process.communicate()
        before = (run / "ledger.jsonl").read_bytes()
        os.kill(workers(process.pid)[1], signal.SIGKILL)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    found = json.loads(out.splitlines()[-1])
    after = (run / "ledger.jsonl").read_bytes()
    assert after.startswith(before[: before.rfind(b"\n") + 1])
    lost = len(charges(run)) - found["steps"]
    assert lost in (0, 1)
    assert len(charges(run)) == 60
    assert datalens("verify", run, "--json").succeeded().json["events"] == len(charges(run))
