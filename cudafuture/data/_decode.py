"""Decoder of image files to tensors, with Pillow."""

from __future__ import annotations

import io
import sys
from typing import Any

import torch

from cudafuture.data._extra import extra
from cudafuture.data._faults import Fault

__all__ = ["FORMATS", "Decoder"]

# Pillow has more decoders; some of them start other programs, and most are for formats without labelled images.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF", "JPEG2000")
_SIXTEEN = ("PNG", "PPM", "JPEG2000")  # Pillow returns grey values of more than 8 bits of these formats as 16 bits


class Decoder:
    """Function from the bytes of an image file to a tensor of uint8, in the order height, width, channels.

    Args:
        size: height and width of the result; None for those of the image.
        mode: Pillow's name of the pixel format, such as "RGB" or "L".

    Raises:
        ImportError: Pillow is not installed.
        ValueError: the pixels of `mode` are not bytes.
    """

    def __init__(self, size: tuple[int, int] | None, mode: str) -> None:
        self._pillow: Any = extra("PIL.Image", "decoding images")
        self._size = None if size is None else (size[1], size[0])
        self._mode = mode
        if not self._has_bytes(mode):
            raise ValueError(f"mode={mode!r} does not have 8 bits per channel; use 'RGB', 'L' or 'RGBA'")

    def __call__(self, data: bytes) -> torch.Tensor:
        """Return the pixels of an image.

        Raises:
            Fault: the data is not an image, is corrupt, has more pixels than Pillow's MAX_IMAGE_PIXELS, or has pixels
                of 32 bits.
        """
        pillow = self._pillow
        try:
            image = pillow.open(io.BytesIO(data), formats=FORMATS)
        except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as e:
            raise Fault("too_large", str(e)) from e
        except pillow.UnidentifiedImageError as e:
            raise Fault("not_an_image", "the member is not an image of a known format") from e
        except MemoryError:
            raise
        except Exception as e:  # decoders raise OSError, SyntaxError, struct.error and more
            raise Fault("corrupt", f"the image is corrupt: {e}") from e
        width, height = image.size
        if pillow.MAX_IMAGE_PIXELS is not None and width * height > pillow.MAX_IMAGE_PIXELS:
            raise Fault(
                "too_large", f"the image has {width} x {height} pixels, but only {pillow.MAX_IMAGE_PIXELS} are allowed"
            )
        try:
            return self._pixels(image)
        except (Fault, MemoryError):
            raise
        except Exception as e:
            raise Fault("corrupt", f"the image is corrupt: {e}") from e

    def _has_bytes(self, mode: str) -> bool:
        """Return True if each channel of a mode is a byte."""
        if mode not in self._pillow.MODES or mode in (
            "1",
            "P",
            "PA",
            "La",
            "RGBa",
        ):  # few images convert to the last two
            return False
        pixel = self._pillow.new(mode, (1, 1)).tobytes()
        return len(pixel) == len(self._pillow.getmodebandnames(mode))

    def _pixels(self, image: Any) -> torch.Tensor:
        if image.mode in ("I", "F") or image.mode.startswith("I;16"):
            image = self._of_bytes(image)
        if image.mode != self._mode:
            image = image.convert(self._mode)
        if self._size is not None and image.size != self._size:
            image = image.resize(self._size, self._pillow.Resampling.BILINEAR)
        width, height = image.size
        return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(height, width, -1)

    def _of_bytes(self, image: Any) -> Any:
        """Return a grey image of 16 bits with the higher 8 bits of each pixel; Pillow's conversion clips at 255.

        Raises:
            Fault: a pixel has 32 bits. Their range of values is not defined, so they cannot be scaled.
        """
        if image.mode == "I" and image.format in _SIXTEEN:
            image = image.convert("I;16")
        if not image.mode.startswith("I;16"):
            text = f"the image has pixels of 32 bits (mode {image.mode!r}), whose range is not known"
            raise Fault("pixel_format", text)
        is_big = image.mode == "I;16B" or (image.mode == "I;16N" and sys.byteorder == "big")
        return self._pillow.frombytes("L", image.size, image.tobytes()[0 if is_big else 1 :: 2])
