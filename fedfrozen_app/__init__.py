"""Federated fine-tuning of Transformers on Flower that sends only what still moves."""

__version__ = "0.1.0"
