"""Is the file with Inception-v3 the network that published FIDs come from? An FID that others publish too.

CIFAR-10, all 50,000 training images against all 10,000 test images, where about 3.15 is published. Another network,
another order of colours, another range of pixels would each give something else by far. For a GPU: 60,000 images are
a minute there, and hours on a CPU. --images takes a part of each split, whose FID is larger: the bias goes with 1/n, so
a line through two sizes is drawn on to 1/n = 0 as well (FID∞, Chong and Forsyth 2020).

    python -m benchmarks.fid_check --device cuda
"""

import argparse
import json
import time

import numpy as np
import torch

from benchmarks.machine import describe
from datalens.datasets import sources, weights
from datalens.evaluate.features import inception
from datalens.evaluate.fid import fid

PUBLISHED = 3.15


def without_bias(test: np.ndarray, train: np.ndarray, value: float, features: object) -> float:
    """From all of the images and from half of them: the bias is about proportional to 1/n."""
    half = fid(test[: len(test) // 2], train[: len(train) // 2], features).fid  # type: ignore[arg-type]
    return 2 * value - half


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=None, help="of each split, at most; all of them by default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--resize", choices=("bilinear", "bicubic"), nargs="+", default=("bilinear", "bicubic"))
    asked = parser.parse_args()
    order = np.random.default_rng(0)
    train, test = (sources.load("cifar10", split).images for split in ("train", "test"))
    train, test = (images[order.permutation(len(images))][: asked.images] for images in (train, test))
    found = []
    for resize in asked.resize:
        began = time.monotonic()
        features = inception(asked.device, resize=resize)
        result = fid(test, train, features)
        found.append(
            {
                **result.as_dict(),
                "extrapolated": without_bias(test, train, result.fid, features),
                "seconds": round(time.monotonic() - began, 1),
            }
        )
    result_of_all = {
        "published_50000_against_10000": PUBLISHED,
        "file_sha256": weights.WEIGHTS["inception"].file.sha256,
        "found": found,
        "machine": describe(torch.device(asked.device)),
    }
    print(json.dumps(result_of_all, indent=1))


if __name__ == "__main__":
    main()
