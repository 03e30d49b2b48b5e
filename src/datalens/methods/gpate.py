"""G-PATE (Long et al. 2021), Algorithms 1 and 2: teachers vote on randomly projected gradients, a student follows.

Differs from the paper:
- a teacher's gradient is divided by its largest projected coordinate instead of clipped at a constant;
- every projected coordinate of every image is a query, each with its own check, and both are priced data-independently:
  the published figures use the data-dependent price of Papernot et al. 2018, which is itself private (docs/methods.md);
- where the check fails the direction is zero, and the check has been paid for.
"""

import torch
from torch import Tensor

from datalens.bounded.ballots import binned
from datalens.bounded.contributions import count_ballots
from datalens.data.records import Records
from datalens.data.schema import Schema
from datalens.errors import BudgetExceeded
from datalens.peers.gpate import GPateSettings
from datalens.privacy.events import UnknownEvent
from datalens.privacy.mechanisms import ConfidentGNMax
from datalens.privacy.noise import SecureNoise, SeededNoise
from datalens.private.networks import Network, network_named
from datalens.private.partition import rule_named
from datalens.private.shares import Shares
from datalens.private.teachers import Teachers
from datalens.public import streams
from datalens.public.basis import make_basis
from datalens.released.decode import DecodeBins
from datalens.released.generator import Generator, dcgan_architecture
from datalens.released.student import Student
from datalens.run.folder import Alone, Run


def gather(records: Records, settings: GPateSettings, *, device: torch.device) -> Shares:
    """Every record into exactly one share."""
    rule = rule_named(settings.shares, teachers=settings.teachers, seed=settings.seed)
    return Shares.gather(records, rule, features=_network(settings, records.schema).record_features, device=device)


def train(run: Run, shares: Shares, settings: GPateSettings, *, device: torch.device) -> Generator:
    """Stops at the last planned step, at the budget, or when a person asks; the state is kept."""
    s, schema = settings, run.schema
    mechanism = ConfidentGNMax(
        sigma_check=s.sigma_check,
        sigma=s.sigma,
        threshold=s.threshold * s.teachers,
        noise=SecureNoise() if run.noise_seed is None else SeededNoise(run.noise_seed),
    )
    teachers = make_teachers(shares, s, schema)
    student = Student(
        dcgan_architecture(schema.shape, len(schema.classes), latent=s.latent, latent_law="normal"),
        batch=s.batch,
        gamma=s.gamma,
        learning_rate=s.student_rate,
        decay_over=s.steps,
        balanced_labels=True,
        seed=s.seed,
        device=device,
    )
    decode = DecodeBins(bins=s.bins, basis=make_basis(s.basis, schema.shape, s.basis_size))

    for step in run.steps(s.steps, student=student, teachers=Alone(teachers, run.path / "checkpoints")):
        answered = _answered(run, s, before=step)
        fakes = student.generate(step)
        loss = teachers.fit_step(fakes, step=step, repeats=s.teacher_steps_first if step == 0 else s.teacher_steps)
        projection = random_projection(s.basis_size, s.projections, seed=s.seed, step=step)
        noisy = run.journal.find(run.ledger, step=step)  # paid for before an interruption: not asked again
        if noisy is None:
            gradients = teachers.image_gradients(fakes, step=step)
            ballots = (binned(part, projection, bins=s.bins) for part in gradients)
            try:
                noisy = mechanism.release(count_ballots(ballots, answers=s.bins), run.ledger, step=step)
            except BudgetExceeded:
                break  # an interruption cost a release: the run ends with fewer steps, never over budget
            run.journal.save(noisy)
        student.step(fakes, decode(noisy, projection))
        run.answered = answered + int((noisy.value >= 0).sum())
        run.log(step, teacher_loss=loss, answered=float((noisy.value >= 0).mean()))
    run.answered = _answered(run, s, before=s.steps)
    return student.generator


def _answered(run: Run, s: GPateSettings, *, before: int) -> int:
    """Return how many queries were answered so far; where a checkpoint of version 0.1.0 does not say, what was paid."""
    if run.answered is not None:
        return run.answered
    charges = [event for event in run.ledger.events if not isinstance(event, UnknownEvent)]
    return s.answers_paid([event for event in charges if event.step < before])


def random_projection(size: int, projections: int, *, seed: int, step: int) -> Tensor:
    """[size, projections] orthonormal columns, public; new ones in every step."""
    random = torch.randn(size, projections, generator=streams.generator(seed, "projection", step), dtype=torch.float64)
    return torch.linalg.qr(random).Q


def make_teachers(shares: Shares, s: GPateSettings, schema: Schema) -> Teachers:
    return Teachers(
        _network(s, schema),
        shares,
        batch=s.teacher_batch,
        learning_rate=s.teacher_rate,
        weight_decay=s.teacher_weight_decay,
        seed=s.seed,
    )


def _network(s: GPateSettings, schema: Schema) -> Network:
    basis = make_basis(s.basis, schema.shape, s.basis_size)
    return network_named(s.network, basis, len(schema.classes), hidden=s.hidden)
