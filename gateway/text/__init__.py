"""Converts text to tokens and back: tokenizer, chat template, detokeniser, stop strings."""
