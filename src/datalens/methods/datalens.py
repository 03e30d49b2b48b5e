"""DataLens (Wang et al., CCS 2021), Algorithms 1-3: teachers vote with compressed gradients, a student learns.

Both `datalens-paper` and `datalens` are this loop; they differ in settings only.

Differs from the paper:
- the direction is ∂ log D/∂x, which is added (see `Teachers.image_gradients`);
- the threshold uses the number of teachers N (line 14 prints T);
- one event is charged per batch of m images, with sensitivity 2√(km): the same cost as m events of 2√k.
"""

import torch

from datalens.basis import Basis, make_basis
from datalens.bounded.contributions import sum_bounded
from datalens.bounded.topk_sign import TopKSign
from datalens.config import Settings
from datalens.datasets.sources import Dataset
from datalens.errors import BudgetExceeded
from datalens.privacy.mechanisms import GaussianSum
from datalens.privacy.noise import NoiseSource
from datalens.private.networks import Network, Spectral, compact_network, paper_network
from datalens.private.partition import balanced, hashed, record_keys
from datalens.private.shares import Shares
from datalens.private.teachers import Teachers
from datalens.released.decode import Decode
from datalens.released.generator import dcgan_architecture
from datalens.released.student import Student
from datalens.runs import Run


def train(run: Run, dataset: Dataset, settings: Settings, *, noise: NoiseSource, device: torch.device) -> Student:
    """Algorithm 1. Stops at the last planned step, at the budget, or when a person asks; the state is kept."""
    s, schema = settings, dataset.schema
    basis = make_basis(s.basis, schema.shape, s.basis_size)
    network = make_network(s, basis, len(schema.classes))
    teachers = Teachers(
        network,
        make_shares(dataset, network, s, device),
        batch=s.batch,
        learning_rate=s.teacher_rate,
        weight_decay=s.teacher_weight_decay,
        seed=s.seed,
    )
    student = Student(
        dcgan_architecture(schema.shape, len(schema.classes), latent=s.latent, latent_law=s.latent_law),
        batch=s.batch,
        gamma=s.gamma,
        learning_rate=s.student_rate,
        decay_over=s.steps if s.student_decay else None,
        balanced_labels=s.balanced_labels,
        seed=s.seed,
        device=device,
    )
    compress = TopKSign(k=s.k, clip=s.clip, quantise=s.compress != "topk", seed=s.seed)
    mechanism = GaussianSum(sigma=s.sigma, noise=noise)
    decode = Decode(rule=s.decode, beta=s.beta, teachers=s.teachers, basis=basis)

    for step in run.steps(s.steps, student=student, teachers=teachers):
        fakes = student.generate(step)
        loss = teachers.fit_step(fakes, step=step, repeats=s.teacher_steps_first if step == 0 else s.teacher_steps)
        noisy = run.journal.find(run.ledger, step=step)  # paid for before an interruption: not asked again
        if noisy is None:
            votes = sum_bounded(map(compress, teachers.image_gradients(fakes, step=step)))
            try:
                noisy = mechanism.release(votes, run.ledger, step=step)
            except BudgetExceeded:
                break  # an interruption cost a release: the run ends with fewer steps, never over budget
            run.journal.save(noisy)
        student.step(fakes, decode(noisy))
        run.log(step, teacher_loss=loss, mean_vote=float(abs(noisy.value).mean()) / s.teachers)
    return student


def make_network(settings: Settings, basis: Basis, classes: int) -> Network:
    if settings.network == "spectral":
        return Spectral(basis=basis, classes=classes, hidden=settings.hidden)
    make = paper_network if settings.network == "paper" else compact_network
    return make(basis, classes, hidden=settings.hidden)


def make_shares(dataset: Dataset, network: Network, settings: Settings, device: torch.device) -> Shares:
    """Every record into exactly one share, then onto the device as the features the teachers see."""
    if settings.shares == "balanced":
        partition = balanced(len(dataset.images), teachers=settings.teachers)
    else:
        salt = f"datalens shares, seed {settings.seed}".encode()
        partition = hashed(record_keys(dataset.images, dataset.ids), teachers=settings.teachers, salt=salt)
    parts = torch.from_numpy(dataset.images).split(10_000)
    features = torch.cat([network.record_features(part.to(device)) for part in parts])
    return Shares(features, torch.from_numpy(dataset.labels).to(device), partition)
