"""Evaluation that reproduces published tables; ``README.md`` beside this file shows how, and what it reproduces."""

from sr.evaluation.models import BICUBIC, Model, NetworkModel, open_models
from sr.evaluation.report import Report, SetScores, cell, matrix
from sr.evaluation.scores import Mean, PictureScores, Score, bicubic, evaluate, mean, score
from sr.evaluation.strips import PictureWriter

__all__ = [
    "BICUBIC",
    "Mean",
    "Model",
    "NetworkModel",
    "PictureScores",
    "PictureWriter",
    "Report",
    "Score",
    "SetScores",
    "bicubic",
    "cell",
    "evaluate",
    "matrix",
    "mean",
    "open_models",
    "score",
]
