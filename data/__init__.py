"""Training data: text made into tokens on disk, and loaders of microbatches.

Tokens on disk (``triax data``):
    sources.py: documents of text files, JSON lines, Parquet and Arrow files, each with its line
    conversations.py: columns of ShareGPT and of Alpaca, as messages; bad_document.py: a document that cannot be used
    tokenizer.py: bytes, or a tokenizer of ``tokenizers`` or transformers; its fingerprint; training one
    byte_tokenizer.py: the tokenizer bytes, as files of transformers
    chat.py: conversations with a chat template, of which only the assistant's tokens count in the loss
    tokenization.py: ``tokenize``, on several processes, resumed after an interruption
    token_file.py: one file of tokens: memory maps of a safetensors file
    token_folder.py: ``TokenFolder``: the files and their index; checks

Prompts with and without answers, for post-training:
    answers.py: ``Answers``: data sets with TRL's columns, for ``sft``, pairs of answers, and answers with a label
    image_answers.py: ``ImageAnswers``: conversations with images, for vision-language models
    image_processor.py: the processor of a folder: the text of an image, and its pixels
    held_out.py: ``NumberedSamples``: the part of all that is held out
    prompts.py: ``Prompts``: prompts whose answers are drawn, with columns for reward functions

Loaders:
    packing.py: rows of documents: their order in an epoch, and which tokens each row has
    balance.py: documents dealt out to microbatches of equal work
    mixture.py: rows of one set of documents, or of a mixture by weight
    token_data.py: ``TokenData``: tokenized folders as packed rows, with a held-out part
    token_loader.py: ``TokenLoader``: its microbatches on one replica, from a place, read ahead by threads
    dataloader.py: the loader of other data sets: BatchOrder (order by seed and epoch), Loader, RepeatingLoader
"""

from ..base.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
