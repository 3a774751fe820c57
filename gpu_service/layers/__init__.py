"""Modules that models are composed of."""
