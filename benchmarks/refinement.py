"""Whether TopAgg improves images from private moments, if it has an additional budget, which a real run would not have.

python -m benchmarks.refinement --data fashion-mnist [--epsilon 1] [--rates 1e-3 1e-4 1e-5] [--steps 150]

1. Private moments at ε, as `datalens train` makes them; their images are scored.
2. A DC-GAN generator learns to reproduce each image from its noise and class, and is scored.
3. Teachers vote on that generator's images, in cosine coordinates, with **another** ε of their own: twice the budget in
   all. The result is scored, for several learning rates of the student.

If 3 is not better than 1, TopAgg is worth no part of the budget. The scores are accuracies of classifiers on real
images that were held out of training: a sixth of the training set. The test set is not read. For the owner: not covered
by ε. Prints one JSON line per score.
"""

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from benchmarks import held_out
from benchmarks.machine import describe
from datalens.driver import train
from datalens.methods import topagg
from datalens.options import TrainOptions
from datalens.plans.base import Place
from datalens.privacy.mechanisms import make_mechanism
from datalens.privacy.noise import open_noise
from datalens.private.shares import Shares
from datalens.public import streams
from datalens.released.generator import Generator, dcgan_architecture, initialise
from datalens.released.moments import MomentModel
from datalens.released.release import load_generator
from datalens.run.folder import Run


def learn(model: MomentModel, latent: int, classes: int, steps: int, device: torch.device) -> Generator:
    """Return a generator trained to map each noise to the moment model's image. This is post-processing."""
    generator = Generator(dcgan_architecture(model.start.shape, classes, latent=latent, latent_law="normal"))
    initialise(generator, streams.generator(0, "student"))
    generator.to(device).train()
    adam = torch.optim.Adam(generator.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    labels = model.present[torch.arange(3 * held_out.COUNT) % len(model.present)]
    noise, images = [], []
    for number, part in enumerate(labels.split(1000)):
        same = streams.generator(number, "noise of first images")
        noise.append(torch.randn(len(part), latent, generator=same))
        images.append(model.images(part, streams.generator(number, "noise of first images")))
    z, x, y = torch.cat(noise).to(device), torch.cat(images).to(device), labels.to(device)
    for _ in range(steps):
        chosen = torch.randint(len(z), (128,), device=device)
        loss = F.mse_loss(generator(z[chosen], y[chosen]), x[chosen])
        adam.zero_grad()
        loss.backward()
        adam.step()
        schedule.step()
    return generator


def refine(options: TrainOptions, start: Generator, device: torch.device, rate: float) -> Generator:
    """Run Algorithm 1 from this generator, with a budget of its own."""
    learned: list[Generator] = []

    def learn(run: Run, shares: Shares, settings: topagg.TopAggSettings, place: Place) -> Generator:
        s = dataclasses.replace(settings, student_rate=rate, latent=start.architecture.latent)
        crowd = topagg.make_crowd(shares, s, run.schema, place)
        with open_noise(s.noise, s.sigma, draws=s.steps * s.batch * s.cells) as noise:
            gate = make_mechanism(s.sigma, noise)
            student = topagg.learn(run, crowd, s, mechanism=gate, device=device, start=start.state_dict())
        learned.append(student.generator)
        return student.generator

    train(options, method=dataclasses.replace(topagg.TOPAGG, train=learn, follow=None))
    return learned[0].eval()


def measure(arguments: argparse.Namespace, device: torch.device, folder: Path) -> None:
    common, *held = held_out.split(arguments.data, folder)
    common["epsilon"] = arguments.epsilon

    def score(what: str, generator: Any, **facts: Any) -> None:
        held_out.score(what, generator, *held, device, data=arguments.data, **facts)

    trained = train(TrainOptions(out=folder / "moments", **common))
    cost = {key: trained[key] for key in ("epsilon", "delta", "relation", "accountant")}
    model, names = load_generator(folder / "moments" / "release")
    assert isinstance(model, MomentModel)
    model = model.to(device)
    score("private moments", model, **cost)
    student = learn(model, model.start.means.shape[1], len(names), arguments.learning, device)
    score("a generator that learned them", student.eval(), **cost)
    for rate in arguments.rates:
        options = TrainOptions(out=folder / f"topagg-{rate}", warm_start="off", steps=arguments.steps, **common)
        refined = refine(options, student, device, rate)
        score("and TopAgg, with as much ε again", refined, rate=rate, steps=arguments.steps)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=150, help="number of steps of TopAgg")
    parser.add_argument("--learning", type=int, default=4000, help="steps of the generator that learns the moments")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 1e-4, 1e-5])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, default=held_out.COUNT, help="number of training images of a classifier")
    parser.add_argument("--epochs", type=int, default=held_out.EPOCHS)
    asked = parser.parse_args()
    held_out.COUNT, held_out.EPOCHS = asked.images, asked.epochs
    print(json.dumps({"machine": describe(torch.device(asked.device))}), flush=True)
    with tempfile.TemporaryDirectory() as place:
        measure(asked, torch.device(asked.device), Path(place))
