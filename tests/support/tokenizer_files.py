"""Files of tokenizers, learned from a small text."""

TEXT = "to be, or not to be:\nthat is the question — «ça» 🙂\n\n"


def bpe(folder, text=TEXT):
    """A tokenizer.json as GPT-2's: bytes, its splitting into words, merges learned from a text."""
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([text] * 3, trainer)
    made.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")
