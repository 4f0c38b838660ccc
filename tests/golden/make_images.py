#!/usr/bin/env python3
"""Writes golden images: small images with every number of channels, resized by Pillow's bilinear filter, and
images that transformers' image processors have preprocessed.

    python tests/golden/make_images.py            writes tests/golden/resize.safetensors and
                                                  preprocess.safetensors
    python tests/golden/make_images.py --check    compares with the files there, byte for byte

needs: pillow 12.1 or older, numpy, safetensors, transformers 5. Both files have tensors NAME.from, the
pixels of an image, and NAME.to, the pixels of the result, U8 (height, width, channels). In
preprocess.safetensors the result is not yet rescaled and normalised, and NAME.json is the text of a
preprocessor_config.json. With alpha (2 or 4 channels) Pillow multiplies the colours by alpha before
resizing and divides them afterwards.

Later versions of Pillow resize the height before the width if the height shrinks much more (12.2 for a very
tall image, 13.0 if the height loses more than twice as many pixels as the width), so that the rounding in
between differs: by one grey level at most, before the division by alpha.
"""
import json
import os
import sys

import numpy as np
from PIL import Image, __version__ as pillow
from safetensors.numpy import save

FOLDER = os.path.dirname(os.path.abspath(__file__))
CASES = [  # (channels, (height, width) before, (height, width) after)
    (3, (32, 32), (48, 48)), (3, (13, 7), (29, 31)), (3, (37, 53), (16, 16)), (3, (61, 90), (7, 5)), (3, (24, 24), (23, 25)), (3, (8, 8), (64, 3)),
    (3, (1, 1), (4, 6)), (3, (9, 7), (1, 1)), (3, (1, 8), (5, 3)), (3, (8, 1), (3, 2)), (3, (12, 10), (12, 5)), (3, (10, 12), (5, 12)), (3, (6, 5), (6, 5)),
    (1, (40, 200), (3, 2)), (1, (17, 23), (20, 11)), (1, (1, 300), (1, 7)), (1, (5, 5), (41, 37)),
    (2, (15, 9), (8, 14)), (2, (6, 5), (6, 5)), (4, (14, 11), (23, 6)), (4, (6, 6), (19, 19)), (4, (30, 20), (9, 7)), (4, (7, 9), (7, 4)), (3, (25, 19), (11, 13)),
]


def image(rng, channels, height, width):
    """Returns a gradient with noise, in which the colours of a quarter of the pixels are 0 or 255. Alpha is
    random."""
    y, x, c = np.mgrid[0:height, 0:width, 0:channels]
    pixels = 255 * (y + (1 + c) * x) / (height + (1 + c) * width) + rng.randint(-60, 61, (height, width, channels))
    extreme = rng.randint(0, 4, (height, width, 1)) == 0
    pixels = np.where(extreme, 255 * rng.randint(0, 2, pixels.shape), pixels)
    if channels % 2 == 0:
        alpha = rng.randint(0, 256, (height, width))
        pixels[..., -1] = np.where(rng.randint(0, 3, alpha.shape) == 0, 255 * (alpha > 127), alpha)
    return np.clip(pixels, 0, 255).astype(np.uint8)


def square(n):
    return {"height": n, "width": n}


PROCESSORS = [  # preprocessor_config.json, sizes of images; the model's images are 12 x 12
    *({"image_processor_type": "ViTImageProcessor", "size": square(12), "resample": k} for k in range(4)),
    *({"image_processor_type": "ViTImageProcessor", "size": square(17), "resample": k, "do_center_crop": True, "crop_size": square(12)}
      for k in range(4)),
    {"image_processor_type": "DeiTImageProcessor", "size": 14, "crop_size": 12},
    {"feature_extractor_type": "DeiTFeatureExtractor", "size": square(12), "do_center_crop": False},
    {"image_processor_type": "ViTImageProcessor", "size": {"shortest_edge": 15}, "do_center_crop": True, "crop_size": square(12)},
    {"image_processor_type": "DeiTImageProcessor", "size": {"shortest_edge": 12}, "crop_size": 12, "resample": 1},
    {"image_processor_type": "DeiTImageProcessor", "size": square(7), "crop_size": square(12)},
    {"image_processor_type": "DeiTImageProcessor", "do_resize": False, "size": square(224), "crop_size": square(12)},
]
SIZES = [(23, 23), (13, 7), (5, 31), (36, 27), (9, 9)]


def processed(config, pixels):
    from transformers import DeiTImageProcessorPil, ViTImageProcessorPil

    kind = config.get("image_processor_type", config.get("feature_extractor_type"))
    processor = (DeiTImageProcessorPil if kind.startswith("DeiT") else ViTImageProcessorPil).from_dict(
        {k: v for k, v in config.items() if not k.endswith("_type")}
    )
    values = processor(Image.fromarray(pixels), do_rescale=False, do_normalize=False)["pixel_values"][0]
    return np.ascontiguousarray(np.moveaxis(np.asarray(values), 0, -1)).astype(np.uint8)


def make_processed(rng):
    golden = {}
    for n, config in enumerate(PROCESSORS):
        golden[f"{n:02}.json"] = np.frombuffer(json.dumps(config).encode(), np.uint8)
        for k, size in enumerate(SIZES):
            pixels = image(rng, 3, *size)
            golden[f"{n:02}.{k}.from"], golden[f"{n:02}.{k}.to"] = pixels, processed(config, pixels)
            assert golden[f"{n:02}.{k}.to"].shape == (12, 12, 3)
    return golden


def main():
    assert tuple(map(int, pillow.split(".")[:2])) <= (12, 1), f"pillow {pillow} goes another way"
    rng = np.random.RandomState(5)  # a legacy generator, with equal numbers in all versions of numpy
    golden = {}
    for n, (channels, size, to) in enumerate(CASES):
        pixels = image(rng, channels, *size)
        if n == len(CASES) - 1:
            pixels[:] = 255  # must stay white, because the weights add up to one
        resized = Image.fromarray(pixels[..., 0] if channels == 1 else pixels).resize((to[1], to[0]), Image.Resampling.BILINEAR)
        golden[f"{n:02}.from"], golden[f"{n:02}.to"] = pixels, np.asarray(resized).reshape(*to, channels).copy()
    for name, tensors in (("resize", golden), ("preprocess", make_processed(rng))):
        data, path = save(tensors), os.path.join(FOLDER, f"{name}.safetensors")
        if "--check" not in sys.argv[1:]:
            with open(path, "wb") as f:
                f.write(data)
        elif open(path, "rb").read() != data:
            sys.exit(f"{path} differs from the committed file")


if __name__ == "__main__":
    main()
