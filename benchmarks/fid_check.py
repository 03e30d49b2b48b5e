"""Check that our file of Inception-v3 is the network of published FIDs, by FIDs of real images that others published.

It compares all training images with all test images. Published: CIFAR-10 about 3.15; MNIST 1.04 and Fashion-MNIST 1.54
as the "real data" of DataLens, Table 12 (which does not state the number of images, nor how they were resized). Another
network, another order of colours or another range of pixels would give very different values. Use a GPU: 60,000 images
take a minute there, and hours on a CPU. --images uses a part of each split, whose FID is larger. The bias is
proportional to 1/n, so the value is also extrapolated from two sizes to 1/n = 0 (FID∞, Chong and Forsyth 2020).

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
    """Extrapolate from all images and half of them: the bias is approximately proportional to 1/n."""
    return 2 * value - fid(test[: len(test) // 2], train[: len(train) // 2], features).fid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", choices=tuple(PUBLISHED), nargs="+", default=tuple(PUBLISHED))
    parser.add_argument("--images", type=int, default=None, help="limit of images of each split (default: all)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--resize", choices=("bilinear", "bicubic"), nargs="+", default=("bilinear", "bicubic"))
    options = parser.parse_args()
    for data in options.data:
        order = np.random.default_rng(0)
        train, test = (sources.load(data, split).images for split in ("train", "test"))
        train, test = (images[order.permutation(len(images))][: options.images] for images in (train, test))
        for resize in options.resize:
            began = time.monotonic()
            features = inception(options.device, resize=resize)
            result = fid(test, train, features)
            line = {
                "data": data,
                "published": PUBLISHED[data],
                "fid": result.fid,
                "extrapolated": without_bias(test, train, result.fid, features),
                "test": len(test),
                "train": len(train),
                "features": result.features,
                "file_sha256": weights.WEIGHTS["inception"].file.sha256,
                "seconds": round(time.monotonic() - began, 1),
                **describe(torch.device(options.device)),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
