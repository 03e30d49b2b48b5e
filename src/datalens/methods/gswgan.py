"""GS-WGAN (Chen, Orekondy, Fritz 2020): the generator alone is private, through gradients of single images.

Discriminators on disjoint shares see records freely. In a step one of them, chosen in secret, says how each synthetic
image should change; every image's gradient is clipped to C and noised; the generator follows.

Differs from the paper:
- it is priced as what it is (docs/decisions.md): all gradients of a step come from one discriminator;
- who learns in a step does not depend on who is chosen (`private.critics`);
- the warm start shows discriminators the first images of the generator, not those of generators of their own;
- the architecture is DC-GAN's.
"""

import torch

from datalens.bounded.clip import clip_images
from datalens.bounded.contributions import BoundedSum
from datalens.data.records import Records
from datalens.errors import BudgetExceeded
from datalens.peers.gswgan import GswganSettings
from datalens.privacy.noise import SecureNoise, SeededNoise
from datalens.privacy.one_of_many import charge_block
from datalens.private.critics import Critics
from datalens.private.partition import rule_named
from datalens.private.shares import Shares
from datalens.public import streams
from datalens.public.critic import Critic
from datalens.public.learner import Learner
from datalens.released.follow import follow
from datalens.released.generator import Generator, draw_latent, fresh_generator
from datalens.run.folder import Alone, Run


def gather(records: Records, settings: GswganSettings, *, device: torch.device) -> Shares:
    """Every record into exactly one share, as bytes."""
    rule = rule_named(settings.shares, teachers=settings.teachers, seed=settings.seed)
    return Shares.gather(records, rule, features=lambda images: images.permute(0, 3, 1, 2), device=device)


def train(run: Run, shares: Shares, settings: GswganSettings, *, device: torch.device) -> Generator:
    s, schema = settings, run.schema
    classes = len(schema.classes)
    generator = fresh_generator(schema.shape, classes, latent=s.latent, seed=s.seed, slim=s.slim).to(device)
    student = Learner(generator, rate=s.rate)
    critic = Critic(schema.shape, classes, width=s.width)
    critics = Critics(critic, shares, batch=s.batch, rate=s.teacher_rate, penalty=s.penalty, seed=s.seed)
    noise = SecureNoise() if run.noise_seed is None else SeededNoise(run.noise_seed)

    for block in run.steps(s.steps, student=student, teachers=Alone(critics, run.path / "checkpoints")):
        if block == 0 and s.warm_steps:
            critics.warm_up(s.warm_steps, *fakes(generator, s, step=-1))
        try:
            paid = charge_block(run.ledger, s.event(run.ledger.budget, step=block), noise)
        except BudgetExceeded:
            break  # an interruption cost a block: the run ends with fewer, never over budget
        for step in range(block * s.block, (block + 1) * s.block):
            images, labels = fakes(generator, s, step=step)
            critics.fit(step * s.trained, s.trained, images, labels, step=step)

            def ask(teacher: int, images: torch.Tensor = images, labels: torch.Tensor = labels) -> BoundedSum:
                return clip_images(critics.image_gradient(teacher, images, labels), clip=s.clip, teacher=teacher)

            follow(student, images, paid.release(ask))
        run.log(block)
    return generator


def fakes(generator: Generator, s: GswganSettings, *, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of synthetic images, with the graph back to the generator, and their labels."""
    random = streams.generator(s.seed, "fakes", step)
    device = next(generator.parameters()).device
    z = draw_latent(s.batch, generator.architecture, random).to(device)
    labels = torch.randint(generator.architecture.classes, (s.batch,), generator=random).to(device)
    return generator(z, labels), labels
