"""Text in, tokens out, and back: tokenizer, chat template, detokeniser, stop strings."""
