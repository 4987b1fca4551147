"""Enlarging one picture: tiles, memory, narrow types, transparency."""

from sr.inference.upscaler import Upscaler

__all__ = ["Upscaler"]
