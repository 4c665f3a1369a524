"""Tables of embeddings within a run: ids that are looked up ahead, caches, jagged batches."""
