"""Discriminators that learn together and know nothing of each other."""

import numpy as np
import pytest
import torch

from datalens.data.records import Dataset
from datalens.data.schema import Schema
from datalens.errors import DatalensError
from datalens.private.critics import Critics, convolves_alike
from datalens.private.partition import Balanced
from datalens.private.shares import Shares
from datalens.public.critic import Critic, initialise_critic

SCHEMA = Schema(name="own", height=8, width=8, channels=1, classes=("a", "b"), nominal_size=40)
LUCK = np.random.default_rng(0)
IMAGES = LUCK.integers(0, 256, (40, 8, 8, 1), dtype=np.uint8)
LABELS = np.arange(40) // 20
FAKES, OF = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 0, 1])


def critics(images: np.ndarray = IMAGES, *, teachers: int = 5, rate: float = 1e-2) -> Critics:
    data = Dataset(schema=SCHEMA, images=images, labels=LABELS[: len(images)])
    rule = Balanced(teachers=teachers)
    shares = Shares.gather(data, rule, features=lambda x: x.permute(0, 3, 1, 2), device=torch.device("cpu"))
    critic = Critic((1, 8, 8), 2, width=4)
    return Critics(critic, shares, batch=4, rate=rate, penalty=10.0, seed=0)


def rows(of: Critics, teachers: int = 5) -> list[torch.Tensor]:
    return [of.image_gradient(teacher, FAKES, OF) for teacher in range(teachers)]


def trained(of: Critics, steps: int = 4) -> Critics:
    for step in range(steps):
        of.fit(2 * step, 2, FAKES, OF, step=step)
    return of


def test_a_record_changes_one_row_and_leaves_the_others_to_the_last_bit() -> None:
    other = IMAGES.copy()
    other[7] = 255 - other[7]  # of discriminator 2
    same = [torch.equal(a, b) for a, b in zip(rows(trained(critics())), rows(trained(critics(other))), strict=True)]
    assert same == [True, True, False, True, True]


def test_who_learns_does_not_depend_on_who_is_asked() -> None:
    """The paper's code trains the one that is chosen: then its row would tell of choices that were secret."""
    quiet, asked = critics(), critics()
    for step in range(4):
        quiet.fit(2 * step, 2, FAKES, OF, step=step)
        asked.image_gradient(step, FAKES, OF)
        asked.fit(2 * step, 2, FAKES, OF, step=step)
    for name, value in quiet.state().items():
        assert torch.equal(value, asked.state()[name])


def test_learning_takes_turns() -> None:
    one = critics()
    before = rows(one)
    one.fit(4, 3, FAKES, OF, step=0)  # 4, 0 and 1
    assert [torch.equal(a, b) for a, b in zip(before, rows(one), strict=True)] == [False, False, True, True, False]
    assert one.state()["updates"].tolist() == [1, 1, 0, 0, 1]


def test_together_is_as_one_by_one() -> None:
    together, alone = critics(), critics()
    together.fit(0, 5, FAKES, OF, step=0)
    for teacher in range(5):
        alone.fit(teacher, 1, FAKES, OF, step=0)
    for a, b in zip(rows(together), rows(alone), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_they_learn_to_tell_real_from_fake_with_slopes_of_one() -> None:
    dark = np.zeros_like(IMAGES)
    one = critics(dark, teachers=2, rate=3e-3)
    bright = torch.ones(4, 1, 8, 8)
    one.warm_up(100, bright, OF)
    slopes = one.image_gradient(0, bright, OF)
    assert bool((slopes.sum(dim=1) < 0).all())  # darker is more real
    assert 0.5 < float(slopes.norm(dim=1).mean()) < 2


def test_without_a_record_there_is_nothing_to_say() -> None:
    few = critics(IMAGES[:3], teachers=5)
    assert [bool(row.any()) for row in rows(few)] == [True, True, True, False, False]


def test_a_state_is_read_back() -> None:
    one, other = trained(critics()), critics()
    other.load_state(one.state())
    again = trained(one), trained(other)
    assert all(torch.equal(a, b) for a, b in zip(rows(again[0]), rows(again[1]), strict=True))


def test_large_images_have_more_layers() -> None:
    small, large = Critic((1, 28, 28), 10, width=4), Critic((3, 64, 64), 2, width=4)
    assert (len(small.down), len(large.down)) == (2, 4)
    initialise_critic(large, torch.Generator().manual_seed(0))
    assert large(torch.rand(2, 3, 64, 64), torch.tensor([0, 1])).shape == (2,)


def test_where_numbers_lie_in_memory_decides_nothing_here() -> None:
    assert convolves_alike()


def test_where_convolutions_round_by_their_place_it_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: a library whose last bits depend on where its factors begin."""
    real, calls = torch.nn.functional.conv2d, iter(range(100))

    def by_place(images: torch.Tensor, kernel: torch.Tensor, **facts: int) -> torch.Tensor:
        return real(images, kernel, **facts) * (1 + 1e-6 * (next(calls) % 2))

    convolves_alike.cache_clear()
    monkeypatch.setattr(torch.nn.functional, "conv2d", by_place)
    try:
        assert not convolves_alike()
    finally:
        convolves_alike.cache_clear()


@pytest.mark.parametrize("where", ["layers.rounds_alike", "critics.convolves_alike"])
def test_discriminators_that_would_round_by_place_are_not_trained(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"datalens.private.{where}", lambda: False)
    with pytest.raises(DatalensError, match="MKL_CBWR"):
        critics()
