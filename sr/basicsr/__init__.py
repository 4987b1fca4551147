"""Training configs of other tools: BasicSR, neosr, traiNNer."""

from sr.basicsr.convert import convert, read

__all__ = ["convert", "read"]
