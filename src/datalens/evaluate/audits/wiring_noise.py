"""Checks of one watched run: its noise is as charged, new, and from the operating system; every release is charged."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from datalens.evaluate.audits.wiring_runs import Ran
from datalens.evaluate.audits.wiring_tape import Crossing, Draw
from datalens.privacy.events import LaplaceEvent, OneOfManyEvent, SubsampledGaussianEvent
from datalens.privacy.ledger import read_ledger

SECURE = "operating-system"
NOISE = ("standard_normal", "integers")
WRONG_WIDTH = "its noise does not have the charged width"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of a method. `kind` is records, secrets, moved, sampling, noise, charges or stamp."""

    kind: str
    what: str


def draws_of(crossing: Crossing) -> np.ndarray:
    """Return all noise values that were drawn for a release."""
    parts = [draw.values.ravel().astype(np.float64) for draw in crossing.draws if draw.kind in NOISE]
    return np.concatenate([np.zeros(0), *parts])


def block(draw: Draw) -> bytes:
    """Return the bytes of a draw of noise that is long enough never to repeat by chance; empty for other draws."""
    return draw.values.tobytes() if draw.kind in NOISE and draw.values.size >= 16 else b""


def noise_faults(ran: Ran, *, units: int) -> Iterator[Fault]:
    """Yield a fault where the noise of a release is not as charged.

    It must come from the operating system, have the charged width, be added to every number, and never be used twice.
    """
    blocks: Counter[bytes] = Counter()
    for number, crossing in enumerate(ran.tape.crossings):
        event = crossing.event
        assert event is not None
        where = f"release {number}"
        for draw in (*crossing.draws, *crossing.before):
            yield from _source_faults(where, draw, event.noise)
        if event.sigma > 0 and (why := _wrong_noise(crossing)):
            yield Fault(kind="noise", what=f"{where}: {why}")
        blocks.update(block(draw) for draw in crossing.draws if block(draw))
        samples = [draw.count for draw in crossing.before if draw.kind == "words"]
        if isinstance(event, SubsampledGaussianEvent) and event.rate < 1 and samples != [units]:
            yield Fault(
                kind="sampling", what=f"{where}: samples of {samples} units were drawn, but there are {units} units"
            )
        if isinstance(event, OneOfManyEvent):
            choices = [draw for draw in crossing.draws if draw.kind == "below"]
            answered = crossing.parts[-1].units
            if [draw.count for draw in choices] != [event.teachers] or answered != [int(choices[0].values)]:
                yield Fault(
                    kind="sampling", what=f"{where}: the teacher was not chosen in secret, once, from all teachers"
                )
    if any(times > 1 for times in blocks.values()):
        yield Fault(kind="noise", what="two releases have the same block of noise")


def _source_faults(where: str, draw: Draw, origin: str) -> Iterator[Fault]:
    if draw.origin != origin:
        yield Fault(kind="noise", what=f"{where}: the noise is {draw.origin}, but was charged as {origin}")
    elif origin == SECURE and draw.bits < draw.needed:
        yield Fault(
            kind="noise",
            what=f"{where}: {draw.count} draws of {draw.source}.{draw.kind} took {draw.bits} bits from the operating "
            f"system, but independent draws need at least {draw.needed:g}",
        )


def _wrong_noise(crossing: Crossing) -> str | None:
    """Return what is wrong with the noise of a release, given its draws, or None."""
    event, total, value = crossing.event, crossing.total, crossing.value
    assert event is not None
    draws = [draw for draw in crossing.draws if draw.kind in NOISE]
    if not draws:
        return "it was charged as noisy, but no noise was drawn"
    if len(crossing.charges) > 1 or value.shape != total.shape:
        return _wrong_answers(crossing, draws)
    drawn = np.concatenate([draw.values.ravel() for draw in draws])
    if drawn.size != total.size:
        return f"{drawn.size} draws for {total.size} numbers"
    drawn = drawn.reshape(total.shape)
    width = event.scale if isinstance(event, LaplaceEvent) else event.sigma
    if draws[0].kind == "integers":
        as_charged = all(draw.width == width for draw in draws)
        return None if as_charged and np.array_equal(value, total + drawn) else WRONG_WIDTH
    noise = width * drawn
    if np.issubdtype(value.dtype, np.integer):
        return None if np.array_equal(value, total + np.rint(noise)) else WRONG_WIDTH
    close = np.allclose(value, total + noise, rtol=1e-9, atol=1e-9 * width)
    return None if close else WRONG_WIDTH


def _wrong_answers(crossing: Crossing, draws: list[Draw]) -> str | None:
    """Return what is wrong with the noise of winning answers, where a noisy check decides which queries get one."""
    total, value = crossing.total, crossing.value
    passed = value >= 0
    needed = [len(total), *([total[passed].size] if passed.any() else [])]
    if [draw.count for draw in draws] != needed or len(crossing.charges) != len(needed):
        return f"{[draw.count for draw in draws]} draws instead of {needed}"
    widths = [event.sigma for event in crossing.charges]
    score = total.max(axis=1) + np.rint(widths[0] * draws[0].values)
    if passed.any() and not passed.all() and not score[passed].min() > score[~passed].max():
        return "the queries that passed the check do not follow from the charged noise"
    if passed.any():
        counts = total[passed] + np.rint(widths[1] * draws[1].values.reshape(total[passed].shape))
        if not np.array_equal(value[passed], counts.argmax(axis=1)):
            return "the answers do not follow from the charged noise"
    return None


def charge_faults(ran: Ran, parts: list[Ran]) -> Iterator[Fault]:
    """Yield a fault where a release is not charged in the run's own ledger, or two releases use the same charge.

    Args:
        ran: the last part of the run, whose ledger is read.
        parts: all parts of the run, which interruptions divide.
    """
    _, charged = read_ledger(ran.folder / "run" / "ledger.jsonl")
    watched = [event for part in parts for _, event in part.tape.charges]
    if watched != list(charged):
        yield Fault(kind="charges", what="not every charge is in the ledger of the run, in its order")
    for part in parts:
        used: Counter[int] = Counter()
        for number, crossing in enumerate(part.tape.crossings):
            event, place = crossing.event, crossing.number
            used[place] += 1
            if not 0 <= place < len(charged) or charged[place] != event:
                yield Fault(kind="charges", what=f"release {number} names a charge that is not in the run's ledger")
                continue
            if used[place] > getattr(event, "repeats", 1):
                yield Fault(kind="charges", what=f"release {number}: charge {place} is for fewer releases")
            answered = len(crossing.total)
            paid = max(getattr(one, "queries", 0) for one in (event, *crossing.charges))
            if answered > paid:
                yield Fault(
                    kind="charges", what=f"release {number} answers {answered} queries, but {paid} were charged"
                )
            if len(crossing.parts) > 1:
                yield Fault(kind="charges", what=f"release {number} used {len(crossing.parts)} sums")
        if part.tape.outside:
            yield Fault(kind="charges", what="a `Released` value was made that passed no gate")


def stamp_faults(ran: Ran) -> Iterator[Fault]:
    """Yield a fault where a run with seeded noise, or without noise, is not marked NOT PRIVATE."""
    page = (ran.folder / "run" / "release" / "CERTIFICATE.md").read_text(encoding="utf-8")
    if ran.facts["private"] or "NOT PRIVATE" not in ran.said or "NOT PRIVATE" not in page:
        yield Fault(kind="stamp", what="a run with seeded noise, or none, is not called NOT PRIVATE")
    for _, event in ran.tape.charges:
        if event.noise == SECURE and event.sigma > 0:
            yield Fault(kind="stamp", what="seeded noise is charged as operating-system noise")
    for draw in ran.tape.draws:
        if draw.origin == SECURE and any(event.noise != SECURE for _, event in ran.tape.charges):
            yield Fault(kind="stamp", what="operating-system noise is charged as seeded")
