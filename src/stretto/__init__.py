"""Stretto: RL post-training of language models that turns its own history into speed."""

__version__ = "0.1.0"
