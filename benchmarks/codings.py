"""What decoding an image takes, by its coding: bytes of memory at the peak and CPU time, for each pixel.

``python -m benchmarks.codings`` prints the table of docs/explanations/security.md. Each coding has a process of its
own, which prepares the image once as the servers do (`serve.runtime.images.image_preprocessing.load`). Memory is the
peak of its resident set (``VmHWM``) above what it held before; the file is in that already.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image

from benchmarks.here import here
from benchmarks.hostile.bombs import webp
from benchmarks.hostile.pictures import encoded, picture

#: Of the square that is coded: 24 megapixels, as a camera's.
SIDE = 4900


def codings(side: int) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """The words for each coding, and what makes the file: a smooth picture with a little noise."""
    smooth = np.asarray(picture(1, (side, side)), dtype=np.int16)
    noise = np.random.default_rng(0).integers(-6, 7, smooth.shape, dtype=np.int16)
    image = Image.fromarray(np.clip(smooth + noise, 0, 255).astype(np.uint8))
    deep = np.asarray(image.convert("L")).astype(np.uint16) * 257
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 6
    quick = {"lossless": True, "quality": 0, "method": 0}
    yield "JPEG", lambda: encoded(image, "JPEG", quality=85)
    yield "JPEG, progressive", lambda: encoded(image, "JPEG", quality=85, progressive=True)
    yield "JPEG, progressive, 4:4:4", lambda: encoded(image, "JPEG", quality=85, progressive=True, subsampling=0)
    yield "JPEG, CMYK", lambda: encoded(image.convert("CMYK"), "JPEG")
    yield "PNG", lambda: encoded(image, "PNG", compress_level=1)
    yield "PNG, alpha", lambda: encoded(image.convert("RGBA"), "PNG", compress_level=1)
    yield "PNG, palette", lambda: encoded(image.quantize(64, dither=Image.Dither.NONE), "PNG", compress_level=1)
    yield "PNG, 16 bits of grey", lambda: encoded(Image.fromarray(deep), "PNG", compress_level=1)
    yield "WebP", lambda: encoded(image, "WEBP", quality=80, method=0)
    yield "WebP, turned by EXIF", lambda: encoded(image, "WEBP", quality=80, method=0, exif=turned)
    yield "WebP, lossless", lambda: encoded(image, "WEBP", **quick)
    yield "WebP, lossless, alpha", lambda: encoded(image.convert("RGBA"), "WEBP", **quick)
    yield "WebP, black", lambda: webp(side)
    yield "WebP, moving", lambda: encoded(image, "WEBP", save_all=True, append_images=[image.rotate(90)], method=0)
    yield "GIF", lambda: encoded(image.quantize(64, dither=Image.Dither.NONE), "GIF")
    yield "TIFF", lambda: encoded(image, "TIFF")
    yield "TIFF, LZW", lambda: encoded(image, "TIFF", compression="tiff_lzw")
    yield "TIFF, floats of grey", lambda: encoded(Image.fromarray(np.float32(deep) / 65535), "TIFF")
    yield "BMP", lambda: encoded(image, "BMP")
    yield "BMP, palette", lambda: encoded(image.quantize(64, dither=Image.Dither.NONE), "BMP")


def measure(path: Path) -> dict[str, float]:
    """Prepare the image in a file, in this process: ``bytes`` above what was held before, and CPU ``seconds``."""
    import torch

    from serve.runtime.card.card import Preprocessing
    from serve.runtime.images.image_preprocessing import load

    torch.set_num_threads(1)
    preprocessing = Preprocessing(resize=256, crop=(224, 224))
    data = path.read_bytes()
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"):  # what is loaded and made at the first of a kind
        load(encoded(picture(2, (300, 260)), kind), preprocessing)
    held = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # proc(5): resets VmHWM
    begun = time.process_time()
    load(data, preprocessing)
    return {"seconds": time.process_time() - begun, "bytes": _status("VmHWM") - held}


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def table(side: int) -> Iterator[str]:
    """The lines of the table, a coding each."""
    yield (
        f"Made by `python -m benchmarks.codings` on {datetime.date.today().isoformat()}: "
        f"{here('torch', 'torchvision', 'pillow', isa=False)}; {side}x{side} pixels."
    )
    yield ""
    yield "| coding | bytes of memory a pixel | ns of CPU time a pixel |"
    yield "|---|---:|---:|"
    with tempfile.TemporaryDirectory(prefix="codings-") as folder:
        path = Path(folder, "image")
        for words, make in codings(side):
            path.write_bytes(make())
            run = [sys.executable, "-m", "benchmarks.codings", "--measure", str(path)]
            found = json.loads(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
            pixels = side * side
            yield f"| {words} | {found['bytes'] / pixels:.1f} | {found['seconds'] / pixels * 1e9:.0f} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=SIDE, help=f"pixels of each side ({SIDE})")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure is not None:
        print(json.dumps(measure(options.measure)))
        return
    for line in table(options.side):
        print(line, flush=True)


if __name__ == "__main__":
    main()
