"""Text: tokens on disk, packed documents, mixtures, pairs for translation."""
