"""Multi-head latent attention over paged latents (DeepSeek-V2 and V3, Kimi-K2, GLM-4.7-Flash)."""
