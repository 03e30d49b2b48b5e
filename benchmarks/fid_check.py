"""Is the file with Inception-v3 the network that published FIDs come from? FIDs of real images that others publish too.

All training images against all test images. Published: CIFAR-10 about 3.15; MNIST 1.04 and Fashion-MNIST 1.54 as the
"real data" of DataLens, Table 12 (which does not say how many images, nor how they were resized). Another network,
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
from datalens.data.named import sources, weights
from datalens.evaluate.features import Features, inception
from datalens.evaluate.fid import fid

PUBLISHED = {"cifar10": 3.15, "mnist": 1.04, "fashion-mnist": 1.54}


def without_bias(test: np.ndarray, train: np.ndarray, value: float, features: Features) -> float:
    """From all of the images and from half of them: the bias is about proportional to 1/n."""
    return 2 * value - fid(test[: len(test) // 2], train[: len(train) // 2], features).fid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", choices=tuple(PUBLISHED), nargs="+", default=tuple(PUBLISHED))
    parser.add_argument("--images", type=int, default=None, help="of each split, at most; all of them by default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--resize", choices=("bilinear", "bicubic"), nargs="+", default=("bilinear", "bicubic"))
    asked = parser.parse_args()
    for data in asked.data:
        order = np.random.default_rng(0)
        train, test = (sources.load(data, split).images for split in ("train", "test"))
        train, test = (images[order.permutation(len(images))][: asked.images] for images in (train, test))
        for resize in asked.resize:
            began = time.monotonic()
            features = inception(asked.device, resize=resize)
            found = fid(test, train, features)
            line = {
                "data": data,
                "published": PUBLISHED[data],
                "fid": found.fid,
                "extrapolated": without_bias(test, train, found.fid, features),
                "test": len(test),
                "train": len(train),
                "features": found.features,
                "file_sha256": weights.WEIGHTS["inception"].file.sha256,
                "seconds": round(time.monotonic() - began, 1),
                **describe(torch.device(asked.device)),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
