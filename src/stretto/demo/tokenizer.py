"""The demo model's tokenizer: one token per word of the Knights and Knaves task, bytes for all other text.

A byte-level BPE whose words are split at spaces only and keep the space before them, trained on the
task's words alone. So the task's text is one token per word, any other text still encodes (as bytes), and
decoding gives back every text exactly.
"""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from stretto.tasks.knights import KINDS, NAMES

EOS = "<eos>"
PAD = "<pad>"
VOCABULARY = 512  # an upper bound; training stops when every word is one token
PROMPT_WORDS = "Puzzle : says is a are alike different and or . Solution"
TRACE_WORDS = "careful hasty try true false answer"


def task_words() -> list[str]:
    """Every word that a prompt or a trace is made of."""
    words = [*PROMPT_WORDS.split(), *TRACE_WORDS.split(), *KINDS, *(f"{kind}s" for kind in KINDS)]
    return words + [name + suffix for name in NAMES for suffix in ("", "+", "-")]


def build_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """The tokenizer, without a beginning-of-sequence token; `max_length` is the model's, in tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?[^ ]+| +"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=1,
        special_tokens=[PAD, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["Puzzle", *(f" {word}" for word in task_words())], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
