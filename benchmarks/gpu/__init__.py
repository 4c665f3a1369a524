"""All measurements of one GPU, in one command."""

CHANGES = ("sums", "heads", "reduction", "loop", "finite")
"""What `benchmarks.gpu.without` takes back, the most worthwhile first."""
CHANGES_OF_RESNET = ("folding",)
"""The same of ResNet-50."""
