"""DataLens (Wang et al., CCS 2021), Algorithms 1-3: teachers vote with compressed gradients, a student learns.

Both `datalens-paper` and `datalens` are this loop; they differ in settings only.

Differs from the paper:
- the direction is ∂ log D/∂x, which is added (see `Teachers.image_gradients`);
- the threshold uses the number of teachers N (line 14 prints T);
- one event is charged per batch of m images, with sensitivity 2√(km): the same cost as m events of 2√k.
"""

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from datalens.bounded.contributions import Contributions, Gradients, sum_bounded
from datalens.bounded.count_sketch import CountSketch
from datalens.bounded.klevel import KLevel
from datalens.bounded.third_party import PerTeacher
from datalens.bounded.topk_sign import TopKSign
from datalens.data.records import Records
from datalens.data.schema import Schema
from datalens.errors import BudgetExceeded
from datalens.plans.plugins import compressor
from datalens.plans.settings import COMPRESSORS, Settings
from datalens.privacy.mechanisms import Mechanism
from datalens.private.networks import Network, network_named
from datalens.private.partition import Partition, Rule, rule_named
from datalens.private.shares import Shares
from datalens.private.teachers import Teachers, plan_memory
from datalens.progress import say
from datalens.public.basis import Basis, make_basis
from datalens.public.transforms import Rotation, Sketch
from datalens.released import classes
from datalens.released.decode import Decode, agreement
from datalens.released.generator import can_show, dcgan_architecture
from datalens.released.student import Fakes, Student
from datalens.run.folder import Run
from datalens.run.ranks import World
from datalens.run.remote_teachers import Crowd


def train(
    run: Run,
    crowd: Crowd,
    settings: Settings,
    *,
    mechanism: Mechanism,
    device: torch.device,
    start: dict[str, torch.Tensor] | None = None,
) -> Student:
    """Algorithm 1. Stops at the last planned step, at the budget, or when a person asks; the state is kept.

    `start`: weights of a generator made from released values, to refine instead of new ones.
    """
    s, schema = settings, run.schema
    student = Student(
        dcgan_architecture(
            schema.shape,
            len(schema.classes),
            latent=s.latent,
            latent_law=s.latent_law,
            cosines=shown_cosines(s, schema) if start is None else 0,
        ),
        batch=s.batch,
        gamma=s.gamma,
        learning_rate=s.student_rate,
        decay_over=s.steps if s.student_decay else None,
        balanced_labels=s.balanced_labels,
        seed=s.seed,
        device=device,
    )
    if start is not None:
        student.generator.load_state_dict(start)
    decode = make_decode(s, schema)

    for step in run.steps(s.steps, student=student, teachers=crowd):
        fakes = student.generate(step)
        loss = crowd.fit_step(fakes, repeats=s.teacher_steps_first if step == 0 else s.teacher_steps)
        noisy = run.journal.find(run.ledger, step=step)  # paid for before an interruption: not asked again
        if noisy is None:
            votes = crowd.votes(fakes)
            try:
                noisy = mechanism.release(votes, run.ledger, step=step)
            except BudgetExceeded:
                break  # an interruption cost a release: the run ends with fewer steps, never over budget
            run.journal.save(noisy)
        student.step(fakes, decode(noisy))
        agreed, noise = agreement(noisy, teachers=s.teachers, longest=s.l2_bound)
        run.log(step, teacher_loss=loss, agreement=agreed, agreement_noise=noise, **diagnose(student, step, s.steps))
    return student


def diagnose(student: Student, step: int, steps: int) -> dict[str, float]:
    """Measure now and then whether the student heeds its labels, and warn half-way and at the end if it does not."""
    due = {steps // 2, steps - 1}
    if step % classes.EVERY and step not in due:
        return {}
    spread = classes.spread_of(student.generator, seed=step)
    wrong = classes.trouble(spread, classes=student.generator.architecture.classes)
    if wrong and step in due and steps >= classes.FEWEST_STEPS:
        say(f"warning: after {step + 1} of {steps} steps {wrong}")
    return {"between_classes": spread.between, "within_classes": spread.within}


def shown_cosines(settings: Settings, schema: Schema) -> int:
    """Those that teachers vote on; 0: the whole image, where they vote on all of it, or on too many to keep apart."""
    s = settings
    some = s.basis == "dct" and s.basis_size < schema.dimensions and can_show(schema.shape, s.basis_size)
    return s.basis_size if some else 0


def gather(records: Records, settings: Settings, *, world: World) -> Shares:
    """Every record into exactly one share; this rank keeps those of its teachers, as the features they see."""
    s, schema = settings, records.schema
    network = make_network(s, make_basis(s.basis, schema.shape, s.basis_size), len(schema.classes))
    return Shares.gather(
        records, share_rule(s), numbers=world.numbers(s.teachers), features=network.record_features, device=world.device
    )


def share_rule(settings: Settings) -> Rule:
    """Which teacher a record goes to."""
    return rule_named(settings.shares, teachers=settings.teachers, seed=settings.seed)


def make_crowd(
    shares: Shares, settings: Settings, schema: Schema, *, world: World, folder: Path, chunk: int | None = None
) -> Crowd:
    """The teachers of this rank, and the way to those of all ranks; states are kept in `folder`."""
    s, mine = settings, make_teachers(shares, settings, schema, chunk=chunk)
    return Crowd(mine, make_compress(s), world=world, count=s.teachers, shape=(s.batch, *schema.shape), folder=folder)


def make_teachers(shares: Shares, settings: Settings, schema: Schema, *, chunk: int | None = None) -> Teachers:
    s = settings
    return Teachers(
        make_network(s, make_basis(s.basis, schema.shape, s.basis_size), len(schema.classes)),
        shares,
        batch=s.batch,
        learning_rate=s.teacher_rate,
        weight_decay=s.teacher_weight_decay,
        seed=s.seed,
        chunk=chunk,
    )


def seconds_a_step(settings: Settings, schema: Schema) -> float:
    """Estimate from one timed step of a few teachers, on random images, what a step takes on this machine's CPU."""
    s, random = settings, torch.Generator().manual_seed(0)
    network = make_network(s, make_basis(s.basis, schema.shape, s.basis_size), len(schema.classes))
    chunk = plan_memory(s.teachers, *network.bytes_per_teacher(s.batch), torch.device("cpu")).chunk
    some = dataclasses.replace(s, teachers=min(s.teachers, chunk * torch.get_num_threads()))
    shown = Fakes(
        images=torch.rand(s.batch, *schema.shape, generator=random),
        labels=torch.arange(s.batch) % len(schema.classes),
        step=0,
    )
    share = np.arange(some.teachers)
    pixels = torch.randint(256, (len(share), schema.height, schema.width, schema.channels), generator=random)
    features = network.record_features(pixels.to(torch.uint8))
    labels = torch.from_numpy(share % len(schema.classes))
    teachers = make_teachers(Shares(features, labels, Partition(share=share, teachers=some.teachers)), some, schema)
    compress = make_compress(s)

    def once(repeats: int) -> float:
        began = time.perf_counter()
        teachers.fit_step(shown, step=0, repeats=repeats)
        sum_bounded(teachers.rows(shown, compress, step=0))
        return time.perf_counter() - began

    once(1)  # the first one pays for what libraries prepare
    return once(s.teacher_steps) * s.teachers / some.teachers


def make_compress(settings: Settings) -> Callable[[Gradients], Contributions]:
    """From a teacher's gradient to its row."""
    s = settings
    if s.compress not in COMPRESSORS:
        theirs = compressor(s.compress)[0]
        return PerTeacher(
            row=lambda gradient, uniform: theirs.row(gradient, uniform, s),
            l2_bound=s.l2_bound,
            cells=s.cells,
            whole_numbers=theirs.whole_numbers,
            seed=s.seed,
        )
    if s.compress == "klevel":
        return KLevel(levels=s.levels, clip=s.clip, seed=s.seed, size=s.basis_size)
    votes = TopKSign(k=s.k, clip=s.clip, quantise=s.compress != "topk", seed=s.seed)
    if s.compress == "sketch":
        return CountSketch(votes=votes, rows=s.sketch_rows, columns=s.sketch_columns, size=s.basis_size)
    return votes


def make_decode(settings: Settings, schema: Schema) -> Decode:
    """And from the released sum of rows back to a direction of the image."""
    s, unpack = settings, None
    if s.compress == "klevel":
        unpack = partial(Rotation(s.basis_size, s.seed).inverse, scale=1 / (s.levels - 1))
    if s.compress == "sketch":
        unpack = partial(Sketch(s.basis_size, s.sketch_rows, s.sketch_columns, s.seed).heaviest, k=s.k)
    theirs = None if s.compress in COMPRESSORS else compressor(s.compress)[0].unpack
    if theirs is not None:
        unpack = partial(_unpacked, theirs, s)
    basis = make_basis(s.basis, schema.shape, s.basis_size)
    return Decode(rule=s.decode, beta=s.beta, teachers=s.teachers, basis=basis, unpack=unpack)


def _unpacked(theirs: Callable[[Tensor, Settings], Tensor], s: Settings, votes: Tensor) -> Tensor:
    return theirs(votes, s)


def make_network(settings: Settings, basis: Basis, classes: int) -> Network:
    s = settings
    return network_named(s.network, basis, classes, hidden=s.hidden, linear=s.linear)
