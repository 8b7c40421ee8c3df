"""A pretrained MiniLM on BBC news, query and key frozen after two rounds."""
