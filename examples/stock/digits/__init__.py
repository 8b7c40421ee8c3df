"""A small Transformer on handwritten digits, federated with Flower."""
