"""DC-GAN (Radford et al. 2016) with labels: a discriminator on the records, a generator against it. NOT PRIVATE.

Differs from the paper: labels, in both networks; no batch norm in the discriminator; the generator that is
released has the average of the last weights.
"""

import torch
import torch.nn.functional as F  # noqa: N812

from datalens.data.records import Records
from datalens.peers.dcgan import DcganSettings
from datalens.privacy.mechanisms import release_unprotected
from datalens.private.pool import Pool
from datalens.public import streams
from datalens.public.critic import fresh_critic
from datalens.public.learner import Learner
from datalens.released.generator import Generator, draw_latent, fresh_generator
from datalens.run.folder import Alone, Run

LOG_EVERY = 100


def gather(records: Records, settings: DcganSettings, *, device: torch.device) -> Pool:
    return Pool.gather(records, device=device)


def train(run: Run, pool: Pool, settings: DcganSettings, *, device: torch.device) -> Generator:
    s, schema = settings, run.schema
    classes = len(schema.classes)
    generator = fresh_generator(schema.shape, classes, latent=s.latent, seed=s.seed, slim=s.slim).to(device)
    critic = fresh_critic(schema.shape, classes, width=s.width, seed=s.seed).to(device)
    student = Learner(generator, rate=s.rate, average=s.average)
    teacher = Learner(critic, rate=s.rate)
    if not run.ledger.events:
        release_unprotected(run.ledger, origin=s.origin)

    for step in run.steps(s.steps, student=student, teachers=Alone(teacher, run.path / "checkpoints")):
        random = streams.generator(s.seed, "step", step)
        real, labels = pool.batch(torch.randint(pool.count, (s.batch,), generator=random))
        fake = generator(draw_latent(s.batch, generator.architecture, random).to(device), labels)
        says_real, says_fake = critic(real, labels), critic(fake.detach(), labels)
        loss = F.softplus(-says_real).mean() + F.softplus(says_fake).mean()
        teacher.step(loss)
        student.step(F.softplus(-critic(fake, labels)).mean())
        if step % LOG_EVERY == 0:
            run.log(step, critic_loss=float(loss.detach()))
    return student.averaged()
