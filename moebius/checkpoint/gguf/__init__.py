"""GGUF files as one more source of weights, configuration and tokenizer; no torch.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. What quantised blocks stand for comes from
the package `gguf`; headers are read here: errors then name file, tensor and byte, and a vocabulary of 150,000
tokens takes half a second where the package takes 40.
"""
