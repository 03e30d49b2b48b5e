"""PATE-GAN (Yoon, Jordon, van der Schaar 2019), Algorithm 1: teachers label generated images; a student learns it.

Differs from the paper:
- all nets are convolutional and see labels; thousands of teachers are one batch dimension;
- by default a teacher compares an image with the batch's others of its label, and the student is told the noisy
  counts, not only which is larger (both are what was paid for);
- a charge is made for every label before it is answered, and all of them are priced together, data-independently:
  the published code spends until a data-dependent estimate passes ε, and then once more.
"""

import torch
from torch import nn

from datalens.bounded.ballots import real_or_fake
from datalens.bounded.contributions import count_ballots
from datalens.data.records import Records
from datalens.data.schema import Schema
from datalens.errors import BudgetExceeded
from datalens.peers.pategan import PateGanSettings
from datalens.privacy.mechanisms import LaplaceVote, Mechanism, make_mechanism
from datalens.privacy.noise import LaplaceNoise, open_noise
from datalens.private.networks import Network, network_named
from datalens.private.partition import rule_named
from datalens.private.shares import Shares
from datalens.private.teachers import Teachers
from datalens.public.basis import make_basis
from datalens.public.critic import CosineCritic, Critic
from datalens.released.generator import Generator
from datalens.released.labelled import CriticStudent
from datalens.run.folder import Alone, Run


def gather(records: Records, settings: PateGanSettings, *, device: torch.device) -> Shares:
    """Every record into exactly one share."""
    rule = rule_named(settings.shares, teachers=settings.teachers, seed=settings.seed)
    return Shares.gather(records, rule, features=_network(settings, records.schema).record_features, device=device)


def train(run: Run, shares: Shares, settings: PateGanSettings, *, device: torch.device) -> Generator:
    """Stops at the last planned step, at the budget, or when a person asks; the state is kept."""
    s = settings
    if s.noise == "discrete-laplace":
        return _train(run, shares, s, LaplaceVote(noise=LaplaceNoise(s.scale, run.noise_seed)), device)
    with open_noise(s.noise, s.scale, draws=2 * s.steps * s.batch, seed=run.noise_seed) as noise:
        return _train(run, shares, s, make_mechanism(s.scale, noise), device)


def _train(
    run: Run, shares: Shares, s: PateGanSettings, mechanism: Mechanism | LaplaceVote, device: torch.device
) -> Generator:
    teachers = make_teachers(shares, s, run.schema)
    student = make_student(s, run.schema, device)
    for step in run.steps(s.steps, student=student, teachers=Alone(teachers, run.path / "checkpoints")):
        fakes = student.generate(step)
        loss = teachers.fit_step(fakes, step=step, repeats=s.teacher_steps_first if step == 0 else s.teacher_steps)
        noisy = run.journal.find(run.ledger, step=step)  # paid for before an interruption: not asked again
        if noisy is None:
            ballots = (
                real_or_fake(part, fakes.labels, relative=s.votes == "relative") for part in teachers.scores(fakes)
            )
            try:
                noisy = mechanism.release(count_ballots(ballots, answers=2), run.ledger, step=step)
            except BudgetExceeded:
                break  # an interruption cost a release: the run ends with fewer steps, never over budget
            run.journal.save(noisy)
        student.learn(fakes, noisy)
        run.log(step, teacher_loss=loss, real=float(noisy.value[:, 1].mean()) / s.teachers)
    return student.averaged()


def make_teachers(shares: Shares, s: PateGanSettings, schema: Schema) -> Teachers:
    return Teachers(
        _network(s, schema),
        shares,
        batch=s.teacher_batch,
        learning_rate=s.teacher_rate,
        weight_decay=s.teacher_weight_decay,
        seed=s.seed,
    )


def make_student(s: PateGanSettings, schema: Schema, device: torch.device) -> CriticStudent:
    basis, classes = make_basis(s.basis, schema.shape, s.basis_size), len(schema.classes)
    if s.network == "spectral":  # the critic sees what the teachers see
        critic: nn.Module = CosineCritic(basis, classes, width=s.width)
    else:
        critic = Critic(schema.shape, classes, width=s.width)
    return CriticStudent(
        schema.shape,
        classes,
        critic,
        teachers=s.teachers,
        labels=s.labels,
        batch=s.batch,
        jitter=s.jitter,
        memory=s.memory,
        latent=s.latent,
        critic_steps=s.critic_steps,
        critic_rate=s.critic_rate,
        generator_steps=s.generator_steps,
        generator_batch=s.generator_batch,
        generator_rate=s.generator_rate,
        average=s.average,
        spread=s.spread,
        seed=s.seed,
        device=device,
    )


def _network(s: PateGanSettings, schema: Schema) -> Network:
    return network_named(
        s.network, make_basis(s.basis, schema.shape, s.basis_size), len(schema.classes), hidden=s.hidden
    )
